"""R_total, shared by all stages (QUART Algorithm 1 names it and never uses it)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from livescale.control.stages.formulas.stage_load import StageLoad
from livescale.values.types import Value


class StageWish(Value, frozen=True):
    """`count` replicas for a stage whose requests may wait `allowed_ns`."""

    load: StageLoad
    allowed_ns: int
    count: int

    def urgency(self, replicas: int) -> tuple[float, float]:
        """How badly the stage is off with so many: its wait in units of the allowed one, and among
        those without a steady state the load of each replica."""
        load = self.load
        rho = load.arrivals_per_s / load.served_per_s / max(replicas, 1)
        return load.wait_ns(replicas) / self.allowed_ns, math.inf if replicas < 1 else rho


def share_out(wishes: Sequence[StageWish], least: int, total: int) -> list[int]:
    """Replicas of each stage, never more than `total` together, and `least` for each where that
    fits into it.

    Stages that want fewer get that. What is free then goes, one at a time, to the stage that is
    worst off. No stage gives any up for another that has `least`, unless together they have too
    many: then those give that feel it least. Of equals the first stage is meant.
    """
    least = min(least, total // max(len(wishes), 1))
    counts = [max(min(wish.load.replicas, wish.count), least) for wish in wishes]
    _add(wishes, counts, total - sum(counts))
    _take(wishes, counts, least, sum(counts) - total)
    return counts


def _add(wishes: Sequence[StageWish], counts: list[int], free: int) -> None:
    """Gives out `free` replicas."""

    def badness(i: int) -> tuple[float, float, int]:
        return (*wishes[i].urgency(counts[i]), -wishes[i].load.stage)

    bad = {i: badness(i) for i, wish in enumerate(wishes) if counts[i] < wish.count}
    for _ in range(free):
        if not bad:
            return
        worst = max(bad, key=lambda i: bad[i])
        counts[worst] += 1
        if counts[worst] < wishes[worst].count:
            bad[worst] = badness(worst)
        else:
            del bad[worst]


def _take(wishes: Sequence[StageWish], counts: list[int], least: int, excess: int) -> None:
    """Takes `excess` replicas back."""

    def badness(i: int) -> tuple[float, float, int]:
        return (*wishes[i].urgency(counts[i] - 1), wishes[i].load.stage)

    bad = {i: badness(i) for i in range(len(wishes)) if counts[i] > least}
    for _ in range(excess):
        if not bad:
            return
        best = min(bad, key=lambda i: bad[i])
        counts[best] -= 1
        if counts[best] > least:
            bad[best] = badness(best)
        else:
            del bad[best]
