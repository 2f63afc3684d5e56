"""Keys: where they come from, and the gate that asks for an API key wherever work is done
for clients, and for an admin key on `/admin`. And what a client is: a key, else an address.

A key is kept as its SHA-256 digest only: settings, boot messages, run records and logs never hold
the key itself. Other paths are open to every client, as monitoring expects.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from livescale.common.settings import ConfigError
from livescale.gateway.contract.backend import Client
from livescale.gateway.contract.errors import ApiError
from livescale.values.types import Value

KEY_VARIABLES = ("LIVESCALE_API_KEY", "VLLM_API_KEY")
"""Environment variables that hold one API key each."""
ADMIN_KEY_VARIABLES = ("LIVESCALE_ADMIN_KEY",)
"""Environment variables that hold one admin key each."""
GUARDED = ("/v1", "/tokenize", "/detokenize")
"""An API key is needed for these paths, and for all that lie below."""
ADMINISTERED = ("/admin",)
"""An admin key is needed for these. (Where there is none `admin.py` decides.)"""
KEYS_MAX = 1024
"""Every request is compared with every key of a kind."""
WEIGHT_MAX = 100
"""A turn of one client is worth at most so many requests."""
FILE_BYTES_MAX = 1 << 20


class KeyDigests(Value, frozen=True):
    """The digests of all keys, by kind. No keys of a kind: none is asked for. `weights` are the
    requests that a turn of the client with an API key is worth, where they are more than one."""

    api: tuple[str, ...] = ()
    admin: tuple[str, ...] = ()
    weights: dict[str, int] = msgspec.field(default_factory=dict)


class KeyRing:
    """The keys that count now. `replace` may be called from any thread."""

    def __init__(self, digests: KeyDigests | None = None) -> None:
        self.digests = digests or KeyDigests()

    def asked_at(self, path: str) -> tuple[str, tuple[str, ...]]:
        """The kind of key that the path asks for, and the digests of those that do; none: any
        request is let through."""
        if _is_below(path, ADMINISTERED):
            return "an admin key", self.digests.admin
        return "an API key", self.digests.api if _is_below(path, GUARDED) else ()

    def needs_key(self, path: str) -> bool:
        """Requests to this path need a key now."""
        return bool(self.asked_at(path)[1])

    def replace(self, digests: KeyDigests) -> None:
        """These keys count from now on, and no others; requests that were let in go on."""
        self.digests = digests


def read_key_weights(
    path: str | None,
    environ: Mapping[str, str],
    *,
    variables: Sequence[str] = KEY_VARIABLES,
    setting: str = "api_key_file",
    has_weights: bool = True,
) -> dict[str, int]:
    """Digests of the keys in the file (one per line, # comments) and in these variables, with the
    weights of their clients (where it `has_weights`, `KEY weight=N` in the file; else 1).

    `setting` names the file. Raises ConfigError, which never repeats a key, for a file that is
    unreadable or holds none, for a wrong weight, and for a key that is given two.
    """
    keys: list[tuple[str, int | None]] = [
        (_checked(environ[name], f"environment: {name}"), None)
        for name in variables
        if name in environ
    ]
    if path is not None:
        keys += _keys_in(path, setting, has_weights)
    if len(keys) > KEYS_MAX:
        raise ConfigError(f"{setting}: {len(keys)} keys are given, above the maximum of {KEYS_MAX}")
    weights: dict[str, int | None] = {}
    for key, weight in keys:
        digest = digest_of(key)
        known = weights.setdefault(digest, weight)
        if None not in (known, weight) and known != weight:
            raise ConfigError(
                f"{setting} {path}: one key has two weights, {known} and {weight}. Give it once"
            )
        weights[digest] = weight if known is None else known
    return {digest: weight or 1 for digest, weight in weights.items()}


def digest_of(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


class KeyGate:
    """Lets a request to GUARDED or ADMINISTERED through only with a bearer key of that kind; any
    if there are no keys of the kind.

    A request with an API key is of the client of that key (`scope["state"]["client"]`), wherever it
    comes from. An ASGI middleware; stands inside the Envelope, so that a refusal has its ids, too.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        kind, known = self._keys.asked_at(path)
        if known:
            digest = _known_digest(known, Headers(scope=scope).get("authorization"))
            if digest is None:
                # Whether there was none, or one that is not known, is not reported.
                refusal = ApiError(
                    401,
                    f"A valid key is required, {kind}. Send the header 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await refusal.response()(scope, receive, send)
                return
            weight = self._keys.digests.weights.get(digest, 1)
            scope["state"]["client"] = Client(f"key-{digest[:_DIGEST_CHARS]}", weight)
        await self._app(scope, receive, send)


def _is_below(path: str, roots: Sequence[str]) -> bool:
    return any(f"{path}/".startswith(f"{root}/") for root in roots)


def _known_digest(known: Sequence[str], authorization: str | None) -> str | None:
    """The digest of the key that was sent, if it is one of these."""
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer":
        return None
    digest = digest_of(key.strip())
    # All of them, each in constant time: how long it takes shows nothing of the keys.
    is_known = sum(hmac.compare_digest(digest, one) for one in known) > 0
    return digest if is_known else None


def _keys_in(path: str, setting: str, has_weights: bool) -> list[tuple[str, int | None]]:
    try:
        with Path(path).open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        lines = content.decode("utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{setting} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{setting} {path}: is not UTF-8 text") from None
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{setting} {path}: has more than {FILE_BYTES_MAX} bytes")
    keys = [
        _key_and_weight(line.split(), f"{setting} {path}, line {number}", has_weights)
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not keys:
        raise ConfigError(f"{setting} {path} has no key. Write one key per line")
    return keys


def _key_and_weight(words: Sequence[str], where: str, has_weights: bool) -> tuple[str, int | None]:
    """Of one line: a key, and behind it perhaps its client's weight."""
    key, *others = words
    if not others or not has_weights:
        return _checked(" ".join(words), where), None
    _checked(key, where)
    name, _, number = others[0].partition("=")
    if len(others) > 1 or name != "weight":
        raise ConfigError(f"{where}: invalid text after the key. Write KEY or KEY weight=N")
    weight = int(number) if number.isascii() and number.isdecimal() and len(number) < 4 else 0
    if not 1 <= weight <= WEIGHT_MAX:
        raise ConfigError(f"{where}: invalid weight. Give a whole number from 1 to {WEIGHT_MAX}")
    return key, weight


def _checked(key: str, where: str) -> str:
    """The key, if a client can send it in a header."""
    if not key or not all("!" <= char <= "~" for char in key):
        raise ConfigError(f"{where}: invalid key. Use printable ASCII without spaces")
    return key


_DIGEST_CHARS = 12
"""Of a key's digest: enough to tell the keys of a pool apart, and no help to guess one."""
_IPV6_PREFIX_BITS = 64
"""What one subscriber has of IPv6: its addresses are as many as it likes."""


_ADDRESSES_KEPT = 1024
"""Reading an address takes as long as some headers; most requests come from few."""


def client_at(peer: tuple[str, int] | None) -> Client:
    """The client at the other end of a connection (address and port, as ASGI names it).

    An IPv6 address counts by its /64. All whose address is not known are one client.
    """
    return _client_of(peer[0] if peer is not None else "")


@functools.lru_cache(_ADDRESSES_KEPT)
def _client_of(host: str) -> Client:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return Client()
    if isinstance(address, ipaddress.IPv4Address):
        return Client(str(address))
    if address.ipv4_mapped is not None:
        return Client(str(address.ipv4_mapped))
    # Without its zone, which is a matter of this machine.
    return Client(str(ipaddress.IPv6Network((int(address), _IPV6_PREFIX_BITS), strict=False)))
