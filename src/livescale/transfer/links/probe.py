"""Measuring the rate of one peer: bytes are asked for and thrown away."""

from __future__ import annotations

import itertools
import threading
import time

from livescale.transfer.formats.frames import PROBE_BYTES_MAX, Frame, FrameError, FrameKind
from livescale.transfer.formats.orders import TransferError
from livescale.transfer.links.connection import Connection
from livescale.transfer.links.outbox import OutboxFullError, Word
from livescale.values.types import WorkerRef


class Probe:
    """Counts what comes. The clock runs from the end of the first part, so that the way there and
    what was queued before do not count."""

    def __init__(self, connection: Connection, size_bytes: int) -> None:
        self.connection = connection
        self._size_bytes = size_bytes
        self._ended = threading.Event()
        self._reason: str | None = None
        self._came_bytes = 0
        self._uncounted_bytes = 0
        self._start_ns = 0
        self._end_ns = 0

    def took(self, size_bytes: int, begin_ns: int, end_ns: int) -> None:
        """A part came between these times."""
        self._came_bytes += size_bytes
        is_first = self._came_bytes == size_bytes
        if is_first and size_bytes < self._size_bytes:
            self._start_ns, self._uncounted_bytes = end_ns, size_bytes
        elif is_first:
            self._start_ns = begin_ns
        if self._came_bytes >= self._size_bytes:
            self._end_ns = end_ns
            self._ended.set()

    def fail(self, reason: str) -> None:
        self._reason = reason
        self._ended.set()

    def wait(self, timeout_s: float) -> int:
        """Bytes per second. Raises TransferError if the bytes do not come in time."""
        peer = self.connection.peer
        if not self._ended.wait(timeout_s):
            raise TransferError(f"{peer} did not answer a probe within {timeout_s:g} s")
        if self._reason is not None:
            raise TransferError(f"the probe of {peer} failed: {self._reason}")
        elapsed_ns = max(1, self._end_ns - self._start_ns)
        return (self._came_bytes - self._uncounted_bytes) * 1_000_000_000 // elapsed_ns


class Probes:
    """Probes of this side under way, and answers to those of others."""

    def __init__(self, worker: WorkerRef) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._probes: dict[int, Probe] = {}

    def measure(self, connection: Connection, size_bytes: int, timeout_s: float) -> int:
        """Bytes per second at which the peer's memory comes here. Blocks. Raises TransferError."""
        if not 1 <= size_bytes <= PROBE_BYTES_MAX:
            raise TransferError(f"a probe of {size_bytes} bytes is not in 1..{PROBE_BYTES_MAX}")
        probe = Probe(connection, size_bytes)
        with self._lock:
            number = next(self._numbers)
            self._probes[number] = probe
        try:
            frame = Frame(FrameKind.PROBE, self._worker, number, chunk=size_bytes)
            connection.outbox.put(Word(frame.encode()))
            return probe.wait(timeout_s)
        finally:
            with self._lock:
                del self._probes[number]

    def answer(self, connection: Connection, frame: Frame) -> None:
        """The peer gets the bytes that it asks for. Raises FrameError."""
        if not 1 <= frame.chunk <= PROBE_BYTES_MAX:
            raise FrameError(f"a probe of {frame.chunk} bytes")
        try:
            connection.outbox.put_probe(frame.plan, frame.chunk)
        except OutboxFullError as error:
            raise FrameError(str(error)) from None

    def take(self, connection: Connection, frame: Frame) -> None:
        """A part of what was asked for comes, and is thrown away."""
        with self._lock:
            probe = self._probes.get(frame.plan)
        begin_ns = time.monotonic_ns()

        def landed(_: int) -> None:
            connection.count(frame.payload_bytes, frame.payload_bytes)
            if probe is not None and probe.connection is connection:
                probe.took(frame.payload_bytes, begin_ns, time.monotonic_ns())

        connection.channel.discard_range(frame.payload_bytes, landed)

    def connection_ended(self, connection: Connection, reason: str) -> None:
        with self._lock:
            probes = [probe for probe in self._probes.values() if probe.connection is connection]
        for probe in probes:
            probe.fail(reason)
