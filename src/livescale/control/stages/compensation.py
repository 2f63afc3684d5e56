"""CPU compensation (QUART §5.3): cores instead of a replica that is reclaimed.

Cores speed up what a stage does beside its device. How much is read off a profile; where all cores
of a host do not suffice the reclaim does not happen. (In the paper's Algorithm 1 line 19 makes
line 20 unreachable.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from livescale.control.stages.formulas.stage_load import StageLoad
from livescale.control.stages.formulas.targets import wait_allowed_ns
from livescale.values.scaling_policies import CoresModel
from livescale.values.types import Value


class Compensated(Value, frozen=True):
    """What becomes of a reclaim: replicas and cores per replica.

    `reason` is `enough_cores` (the target holds as it is), `more_cores`, `fewer_reclaimed`
    (some of the reclaim would have needed more than there are), `too_few_cores` (all of it), or
    `nothing_to_reclaim`. `sojourn_ns` is T_i by the model after it (None: no steady state).
    """

    to_replicas: int
    from_cores: int
    to_cores: int
    reason: str
    sojourn_ns: int | None


def fit_cores(profile: Sequence[tuple[int, int]]) -> CoresModel:
    """Least squares over (cores, service_ns): linear in 1 / cores.

    A line that falls with 1 / cores is replaced by its mean (cores do not help), one that would be
    negative with many cores by the best one through the origin. Raises ValueError unless there are
    two numbers of cores, and all figures are positive.
    """
    if len({cores for cores, _ in profile}) < 2:
        raise ValueError("a profile needs service times for two numbers of cores")
    if any(cores < 1 or service_ns <= 0 for cores, service_ns in profile):
        raise ValueError(f"a profile with figures that are not positive: {list(profile)}")
    xs = [1 / cores for cores, _ in profile]
    ys = [service_ns for _, service_ns in profile]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    both = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    slope = both / sum((x - x_mean) ** 2 for x in xs)
    if slope <= 0:
        return CoresModel(y_mean, 0.0)
    fixed = y_mean - slope * x_mean
    if fixed < 0:
        through = sum(x * y for x, y in zip(xs, ys, strict=True)) / sum(x * x for x in xs)
        return CoresModel(0.0, through)
    return CoresModel(fixed, slope)


def with_cores(load: StageLoad, model: CoresModel, cores: int, to_cores: int) -> StageLoad:
    """The load as it would be with `to_cores` per replica instead of `cores`.

    The measured service time says from where, the profile by which factor.
    """
    factor = model.service_ns(to_cores) / model.service_ns(cores)
    service_ns = max(round(load.service_ns * factor), 1)
    return msgspec.structs.replace(load, service_ns=service_ns)


def cores_needed(
    load: StageLoad, model: CoresModel, replicas: int, target_ns: int, cores: int, cores_max: int
) -> int | None:
    """The fewest cores per replica, from `cores` to `cores_max`, with which `replicas` keep T_i
    within T_target; None: there are none."""
    for count in range(cores, cores_max + 1):
        if with_cores(load, model, cores, count).sojourn_ns(replicas) <= target_ns:
            return count
    return None


def compensate(
    load: StageLoad,
    model: CoresModel | None,
    to_replicas: int,
    target_ns: int,
    cores: int,
    cores_most: Callable[[int], int],
) -> Compensated:
    """As much of the reclaim from `load.replicas` to `to_replicas` as cores make up for; so many
    replicas may have `cores_most` of that number each.

    Without a model cores do not help. A target that leaves no room for a queue is taken as the
    Corrector takes it (`wait_allowed_ns`). A stage that is over its target keeps what it has unless
    cores bring it back with fewer replicas.
    """
    target_ns = load.service_ns + wait_allowed_ns(target_ns, load.service_ns)
    model = model or CoresModel(1.0, 0.0)
    found, count = None, load.replicas
    for count in range(max(to_replicas, 1), load.replicas):
        found = cores_needed(load, model, count, target_ns, cores, cores_most(count))
        if found is not None:
            break
    if found is None:
        wanted = to_replicas < load.replicas
        count, found = load.replicas, cores
        reason = "too_few_cores" if wanted else "nothing_to_reclaim"
    elif count > to_replicas:
        reason = "fewer_reclaimed"
    else:
        reason = "more_cores" if found > cores else "enough_cores"
    after = with_cores(load, model, cores, found)
    sojourn_ns = round(after.sojourn_ns(count)) if count >= after.least_stable else None
    return Compensated(count, cores, found, reason, sojourn_ns)
