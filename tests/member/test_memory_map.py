"""MemoryMap of a host's memory: what is taken never overlaps, and nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.common.regions import ALIGNMENT_BYTES, lowest_gap
from livescale.member.memory_map import MemoryMap

SIZE_BYTES = 40 * ALIGNMENT_BYTES + 100
SIZES = st.integers(0, 15 * ALIGNMENT_BYTES)
#: allocate so many bytes, or free the n-th region that is taken
STEPS = st.lists(SIZES | st.tuples(st.integers(0, 50)), max_size=60)


def is_gap(taken: dict[int, int], offset: int, size_bytes: int) -> bool:
    """The region lies in the memory, on a page, and meets no other."""
    ends = [offset + size_bytes <= other or other + size <= offset for other, size in taken.items()]
    is_inside = offset >= 0 and offset + size_bytes <= SIZE_BYTES
    return offset % ALIGNMENT_BYTES == 0 and is_inside and all(ends)


@given(STEPS)
def test_regions_lie_apart_aligned_and_at_the_first_place_that_fits(steps: list) -> None:
    regions = MemoryMap(SIZE_BYTES)
    taken: dict[int, int] = {}
    for step in steps:
        if isinstance(step, tuple):
            if taken:
                offset = sorted(taken)[step[0] % len(taken)]
                regions.free(offset)
                del taken[offset]
            continue
        size = max(step, 1)
        places = range(0, SIZE_BYTES, ALIGNMENT_BYTES)
        first = next((at for at in places if is_gap(taken, at, size)), None)
        assert lowest_gap(taken.items(), size, SIZE_BYTES) == first
        offset = regions.allocate(step)
        assert offset == first
        if offset is not None:
            taken[offset] = size
    for offset in taken:
        regions.free(offset)
    assert regions.free_bytes == SIZE_BYTES
    assert regions.allocate(SIZE_BYTES) == 0


@given(st.lists(st.tuples(st.integers(0, 45), SIZES), max_size=30))
def test_a_place_is_taken_where_it_is_free(wanted: list[tuple[int, int]]) -> None:
    regions = MemoryMap(SIZE_BYTES)
    taken: dict[int, int] = {}
    for page, size in wanted:
        offset, size = page * ALIGNMENT_BYTES, max(size, 1)
        assert regions.take(offset, size) == is_gap(taken, offset, size)
        if is_gap(taken, offset, size):
            taken[offset] = size
    for offset in taken:
        regions.free(offset)
    assert regions.free_bytes == SIZE_BYTES


KEPT = st.lists(st.tuples(st.integers(0, SIZE_BYTES - 1), SIZES.map(lambda n: max(n, 1))))


@given(st.lists(SIZES, max_size=20), KEPT, st.lists(SIZES, max_size=20))
def test_nothing_is_placed_in_what_is_kept_until_it_is_free_again(
    before: list[int], kept: list[tuple[int, int]], after: list[int]
) -> None:
    regions = MemoryMap(SIZE_BYTES)
    taken = {at: max(n, 1) for n in before if (at := regions.allocate(n)) is not None}
    # What is kept may lie anywhere, also where something lies that is freed later.
    regions.keep(7, tuple(kept))
    for offset in list(taken):
        regions.free(offset)
    taken = {}
    for size in (max(n, 1) for n in after):
        is_free = {
            at: is_gap(taken, at, size)
            and all(at + size <= start or start + n <= at for start, n in kept)
            for at in range(0, SIZE_BYTES, ALIGNMENT_BYTES)
        }
        assert not any(regions.take(at, size) for at, free in is_free.items() if not free)
        offset = regions.allocate(size)
        assert offset == next((at for at, free in is_free.items() if free), None)
        if offset is not None:
            taken[offset] = size
    for offset in taken:
        regions.free(offset)
    regions.keep(7, ())
    assert regions.allocate(SIZE_BYTES) == 0


def test_only_what_was_allocated_can_be_freed() -> None:
    regions = MemoryMap(SIZE_BYTES)
    offset = regions.allocate(10)
    assert offset == 0
    with pytest.raises(KeyError):
        regions.free(ALIGNMENT_BYTES)
    regions.free(offset)
    with pytest.raises(KeyError):
        regions.free(offset)


def test_no_memory_holds_nothing() -> None:
    assert MemoryMap(0).allocate(1) is None
