"""Large bodies are read in turns, so many bytes per second: small requests come in between.

What is read costs time of the event loop, whether the request is refused or not. So the bytes of
all large bodies together are bounded, not those of each.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from uvicorn.protocols.http.flow_control import FlowControl

PACED_FROM_BYTES = 64 * 1024
"""What a body has beyond this is read in turns."""
PACED_BYTES_PER_S = 64 * 1024 * 1024
"""Of all large bodies together: a body of 8 MiB alone takes an eighth of a second."""
# Within this time a connection whose turn it is has read what was there.
_TURN_S = 0.001


class ReadPacer:
    """Turns at reading, in order of asking; those whose request is refused come last.

    Lives on one event loop.
    """

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._wanted: deque[Callable[[], None]] = deque()
        self._refused: deque[Callable[[], None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def wait(self, read_bytes: int, resume: Callable[[], None], *, is_refused: bool) -> None:
        """So many bytes have just been read; `resume` is called when more may be."""
        now_s = asyncio.get_running_loop().time()
        self._free_s = max(now_s, self._free_s) + read_bytes / self._bytes_per_s
        (self._refused if is_refused else self._wanted).append(resume)
        if self._timer is None:
            self._arm(self._free_s)

    def _arm(self, at_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_at(at_s, self._turn)

    def _turn(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._timer = None
        if now_s >= self._free_s:
            (self._wanted or self._refused).popleft()()
        # Who was resumed may have read, and asked, at once.
        if self._timer is None and (self._wanted or self._refused):
            self._arm(max(self._free_s, now_s + _TURN_S))

    def __repr__(self) -> str:
        return f"<ReadPacer {len(self._wanted)} wait, and {len(self._refused)} refused ones>"


class PacedFlow(FlowControl):
    """A connection's flow control that can be held: nothing is read until every hold is released,
    and then only if the application wants more."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._holds = 0

    def hold(self) -> None:
        if not (self._holds or self.read_paused or self._transport.is_closing()):
            self._transport.pause_reading()
        self._holds += 1

    def release(self) -> None:
        """One of the holds."""
        self._holds -= 1
        if not (self._holds or self.read_paused or self._transport.is_closing()):
            self._transport.resume_reading()

    def pause_reading(self) -> None:
        if self._holds:
            self.read_paused = True
        else:
            super().pause_reading()

    def resume_reading(self) -> None:
        if self._holds:
            self.read_paused = False
        else:
            super().resume_reading()


class ByteBudget:
    """Bytes for all who are at work, given in order of arrival. Lives on one event loop.

    Who wants more than there are at all gets everything, alone.
    """

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._free_bytes = total_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def is_wanted(self) -> bool:
        """Somebody waits for bytes that others hold."""
        return bool(self._waiting)

    @asynccontextmanager
    async def holding(self, wanted_bytes: int) -> AsyncIterator[None]:
        """Wait for so many bytes and hold them meanwhile."""
        held_bytes = min(wanted_bytes, self._total_bytes)
        await self._take(held_bytes)
        try:
            yield
        finally:
            self._give_back(held_bytes)

    async def _take(self, wanted_bytes: int) -> None:
        if not self._waiting and wanted_bytes <= self._free_bytes:
            self._free_bytes -= wanted_bytes
            return
        entry = (wanted_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        try:
            await entry[1]
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
                self._give_back(0)  # those behind may fit
            else:
                self._give_back(wanted_bytes)
            raise

    def _give_back(self, size_bytes: int) -> None:
        self._free_bytes += size_bytes
        while self._waiting and self._waiting[0][0] <= self._free_bytes:
            wanted_bytes, turn = self._waiting.popleft()
            self._free_bytes -= wanted_bytes
            turn.set_result(None)

    def __repr__(self) -> str:
        used_bytes = self._total_bytes - self._free_bytes
        return f"<ByteBudget {used_bytes} of {self._total_bytes}, {len(self._waiting)} wait>"
