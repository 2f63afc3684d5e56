"""What the controller keeps per model besides its instances, copies and queue."""

from __future__ import annotations

from livescale.control.autoscaler import Autoscaler, TokenWindow
from livescale.control.config import ControllerConfig
from livescale.control.load_failures import LoadFailures
from livescale.control.policy import make_policy
from livescale.control.service_rate import ServiceRate
from livescale.policies import ModelPolicy, ScalingPolicy, TargetOngoing
from livescale.types import LayerSpan, Part

# For policies that do not look at rates.
_WINDOW_NS = 1_000_000_000
# A window's tokens leave it at any time: look again this many times per window while they do.
_LOOKS_PER_WINDOW = 10


class ModelState:
    """One model's policy, hysteresis and measured capacity."""

    def __init__(
        self, policy: ModelPolicy, config: ControllerConfig, now_ns: int, number: int
    ) -> None:
        #: models are gone through in this order
        self.number = number
        scaling = _scaling(policy, config)
        self.policy = policy
        self.spec = policy.spec
        #: all that instances of the model serve
        self.part = Part(policy.spec.name, LayerSpan(0, policy.spec.layers))
        self.scaling = make_policy(scaling)
        self.window = TokenWindow(
            _WINDOW_NS if isinstance(scaling, TargetOngoing) else scaling.load_window_ns
        )
        self.autoscaler = Autoscaler(scaling.scale_down_timeout_ns, _idle_ns(policy, config))
        self.prefill_tokens_per_s = policy.prefill_tokens_per_s
        self.kv_blocks = policy.kv_blocks
        #: what its instances really do
        self.service = ServiceRate()
        #: how much longer (or, below 0, shorter) than predicted the last load of an instance took
        self.load_error_ns = 0
        #: instances that were ordered, and those of them that found their parameters in place
        self.starts = self.warm_starts = 0
        #: requests that an instance computes at once
        self.places = config.sequences_max
        #: of loads to devices
        self.load_failures = LoadFailures(config)
        #: since when it has had no request (None: it has some)
        self.idle_since_ns: int | None = now_ns
        #: withdrawn: it finishes its requests and goes
        self.is_leaving = False

    def change(self, policy: ModelPolicy, config: ControllerConfig) -> None:
        """Other limits hold from now on. What is known of its load and its capacity stays."""
        scaling = _scaling(policy, config)
        if scaling != _scaling(self.policy, config):
            self.scaling = make_policy(scaling)
        self.autoscaler.scale_down_timeout_ns = scaling.scale_down_timeout_ns
        self.autoscaler.idle_ns = _idle_ns(policy, config)
        self.policy = policy

    @property
    def instance_bytes(self) -> int:
        """Bytes of a whole copy, all ranks together."""
        return self.spec.size_bytes * self.spec.tp_size

    def note_requests(self, now_ns: int, requests: int) -> None:
        """How many of its requests are unfinished now."""
        if requests:
            self.idle_since_ns = None
        elif self.idle_since_ns is None:
            self.idle_since_ns = now_ns

    def has_been_idle_since(self, now_ns: int) -> None:
        """If it has no request, that counts from now on."""
        if self.idle_since_ns is not None:
            self.idle_since_ns = now_ns

    def limits(self, wall_ns: int) -> tuple[int, int]:
        """Instances at least and at most now."""
        least, most = self.policy.limits_at(wall_ns)
        if not self.is_leaving:
            return least, most
        return 0, (most if self.idle_since_ns is None else 0)

    def deadlines_ns(self, now_ns: int, wall_ns: int) -> list[int]:
        """When something about it changes by time alone; some may be over. `wall_ns` is the wall
        clock at time 0."""
        deadlines = [self.load_failures.blocked_until_ns]
        deadlines += self.autoscaler.deadlines_ns(self.idle_since_ns)
        deadlines += self.scaling.deadlines_ns(now_ns)
        if self.window.tokens:
            deadlines.append(now_ns + self.window.window_ns // _LOOKS_PER_WINDOW)
        for period in self.policy.schedule:
            for edge_ns in (period.start_ns, period.stop_ns):
                ahead_ns = (edge_ns - wall_ns - now_ns) % period.every_ns
                deadlines.append(now_ns + (ahead_ns or period.every_ns))
        return deadlines

    def changes_by_itself(self) -> bool:
        """What it wants may be another number at every look, though nothing happens to it."""
        return self.window.tokens > 0 or bool(self.policy.schedule) or self.is_leaving

    def __repr__(self) -> str:
        return f"<ModelState {self.spec.name}{', leaving' if self.is_leaving else ''}>"


def _scaling(policy: ModelPolicy, config: ControllerConfig) -> ScalingPolicy:
    return policy.scaling if policy.scaling is not None else config.scaling


def _idle_ns(policy: ModelPolicy, config: ControllerConfig) -> int:
    """How long its last instance stays without requests: not as long where it leaves a warm spare,
    which is there at once, and another model can use the device."""
    if config.warm_spares == "off":
        return policy.idle_ns
    return min(policy.idle_ns, config.spare_idle_ns)
