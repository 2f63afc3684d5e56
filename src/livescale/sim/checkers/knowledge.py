"""What a controller can know: its events and its own commands, written down once for the checkers.

It shares no code with the controller, which keeps the same things in other ways. Nothing is
checked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from livescale.messages import commands, events
from livescale.values.chunks import senders
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.stages import stage_name
from livescale.values.types import HoldingId, InstanceId, ModelSpec, RequestId, WorkerRef

PROGRESS = (events.InstanceReported, events.LayerArrived)
"""By far the most events; none of them answers an order, or changes what may be ordered."""

CopyKey = InstanceId | WorkerRef
"""A copy of a model is all ranks of an instance, or all ranks in the memory of an agent's host."""


@dataclass(slots=True)
class Held:
    """What a member holds, or is getting: the order as it was amended last."""

    order: commands.StartHolding
    is_whole: bool = False
    #: it was dropped, and there is no answer yet
    is_leaving: bool = False
    #: no instance computes with it any more
    is_spare: bool = False

    @property
    def member(self) -> WorkerRef:
        return self.order.holding.member

    @property
    def instance(self) -> InstanceId | None:
        """Of a worker, but for a warm spare."""
        is_none = self.is_spare or self.order.duty is None
        return None if is_none or self.order.duty is None else self.order.duty.instance

    @property
    def has_bytes(self) -> bool:
        """All are there. What was made of a warm spare has them before its worker says so."""
        return self.is_whole or self.order.spare is not None

    @property
    def copy(self) -> CopyKey:
        return self.member if self.order.duty is None else self.order.duty.instance


