"""Which bytes of one flat memory are taken: first fit over a list of free regions.

Offsets and sizes only; the memory itself is elsewhere. Free regions may be kept from use.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

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
        #: by whom they are kept from use: (first byte, end), wherever they lie
        self._kept: dict[int, tuple[tuple[int, int], ...]] = {}

    @property
    def free_bytes(self) -> int:
        """Free bytes together; one region may be smaller."""
        return sum(size for _, size in self._free)

    def allocate(self, size_bytes: int, but: Sequence[tuple[int, int]] = ()) -> int | None:
        """The offset of a region of so many bytes, or None where no free one is large enough that
        meets none of the ranges `but`: (first byte, end)."""
        for start, size in self._free:
            offset = self._behind_kept(start, size_bytes, but)
            if offset + size_bytes <= start + size and self.take(offset, size_bytes):
                return offset
        return None

    def keep(self, owner: int, ranges: tuple[tuple[int, int], ...]) -> None:
        """Nothing is allocated or taken in these (offset, size) from now on; in what the owner kept
        before, it may be again."""
        self._kept.pop(owner, None)
        if ranges:
            self._kept[owner] = tuple((offset, offset + size) for offset, size in ranges)

    def _behind_kept(
        self, offset_bytes: int, size_bytes: int, but: Sequence[tuple[int, int]] = ()
    ) -> int:
        """The first aligned offset from this one on that meets nothing that is kept, nor `but`."""
        kept = (part for parts in self._kept.values() for part in parts)
        for start, stop in sorted((*kept, *but)):
            if start < offset_bytes + max(size_bytes, 1) and offset_bytes < stop:
                offset_bytes = aligned(stop)
        return offset_bytes

    def take(self, offset_bytes: int, size_bytes: int) -> bool:
        """Whether `size_bytes` from this aligned offset on were free. They are taken now."""
        if self._behind_kept(offset_bytes, size_bytes) != offset_bytes:
            return False
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
        kept = f", {len(self._kept)} plans may still write" if self._kept else ""
        return f"<MemoryMap {self.free_bytes} of {self.size_bytes} bytes free{kept}>"
