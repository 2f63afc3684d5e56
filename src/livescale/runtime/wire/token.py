"""The token: what a machine needs to join a pool, in a file that only its owner may read.

It holds the pool's secret and, where the pool has certificates, the fingerprint of their authority.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

import msgspec

from livescale.common.private_files import is_private
from livescale.common.settings import ConfigError
from livescale.values.types import Value

_KIND = "livescale token"
_FILE_BYTES_MAX = 64 << 10
_SECRET_BYTES = 16
_SECRET_CHARS_MIN = 2 * _SECRET_BYTES


class JoinToken(Value, frozen=True):
    """`fingerprint` is the SHA-256 of the certificate of the pool's authority (None: it has
    none)."""

    secret: str
    fingerprint: str | None = None
    kind: str = _KIND

    def __repr__(self) -> str:
        # Without the secret: what is told of a token may be logged.
        return f"<JoinToken, fingerprint {self.fingerprint}>"


def new_secret() -> str:
    return secrets.token_hex(_SECRET_BYTES)


def make_token(path: Path, fingerprint: str | None = None) -> JoinToken:
    """The token in this file, which must be one with this fingerprint; a new one where there is no
    file. Raises ConfigError."""
    # First: where a token is mounted, nothing can be written beside it.
    if not os.path.lexists(path):
        token = JoinToken(new_secret(), fingerprint)
        try:
            _write_new(path, msgspec.json.encode(token) + b"\n")
            return token
        except FileExistsError:
            pass  # another start was quicker
        except OSError as error:
            raise ConfigError(f"token_file {path}: {error.strerror}") from error
    token = read_token(path)
    check_fingerprint(path, token, fingerprint)
    return token


def check_fingerprint(path: Path, token: JoinToken, fingerprint: str | None) -> None:
    """Raises ConfigError for a token of a pool with other certificates, or with none."""
    check_authority(f"token_file {path}", token, fingerprint)


def check_authority(where: str, token: JoinToken, fingerprint: str | None) -> None:
    """The same for a token that is not from a file."""
    if token.fingerprint == fingerprint:
        return
    if fingerprint is None:
        raise ConfigError(f"{where} is of a pool with certificates. Give tls_dir")
    if token.fingerprint is None:
        raise ConfigError(f"{where} is of a pool without certificates. Leave out tls_dir")
    raise ConfigError(
        f"{where} is of a pool with another certificate authority than tls_dir. Give the "
        "tls_dir of that pool"
    )


def read_token(path: Path) -> JoinToken:
    """Raises ConfigError, also for a file that others may read."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            text = file.read(_FILE_BYTES_MAX)
    except OSError as error:
        raise ConfigError(f"token_file {path}: {error.strerror}") from error
    if not is_private(found.st_mode, found.st_uid, os.geteuid()):
        raise ConfigError(f"token_file {path} is readable by other users. Run: chmod 600 {path}")
    try:
        token = msgspec.json.decode(text, type=JoinToken)
    except msgspec.MsgspecError:
        token = JoinToken("", kind="")
    if token.kind != _KIND or len(token.secret) < _SECRET_CHARS_MIN:
        raise ConfigError(
            f"token_file {path} is not a valid token. Copy the file that `livescale serve` wrote"
        )
    return token


def _write_new(path: Path, text: bytes) -> None:
    """The file appears whole, whatever interrupts this, and replaces none. Raises OSError."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        os.link(name, path)
    finally:
        os.unlink(name)
