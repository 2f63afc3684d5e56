"""Which growth of a stage would only move the queue.

A line of even stages waits as long in all as its narrowest stage alone would (Friedman 1965): what
waits before a stage would wait before another one that is as narrow. So such stages have one queue,
and the time that all of them may take for waiting is for that one queue. As long as it suffices,
none of them grows; and where one of them cannot grow, the others would grow for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from livescale.control.stages.corrector import StageDecision
from livescale.control.stages.formulas.stage_load import StageLoad
from livescale.control.stages.formulas.targets import wait_allowed_ns
from livescale.values.units import NS_PER_S

_AS_NARROW_PERMILLE = 1100
"""Of a stage's capacity: others that have no more are as narrow."""


def without_moving(
    decided: Sequence[StageDecision],
    loads: Sequence[StageLoad],
    targets_ns: Sequence[int],
    period_ns: int,
) -> list[StageDecision]:
    """The decisions, but for growth that would only move the queue. All in the same order, one per
    stage.

    A stage does not grow with the reason `queue_elsewhere` where the wait is within `shared_ns` (in
    its values): the time for one queue of all stages that are as narrow, others than itself among
    them. Or with `no_room_for_all`, where R_total leaves none for one of these.
    """
    allowed_ns = [
        wait_allowed_ns(target_ns, load.service_ns)
        for target_ns, load in zip(targets_ns, loads, strict=True)
    ]
    found = []
    for number, (its, load) in enumerate(zip(decided, loads, strict=True)):
        narrow = [i for i, other in enumerate(loads) if i != number and _is_as_narrow(other, load)]
        shared_ns = allowed_ns[number] + sum(allowed_ns[i] for i in narrow)
        if its.to_replicas <= load.replicas:
            found.append(its)
        elif narrow and _wait_ns(load, period_ns) <= shared_ns:
            values = its.values | {"shared_ns": shared_ns}
            found.append(_held(its, "queue_elsewhere", values))
        elif any(decided[i].reason == "no_room" for i in narrow):
            found.append(_held(its, "no_room_for_all", its.values))
        else:
            found.append(its)
    return found


def _wait_ns(load: StageLoad, period_ns: int) -> float:
    """Without a steady state that of requests which come a period later: chance alone makes more
    come in a period than are served, and such an overload is soon over."""
    wait_ns = load.wait_ns(load.replicas)
    if wait_ns < math.inf or not load.replicas:
        return wait_ns
    seconds = period_ns / NS_PER_S
    left = load.waiting + seconds * (load.arrivals_per_s - load.replicas * load.served_per_s)
    return max(left, 0.0) * load.service_ns / load.replicas


def _held(its: StageDecision, reason: str, values: dict[str, int]) -> StageDecision:
    return replace(its, to_replicas=its.from_replicas, reason=reason, values=values)


def _is_as_narrow(one: StageLoad, other: StageLoad) -> bool:
    capacity = other.replicas * other.served_per_s
    return 1000 * one.replicas * one.served_per_s <= _AS_NARROW_PERMILLE * capacity
