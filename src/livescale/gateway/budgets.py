"""Bytes that may be at work at once: who wants more of them waits for those before."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ByteBudget:
    """Bytes for all who are at work, given in order of arrival. Lives on one event loop.

    Who wants more than there are at all gets everything, alone.
    """

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._free_bytes = total_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

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
