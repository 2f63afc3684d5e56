"""Windows of what instances of stages count: differences of reports, and how values vary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from livescale.messages.events import StageCounts
from livescale.values.types import InstanceId
from livescale.values.units import NS_PER_S

COUNTED_MIN = 8
"""Fewer gaps or services say nothing of how they vary."""


def differences(
    before: Mapping[InstanceId, StageCounts], after: Mapping[InstanceId, StageCounts]
) -> list[StageCounts]:
    """What each instance did between two reports, of instances that were known before: what others
    did may have been long ago."""
    pairs = [(before[number], its) for number, its in after.items() if number in before]
    return [
        StageCounts(*(getattr(b, name) - getattr(a, name) for name in a.__struct_fields__))
        for a, b in pairs
        if b.came >= a.came and b.done >= a.done
    ]


def cv_of_gaps(parts: Iterable[StageCounts]) -> float | None:
    """How the gaps between arrivals vary (QUART §4): each instance has arrivals of its own; of all
    of them the mean of squares. None: too few to say."""
    varied, counted = 0.0, 0
    for part in parts:
        if part.came > 1 and part.gaps_ns > 0:
            varied += part.came * squared_cv(part.came, part.gaps_ns, part.gaps_squared_ns_s)
            counted += part.came
    return math.sqrt(varied / counted) if counted >= COUNTED_MIN else None


def squared_cv(count: int, sum_ns: int, squared_ns_s: int) -> float:
    """The square of a coefficient of variation, from sums of values and of their squares."""
    return max(count * squared_ns_s * NS_PER_S / (sum_ns * sum_ns) - 1, 0.0)
