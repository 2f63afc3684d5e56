"""What the controller keeps per model, and per part of it, besides instances, copies and queues."""

from __future__ import annotations

from livescale.control.policy.autoscaler import Autoscaler, TokenWindow
from livescale.control.policy.part_policies import PartPolicies
from livescale.control.policy.policy import DecayingFloor
from livescale.control.policy.service_rate import ServiceRate
from livescale.control.state.config import ControllerConfig
from livescale.control.state.load_failures import LoadFailures
from livescale.values.scaling_policies import (
    LinePolicy,
    ModelPolicy,
    RoleLimits,
    ScalingPolicy,
    SloAim,
    TargetOngoing,
)
from livescale.values.types import LayerSpan, ModelSpec, Part, Role

# For policies that do not look at rates.
_WINDOW_NS = 1_000_000_000
# A window's tokens leave it at any time: look again at most this many times per window.
_LOOKS_PER_WINDOW = 10


_LATELY_NS = 300_000_000_000
"""A burst of so long ago is as good as forgotten: so long ServerlessLLM keeps parameters in a
host's memory (BlitzScale, Figure 4)."""


class ModelState:
    """One model's policy, measured capacity and loads. Its `parts` are one of all instances, or one
    for each role, prefill first; new requests come to the first."""

    def __init__(
        self, policy: ModelPolicy, config: ControllerConfig, now_ns: int, number: int
    ) -> None:
        #: models are gone through in this order
        self.number = number
        self.policy = policy
        self.spec = policy.spec
        #: per instance
        self.prefill_tokens_per_s = policy.prefill_tokens_per_s
        self.kv_blocks = policy.kv_blocks
        #: what its instances really do
        self.service = ServiceRate()
        #: how much longer (or, below 0, shorter) than predicted the last load of an instance took
        self.load_error_ns = 0
        #: instances that were ordered, and those of them that found their parameters in place
        self.starts = self.warm_starts = 0
        #: of loads to devices
        self.load_failures = LoadFailures(config)
        #: instances that would have been of use lately, had all been there at once
        self.lately = DecayingFloor(_LATELY_NS)
        #: since when it has had no request (None: it has some)
        self.idle_since_ns: int | None = now_ns
        #: withdrawn: it finishes its requests and goes
        self.is_leaving = False
        scaling = _scaling(policy, config)
        self.scaling = PartPolicies(scaling)
        #: how long its prompts may queue for the time to the first token that it is promised
        self.wait_ns = _wait_ns(scaling)
        #: its line's, if the model is a stage that scales with others
        self.line_policy = _line_policy(policy, scaling)
        self.parts = tuple(PartState(self, role, scaling, config) for role in _roles(policy))

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def entry(self) -> PartState:
        """What new requests come to."""
        return self.parts[0]

    @property
    def keys(self) -> tuple[Part, ...]:
        """What its parts are called elsewhere."""
        return tuple([state.part for state in self.parts])

    @property
    def has_roles(self) -> bool:
        return len(self.parts) > 1

    @property
    def is_divided(self) -> bool:
        """Its instances pass work to one another: they have roles, or are a stage."""
        return self.has_roles or self.spec.stage is not None

    def of_role(self, role: Role) -> PartState:
        """The part of instances with this role. An instance of a role that the model does not have
        (any more) belongs to its first part."""
        return next((part for part in self.parts if part.part.role is role), self.entry)

    def change(self, policy: ModelPolicy, config: ControllerConfig) -> None:
        """Other limits hold from now on. What is known of its load and its capacity stays."""
        scaling = _scaling(policy, config)
        if scaling != _scaling(self.policy, config):
            self.scaling = PartPolicies(scaling)
        self.policy = policy
        self.wait_ns = _wait_ns(scaling)
        self.line_policy = _line_policy(policy, scaling)
        for part in self.parts:
            part.autoscaler.scale_down_timeout_ns = _timeout_ns(policy, scaling)
            part.autoscaler.idle_ns = _idle_ns(policy, config)
            part.window.window_ns = _window_ns(scaling)

    @property
    def instance_bytes(self) -> int:
        """Bytes of a whole copy, all ranks together."""
        return self.spec.size_bytes * self.spec.tp_size

    def measured(self, prefill_tokens_per_s: int, kv_blocks: int) -> None:
        """At a warm-up. The configured figure wins; of several measurements the newest counts."""
        if self.policy.prefill_tokens_per_s is None:
            self.prefill_tokens_per_s = prefill_tokens_per_s
        if self.policy.kv_blocks is None:
            self.kv_blocks = kv_blocks

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
        """Instances at least and at most now, of all parts together."""
        least, most = self.policy.limits_at(wall_ns)
        if self.is_leaving and self.idle_since_ns is not None:
            return 0, 0
        if self.is_leaving:
            least = 0
        if self._needs_every_stage():
            least = max(least, min(most, 1))
        return least, most

    def _needs_every_stage(self) -> bool:
        """Requests wait at the first stage, so the loads of later ones do not ask for an instance.
        A line asks for all of its stages itself, as long as it is not withdrawn."""
        is_alone = self.line_policy is None or self.is_leaving
        return self.spec.stage is not None and is_alone and self.idle_since_ns is None

    def __repr__(self) -> str:
        return f"<ModelState {self.spec.name}{', leaving' if self.is_leaving else ''}>"