class Knowledge:
    """Members, what they hold, and what is on its way, in one life of a controller."""

    def __init__(self, models: Sequence[ModelPolicy]) -> None:
        self.specs: dict[str, ModelSpec] = {policy.spec.name: policy.spec for policy in models}
        #: of every model that was ever served, gone ones included: its newest policy
        self.policies = {policy.spec.name: policy for policy in models}
        #: bytes of a rank of every model that was ever served, gone ones included
        self.sizes: dict[str, int] = {name: spec.size_bytes for name, spec in self.specs.items()}
        #: models that were withdrawn: they need no copy any more
        self.withdrawn: dict[str, None] = {}
        #: what every request that arrived came to: a model, or its first stage
        self.requested: dict[RequestId, str] = {}
        #: living members and the bytes that they have room for
        self.memory_bytes: dict[WorkerRef, int] = {}
        #: living and dead members that wanted to go while they were there
        self.leaving: dict[WorkerRef, None] = {}
        #: there is something of these on their members
        self.holdings: dict[HoldingId, Held] = {}
        self._copies: dict[tuple[str, CopyKey], dict[HoldingId, Held]] = {}
        #: instances that take requests, whatever of them is there
        self.live: dict[InstanceId, None] = {}
        #: instances that lost a rank or failed: what is left of them is dropped
        self.ended: dict[InstanceId, None] = {}
        #: instances that finish what they have, and get nothing new
        self.draining: dict[InstanceId, None] = {}

    # -- questions ------------------------------------------------------------------------------

    def is_alive(self, member: WorkerRef) -> bool:
        return member in self.memory_bytes

    def tp_size(self, model: str) -> int:
        return self.specs[model].tp_size if model in self.specs else 1

    def on(self, member: WorkerRef) -> list[Held]:
        """What the member has something of."""
        return [held for held in self.holdings.values() if held.member == member]

    def model_of(self, instance: InstanceId) -> str:
        """Of an instance of which some worker has something."""
        return next(h.order.model for h in self.holdings.values() if h.instance == instance)

    def ranks(self, model: str, copy: CopyKey) -> dict[int, Held]:
        """What there is of a copy, by rank."""
        ranks = self._copies.get((model, copy), {})
        return {held.order.rank: held for held in ranks.values()}

    def instances(self, model: str) -> list[InstanceId]:
        """Instances of which some worker has something, and that are not given up."""
        of_model = [h.instance for h in self.holdings.values() if h.order.model == model]
        found = [instance for instance in dict.fromkeys(of_model) if instance is not None]
        return [instance for instance in found if not self._is_over(model, instance)]

    def is_placed(self, model: str, copy: CopyKey) -> bool:
        """Every rank is there or on its way, and an instance did not end otherwise."""
        is_there = len(self.ranks(model, copy)) >= self.tp_size(model)
        return is_there and copy not in self.ended

    def is_copy(self, model: str, copy: CopyKey) -> bool:
        """Every rank is whole, none was lost, and none is being dropped."""
        ranks = self.ranks(model, copy).values()
        whole = [held for held in ranks if held.has_bytes and not held.is_leaving]
        return len(whole) == self.tp_size(model) and copy not in self.ended

    def is_loaded(self, model: str, copy: CopyKey) -> bool:
        """It is a copy, and its members have reported that."""
        ranks = self.ranks(model, copy).values()
        return self.is_copy(model, copy) and all(held.is_whole for held in ranks)

    def copies(self, model: str) -> list[CopyKey]:
        of_model = [h.copy for h in self.holdings.values() if h.order.model == model]
        return [copy for copy in dict.fromkeys(of_model) if self.is_copy(model, copy)]

    def holders(self, model: str) -> list[InstanceId]:
        """Instances that are complete and not given up."""
        return [i for i in self.instances(model) if self.is_loaded(model, i)]

    def may_serve(self, model: str, instance: InstanceId) -> bool:
        """It is complete, or live, and not given up."""
        if self._is_over(model, instance):
            return False
        ranks = self.ranks(model, instance).values()
        is_instance = any(held.instance is not None for held in ranks)
        return instance in self.live or (is_instance and self.is_loaded(model, instance))

    def loading(self, model: str) -> list[InstanceId]:
        """Instances that will be complete, if all goes well."""
        placed = [i for i in self.instances(model) if self.is_placed(model, i)]
        return [instance for instance in placed if not self.is_loaded(model, instance)]

    def open(self) -> list[Held]:
        """What is not whole yet."""
        return [held for held in self.holdings.values() if not held.is_whole]

    def readers(self, model: str, holder: WorkerRef) -> list[Held]:
        """What is fed by the holder's copy of the model."""
        of_model = [held for held in self.open() if held.order.model == model]
        return [h for h in of_model if any(u.worker == holder for u in senders(h.order.feeds))]

    def predecessors(self, member: WorkerRef) -> list[WorkerRef] | None:
        """Incarnations that this one replaces; None if it is itself late news."""
        others = [other for other in self.memory_bytes if other.worker == member.worker]
        return None if any(other >= member for other in others) else others

    def lost_by(self, event: events.AnyEvent) -> list[WorkerRef]:
        """Members that are gone by this event, before it is absorbed."""
        if isinstance(event, events.WorkerLost):
            return [event.worker]
        if isinstance(event, events.WorkerJoined):
            return self.predecessors(event.worker) or []
        return self.predecessors(event.agent) or [] if isinstance(event, events.AgentJoined) else []

    # -- what happened --------------------------------------------------------------------------

    def absorb(self, event: events.AnyEvent) -> None:
        if isinstance(event, events.WorkerJoined):
            self._joined(event.worker, event.device.arena_bytes, event.holdings)
        elif isinstance(event, events.AgentJoined):
            self._joined(event.agent, event.host.memory_bytes, event.holdings)
        elif isinstance(event, events.WorkerLost):
            self._lost(event.worker)
        elif isinstance(event, events.MembersLeave):
            self.leaving |= dict.fromkeys(filter(self.is_alive, event.members))
        elif isinstance(event, events.LiveStarted):
            held = self.holdings.get(event.holding)
            if held is not None and held.instance is not None:
                self.live[held.instance] = None
        elif isinstance(event, events.HoldingCompleted):
            if event.holding in self.holdings:
                self.holdings[event.holding].is_whole = True
        elif isinstance(event, events.HoldingFailed):
            self._gone(event.holding, is_end=True)
        elif isinstance(event, events.HoldingDropped):
            held = self.holdings.get(event.holding)
            # One that is not whole has failed before.
            if held is not None and held.is_whole:
                self._gone(event.holding, is_end=False)
        elif isinstance(event, events.RequestArrived):
            first = stage_name(event.model, 0)
            self.requested[event.request] = first if first in self.specs else event.model
        elif isinstance(event, events.ModelChanged):
            self.policies[event.policy.spec.name] = event.policy
        elif isinstance(event, events.ModelAdded):
            spec = event.policy.spec
            self.policies[spec.name] = event.policy
            self.specs[spec.name], self.sizes[spec.name] = spec, spec.size_bytes
            self.withdrawn.pop(spec.name, None)
        elif isinstance(event, events.ModelRemoved):
            self.withdrawn[event.model] = None

    def ordered(self, command: commands.AnyCommand) -> None:
        if isinstance(command, commands.StartHolding):
            if command.spare is not None:
                self._gone(HoldingId(command.spare, command.holding.member), is_end=False)
            self._hold(Held(command))
        elif isinstance(command, commands.ReleaseHolding):
            self.holdings[command.holding].is_spare = True
        elif isinstance(command, commands.AmendHolding):
            held = self.holdings[command.holding]
            held.order = msgspec.structs.replace(held.order, feeds=command.feeds)
        elif isinstance(command, commands.ChangeDuty):
            held = self.holdings[command.holding]
            held.order = msgspec.structs.replace(held.order, duty=command.duty)
        elif isinstance(command, commands.DropHolding):
            self.holdings[command.holding].is_leaving = True
        elif isinstance(command, commands.Drain):
            self.draining[command.instance] = None
        elif isinstance(command, commands.Resume):
            self.draining.pop(command.instance, None)
        elif isinstance(command, commands.ModelGone):
            self.specs.pop(command.model, None)

    # -- helpers --------------------------------------------------------------------------------

    def _joined(
        self, member: WorkerRef, memory_bytes: int, reports: Sequence[events.HoldingReport]
    ) -> None:
        before = self.predecessors(member)
        if before is None:
            return
        for old in before:
            self._lost(old)
        self.memory_bytes[member] = memory_bytes
        for report in reports:
            duty = report.order.duty
            self._hold(Held(report.order, report.is_whole, is_spare=report.is_spare))
            if duty is not None and duty.live_order is not None:
                self.live[duty.instance] = None

    def _hold(self, held: Held) -> None:
        order = held.order
        self.holdings[order.holding] = held
        self._copies.setdefault((order.model, held.copy), {})[order.holding] = held

    def _lost(self, member: WorkerRef) -> None:
        self.memory_bytes.pop(member, None)
        for held in self.on(member):
            self._gone(held.order.holding, is_end=True)

    def _gone(self, holding: HoldingId, is_end: bool) -> None:
        """Nothing of it is left, which may be the end of its instance."""
        held = self.holdings.pop(holding, None)
        if held is None:
            return
        del self._copies[held.order.model, held.copy][holding]
        if held.instance is not None and is_end:
            self.ended[held.instance] = None

    def _is_over(self, model: str, instance: InstanceId) -> bool:
        """Nothing of it is there, or what there is is being dropped."""
        ranks = self.ranks(model, instance).values()
        return instance in self.ended or not ranks or any(held.is_leaving for held in ranks)
