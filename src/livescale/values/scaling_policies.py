"""How models are to be scaled, as values: bounds, targets, schedules, limits, priorities.

Ground floor: what is configured and travels in messages. What follows from it is decided in
`control/`.
"""

from __future__ import annotations

from typing import ClassVar

from livescale.values.types import ModelSpec, Role, Value

ROLES = (Role.PREFILL, Role.DECODE)
"""Of a model whose prompts are computed at one instance, and whose requests decode at another."""
DAY_NS = 86_400_000_000_000


class Bounds(Value, frozen=True, tag="bounds"):
    """Upper and lower bounds of the loads (BlitzScale §5.3 and the authors' constants).

    Rate and KV bounds are per mille of one instance's capacity, those on requests per mille of its
    places; backlog bounds are nanoseconds of queued prefill work per instance. Those on the KV that
    prefill instances send decode instances (`kv_rate`) are per mille of an instance's link. Above
    an upper bound the pool grows, and while requests wait for a place or for KV; it shrinks after
    `scale_down_timeout_ns` during which every load stayed below its lower bound.
    """

    token_rate_upper_permille: int = 900
    token_rate_lower_permille: int = 600
    backlog_upper_ns: int = 700_000_000
    backlog_lower_ns: int = 500_000_000
    kv_upper_permille: int = 850
    kv_lower_permille: int = 750
    requests_upper_permille: int = 850
    requests_lower_permille: int = 750
    load_window_ns: int = 1_000_000_000
    scale_down_timeout_ns: int = 333_000_000
    kv_rate_upper_permille: int = 800
    kv_rate_lower_permille: int = 400


class TargetOngoing(Value, frozen=True, tag="target_ongoing_requests"):
    """So many unfinished requests per instance (Ray Serve's `target_ongoing_requests`).

    Grows when there are more than `target_permille` / 1000 per instance, and shrinks when one
    instance fewer would still be below `lower_permille` of that, for `scale_down_timeout_ns`.
    """

    target_permille: int = 2000
    lower_permille: int = 900
    scale_down_timeout_ns: int = 333_000_000


