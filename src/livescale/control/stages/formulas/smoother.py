"""The Smoother (QUART §5.2, Eq. 7): replicas that even arrivals make needless go back.

Laplacian smoothing over the neighbours of a stage. At the ends of a line it does not keep the sum,
so it may only reclaim here, never raise a stage. The predicted CV is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from livescale.control.stages.formulas.graph import StageGraph
from livescale.values.types import Value

_ROUNDING = 1e-9
"""So much less than a whole replica is one, so that sums of fractions do not round up."""


class Smoothed(Value, frozen=True):
    """What Eq. 7 makes of a stage: `smooth` is y' as it is, `to_replicas` what it comes to in whole
    replicas, never more than there are."""

    stage: int
    to_replicas: int
    cv: float
    smooth: float


def beta(cv: float) -> float:
    """β(CV): how much a stage's own need counts, in [0, 1) and rising with the CV of its arrivals.

    The paper says no more than that. CV² / (CV² + 1): the wait grows with CV², and a stage that
    gets requests evenly needs what its neighbours need.
    """
    if cv < 0:
        raise ValueError(f"CV {cv} is negative")
    return cv * cv / (cv * cv + 1)


def smooth(
    graph: StageGraph,
    replicas: Sequence[int],
    cvs: Sequence[float],
    floors: Sequence[int],
) -> list[Smoothed]:
    """One entry per stage. `replicas` are ŷ, after the Corrector; `cvs` the predicted CVs of
    arrivals; below `floors` (r_min, and what keeps the stage faster than its arrivals) none goes.

    All stages are computed from the same ŷ. Fractions of a replica count as one.
    """
    found = []
    for stage, (cv, floor) in enumerate(zip(cvs, floors, strict=True)):
        own, has, near = beta(cv), replicas[stage], graph.neighbours(stage)
        # A stage without neighbours has none to be smoothed with.
        mean = sum(replicas[j] for j in near) / len(near) if near else float(has)
        needed = own * has + (1 - own) * mean
        count = min(has, max(math.ceil(needed - _ROUNDING), floor))
        found.append(Smoothed(stage, count, cv, needed))
    return found
