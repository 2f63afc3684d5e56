"""What the control plane is told once, at its start. Values only; a run record begins with them."""

from __future__ import annotations

from livescale.types import ModelSpec, Value


class Bounds(Value, frozen=True):
    """Upper and lower bounds of the three loads (BlitzScale §5.3 and the authors' constants).

    Rate and KV bounds are per mille of one instance's capacity; backlog bounds are nanoseconds of
    queued prefill work per instance. Above an upper bound the pool grows; it shrinks after
    `scale_down_timeout_ns` during which every load stayed below its lower bound.
    """

    token_rate_upper_permille: int = 900
    token_rate_lower_permille: int = 600
    backlog_upper_ns: int = 700_000_000
    backlog_lower_ns: int = 500_000_000
    kv_upper_permille: int = 850
    kv_lower_permille: int = 750
    load_window_ns: int = 1_000_000_000
    scale_down_timeout_ns: int = 333_000_000


class ModelPolicy(Value, frozen=True):
    """One model's limits, and its capacity on one instance where that is configured.

    A capacity of None is measured at warm-up and arrives as CapacityMeasured.
    """

    spec: ModelSpec
    instances_min: int
    instances_max: int
    prefill_tokens_per_s: int | None = None
    kv_blocks: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.instances_min <= self.instances_max:
            raise ValueError(
                f"{self.spec.name}: 1 <= min {self.instances_min} <= max {self.instances_max}"
                " does not hold"
            )


class ControllerConfig(Value, frozen=True):
    """Everything that shapes the controller's decisions besides its events.

    `epoch` counts the controller's lives, so that ids of an earlier life are never reused.
    `workers_expected` ends the settling time early: placement waits until that many workers
    have joined or `settle_ns` have passed since the first event. A failed load is ordered again
    after `load_retry_ns`; a request whose gateway lost its worker is not sent to that worker
    again for `avoid_ns`.
    """

    models: tuple[ModelPolicy, ...]
    workers_expected: int
    epoch: int = 0
    settle_ns: int = 1_000_000_000
    dispatched_ahead_max: int = 8
    request_attempts_max: int = 2
    load_retry_ns: int = 1_000_000_000
    avoid_ns: int = 1_000_000_000
    bounds: Bounds = Bounds()
