"""Measuring the rate of one peer: bytes are asked for and thrown away."""

from __future__ import annotations

import threading

from livescale.transfer.connection import Connection
from livescale.transfer.orders import TransferError


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
