"""What members hold, and what they report of that: a layer counts only when it is whole."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from livescale.member.instance import HostedInstance
from livescale.member.member_holdings import ModelHolding
from livescale.messages.commands import (
    AnyCommand,
    ChangeDuty,
    DropHolding,
    ModelGone,
    ReleaseHolding,
    SetCores,
    StartHolding,
)
from livescale.messages.events import (
    AnyEvent,
    BatchTaken,
    CoresChanged,
    HoldingCompleted,
    HoldingFailed,
    LayerArrived,
    RoleChanged,
)
from livescale.sim.checkers.invariants import require
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.types import HoldingId, RequestId, Role, WorkerRef

Missing = Callable[[WorkerRef, str, int, int], int]
"""How many bytes a member (of a model, a rank and a layer) still lacks."""


class MemberChecker:
    """Workers and agents, over all lives of the controller. Workers keep layers of models that they
    gave up in `resident_bytes` at most. Layers come twice where bytes are `corruptible`."""

    def __init__(
        self,
        models: Sequence[ModelPolicy],
        missing: Missing,
        *,
        resident_bytes: int = 0,
        corruptible: bool = False,
    ) -> None:
        self._resident_bytes = resident_bytes
        self._corruptible = corruptible
        self._specs = {policy.spec.name: policy.spec for policy in models}
        self._missing = missing
        self._orders: dict[HoldingId, StartHolding] = {}
        #: roles that instances were told to have, and the one that each has, as its worker says
        self._told: dict[HoldingId, dict[Role, None]] = {}
        self._roles: dict[HoldingId, Role] = {}
        #: cores that workers were told to have
        self._cores: dict[WorkerRef, dict[int, None]] = {}
        #: what was ordered to be dropped or released
        self._taken_back: dict[HoldingId, None] = {}
        #: layers that their members reported
        self._arrived: dict[HoldingId, dict[int, None]] = {}
        #: nothing is left of these models, as far as the controller knows
        self._gone: dict[str, None] = {}
        #: what members have given up by themselves
        self._failed: dict[HoldingId, None] = {}
        #: who took attempts over last, as it reported
        self._taker: dict[tuple[RequestId, int], WorkerRef] = {}
        #: when a member refused the model last
        self._refused_ns: dict[str, int] = {}

    def ordered(self, commands: Sequence[AnyCommand]) -> None:
        for command in commands:
            if isinstance(command, StartHolding):
                self._orders[command.holding] = command
                if command.duty is not None:
                    self._roles[command.holding] = command.duty.role
            elif isinstance(command, ChangeDuty):
                self._told.setdefault(command.holding, {})[command.duty.role] = None
            elif isinstance(command, SetCores):
                self._cores.setdefault(command.worker, {})[command.cores] = None
            elif isinstance(command, ModelGone):
                self._gone[command.model] = None
            elif isinstance(command, DropHolding | ReleaseHolding):
                self._taken_back[command.holding] = None

    def reports(self, member: WorkerRef, event: AnyEvent) -> None:
        """The member is about to report this to the controller. Nothing of that is late or lost
        yet."""
        if isinstance(event, HoldingFailed):
            self._failed[event.holding] = None
        if isinstance(event, BatchTaken):
            taken = [(request, attempt) for request, attempt, _ in event.requests]
            self._taker.update(dict.fromkeys(taken, member))
        if isinstance(event, RoleChanged):
            is_told = event.role in self._told.get(event.holding, {})
            is_new = event.role is not self._roles[event.holding]
            require(is_told and is_new, "instances tell the roles that they take on", event)
            self._roles[event.holding] = event.role
        if isinstance(event, CoresChanged):
            told = {0: None, **self._cores.get(member, {})}
            is_told = event.worker == member and event.asked in told
            # One that has no use for more keeps the one with which it began.
            is_told = is_told and (event.cores in told or event.cores == 1)
            require(is_told, "workers have the cores that they were told to have", member, event)
        if not isinstance(event, LayerArrived | HoldingCompleted):
            return
        require(event.holding.member == member, "members speak for themselves", member, event)
        order = self._orders[event.holding]
        if isinstance(event, LayerArrived):
            arrived = self._arrived.setdefault(event.holding, {})
            require(event.layer not in arrived, "a layer arrives once", event)
            self._require_whole(order, event.layer)
            arrived[event.layer] = None
            is_prefix = all(layer in arrived for layer in range(order.span.start, event.watermark))
            is_all = is_prefix and event.watermark not in arrived
            require(is_all, "the watermark is the prefix", event)
        else:
            spec = self._specs[order.model]
            for layer in range(spec.layers):
                self._require_whole(order, layer)
            self._require_bytes(order, event.received_bytes)

    def at_rest(self, worker: WorkerRef, kv_blocks_used: int) -> None:
        require(kv_blocks_used == 0, "no KV is in use when all is over", worker, kv_blocks_used)

    def is_let_go(self, worker: WorkerRef, instance: HostedInstance | None) -> None:
        """The worker may leave. The order that ends its instance may still be under way."""
        is_over = instance is None or instance.order.holding in self._taken_back
        require(is_over, "no instance is on a worker that is let go", worker, instance)

    def assigned(self, worker: WorkerRef, is_taken: bool, order: StartHolding) -> None:
        require(not is_taken, "a worker belongs to one instance", worker, order)
        require(order.holding.member == worker, "orders reach their worker", worker, order)

    def refused(self, model: str, now_ns: int) -> None:
        """A member has refused the model."""
        self._refused_ns[model] = now_ns

    def was_refused(self, model: str, since_ns: int) -> bool:
        """A member has refused the model at that time or later."""
        return self._refused_ns.get(model, -1) >= since_ns

    def holds(
        self, agent: WorkerRef, memory_bytes: int, size_bytes: int, held: list[tuple[str, int]]
    ) -> None:
        """What lies in the memory of the agent's host now."""
        require(size_bytes <= memory_bytes, "host memory is not overdrawn", agent, size_bytes)
        require(len(set(held)) == len(held), "a host holds a rank of a model once", agent, held)

    def taken_back(
        self,
        order: DropHolding | ReleaseHolding,
        holdings: Sequence[ModelHolding],
        instance: HostedInstance | None,
        taken: Container[tuple[RequestId, int]],
    ) -> None:
        """A worker is to drop or to release something. Other instances gave the attempts `taken` to
        it."""
        if any(held.id == order.holding and held.is_spare for held in holdings):
            return
        # When one rank is lost, the others are dropped with all that they were asked; their own
        # load may have failed meanwhile.
        model = self._orders[order.holding].model
        is_whole = self._specs[model].tp_size == 1
        held = instance.order.holding if instance is not None else None
        has_failed = held is None and order.holding in self._failed
        if (is_whole or held is not None) and not has_failed:
            require(order.holding == held, "a worker drops what it holds", order, held)
        # A model may be gone for a controller that a worker with requests finds very late.
        if is_whole and model not in self._gone and instance is not None and instance.is_loaded:
            # The controller may learn before the giver that its requests were taken over.
            worker = order.holding.member
            own = [a for a in instance.serving.requests() if a not in taken]
            asked = [a for a in own if self._taker.get(a, worker) == worker]
            require(not asked, "an instance with requests is not released", order, asked)

    # -- helpers --------------------------------------------------------------------------------

    def _require_bytes(self, order: StartHolding, received_bytes: int) -> None:
        """A load moves what its member lacked: its own model's or stage's bytes."""
        size_bytes = self._specs[order.model].size_bytes if order.spare is None else 0
        kept_bytes = self._resident_bytes if order.duty is not None else 0
        is_all = received_bytes >= size_bytes - kept_bytes
        is_own = received_bytes <= size_bytes or (self._corruptible and order.spare is None)
        require(is_all and is_own, "what was missing arrived", order, received_bytes)

    def _require_whole(self, order: StartHolding, layer: int) -> None:
        missing_bytes = self._missing(order.holding.member, order.model, order.rank, layer)
        require(missing_bytes == 0, "a layer counts when it is whole", order, layer, missing_bytes)
