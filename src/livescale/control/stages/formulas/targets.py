"""T_target of each stage: the time that a request may spend there (QUART §5.1).

The text has a target per stage, Algorithm 1 one "for the system"; the system's is the SLO here, and
each stage gets its part of that.
"""

from __future__ import annotations

from collections.abc import Sequence

from livescale.control.stages.formulas.graph import StageGraph, line

_LEAST_WAIT_PERMILLE = 100
"""Of a service time: requests may always wait this long, or no number of replicas would do."""


def split_slo(
    slo_ns: int, services_ns: Sequence[int], graph: StageGraph | None = None
) -> tuple[int, ...]:
    """The SLO over the stages in proportion to their service times, rounded down.

    Along no way through the graph (default: a line) do the targets add up to more than the SLO.
    Raises ValueError for an SLO or a service time that is not positive.
    """
    if slo_ns <= 0 or any(service <= 0 for service in services_ns):
        raise ValueError(f"not positive: SLO {slo_ns} ns, or one of {list(services_ns)} ns")
    whole_ns = (graph or line(len(services_ns))).longest_path(services_ns)
    return tuple(slo_ns * service // whole_ns for service in services_ns)


def wait_allowed_ns(target_ns: int, service_ns: int) -> int:
    """What T_target leaves for the queue: a tenth of the service time at least.

    An SLO that is shorter than the services themselves cannot be met by replicas, and must not ask
    for more and more of them.
    """
    return max(target_ns - service_ns, service_ns * _LEAST_WAIT_PERMILLE // 1000, 1)
