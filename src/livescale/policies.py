"""How models are to be scaled, as values: bounds, targets, schedules, limits, priorities.

Ground floor: what is configured and travels in messages. What follows from it is decided in
`control/`.
"""

from __future__ import annotations

from livescale.types import ModelSpec, Value

DAY_NS = 86_400_000_000_000


class Bounds(Value, frozen=True, tag="bounds"):
    """Upper and lower bounds of the loads (BlitzScale §5.3 and the authors' constants).

    Rate and KV bounds are per mille of one instance's capacity, those on requests per mille of its
    places; backlog bounds are nanoseconds of queued prefill work per instance. Above an upper bound
    the pool grows, and while requests wait for a place or for KV; it shrinks after
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

    def __post_init__(self) -> None:
        if (self.ttft_ns is not None and self.ttft_ns < 1) or self.floor_decay_ns < 0:
            raise ValueError(f"an aim of {self.ttft_ns} ns, a decay of {self.floor_decay_ns} ns")
        if self.run_tokens_max < 1:
            raise ValueError(f"Runs of {self.run_tokens_max} tokens")


ScalingPolicy = Bounds | TargetOngoing | SloAim


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


class ModelPolicy(Value, frozen=True):
    """One model's limits, and its capacity on one instance where that is configured.

    A capacity of None is measured at warm-up and arrives as CapacityMeasured. When devices run
    short, models of higher `priority` get them first. `scaling` None is the pool's own policy.
    The first period that holds replaces the limits. With `instances_min` 0 the last instance goes
    after `idle_ns` without a request.
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

    def __post_init__(self) -> None:
        if not (0 <= self.instances_min <= self.instances_max and self.instances_max >= 1):
            raise ValueError(
                f"{self.spec.name}: 0 <= min {self.instances_min} <= max {self.instances_max}"
                " and a max of at least 1 do not hold"
            )

    def limits_at(self, wall_ns: int) -> tuple[int, int]:
        """Instances at least and at most at this time of the wall clock (UTC)."""
        for period in self.schedule:
            if period.holds_at(wall_ns):
                return period.instances_min, period.instances_max
        return self.instances_min, self.instances_max
