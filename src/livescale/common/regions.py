"""Regions of one flat memory: where they begin, and where there is room for one more."""

from __future__ import annotations

from collections.abc import Iterable

ALIGNMENT_BYTES = 4096
"""Every region starts on a page: what is mapped or registered is mapped or registered by pages."""


def lowest_gap(taken: Iterable[tuple[int, int]], size_bytes: int, stop_bytes: int) -> int | None:
    """The lowest aligned offset from which `size_bytes` are free in `[0, stop_bytes)`; None where
    no gap is large enough. `taken` are (offset, size) of regions that lie apart."""
    start_bytes = 0
    for offset_bytes, taken_bytes in sorted(taken):
        if offset_bytes - start_bytes >= size_bytes:
            break
        start_bytes = aligned(offset_bytes + taken_bytes)
    return start_bytes if stop_bytes - start_bytes >= size_bytes else None


def aligned(offset_bytes: int) -> int:
    """The first place from there on where a region may start."""
    return -(-offset_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
