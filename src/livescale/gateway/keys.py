"""API keys: where they come from, and the gate that asks for one wherever work is done.

A key is read once and kept as its SHA-256 digest: settings, boot messages, run records and logs
never hold the key itself. Other paths are open to everybody, as monitoring expects.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from livescale.gateway.errors import unauthorized
from livescale.settings import ConfigError

KEY_VARIABLES = ("LIVESCALE_API_KEY", "VLLM_API_KEY")
"""Environment variables that hold one key each."""
GUARDED = ("/v1", "/admin", "/tokenize", "/detokenize")
"""A key is needed for these paths, and for all that lie below."""
KEYS_MAX = 1024
"""Every request is compared with every key."""


def read_key_digests(path: str | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Digests of the keys in the file (one per line, # comments) and in the environment.

    Raises ConfigError, which never repeats a key, for a file that is unreadable or holds none.
    """
    keys = [
        _checked(environ[name], f"environment: {name}") for name in KEY_VARIABLES if name in environ
    ]
    if path is not None:
        keys += _keys_in(path)
    if len(keys) > KEYS_MAX:
        raise ConfigError(f"{len(keys)} API keys are given, {KEYS_MAX} at most are taken")
    return tuple(dict.fromkeys(digest_of(key) for key in keys))


def digest_of(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


class KeyGate:
    """Lets a request to GUARDED through only with a known bearer key; any if there are no keys.

    An ASGI middleware; stands inside the Envelope, so that a refusal has its ids, too.
    """

    def __init__(self, app: ASGIApp, digests: Sequence[str]) -> None:
        self._app = app
        self._digests = tuple(digests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        needs_key = scope["type"] == "http" and bool(self._digests) and is_guarded(scope["path"])
        if needs_key and not self._is_known(Headers(scope=scope).get("authorization")):
            await unauthorized().response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_known(self, authorization: str | None) -> bool:
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        digest = digest_of(key.strip())
        # All of them, each in constant time: how long it takes says nothing about the keys.
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def is_guarded(path: str) -> bool:
    """Where there are keys, this path needs one."""
    return any(f"{path}/".startswith(f"{guarded}/") for guarded in GUARDED)


def _keys_in(path: str) -> list[str]:
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"api_key_file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"api_key_file {path}: is not UTF-8 text") from None
    keys = [
        _checked(line.strip(), f"api_key_file {path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not keys:
        raise ConfigError(f"api_key_file {path}: holds no key")
    return keys


def _checked(key: str, where: str) -> str:
    """The key, if a client can send it in a header."""
    if not key or not all("!" <= char <= "~" for char in key):
        raise ConfigError(f"{where}: a key is printable ASCII without spaces, and not empty")
    return key
