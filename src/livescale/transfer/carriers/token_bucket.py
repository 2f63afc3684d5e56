"""Rate limit of one direction of a worker's NIC, shared by all its connections.

Only the pace lives here, not what is sent. Both ends of a hop need a bucket: one at the sender
alone would let n senders reach one receiver n times too fast.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterator

from livescale.values.units import NS_PER_S

_SLICE_BYTES_MIN = 16 << 10
_SLICES_PER_S = 200
_BURSTS_PER_S = 100
_TURNS_PER_S = 10
NEXT_PARCEL_NS = 3_000_000
"""How soon behind a parcel the next one of its sender comes, if one is to come."""
# Threads wake up late by less than this, even on a busy machine.
_IDLE_NS = 100_000_000


class BucketClosedError(ConnectionError):
    """The bucket was closed while or before a thread waited for it."""


class TokenBucket:
    """Thread-safe pace of `bytes_per_s`; None does not limit.

    The bucket books each take on a virtual line: the line is busy until `_clear_ns`, and a take
    returns when the line has carried its bytes. A late wake-up costs no rate as long as it is
    shorter than the burst. With `is_fresh_when_idle` a line that was idle for a while begins as
    a link does: its first bytes take their time. Two classes share the line. Urgent takes are
    booked at once, all slices of a parcel together. Parameter takes are booked one after the
    other, in the order of the calls and only when the line is free, so that threads that take
    equal amounts get equal shares. What is urgent waits for one slice of parameters at most. Of
    parcels that follow one another only the first waits: behind each the line is kept for the
    next one for a moment (`NEXT_PARCEL_NS`, or as long as the parcel took), until parameters have
    waited for 100 ms. Parameters have a second line of `parameter_share_percent` of the rate,
    which leaves the rest to urgent bytes even when none are there.
    """

    def __init__(
        self,
        bytes_per_s: int | None,
        burst_bytes: int | None = None,
        parameter_share_percent: int = 100,
        is_fresh_when_idle: bool = False,
        now_ns: Callable[[], int] = time.monotonic_ns,
        changed: threading.Condition | None = None,
    ) -> None:
        """`burst_bytes`: credit that an idle line collects at most; by default 10 ms of rate. Its
        time is `now_ns`, and its threads wait on `changed`, by default on one of its own."""
        if bytes_per_s is not None and bytes_per_s < 1:
            raise ValueError(f"a rate of {bytes_per_s} bytes per second carries nothing")
        if burst_bytes is not None and burst_bytes < 0:
            raise ValueError(f"a burst of {burst_bytes} bytes is negative")
        if not 1 <= parameter_share_percent <= 100:
            raise ValueError(f"a share of {parameter_share_percent} % is not in 1..100")
        self.bytes_per_s = bytes_per_s
        self._share_percent = parameter_share_percent
        self._is_fresh_when_idle = is_fresh_when_idle
        self._burst_ns = 0
        if bytes_per_s is not None:
            burst = bytes_per_s // _BURSTS_PER_S if burst_bytes is None else burst_bytes
            self._burst_ns = burst * NS_PER_S // bytes_per_s
        self._now_ns = now_ns
        self._changed = changed or threading.Condition()
        self._clear_ns = 0
        self._parameter_clear_ns = 0
        # Parameters wait until then for a parcel that may follow.
        self._kept_until_ns = 0
        # When parameters last had the line, or did not ask for it.
        self._open_ns = 0
        # Tickets of those who wait to take for parameters, in order.
        self._line: collections.deque[object] = collections.deque()
        self._is_closed = False

    @classmethod
    def of_uplink(cls, bytes_per_s: int | None, parameter_share_percent: int) -> TokenBucket:
        """Of what a member sends. A downlink keeps its credit: what comes was on its way while its
        sender paid for it."""
        return cls(
            bytes_per_s,
            parameter_share_percent=parameter_share_percent,
            is_fresh_when_idle=True,
        )

    def slice_bytes(self, size_bytes: int) -> int:
        """How much of `size_bytes` to take at once so that the pace stays smooth (about 5 ms)."""
        if self.bytes_per_s is None:
            return size_bytes
        return min(size_bytes, max(_SLICE_BYTES_MIN, self.bytes_per_s // _SLICES_PER_S))

    def take(self, size_bytes: int, is_urgent: bool = False) -> None:
        """The line has carried `size_bytes` more. Blocks; raises BucketClosedError after close."""
        if self.bytes_per_s is None:
            if self._is_closed:
                raise BucketClosedError("the token bucket is closed")
            return
        line_ns = size_bytes * NS_PER_S // self.bytes_per_s
        with self._changed:
            clear_ns = self._book(line_ns) if is_urgent else self._take_turn(line_ns)
            self._wait_until(clear_ns)

    def slices(self, size_bytes: int, is_urgent: bool = False) -> Iterator[int]:
        """Sizes of the slices of so many bytes, each as soon as the line has carried it. Raises
        BucketClosedError.

        What is urgent has the line for all of its slices, or for 100 ms at a time: parameters wait
        for the last one of these.
        """
        if not is_urgent or self.bytes_per_s is None:
            while size_bytes:
                step = self.slice_bytes(size_bytes)
                self.take(step, is_urgent)
                yield step
                size_bytes -= step
            return
        while size_bytes:
            turn = min(size_bytes, max(_SLICE_BYTES_MIN, self.bytes_per_s // _TURNS_PER_S))
            line_ns = turn * NS_PER_S // self.bytes_per_s
            with self._changed:
                clear_ns = self._book(line_ns)
                self._keep(line_ns)
            size_bytes -= turn
            while turn:
                step = self.slice_bytes(turn)
                turn -= step
                with self._changed:
                    self._wait_until(clear_ns - turn * NS_PER_S // self.bytes_per_s)
                yield step

    def pay(self, size_bytes: int) -> None:
        """As many slices as it takes for parameters that have moved another way."""
        for _ in self.slices(size_bytes):
            pass

    def keep_until(self, at_ns: int) -> None:
        """Parameters wait until then for urgent bytes that are on their way, unless they have
        waited for 100 ms. The latest call counts."""
        with self._changed:
            now_ns = self._now_ns()
            if not self._line:
                self._open_ns = now_ns
            if now_ns - self._open_ns < NS_PER_S // _TURNS_PER_S:
                self._kept_until_ns = at_ns
                self._changed.notify_all()

    def close(self) -> None:
        """Every thread that waits, now or later, gets BucketClosedError."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _book(self, line_ns: int) -> int:
        self._clear_ns = self._start_ns(self._clear_ns) + line_ns
        return self._clear_ns

    def _keep(self, line_ns: int) -> None:
        """The line stays free behind a parcel that was booked for so long."""
        if not self._line:
            self._open_ns = self._clear_ns - line_ns
        if self._clear_ns - self._open_ns < NS_PER_S // _TURNS_PER_S:
            self._kept_until_ns = self._clear_ns + min(line_ns, NEXT_PARCEL_NS)

    def _start_ns(self, clear_ns: int) -> int:
        """When a take may be booked on a line that is busy until then."""
        now_ns = self._now_ns()
        if self._is_fresh_when_idle and now_ns - clear_ns > _IDLE_NS:
            return now_ns
        # An idle line collects credit for one burst, not for all the time it was idle.
        return max(clear_ns, now_ns - self._burst_ns)

    def _take_turn(self, line_ns: int) -> int:
        """Books for parameters when all who came before have and the line is free."""
        ticket = object()
        self._line.append(ticket)
        try:
            while self._line[0] is not ticket:
                self._wait()
            while (rest_ns := self._free_ns() - self._now_ns()) > 0:
                self._wait(rest_ns / NS_PER_S)
            start_ns = self._start_ns(self._parameter_clear_ns)
            self._parameter_clear_ns = start_ns + line_ns * 100 // self._share_percent
            self._open_ns = self._book(line_ns)
            return self._open_ns
        finally:
            self._line.remove(ticket)
            self._changed.notify_all()

    def _free_ns(self) -> int:
        """From then on the line takes parameters, as it is booked now."""
        return max(self._clear_ns, self._parameter_clear_ns, self._kept_until_ns)

    def _wait_until(self, at_ns: int) -> None:
        while not self._is_closed and (rest_ns := at_ns - self._now_ns()) > 0:
            self._changed.wait(rest_ns / NS_PER_S)
        if self._is_closed:
            raise BucketClosedError("the token bucket is closed")

    def _wait(self, timeout_s: float | None = None) -> None:
        if not self._is_closed:
            self._changed.wait(timeout_s)
        if self._is_closed:
            raise BucketClosedError("the token bucket is closed")

    def __repr__(self) -> str:
        rate = "unlimited" if self.bytes_per_s is None else f"{self.bytes_per_s} bytes/s"
        return f"<TokenBucket {rate}{', closed' if self._is_closed else ''}>"
