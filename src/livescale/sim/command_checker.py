"""What must hold of a controller's commands, in every simulated world.

The rules are stated from events and commands alone, so that they share no code with what they
check. A broken rule raises at once; nothing is repaired.
"""

from __future__ import annotations

from collections.abc import Sequence

from livescale.chunks import Feed, senders
from livescale.messages.commands import (
    AmendLoad,
    AnyCommand,
    Dispatch,
    DropCopy,
    FailRequest,
    ModelGone,
    Release,
    StartCopy,
    StartLoad,
)
from livescale.messages.events import (
    AgentJoined,
    AnyEvent,
    CopyCompleted,
    CopyDropped,
    CopyFailed,
    LoadCompleted,
    LoadFailed,
    ModelAdded,
    ModelRemoved,
    Released,
    RequestArrived,
    RequestEnded,
    WorkerJoined,
    WorkerLost,
)
from livescale.policies import ModelPolicy
from livescale.sim.checkers import require
from livescale.types import InstanceId, PlanId, WorkerRef

OrderKey = tuple[object, ...]


class CommandChecker:
    """Rules about one life of a controller: its commands and the events that answer them."""

    def __init__(self, models: Sequence[ModelPolicy], keeps_last: bool = True) -> None:
        self._keeps_last = keeps_last
        self._tp_sizes: dict[str, int] = {}
        #: models that must keep a copy in the cluster's memory
        self._kept: dict[str, None] = {}
        for policy in models:
            self._add_model(policy)
        self._alive: dict[WorkerRef, None] = {}
        #: workers of each instance by rank, as far as they have something of it, and its model
        self._ranks: dict[InstanceId, dict[int, WorkerRef]] = {}
        self._model_of: dict[InstanceId, str] = {}
        self._loaded: dict[InstanceId, dict[int, None]] = {}
        #: instances that lost a rank or failed: what is left of them is released
        self._ended: dict[InstanceId, None] = {}
        self._draining: dict[InstanceId, None] = {}
        #: host copies by (model, agent, rank): their plan, and whether they are whole
        self._copies: dict[tuple[str, WorkerRef, int], PlanId] = {}
        self._whole: dict[tuple[str, WorkerRef, int], None] = {}
        #: unanswered orders and the worker that must answer
        self._open: dict[OrderKey, WorkerRef] = {}
        self._answered: dict[OrderKey, None] = {}
        #: what an open load receives, and of which model: (plan, receiver)
        self._feeds: dict[tuple[PlanId, WorkerRef], tuple[str, tuple[Feed, ...]]] = {}
        self._load_of: dict[OrderKey, tuple[PlanId, WorkerRef]] = {}

    def observe(self, events: Sequence[AnyEvent], commands: Sequence[AnyCommand]) -> None:
        """Check one step."""
        for event in events:
            self._absorb(event)
        for command in commands:
            self._check(command)

    def all_answered(self) -> None:
        require(not self._open, "every order is answered", self._open)

    # -- helpers --------------------------------------------------------------------------------

    def _absorb(self, event: AnyEvent) -> None:
        if isinstance(event, WorkerJoined):
            self._joined(event)
        elif isinstance(event, WorkerLost):
            self._lost(event.worker)
        elif isinstance(event, RequestArrived):
            if event.worker is not None:
                self._open["request", event.request, event.attempt] = event.worker
        elif isinstance(event, RequestEnded):
            # Gateway and worker may both see the end: the second news is stale.
            self._open.pop(("request", event.request, event.attempt), None)
        elif isinstance(event, LoadCompleted):
            self._load_over(("load", event.instance, event.attempt, event.rank))
            if event.instance in self._ranks:
                self._loaded.setdefault(event.instance, {})[event.rank] = None
        elif isinstance(event, LoadFailed):
            self._load_over(("load", event.instance, event.attempt, event.rank))
            self._ended[event.instance] = None
            self._forget(event.instance, event.rank)
        elif isinstance(event, Released):
            self._answer(("release", event.instance, event.attempt, event.rank))
            self._forget(event.instance, event.rank)
        else:
            self._absorb_copies(event)

    def _absorb_copies(self, event: AnyEvent) -> None:
        if isinstance(event, AgentJoined):
            self._agent_joined(event)
        elif isinstance(event, CopyCompleted):
            self._load_over(("copy", event.plan, event.agent))
            key = (event.model, event.agent, event.rank)
            if self._copies.get(key) == event.plan:
                self._whole[key] = None
        elif isinstance(event, CopyFailed):
            self._load_over(("copy", event.plan, event.agent))
            self._forget_copy(event.model, event.agent, event.rank, event.plan)
        elif isinstance(event, CopyDropped):
            self._answer(("drop", event.plan, event.agent))
            self._forget_copy(event.model, event.agent, event.rank, event.plan)
        elif isinstance(event, ModelAdded):
            self._add_model(event.policy)
        elif isinstance(event, ModelRemoved):
            self._kept.pop(event.model, None)

    def _add_model(self, policy: ModelPolicy) -> None:
        self._tp_sizes[policy.spec.name] = policy.spec.tp_size
        if self._keeps_last:
            self._kept[policy.spec.name] = None

    def _agent_joined(self, event: AgentJoined) -> None:
        number = event.agent.worker
        others = [agent for agent in self._alive if agent.worker == number]
        if any(other >= event.agent for other in others):
            return
        for old in others:
            self._lost(old)
        self._alive[event.agent] = None
        for report in event.copies:
            key = (report.model, event.agent, report.rank)
            self._copies[key] = report.plan
            if report.is_complete:
                self._whole[key] = None
            else:
                self._feeds[report.plan, event.agent] = (report.model, report.feeds)
                self._load_of["copy", report.plan, event.agent] = (report.plan, event.agent)

    def _forget_copy(self, model: str, agent: WorkerRef, rank: int, plan: PlanId) -> None:
        if self._copies.get((model, agent, rank)) == plan:
            del self._copies[model, agent, rank]
            self._whole.pop((model, agent, rank), None)

    def _load_over(self, key: OrderKey) -> None:
        self._feeds.pop(self._load_of.pop(key, (0, WorkerRef(0))), None)
        self._answer(key)

    def _joined(self, event: WorkerJoined) -> None:
        number = event.worker.worker
        others = [worker for worker in self._alive if worker.worker == number]
        if any(other >= event.worker for other in others):
            return  # late news of an incarnation that was followed by another
        for old in others:
            self._lost(old)
        self._alive[event.worker] = None
        report = event.report
        if report is not None:
            self._model_of[report.instance] = report.model
            self._ranks.setdefault(report.instance, {})[report.rank] = event.worker
            if report.is_loaded:
                self._loaded.setdefault(report.instance, {})[report.rank] = None
            else:
                key: OrderKey = ("load", report.instance, report.attempt, report.rank)
                self._load_of[key] = (report.plan, event.worker)
                self._feeds[report.plan, event.worker] = (report.model, report.feeds)

    def _lost(self, worker: WorkerRef) -> None:
        self._alive.pop(worker, None)
        for instance, ranks in list(self._ranks.items()):
            if worker in ranks.values():
                # One lost rank loses the instance, and what its rank 0 was asked.
                first = ranks.get(0)
                for key in [k for k, asked in self._open.items() if asked == first]:
                    if key[0] == "request":
                        del self._open[key]
            for rank in [rank for rank, there in ranks.items() if there == worker]:
                self._ended[instance] = None
                self._forget(instance, rank)
        for held in [held for held in self._copies if held[1] == worker]:
            self._forget_copy(*held, self._copies[held])
        for load in [load for load in self._feeds if load[1] == worker]:
            del self._feeds[load]
        # The loss answers whatever the worker was asked, in the place of every answer.
        for key in [key for key, asked in self._open.items() if asked == worker]:
            del self._open[key]

    def _forget(self, instance: InstanceId, rank: int) -> None:
        """The rank's worker has nothing of the instance any more."""
        ranks = self._ranks.get(instance, {})
        ranks.pop(rank, None)
        if not ranks:
            self._ranks.pop(instance, None)
            self._loaded.pop(instance, None)

    def _answer(self, key: OrderKey) -> None:
        require(key not in self._answered, "an order is answered once", key)
        if key in self._open:
            del self._open[key]
            self._answered[key] = None

    def _check(self, command: AnyCommand) -> None:
        if isinstance(command, StartLoad):
            self._model_of[command.instance] = command.model
            self._ranks.setdefault(command.instance, {})[command.rank] = command.worker
            key: OrderKey = ("load", command.instance, command.attempt, command.rank)
            self._ask(key, command.worker)
            self._begin_load(key, command.plan, command.worker, command.model, command.feeds)
        elif isinstance(command, StartCopy):
            self._copies[command.model, command.agent, command.rank] = command.plan
            key = ("copy", command.plan, command.agent)
            self._ask(key, command.agent)
            self._begin_load(key, command.plan, command.agent, command.model, command.feeds)
        elif isinstance(command, AmendLoad):
            load = (command.plan, command.receiver)
            require(load in self._feeds, "only open loads are amended", command)
            self._set_feeds(command.plan, command.receiver, self._feeds[load][0], command.feeds)
        elif isinstance(command, DropCopy):
            self._check_drop(command)
        elif isinstance(command, Release):
            self._check_release(command)
        elif isinstance(command, Dispatch):
            self._ask(("request", command.request, command.attempt), command.worker)
            holders = self._holders(self._model_of[command.instance])
            require(command.instance in holders, "complete models serve", command)
            first = self._ranks[command.instance][0]
            require(command.worker == first, "rank 0 gets the requests", command)
        elif isinstance(command, FailRequest):
            open_attempts = [key for key in self._open if key[:2] == ("request", command.request)]
            require(not open_attempts, "a request fails after its last attempt", open_attempts)
        elif isinstance(command, ModelGone):
            self._tp_sizes.pop(command.model, None)

    def _check_release(self, command: Release) -> None:
        self._ask(("release", command.instance, command.attempt, command.rank), command.worker)
        model = self._model_of[command.instance]
        ranks = self._ranks[command.instance]
        if command.instance in self._ended or len(ranks) < self._tp_sizes.get(model, 1):
            return  # nobody can use what is left of it
        self._draining[command.instance] = None
        self._check_kept(model, command.worker, command)

    def _check_drop(self, command: DropCopy) -> None:
        self._ask(("drop", command.plan, command.agent), command.agent)
        is_whole = self._is_whole(command.model, command.agent)
        self._whole.pop((command.model, command.agent, command.rank), None)
        if is_whole:
            self._check_kept(command.model, command.agent, command)

    def _check_kept(self, model: str, holder: WorkerRef, command: AnyCommand) -> None:
        """A copy goes: another one stays, and nobody was reading this one. What members that
        come late still have of a model that is gone may all go, in any order."""
        if model not in self._tp_sizes:
            return
        is_kept = bool(self._holders(model)) or self._has_whole_host_copy(model)
        require(is_kept or model not in self._kept, "the last copy is kept", command)
        readers = [
            load
            for load, (read, feeds) in self._feeds.items()
            if read == model and any(u.worker == holder for u in senders(feeds))
        ]
        require(not readers, "a copy that is read from is kept", command, readers)

    def _has_whole_host_copy(self, model: str) -> bool:
        agents = [agent for name, agent, rank in self._whole if name == model and rank == 0]
        return any(self._is_whole(model, agent) for agent in agents)

    def _is_whole(self, model: str, agent: WorkerRef) -> bool:
        """Every rank of the host copy is there."""
        ranks = range(self._tp_sizes.get(model, 1))
        return all((model, agent, rank) in self._whole for rank in ranks)

    def _begin_load(
        self,
        key: OrderKey,
        plan: PlanId,
        receiver: WorkerRef,
        model: str,
        feeds: tuple[Feed, ...],
    ) -> None:
        self._load_of[key] = (plan, receiver)
        self._set_feeds(plan, receiver, model, feeds)

    def _set_feeds(
        self, plan: PlanId, receiver: WorkerRef, model: str, feeds: tuple[Feed, ...]
    ) -> None:
        self._feeds[plan, receiver] = (model, feeds)
        for upstream in senders(feeds):
            sender = upstream.worker
            require(sender != receiver, "nobody feeds itself", plan, receiver)
            require(sender in self._alive, "senders are alive", plan, receiver, sender)

    def _holders(self, model: str) -> list[InstanceId]:
        """Instances that are complete and not given up."""
        return [
            instance
            for instance, loaded in self._loaded.items()
            if self._model_of.get(instance) == model
            and len(loaded) == self._tp_sizes.get(model, 1)
            and instance not in self._ended
            and instance not in self._draining
        ]

    def _ask(self, key: OrderKey, worker: WorkerRef) -> None:
        require(worker in self._alive, "only living workers get orders", key, worker)
        require(key not in self._open and key not in self._answered, "orders are new", key)
        self._open[key] = worker
