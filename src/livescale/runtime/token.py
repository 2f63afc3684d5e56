"""The token: what a machine needs to join a pool, in a file that nobody else may read.

It holds the pool's secret, and has a place for the fingerprint of the head's certificate.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

import msgspec

from livescale.common.settings import ConfigError
from livescale.types import Value

_KIND = "livescale token"
_FILE_BYTES_MAX = 64 << 10
_SECRET_BYTES = 16
_SECRET_CHARS_MIN = 2 * _SECRET_BYTES


class JoinToken(Value, frozen=True):
    """`fingerprint` is that of the head's certificate (None: it has none)."""

    secret: str
    fingerprint: str | None = None
    kind: str = _KIND


def new_secret() -> str:
    return secrets.token_hex(_SECRET_BYTES)


def make_token(path: Path) -> JoinToken:
    """The token in this file; a new one where there is no file. Raises ConfigError."""
    token = JoinToken(new_secret())
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return read_token(path)
    except OSError as error:
        raise ConfigError(f"token_file {path}: {error.strerror}") from error
    with contextlib.closing(os.fdopen(descriptor, "wb")) as file:
        file.write(msgspec.json.encode(token) + b"\n")
    return token


def read_token(path: Path) -> JoinToken:
    """Raises ConfigError, also for a file that others may read."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_FILE_BYTES_MAX)
    except OSError as error:
        raise ConfigError(f"token_file {path}: {error.strerror}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"token_file {path}: others may read it: chmod 600 {path}")
    try:
        token = msgspec.json.decode(text, type=JoinToken)
    except msgspec.MsgspecError:
        token = JoinToken("", kind="")
    if token.kind != _KIND or len(token.secret) < _SECRET_CHARS_MIN:
        raise ConfigError(f"token_file {path}: this is no token that `livescale serve` wrote")
    return token