class PartState:
    """One part of a model: its hysteresis, and the tokens that came to it."""

    def __init__(
        self, model: ModelState, role: Role, scaling: ScalingPolicy, config: ControllerConfig
    ) -> None:
        self.model = model
        policy = model.policy
        #: what its instances serve
        self.part = Part(policy.spec.name, LayerSpan(0, policy.spec.layers), role)
        self.window = TokenWindow(_window_ns(scaling))
        self.autoscaler = Autoscaler(_timeout_ns(policy, scaling), _idle_ns(policy, config))
        #: requests that an instance computes at once
        self.places = config.sequences_max

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def order(self) -> tuple[int, str]:
        """Parts are gone through in this order."""
        return self.model.number, self.part.role

    def limits(self, wall_ns: int) -> tuple[int, int]:
        """Instances at least and at most now."""
        model = self.model
        own = self._own_limits()
        if own is None:
            return model.limits(wall_ns)
        if not model.is_leaving:
            return own.instances_min, own.instances_max
        return 0, (own.instances_max if model.idle_since_ns is None else 0)

    def _own_limits(self) -> RoleLimits | None:
        """Those of its role, if the model has roles."""
        roles = self.model.policy.roles
        return next((limits for limits in roles if limits.role is self.part.role), None)

    def deadlines_ns(self, now_ns: int, wall_ns: int) -> list[int]:
        """When something about it changes by time alone; some may be over. `wall_ns` is the wall
        clock at time 0."""
        model = self.model
        deadlines = [model.load_failures.blocked_until_ns]
        deadlines += self.autoscaler.deadlines_ns(model.idle_since_ns)
        deadlines += model.scaling.deadlines_ns(now_ns)
        leaves_ns = self.window.oldest_leaves_ns
        if leaves_ns is not None:
            deadlines.append(max(leaves_ns, now_ns + self.window.window_ns // _LOOKS_PER_WINDOW))
        for period in model.policy.schedule:
            for edge_ns in (period.start_ns, period.stop_ns):
                ahead_ns = (edge_ns - wall_ns - now_ns) % period.every_ns
                deadlines.append(now_ns + (ahead_ns or period.every_ns))
        return deadlines

    def changes_by_itself(self) -> bool:
        """What it wants may be another number at every look, though nothing happens to it."""
        return bool(self.model.policy.schedule) or self.model.is_leaving

    def __repr__(self) -> str:
        return f"<PartState of {self.part}>"


def _roles(policy: ModelPolicy) -> tuple[Role, ...]:
    return tuple(limits.role for limits in policy.roles) or (Role.UNIFIED,)


def _scaling(policy: ModelPolicy, config: ControllerConfig) -> ScalingPolicy:
    return policy.scaling if policy.scaling is not None else config.scaling


def _wait_ns(scaling: ScalingPolicy) -> int | None:
    return scaling.wait_ns if isinstance(scaling, SloAim) else None


def _line_policy(policy: ModelPolicy, scaling: ScalingPolicy) -> LinePolicy | None:
    is_stage = policy.spec.stage is not None
    return scaling if is_stage and isinstance(scaling, LinePolicy) else None


def _timeout_ns(policy: ModelPolicy, scaling: ScalingPolicy) -> int:
    """How long a low load is waited for; a line has waited before it suggests fewer."""
    return 0 if _line_policy(policy, scaling) is not None else scaling.scale_down_timeout_ns


def _window_ns(scaling: ScalingPolicy) -> int:
    if isinstance(scaling, TargetOngoing | LinePolicy):
        return _WINDOW_NS
    return scaling.load_window_ns


def _idle_ns(policy: ModelPolicy, config: ControllerConfig) -> int:
    """How long its last instance stays without requests: not as long where it leaves a warm spare,
    which is there at once, and another model can use the device."""
    if config.warm_spares == "off":
        return policy.idle_ns
    return min(policy.idle_ns, config.spare_idle_ns)
