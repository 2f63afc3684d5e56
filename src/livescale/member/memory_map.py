"""Which bytes of one flat memory are taken: first fit over a list of free regions.

Offsets and sizes only; the memory itself is elsewhere.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from livescale.common.regions import aligned


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
        for offset, size in self._free:
            if size >= size_bytes:
                self.take(offset, size_bytes)
                return offset
        return None

    def take(self, offset_bytes: int, size_bytes: int) -> bool:
        """Whether `size_bytes` from this aligned offset on were free. They are taken now."""
        place = bisect_left(self._free, (offset_bytes + 1, 0)) - 1
        if place < 0:
            return False
        offset, size = self._free[place]
        left = offset + size - offset_bytes
        if left < max(size_bytes, 1):
            return False
        # The memory's end need not be aligned.
        used = min(aligned(max(size_bytes, 1)), left)
        pieces = ((offset, offset_bytes - offset), (offset_bytes + used, left - used))
        self._free[place : place + 1] = [piece for piece in pieces if piece[1]]
        self._taken[offset_bytes] = used
        return True

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
