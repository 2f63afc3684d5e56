"""At a receiver, parcels of any sender go before parameters of any sender.

Senders put their own parcels first. Where parcels of one and parameters of another meet at a
receiver's downlink, the network has no classes: only the receiver knows both. While parcels come
it takes no parameters, and asks those who send them to hold them back. What it asks for ends by
itself after a moment: a parcel that stops on its way stops nothing else.
"""

from __future__ import annotations

import threading
import time

from livescale.transfer.carriers.token_bucket import NEXT_PARCEL_NS, TokenBucket
from livescale.transfer.formats.carrier import Channel
from livescale.transfer.formats.frames import Frame, FrameKind
from livescale.transfer.links.connection import Connection
from livescale.transfer.links.kept_line import KeptLine
from livescale.transfer.links.outbox import Word
from livescale.values.types import WorkerRef

# Who has sent parameters within this time may be about to send more. Those who are held back send a
# chunk every 100 ms.
_SENDER_NS = 500_000_000


class Precedence:
    """Of what comes over one `downlink`; where that has no rate, nothing waits. Thread-safe."""

    def __init__(self, worker: WorkerRef, downlink: TokenBucket) -> None:
        self._worker = worker
        self._downlink = downlink
        rate = downlink.bytes_per_s
        self._line = None if rate is None else KeptLine(rate)
        self._lock = threading.Lock()
        # When parameters came last, and until when they were asked to wait.
        self._came_ns: dict[Connection, int] = {}
        self._held_ns: dict[Connection, int] = {}

    def receive_parcel(self, channel: Channel, size_bytes: int) -> bytes:
        """The parcel whose header has come. Raises OSError."""
        line = self._line
        if line is None or not channel.is_network:
            return channel.receive(size_bytes, is_urgent_payload=True)
        pieces: list[bytes] = []
        missing_bytes = size_bytes
        with self._lock:
            self._kept(line, line.begins(size_bytes, time.monotonic_ns()))
        try:
            while missing_bytes:
                step = self._downlink.slice_bytes(missing_bytes)
                pieces.append(channel.receive(step, is_urgent_payload=True))
                missing_bytes -= step
                with self._lock:
                    self._kept(line, line.came(step, time.monotonic_ns()))
        finally:
            with self._lock:
                line.ends(missing_bytes, time.monotonic_ns())
                self._downlink.keep_until(line.until_ns)
        return b"".join(pieces)

    def parameters_come(self, connection: Connection) -> None:
        """The header of a chunk has come on it."""
        line = self._line
        if line is None or not connection.channel.is_network:
            return
        now_ns = time.monotonic_ns()
        with self._lock:
            self._came_ns[connection] = now_ns
            if line.until_ns - now_ns > NEXT_PARCEL_NS and line.is_long:
                self._hold(connection, line.until_ns, now_ns)

    def forget(self, connection: Connection) -> None:
        """The connection has ended."""
        with self._lock:
            self._came_ns.pop(connection, None)
            self._held_ns.pop(connection, None)

    def _kept(self, line: KeptLine, is_longer: bool) -> None:
        if not is_longer:
            return
        self._downlink.keep_until(line.until_ns)
        if not line.is_long:
            return
        now_ns = time.monotonic_ns()
        for connection, came_ns in self._came_ns.items():
            if now_ns < came_ns + _SENDER_NS:
                self._hold(connection, line.until_ns, now_ns)

    def _hold(self, connection: Connection, until_ns: int, now_ns: int) -> None:
        """Its other end sends no parameters until then, if it was not told so before."""
        if self._held_ns.get(connection, 0) >= until_ns:
            return
        self._held_ns[connection] = until_ns
        held_us = max(0, until_ns - now_ns) // 1000
        connection.outbox.put(Word(Frame(FrameKind.HOLD, self._worker, chunk=held_us).encode()))

    def __repr__(self) -> str:
        return f"<Precedence of {self._worker}, {self._line}>"
