"""Arithmetic of chunk ranges that planning and repair need."""

from __future__ import annotations

import math
from collections.abc import Sequence

from livescale.values.chunks import ChunkRange


def intersect(a: ChunkRange, b: ChunkRange) -> bool:
    """Some chunk is in both. (Two arithmetic progressions: the Chinese remainder theorem.)"""
    lower, upper = max(a.start, b.start), min(a.stop, b.stop)
    common = math.gcd(a.step, b.step)
    if lower >= upper or (b.start - a.start) % common:
        return False
    period = a.step // common * b.step
    # The least x >= 0 with a.start + x * a.step in b's progression.
    x = (b.start - a.start) // common * pow(a.step // common, -1, b.step // common)
    first = a.start + x % (b.step // common) * a.step
    first += -(-(lower - first) // period) * period if first < lower else 0
    first -= (first - lower) // period * period
    return first < upper


def overlap(some: Sequence[ChunkRange], others: Sequence[ChunkRange]) -> bool:
    """Some chunk is in both lists."""
    return any(intersect(a, b) for a in some for b in others)


def covers(theirs: Sequence[ChunkRange], wanted: Sequence[ChunkRange]) -> bool:
    """Every wanted chunk is among theirs, as far as single ranges show it."""
    return tuple(theirs) == tuple(wanted) or all(
        any(_holds(other, part) for other in theirs) for part in wanted
    )


def _holds(other: ChunkRange, part: ChunkRange) -> bool:
    last = part.start + (len(part) - 1) * part.step
    steps_fit = len(part) == 1 or part.step % other.step == 0
    return part.start in other and last < other.stop and steps_fit
