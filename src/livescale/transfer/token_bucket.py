"""Rate limit of one direction of a worker's NIC, shared by all its connections.

Only the pace lives here, not what is sent. Both ends of a hop need a bucket: one at the sender
alone would let n senders reach one receiver n times too fast.
"""

from __future__ import annotations

import threading
import time

_SLICE_BYTES_MIN = 16 << 10
_SLICES_PER_S = 200
_BURSTS_PER_S = 100


class BucketClosedError(ConnectionError):
    """The bucket was closed while or before somebody waited for it."""


class TokenBucket:
    """Thread-safe pace of `bytes_per_s`; None does not limit.

    The bucket books each take on a virtual line: the line is busy until `_clear_ns`, and a take
    returns when the line has carried its bytes. Bookings are made in the order of the calls, so
    threads that take equal amounts get equal shares, and a late wake-up costs no rate as long as
    it is shorter than the burst.
    """

    def __init__(self, bytes_per_s: int | None, burst_bytes: int | None = None) -> None:
        """`burst_bytes`: credit that an idle line collects at most; by default 10 ms of rate."""
        if bytes_per_s is not None and bytes_per_s < 1:
            raise ValueError(f"a rate of {bytes_per_s} bytes per second carries nothing")
        if burst_bytes is not None and burst_bytes < 0:
            raise ValueError(f"a burst of {burst_bytes} bytes is negative")
        self.bytes_per_s = bytes_per_s
        self._burst_ns = 0
        if bytes_per_s is not None:
            burst = bytes_per_s // _BURSTS_PER_S if burst_bytes is None else burst_bytes
            self._burst_ns = burst * 1_000_000_000 // bytes_per_s
        self._lock = threading.Lock()
        self._clear_ns = 0
        self._closed = threading.Event()

    def slice_bytes(self, size_bytes: int) -> int:
        """How much of `size_bytes` to take at once so that the pace stays smooth (about 5 ms)."""
        if self.bytes_per_s is None:
            return size_bytes
        return min(size_bytes, max(_SLICE_BYTES_MIN, self.bytes_per_s // _SLICES_PER_S))

    def take(self, size_bytes: int) -> None:
        """The line has carried `size_bytes` more. Blocks; raises BucketClosedError after close."""
        if self.bytes_per_s is None:
            if self._closed.is_set():
                raise BucketClosedError("the token bucket is closed")
            return
        with self._lock:
            # An idle line collects credit for one burst, not for all the time it was idle.
            start_ns = max(self._clear_ns, time.monotonic_ns() - self._burst_ns)
            clear_ns = start_ns + size_bytes * 1_000_000_000 // self.bytes_per_s
            self._clear_ns = clear_ns
        while True:
            wait_ns = max(0, clear_ns - time.monotonic_ns())
            if self._closed.wait(wait_ns / 1e9) if wait_ns else self._closed.is_set():
                raise BucketClosedError("the token bucket is closed")
            if wait_ns == 0:
                return

    def close(self) -> None:
        """Everybody who waits, now or later, gets BucketClosedError."""
        self._closed.set()

    def __repr__(self) -> str:
        rate = "unlimited" if self.bytes_per_s is None else f"{self.bytes_per_s} bytes/s"
        return f"<TokenBucket {rate}{', closed' if self._closed.is_set() else ''}>"
