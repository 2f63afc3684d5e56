"""MemoryMap of a host's memory: what is taken never overlaps, and nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.member.memory_map import ALIGNMENT_BYTES, MemoryMap

SIZE_BYTES = 40 * ALIGNMENT_BYTES + 100
SIZES = st.integers(0, 15 * ALIGNMENT_BYTES)
#: allocate so many bytes, or free the n-th region that is taken
STEPS = st.lists(SIZES | st.tuples(st.integers(0, 50)), max_size=60)


def lowest_gap(taken: dict[int, int], size_bytes: int) -> int | None:
    """Where first fit puts a region, worked out from the taken ones."""
    start = 0
    for offset, size in sorted(taken.items()):
        if offset - start >= max(size_bytes, 1):
            break
        start = -(-(offset + size) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return start if SIZE_BYTES - start >= max(size_bytes, 1) else None


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
        offset = regions.allocate(step)
        assert offset == lowest_gap(taken, step)
        if offset is not None:
            assert offset % ALIGNMENT_BYTES == 0
            taken[offset] = max(step, 1)
    for offset in taken:
        regions.free(offset)
    assert regions.free_bytes == SIZE_BYTES
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
