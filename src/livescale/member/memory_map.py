"""Which bytes of one flat memory are taken: first fit over a list of free regions.

Offsets and sizes only; the memory itself is elsewhere.
"""

from __future__ import annotations

from bisect import bisect_left, insort

ALIGNMENT_BYTES = 4096
"""Every region starts on a page: what is mapped or registered is mapped or registered by pages."""


class MemoryMap:
    """Allocates aligned regions of `[0, size_bytes)`.

    First fit: the lowest free region that is large enough. Neighbours that are free are one.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        #: (offset, size) of free regions, by offset; no two touch
        self._free = [(0, size_bytes)] if size_bytes > 0 else []
        self._taken: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        """Free bytes together; one region may be smaller."""
        return sum(size for _, size in self._free)

    def allocate(self, size_bytes: int) -> int | None:
        """The offset of a region of so many bytes, or None where no free one is large enough."""
        needed = -(-max(size_bytes, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        for place, (offset, size) in enumerate(self._free):
            if size >= size_bytes:
                # The memory's end need not be aligned.
                used = min(needed, size)
                rest = [(offset + used, size - used)] if size > used else []
                self._free[place : place + 1] = rest
                self._taken[offset] = used
                return offset
        return None

    def free(self, offset_bytes: int) -> None:
        """The region that was allocated at this offset is free again. KeyError for any other."""
        offset, size = offset_bytes, self._taken.pop(offset_bytes)
        place = bisect_left(self._free, (offset, 0))
        if place < len(self._free) and self._free[place][0] == offset + size:
            size += self._free.pop(place)[1]
        if place > 0 and sum(self._free[place - 1]) == offset:
            before = self._free.pop(place - 1)
            offset, size = before[0], before[1] + size
        insort(self._free, (offset, size))

    def __repr__(self) -> str:
        return f"<MemoryMap {self.free_bytes} of {self.size_bytes} bytes free>"
