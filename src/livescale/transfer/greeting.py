"""The first words on a channel: both ends say who they are and prove that they belong to the pool.

Three HELLO frames: a nonce; a nonce and a proof; a proof. A proof is a hash keyed with the pool's
secret (HMAC, RFC 2104) over both nonces, both names and the side that it is for, so that neither an
old proof nor one's own, sent back, is worth anything. The secret itself is never sent. What is said
later is not protected: this keeps other processes of a host out, not a network that listens.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Callable

from livescale.transfer.carrier import Channel
from livescale.transfer.frames import (
    HEADER_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    Frame,
    FrameError,
    FrameKind,
    decode_header,
)
from livescale.types import WorkerRef

_CALLER, _CALLED = b"caller", b"called"
_NAMES = struct.Struct(">4I")


class Greeting:
    """What `worker` says first, with the pool's `secret`. Each answer may take `timeout_s`.

    Both calls raise FrameError or OSError; then the channel is to be closed.
    """

    def __init__(self, worker: WorkerRef, secret: str, timeout_s: float) -> None:
        self._worker = worker
        self._secret = secret.encode()
        self._timeout_s = timeout_s

    def call(self, channel: Channel, peer: WorkerRef) -> None:
        """The peer, at the other end of a channel opened here, and this side know each other."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._say(channel, nonce)
        answered, answer = self._hear(channel, NONCE_BYTES + PROOF_BYTES)
        if answered != peer:
            raise FrameError(f"{answered} answered in the place of {peer}")
        nonces = nonce + answer[:NONCE_BYTES]
        self._check(answer[NONCE_BYTES:], self._proof(_CALLED, nonces, self._worker, peer), peer)
        self._say(channel, self._proof(_CALLER, nonces, self._worker, peer))

    def answer(self, channel: Channel, check: Callable[[WorkerRef], None]) -> WorkerRef:
        """Who opened the channel, proved. `check` raises OSError for those who are not wanted."""
        peer, nonce = self._hear(channel, NONCE_BYTES)
        check(peer)
        own = secrets.token_bytes(NONCE_BYTES)
        nonces = nonce + own
        self._say(channel, own + self._proof(_CALLED, nonces, peer, self._worker))
        caller, proof = self._hear(channel, PROOF_BYTES)
        if caller != peer:
            raise FrameError(f"{caller} went on in the place of {peer}")
        self._check(proof, self._proof(_CALLER, nonces, peer, self._worker), peer)
        return peer

    def _proof(self, side: bytes, nonces: bytes, caller: WorkerRef, called: WorkerRef) -> bytes:
        names = _NAMES.pack(caller.worker, caller.incarnation, called.worker, called.incarnation)
        return hmac.digest(self._secret, side + nonces + names, "sha256")

    def _check(self, proof: bytes, right: bytes, peer: WorkerRef) -> None:
        if not hmac.compare_digest(proof, right):
            raise FrameError(f"{peer} does not know the pool's secret")

    def _say(self, channel: Channel, payload: bytes) -> None:
        frame = Frame(FrameKind.HELLO, self._worker, payload_bytes=len(payload))
        channel.send(frame.encode() + payload)

    def _hear(self, channel: Channel, size_bytes: int) -> tuple[WorkerRef, bytes]:
        frame = decode_header(channel.receive(HEADER_BYTES, self._timeout_s))
        if frame.kind is not FrameKind.HELLO or frame.payload_bytes != size_bytes:
            raise FrameError(f"{frame.kind.name} where HELLO with {size_bytes} bytes belongs")
        return frame.sender, channel.receive(size_bytes, self._timeout_s)

    def __repr__(self) -> str:
        return f"<Greeting of {self._worker}>"
