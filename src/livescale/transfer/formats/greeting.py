"""The first words on a channel: both ends say who they are and prove that they belong to the pool.

Three HELLO frames carry the messages of `livescale.common.proofs`; the names in them are those of
both workers. They go over a channel that is protected already (`sealing.py`), in a pool with
certificates. In others, what is sent later is not protected: that keeps other processes of a host
out, not a network that listens. Channels whose other end has not proved yet who it is are counted
and bounded.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
import threading
from collections.abc import Callable, Iterator

from livescale.common.proofs import NONCE_BYTES, PROOF_BYTES, CalledProof, CallerProof, ProofError
from livescale.transfer.formats import frames
from livescale.transfer.formats.carrier import Channel
from livescale.transfer.formats.orders import TransferError
from livescale.values.types import WorkerRef

_NAMES = struct.Struct(">IQIQ")


class Greeting:
    """What `worker` says first, with the pool's `secret`. Each answer may take `timeout_s`.

    Both calls raise FrameError or OSError; then the channel is to be closed.
    """

    def __init__(self, worker: WorkerRef, secret: str, timeout_s: float) -> None:
        self._worker = worker
        self._secret = secret
        self._timeout_s = timeout_s

    def call(self, channel: Channel, peer: WorkerRef) -> None:
        """The peer, at the other end of a channel opened here, and this side know each other."""
        side = CallerProof(self._secret, secrets.token_bytes(NONCE_BYTES))
        self._say(channel, side.nonce)
        answered, answer = self._hear(channel, NONCE_BYTES + PROOF_BYTES)
        if answered != peer:
            raise frames.FrameError(f"{answered} answered in the place of {peer}")
        try:
            proof = side.answer(answer, _names(self._worker, peer))
        except ProofError as error:
            raise frames.FrameError(f"{peer} {error}") from None
        self._say(channel, proof)

    def answer(self, channel: Channel, check: Callable[[WorkerRef], None]) -> WorkerRef:
        """Who opened the channel, proved. `check` raises OSError for those who are not wanted."""
        peer, nonce = self._hear(channel, NONCE_BYTES)
        check(peer)
        own = secrets.token_bytes(NONCE_BYTES)
        side = CalledProof(self._secret, own, nonce, _names(peer, self._worker))
        self._say(channel, side.message)
        caller, proof = self._hear(channel, PROOF_BYTES)
        if caller != peer:
            raise frames.FrameError(f"{caller} went on in the place of {peer}")
        try:
            side.check(proof)
        except ProofError as error:
            raise frames.FrameError(f"{peer} {error}") from None
        return peer

    def _say(self, channel: Channel, payload: bytes) -> None:
        frame = frames.Frame(frames.FrameKind.HELLO, self._worker, payload_bytes=len(payload))
        channel.send(frame.encode() + payload)

    def _hear(self, channel: Channel, size_bytes: int) -> tuple[WorkerRef, bytes]:
        frame = frames.decode_header(channel.receive(frames.HEADER_BYTES, self._timeout_s))
        if frame.kind is not frames.FrameKind.HELLO or frame.payload_bytes != size_bytes:
            raise frames.FrameError(
                f"{frame.kind.name} where HELLO with {size_bytes} bytes belongs"
            )
        return frame.sender, channel.receive(size_bytes, self._timeout_s)

    def __repr__(self) -> str:
        return f"<Greeting of {self._worker}>"


def _names(caller: WorkerRef, called: WorkerRef) -> bytes:
    return _NAMES.pack(caller.worker, caller.incarnation, called.worker, called.incarnation)


_CALLERS_MAX = 64


class Strangers:
    """Greets them, and keeps those that say nothing few. Thread-safe."""

    def __init__(self, worker: WorkerRef, secret: str, handshake_s: float) -> None:
        self._greeting = Greeting(worker, secret, handshake_s)
        self._handshake_s = handshake_s
        self._lock = threading.Lock()
        self._channels: list[Channel] = []
        # Those of them that were opened there, in the order in which they came.
        self._callers: list[Channel] = []
        self._is_closed = False

    def call(self, peer: WorkerRef, channel: Channel) -> Channel:
        """The channel, opened here, when the peer has answered on it. Raises TransferError; the
        channel is closed then."""
        try:
            with self._greeted(channel):
                self._greeting.call(channel, peer)
        except (OSError, frames.FrameError) as error:
            channel.close()
            raise TransferError(str(error)) from error
        return channel

    def came(self, channel: Channel) -> None:
        """Opened there. The oldest that says nothing makes room: members are never kept out by
        strangers."""
        with self._lock:
            if len(self._callers) >= _CALLERS_MAX:
                self._callers.pop(0).break_off()
            self._callers.append(channel)

    def left(self, channel: Channel) -> None:
        """One that came is not answered."""
        with self._lock:
            if channel in self._callers:
                self._callers.remove(channel)

    def answer(self, channel: Channel, check: Callable[[WorkerRef], None]) -> WorkerRef | None:
        """Who opened the channel; None if that is not proved or `check` raises OSError: the
        channel is closed then."""
        try:
            with self._greeted(channel):
                return self._greeting.answer(channel, check)
        except (OSError, frames.FrameError):
            channel.close()
            return None

    def close(self) -> None:
        """No greeting goes on for long. Idempotent."""
        with self._lock:
            self._is_closed = True
            channels = list(self._channels)
        for channel in channels:
            channel.break_off()

    @contextlib.contextmanager
    def _greeted(self, channel: Channel) -> Iterator[None]:
        """After the greeting both ends may share memory. Meanwhile `close` breaks it off."""
        with self._lock:
            self._channels.append(channel)
            is_closed = self._is_closed
        if is_closed:
            channel.break_off()
        try:
            channel.protect(self._handshake_s)
            yield
            channel.share_memory(self._handshake_s)
        finally:
            with self._lock:
                self._channels.remove(channel)
                if channel in self._callers:
                    self._callers.remove(channel)
