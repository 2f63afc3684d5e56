"""What a controller can know: its events and its own commands, written down once for the checkers.

It shares no code with the controller, which keeps the same things in other ways. Nothing is
checked here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from livescale.chunks import Feed, senders
from livescale.messages.commands import (
    AmendLoad,
    AnyCommand,
    Drain,
    DropCopy,
    ModelGone,
    Release,
    Resume,
    StartCopy,
    StartLoad,
)
from livescale.messages.events import (
    AgentJoined,
    AnyEvent,
    CopyCompleted,
    CopyDropped,
    CopyFailed,
    LiveStarted,
    LoadCompleted,
    LoadFailed,
    ModelAdded,
    Released,
    WorkerJoined,
    WorkerLost,
)
from livescale.policies import ModelPolicy
from livescale.topology import Device, Host
from livescale.types import InstanceId, ModelSpec, PlanId, WorkerRef

OrderKey = tuple[object, ...]


class Knowledge:
    """Members, what they hold, and what is on its way, in one life of a controller."""

    def __init__(self, models: Sequence[ModelPolicy]) -> None:
        self.specs: dict[str, ModelSpec] = {policy.spec.name: policy.spec for policy in models}
        #: bytes of a rank of every model that was ever served, gone ones included
        self.sizes: dict[str, int] = {name: spec.size_bytes for name, spec in self.specs.items()}
        self.devices: dict[WorkerRef, Device] = {}
        self.hosts: dict[WorkerRef, Host] = {}
        #: workers of each instance by rank, as far as they have something of it, and its model
        self.ranks: dict[InstanceId, dict[int, WorkerRef]] = {}
        self.model_of: dict[InstanceId, str] = {}
        self.loaded: dict[InstanceId, dict[int, None]] = {}
        #: instances that take requests, whatever of them is there
        self.live: dict[InstanceId, None] = {}
        #: instances that lost a rank or failed: what is left of them is released
        self.ended: dict[InstanceId, None] = {}
        #: instances that finish what they have, and get nothing new
        self.draining: dict[InstanceId, None] = {}
        #: whole instances that are being released
        self.leaving: dict[InstanceId, None] = {}
        #: host copies by (model, agent, rank): their plan, and whether they are whole
        self.copies: dict[tuple[str, WorkerRef, int], PlanId] = {}
        self.whole: dict[tuple[str, WorkerRef, int], None] = {}
        #: what an open load receives, and of which model: (plan, receiver)
        self.feeds: dict[tuple[PlanId, WorkerRef], tuple[str, tuple[Feed, ...]]] = {}
        self._load_of: dict[OrderKey, tuple[PlanId, WorkerRef]] = {}

    # -- questions ------------------------------------------------------------------------------

    def is_alive(self, member: WorkerRef) -> bool:
        return member in self.devices or member in self.hosts

    def tp_size(self, model: str) -> int:
        return self.specs[model].tp_size if model in self.specs else 1

    def holders(self, model: str) -> list[InstanceId]:
        """Instances that are complete and not given up."""
        of_model = [i for i in self.loaded if self.model_of.get(i) == model]
        return [instance for instance in of_model if self.is_holder(instance)]

    def is_holder(self, instance: InstanceId) -> bool:
        """Every rank is loaded, none was lost, and none is being released."""
        loaded = len(self.loaded.get(instance, ()))
        is_whole = loaded == self.tp_size(self.model_of[instance])
        return is_whole and instance not in self.ended and instance not in self.leaving

    def may_serve(self, instance: InstanceId) -> bool:
        """It is complete, or live, and not given up."""
        is_over = instance in self.ended or instance in self.leaving
        return self.is_holder(instance) or (instance in self.live and not is_over)

    def serving(self, model: str) -> list[InstanceId]:
        """Complete instances that are not given up and do not drain."""
        return [instance for instance in self.holders(model) if instance not in self.draining]

    def loading(self, model: str) -> list[InstanceId]:
        """Instances that will be complete, if all goes well."""
        of_model = [i for i in self.ranks if self.model_of[i] == model and self.is_complete(i)]
        return [i for i in of_model if not self.is_holder(i) and i not in self.leaving]

    def has_whole_host_copy(self, model: str) -> bool:
        agents = [agent for name, agent, rank in self.whole if name == model and rank == 0]
        return any(self.is_whole(model, agent) for agent in agents)

    def is_whole(self, model: str, agent: WorkerRef) -> bool:
        """Every rank of the host copy is there."""
        return all((model, agent, rank) in self.whole for rank in range(self.tp_size(model)))

    def readers(self, model: str, holder: WorkerRef) -> list[tuple[PlanId, WorkerRef]]:
        """Open loads of the model that are fed by the holder."""
        return [
            load
            for load, (read, feeds) in self.feeds.items()
            if read == model and any(upstream.worker == holder for upstream in senders(feeds))
        ]

    def instances_on(self, worker: WorkerRef) -> Iterator[InstanceId]:
        """Instances of which the worker has something."""
        for instance, ranks in self.ranks.items():
            if worker in ranks.values():
                yield instance

    def plans_on(self, agent: WorkerRef) -> list[PlanId]:
        """Copies that the agent has something of."""
        return [plan for (_, holder, _), plan in self.copies.items() if holder == agent]

    def predecessors(self, member: WorkerRef) -> list[WorkerRef] | None:
        """Incarnations that this one replaces; None if it is itself late news."""
        living = self.hosts if member.is_agent else self.devices
        others = [other for other in living if other.worker == member.worker]
        return None if any(other >= member for other in others) else others

    # -- what happened --------------------------------------------------------------------------

    def absorb(self, event: AnyEvent) -> None:
        if isinstance(event, WorkerJoined):
            self._worker_joined(event)
        elif isinstance(event, AgentJoined):
            self._agent_joined(event)
        elif isinstance(event, WorkerLost):
            self._lost(event.worker)
        elif isinstance(event, LiveStarted):
            self.live[event.instance] = None
        elif isinstance(event, LoadCompleted):
            self._load_over(("load", event.instance, event.attempt, event.rank))
            if event.instance in self.ranks:
                self.loaded.setdefault(event.instance, {})[event.rank] = None
        elif isinstance(event, LoadFailed):
            self._load_over(("load", event.instance, event.attempt, event.rank))
            self.ended[event.instance] = None
            self._forget(event.instance, event.rank)
        elif isinstance(event, Released):
            self._forget(event.instance, event.rank)
        elif isinstance(event, CopyCompleted):
            self._load_over(("copy", event.plan, event.agent))
            key = (event.model, event.agent, event.rank)
            if self.copies.get(key) == event.plan:
                self.whole[key] = None
        elif isinstance(event, CopyFailed | CopyDropped):
            if isinstance(event, CopyFailed):
                self._load_over(("copy", event.plan, event.agent))
            self._forget_copy(event.model, event.agent, event.rank, event.plan)
        elif isinstance(event, ModelAdded):
            spec = event.policy.spec
            self.specs[spec.name], self.sizes[spec.name] = spec, spec.size_bytes

    def _worker_joined(self, event: WorkerJoined) -> None:
        before = self.predecessors(event.worker)
        if before is None:
            return
        for old in before:
            self._lost(old)
        self.devices[event.worker] = event.device
        report = event.report
        if report is not None:
            self.model_of[report.instance] = report.model
            self.ranks.setdefault(report.instance, {})[report.rank] = event.worker
            if report.pairing is not None:
                self.live[report.instance] = None
            if report.is_loaded:
                self.loaded.setdefault(report.instance, {})[report.rank] = None
            else:
                key: OrderKey = ("load", report.instance, report.attempt, report.rank)
                self._begin_load(key, report.plan, event.worker, report.model, report.feeds)

    def _agent_joined(self, event: AgentJoined) -> None:
        before = self.predecessors(event.agent)
        if before is None:
            return
        for old in before:
            self._lost(old)
        self.hosts[event.agent] = event.host
        for report in event.copies:
            key = (report.model, event.agent, report.rank)
            self.copies[key] = report.plan
            if report.is_complete:
                self.whole[key] = None
            else:
                order: OrderKey = ("copy", report.plan, event.agent)
                self._begin_load(order, report.plan, event.agent, report.model, report.feeds)

    def _lost(self, member: WorkerRef) -> None:
        self.devices.pop(member, None)
        self.hosts.pop(member, None)
        for instance in list(self.instances_on(member)):
            ranks = self.ranks[instance]
            self.ended[instance] = None
            for rank in [rank for rank, there in ranks.items() if there == member]:
                self._forget(instance, rank)
        for held in [held for held in self.copies if held[1] == member]:
            self._forget_copy(*held, self.copies[held])
        for load in [load for load in self.feeds if load[1] == member]:
            del self.feeds[load]

    def _forget(self, instance: InstanceId, rank: int) -> None:
        """The rank's worker has nothing of the instance any more."""
        ranks = self.ranks.get(instance, {})
        ranks.pop(rank, None)
        if not ranks:
            self.ranks.pop(instance, None)
            self.loaded.pop(instance, None)
            self.live.pop(instance, None)
            self.draining.pop(instance, None)

    def _forget_copy(self, model: str, agent: WorkerRef, rank: int, plan: PlanId) -> None:
        if self.copies.get((model, agent, rank)) == plan:
            del self.copies[model, agent, rank]
            self.whole.pop((model, agent, rank), None)

    def _load_over(self, key: OrderKey) -> None:
        self.feeds.pop(self._load_of.pop(key, (0, WorkerRef(0))), None)

    # -- what was ordered -----------------------------------------------------------------------

    def ordered(self, command: AnyCommand) -> None:
        if isinstance(command, StartLoad):
            self.model_of[command.instance] = command.model
            self.ranks.setdefault(command.instance, {})[command.rank] = command.worker
            key: OrderKey = ("load", command.instance, command.attempt, command.rank)
            self._begin_load(key, command.plan, command.worker, command.model, command.feeds)
        elif isinstance(command, StartCopy):
            self.copies[command.model, command.agent, command.rank] = command.plan
            key = ("copy", command.plan, command.agent)
            self._begin_load(key, command.plan, command.agent, command.model, command.feeds)
        elif isinstance(command, AmendLoad):
            load = (command.plan, command.receiver)
            self.feeds[load] = (self.feeds[load][0], command.feeds)
        elif isinstance(command, Drain):
            self.draining[command.instance] = None
        elif isinstance(command, Resume):
            self.draining.pop(command.instance, None)
        elif isinstance(command, Release):
            if self.is_complete(command.instance):
                self.leaving[command.instance] = None
        elif isinstance(command, DropCopy):
            self.whole.pop((command.model, command.agent, command.rank), None)
        elif isinstance(command, ModelGone):
            self.specs.pop(command.model, None)

    def is_complete(self, instance: InstanceId) -> bool:
        """Every rank has a worker, and the instance did not end otherwise."""
        ranks = self.ranks.get(instance, {})
        is_there = len(ranks) >= self.tp_size(self.model_of[instance])
        return is_there and instance not in self.ended

    def _begin_load(
        self, key: OrderKey, plan: PlanId, receiver: WorkerRef, model: str, feeds: tuple[Feed, ...]
    ) -> None:
        self._load_of[key] = (plan, receiver)
        self.feeds[plan, receiver] = (model, feeds)