class SloAim(Value, frozen=True, tag="slo"):
    """A time to the first token that is aimed at, from which all bounds follow.

    Half of `ttft_ns` may pass in a queue, the other half is for the prompt's own computation. None:
    a queue may take what two thirds of a Run of `run_tokens_max` prompt tokens take, and what the
    bounds of `room` say before instances are loaded for it. The number of instances falls from its
    last peak to what the load needs within `floor_decay_ns`, and not before `scale_down_timeout_ns`
    without need. The rate of arriving prompt tokens, places and KV are judged by `room`, too.
    """

    ttft_ns: int | None = None
    floor_decay_ns: int = 2_000_000_000
    scale_down_timeout_ns: int = 100_000_000
    load_window_ns: int = 1_000_000_000
    room: Bounds = Bounds()
    run_tokens_max: int = 2048

    @property
    def wait_ns(self) -> int | None:
        """How long a prompt may queue (None: without an aim, that follows from its Runs)."""
        return None if self.ttft_ns is None else max(self.ttft_ns // 2, 1)

    def __post_init__(self) -> None:
        if (self.ttft_ns is not None and self.ttft_ns < 1) or self.floor_decay_ns < 0:
            raise ValueError(f"an aim of {self.ttft_ns} ns, a decay of {self.floor_decay_ns} ns")
        if self.run_tokens_max < 1:
            raise ValueError(f"Runs of {self.run_tokens_max} tokens")


class VariationWeights(Value, frozen=True):
    """Of the learned predictor of burstiness (`control/stages/formulas/attention.py`),
    QUART's Eqs 4 to 6.

    W (rows of as many numbers as a stage has features), a (twice as many as W has rows), theta, and
    f: a layer of tanh (rows as long as W has rows, and biases) and a sum (numbers, and a bias).
    """

    projection: tuple[tuple[float, ...], ...]
    attention: tuple[float, ...]
    theta: float
    layer: tuple[tuple[float, ...], ...]
    layer_bias: tuple[float, ...]
    output: tuple[float, ...]
    output_bias: float


class CoresModel(Value, frozen=True):
    """Service time of one request: `fixed_ns` + `shared_ns` / cores. Neither is negative."""

    fixed_ns: float
    shared_ns: float

    def __post_init__(self) -> None:
        if min(self.fixed_ns, self.shared_ns) < 0 or self.fixed_ns + self.shared_ns <= 0:
            raise ValueError(f"service times that cannot be: {self}")

    def service_ns(self, cores: float) -> float:
        """With so many cores per replica."""
        return self.fixed_ns + self.shared_ns / cores

    def times_of_one(self, cores: int) -> float:
        """Service time with so many cores, over that with one: at most 1."""
        return self.service_ns(cores) / self.service_ns(1)


class StagesByQueue(Value, frozen=True, tag="stages_by_queue"):
    """Each stage of a model gets replicas by its own queue (QUART §5).

    Once per `period_ns` each stage is compared with its part of `slo_ns`, in which a request should
    go once through all stages (None: four times what that takes if it never waits). A replica goes
    when it was not needed for `scale_down_timeout_ns`. All stages together have at most
    `replicas_total` (None: as many as there are workers). With `smooths` replicas go that evenly
    spaced arrivals make needless; how evenly they come is predicted with `weights` (None: by the
    analytic formula). With `is_uniform`, for comparison, all stages have the same number, as many
    as the stage that needs most: whole pipelines. Models without stages are judged by `Bounds`.

    `cores` says what cores do for service times (None: they are left alone). A replica that would
    be missed goes when more cores make up for it; all workers of a host have at most `cores_max`
    together (CPU_max), or those that they began with.
    """

    slo_ns: int | None = None
    period_ns: int = 1_000_000_000
    scale_down_timeout_ns: int = 3_000_000_000
    replicas_total: int | None = None
    smooths: bool = True
    is_uniform: bool = False
    weights: VariationWeights | None = None
    cores: CoresModel | None = None
    cores_max: int = 1

    def __post_init__(self) -> None:
        if self.cores_max < 1:
            raise ValueError(f"hosts with {self.cores_max} cores")
        if (self.slo_ns is not None and self.slo_ns < 1) or self.period_ns < 1:
            raise ValueError(f"an SLO of {self.slo_ns} ns, a period of {self.period_ns} ns")
        if self.replicas_total is not None and self.replicas_total < 1:
            raise ValueError(f"stages with {self.replicas_total} replicas in all")


class StagesByRate(Value, frozen=True, tag="stages_by_rate"):
    """Each stage of a model gets replicas by how often requests come: for comparison with
    StagesByQueue (InferLine and Cocktail, as QUART §8.1 integrates them).

    Once per `period_ns`; replicas are to be busy for `busy_permille` of the time. Without
    `ahead_ns` a stage is planned for the envelope (the highest rate of the last `envelope_ns`, in
    parts of `part_ns`), and gets more at once where a period brings more than that. With it the
    rate by then is forecast from level and trend, and what waits should be over by then. Replicas
    stay for `scale_down_timeout_ns` after the stage's last change. `planned_per_1000_s`: for so
    many requests a plan was made before the first one came. All stages together have at most
    `replicas_total` (None: as many as there are workers); with `is_uniform` all have the same
    number. Models without stages are judged by `Bounds`.
    """

    period_ns: int = 1_000_000_000
    scale_down_timeout_ns: int = 15_000_000_000
    replicas_total: int | None = None
    busy_permille: int = 800
    envelope_ns: int = 30_000_000_000
    part_ns: int = 5_000_000_000
    planned_per_1000_s: int = 0
    ahead_ns: int | None = None
    is_uniform: bool = False

    #: cores are left alone
    cores: ClassVar[CoresModel | None] = None
    cores_max: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if min(self.period_ns, self.part_ns) < 1 or self.envelope_ns < self.part_ns:
            raise ValueError(
                f"periods of {self.period_ns} ns, an envelope of {self.envelope_ns} ns in parts of"
                f" {self.part_ns} ns"
            )
        if self.replicas_total is not None and self.replicas_total < 1:
            raise ValueError(f"stages with {self.replicas_total} replicas in all")
        if not 1 <= self.busy_permille <= 1000 or self.planned_per_1000_s < 0:
            raise ValueError(f"{self.busy_permille} per mille, {self.planned_per_1000_s} planned")
        if self.ahead_ns is not None and self.ahead_ns < 1:
            raise ValueError(f"a forecast for {self.ahead_ns} ns ahead")


LinePolicy = StagesByQueue | StagesByRate
"""How the stages of a model scale together."""
ScalingPolicy = Bounds | TargetOngoing | SloAim | LinePolicy


class Period(Value, frozen=True):
    """Limits on a model's instances from `start_ns` to `stop_ns` of every `every_ns` (a day).

    Times count from midnight UTC. A period may pass midnight: then `stop_ns` is below `start_ns`.
    """

    start_ns: int
    stop_ns: int
    instances_min: int
    instances_max: int
    every_ns: int = DAY_NS

    def __post_init__(self) -> None:
        if not (0 <= self.start_ns < self.every_ns and 0 <= self.stop_ns <= self.every_ns):
            raise ValueError(f"a period from {self.start_ns} to {self.stop_ns} is not in its day")
        if not 0 <= self.instances_min <= self.instances_max:
            raise ValueError(f"0 <= min {self.instances_min} <= max {self.instances_max} is broken")

    def holds_at(self, wall_ns: int) -> bool:
        at_ns = wall_ns % self.every_ns
        if self.start_ns <= self.stop_ns:
            return self.start_ns <= at_ns < self.stop_ns
        return at_ns >= self.start_ns or at_ns < self.stop_ns


def _check_limits(of: str, least: int, most: int) -> None:
    if not (0 <= least <= most and most >= 1):
        raise ValueError(
            f"{of}: 0 <= min {least} <= max {most} and a max of at least 1 do not hold"
        )


class RoleLimits(Value, frozen=True):
    """How many instances of a model have the role, at least and at most."""

    role: Role
    instances_min: int
    instances_max: int

    def __post_init__(self) -> None:
        _check_limits(self.role, self.instances_min, self.instances_max)


class ModelPolicy(Value, frozen=True):
    """One model's limits, and its capacity on one instance where that is configured.

    A capacity of None is measured at warm-up and arrives as CapacityMeasured. When devices run
    short, models of higher `priority` get them first. `scaling` None is the pool's own policy.
    The first period that holds replaces the limits. With `instances_min` 0 the last instance goes
    after `idle_ns` without a request. With `roles`, prefill and decode, in this order, each
    instance has one of them, with limits of its own; those of the model are their sums then.
    """

    spec: ModelSpec
    instances_min: int
    instances_max: int
    prefill_tokens_per_s: int | None = None
    kv_blocks: int | None = None
    priority: int = 0
    scaling: ScalingPolicy | None = None
    schedule: tuple[Period, ...] = ()
    idle_ns: int = 60_000_000_000
    roles: tuple[RoleLimits, ...] = ()

    def __post_init__(self) -> None:
        if self.roles and tuple(limits.role for limits in self.roles) != ROLES:
            named = ", ".join(limits.role for limits in self.roles)
            raise ValueError(f"{self.spec.name}: roles {named}, not {' and '.join(ROLES)}")
        if self.roles and self.schedule:
            raise ValueError(f"{self.spec.name}: a schedule and roles do not go together")
        _check_limits(self.spec.name, self.instances_min, self.instances_max)

    def limits_at(self, wall_ns: int) -> tuple[int, int]:
        """Instances at least and at most at this time of the wall clock (UTC)."""
        for period in self.schedule:
            if period.holds_at(wall_ns):
                return period.instances_min, period.instances_max
        return self.instances_min, self.instances_max
