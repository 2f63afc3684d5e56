"""Peaks of traces: when one is busiest, and several turned so that their peaks meet or lie apart.

A trace is turned in a circle: what leaves at the end of the window begins it. So each keeps its
rows and the intervals between them, and only the time at which its peak comes changes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

from livescale.load.formats import TraceRow
from livescale.load.traces import rotate

STRETCH_PART = 20
"""A peak is the busiest stretch of a twentieth of the window: 12 s of four minutes."""


class Peaks(enum.StrEnum):
    """When the peaks of traces that share a pool come."""

    AS_THEY_ARE = "as-they-are"
    ALIGNED = "aligned"
    SHIFTED = "shifted"


def peak_ns(rows: Sequence[TraceRow], period_ns: int) -> int:
    """When the busiest stretch begins: a twentieth of the period in which most tokens arrive, the
    earliest of several; it may go on at the start of the window. ValueError without rows."""
    if not rows:
        raise ValueError("a trace without requests has no peak")
    stretch_ns = max(period_ns // STRETCH_PART, 1)
    turn = [(row.arrival_ns, row.input_tokens + row.output_tokens) for row in rows]
    around = turn + [(at_ns + period_ns, tokens) for at_ns, tokens in turn]
    best, best_tokens, inside, end = 0, -1, 0, 0
    for number, (at_ns, tokens) in enumerate(turn):
        while end < number + len(turn) and around[end][0] < at_ns + stretch_ns:
            inside += around[end][1]
            end += 1
        if inside > best_tokens:
            best, best_tokens = at_ns, inside
        inside -= tokens
    return best


def turned(
    loads: Mapping[str, Sequence[TraceRow]], peaks: Peaks, period_ns: int
) -> dict[str, list[TraceRow]]:
    """The same traces, all of which arrive in [0, period_ns), with their peaks there.

    ALIGNED: all begin in the middle of the window, the worst case for what they share. SHIFTED:
    they begin at even distances, in the order of `loads`, the best case.
    """
    if peaks is Peaks.AS_THEY_ARE:
        return {name: list(rows) for name, rows in loads.items()}
    found = {}
    for number, (name, rows) in enumerate(loads.items()):
        half = 1 if peaks is Peaks.ALIGNED else 2 * number + 1
        parts = 2 if peaks is Peaks.ALIGNED else 2 * len(loads)
        found[name] = rotate(rows, period_ns * half // parts - peak_ns(rows, period_ns), period_ns)
    return found
