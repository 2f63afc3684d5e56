"""How a channel of the data plane is protected: who the other end is, by TLS 1.3 with certificates
on both sides, and then each record by AES-256-GCM with keys that both drew.

TLS itself does not fit a channel whose bytes go from and into place, by two threads: its handshake
is carried record by record, and inside of it both sides give each other 32 random bytes. From these
and the pool's secret come a key for each direction (HKDF), used with a counter: a record that was
changed, left out, repeated or moved opens no more.
"""

from __future__ import annotations

import secrets
import ssl
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from livescale.transfer.formats.carrier import ChannelClosedError

if TYPE_CHECKING:
    from livescale.common.credentials import Credentials

TAG_BYTES = 16
_SHARE_BYTES = 32
_KEY_BYTES = 32
_RECORD_HEAD = struct.Struct(">BHH")
_RECORD_BYTES_MAX = (1 << 14) + 256
_NONCE = struct.Struct(">IQ")
_CALLER, _CALLED = b"from the caller", b"from the called"


@dataclass(frozen=True)
class Protection:
    """With what, and of what: `is_wanted` says whether ranges are sealed on a channel between one
    machine (True) or two."""

    credentials: Credentials
    secret: str
    is_wanted: Callable[[bool], bool]


class Seal:
    """One direction of a channel. Used by one thread."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._count = 0

    def seal(self, plain: bytes | memoryview, into: memoryview) -> None:
        """`into` has TAG_BYTES more."""
        self._cipher.encrypt_into(self._nonce(), plain, None, into)

    def open(self, sealed: memoryview, into: bytearray | memoryview) -> None:
        """`into` has TAG_BYTES less. Raises ChannelClosedError."""
        try:
            self._cipher.decrypt_into(self._nonce(), sealed, None, into)
        except InvalidTag:
            raise ChannelClosedError("bytes were changed on the way") from None

    def _nonce(self) -> bytes:
        self._count += 1
        return _NONCE.pack(0, self._count)


@dataclass(frozen=True)
class Keys:
    """Of one channel: for what is sent and what is received here, and whether ranges are sealed."""

    sending: Seal
    receiving: Seal
    seals_ranges: bool


def agree(
    protection: Protection,
    send: Callable[[bytes], None],
    receive: Callable[[int], bytes],
    *,
    is_caller: bool,
    is_one_machine: bool,
) -> Keys:
    """What both sides of a channel use from now on. Raises OSError, also for an end that is no
    member."""
    wants = protection.is_wanted(is_one_machine)
    own = secrets.token_bytes(_SHARE_BYTES)
    other = _exchange(protection.credentials, send, receive, own + bytes([wants]), is_caller)
    shares = (own, other[:-1]) if is_caller else (other[:-1], own)
    caller, called = (
        HKDF(hashes.SHA256(), _KEY_BYTES, protection.secret.encode(), words).derive(
            b"".join(shares)
        )
        for words in (_CALLER, _CALLED)
    )
    sending, receiving = (caller, called) if is_caller else (called, caller)
    return Keys(Seal(sending), Seal(receiving), wants or bool(other[-1]))


def _exchange(
    credentials: Credentials,
    send: Callable[[bytes], None],
    receive: Callable[[int], bytes],
    own: bytes,
    is_caller: bool,
) -> bytes:
    """What the other side says inside of TLS, as long as `own`, which it is told."""
    came, going = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = credentials.calling if is_caller else credentials.answering
    end = context.wrap_bio(came, going, server_side=not is_caller)

    def until_done(step: Callable[[], object]) -> object:
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                _flush(going, send)
                came.write(_record(receive))
            except ssl.SSLError:
                # The other side is told why.
                _flush(going, send)
                raise

    until_done(end.do_handshake)
    credentials.look()
    credentials.check(end.getpeercert(binary_form=True))
    end.write(own)
    _flush(going, send)
    # One record: what was written at once, and is as short.
    other = until_done(lambda: end.read(len(own)))
    if not isinstance(other, bytes) or len(other) != len(own):
        raise ChannelClosedError("the other side ended the handshake")
    return other


def _flush(going: ssl.MemoryBIO, send: Callable[[bytes], None]) -> None:
    if going.pending:
        send(going.read())


def _record(receive: Callable[[int], bytes]) -> bytes:
    """The next one of TLS, and not a byte more: what follows the handshake is not TLS."""
    head = receive(_RECORD_HEAD.size)
    size_bytes = _RECORD_HEAD.unpack(head)[2]
    if size_bytes > _RECORD_BYTES_MAX:
        raise ChannelClosedError("the other side does not speak TLS")
    return head + receive(size_bytes)
