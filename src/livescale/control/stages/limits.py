"""Limits of stages, and of all stages of a line together (R_total)."""

from __future__ import annotations

from collections.abc import Sequence


def within(counts: Sequence[int], limits: Sequence[tuple[int, int]], total: int) -> list[int]:
    """The counts within their limits (at least, at most), and their sum at most `total` unless the
    least numbers are more: what is too much goes from the largest, of equals from the last."""
    found = [min(max(n, least), most) for n, (least, most) in zip(counts, limits, strict=True)]
    while sum(found) > total:
        above = [i for i, (least, _) in enumerate(limits) if found[i] > least]
        if not above:
            break
        found[max(above, key=lambda i: (found[i] - limits[i][0], i))] -= 1
    return found


def even(counts: Sequence[int], total: int) -> list[int]:
    """Whole pipelines: each stage gets what the one that needs most does, one at least, as far as
    `total` replicas suffice."""
    return [max(min(max(counts), total // len(counts)), 1)] * len(counts)
