"""Workers of a host never get more cores together than they may have (QUART's CPU_max), and a
replica that cores make up for goes when these are there. Shares no code with what it checks."""

from __future__ import annotations

from collections.abc import Mapping

from livescale.messages import commands, events
from livescale.sim.checkers.invariants import require
from livescale.sim.checkers.knowledge import Knowledge
from livescale.values.scaling_policies import ScalingPolicy, StagesByQueue
from livescale.values.types import WorkerRef


class CoreChecker:
    """Of one life of a controller; models without a policy of their own scale by `scaling`."""

    def __init__(self, knowledge: Knowledge, scaling: ScalingPolicy) -> None:
        self._knowledge = knowledge
        self._scaling = scaling
        self._hosts: dict[WorkerRef, str] = {}
        #: as workers have told, and as they began
        self._told: dict[WorkerRef, int] = {}
        self._own: dict[WorkerRef, int] = {}
        #: orders without an answer
        self._open: dict[WorkerRef, int] = {}

    def absorb(self, event: events.AnyEvent) -> None:
        """Before the knowledge has this event."""
        for member in self._knowledge.lost_by(event):
            self._lost(member)
        if isinstance(event, events.WorkerJoined):
            if self._knowledge.predecessors(event.worker) is not None:
                self._hosts[event.worker] = event.device.host
                self._told[event.worker], self._own[event.worker] = event.cores, event.own_cores
        elif isinstance(event, events.CoresChanged) and event.worker in self._told:
            # Orders of earlier lives are answered, too.
            if self._open.get(event.worker) == event.asked:
                del self._open[event.worker]
            self._told[event.worker] = event.cores

    def check(self, command: commands.AnyCommand) -> None:
        if isinstance(command, commands.SetCores):
            self._check_order(command)
        elif isinstance(command, commands.ScaleDecided) and command.reason == "even_arrivals":
            self._check_reclaim(command)

    def all_answered(self) -> None:
        require(not self._open, "every order of cores is answered", self._open)

    def at_rest(self, cores: Mapping[WorkerRef, int]) -> None:
        """So many has each living worker in the end."""
        for worker, count in cores.items():
            told = self._told.get(worker)
            require(told == count, "a worker has the cores that are known of it", worker, told)
        for host in dict.fromkeys(self._hosts.values()):
            used = sum(cores.get(worker, 0) for worker in self._on(host))
            most = max(self._most(), sum(self._own[worker] for worker in self._on(host)))
            require(used <= most, "hosts have no more cores than they may", host, used, most)

    # -- helpers --------------------------------------------------------------------------------

    def _check_order(self, order: commands.SetCores) -> None:
        worker = order.worker
        require(worker in self._told, "only living members get orders", order)
        require(worker not in self._open, "one order of cores at a time", order)
        before = self._told[worker]
        require(order.cores != before, "orders change something", order)
        self._open[worker] = order.cores
        if order.cores < before:
            require(order.cores >= self._own[worker], "what a worker began with stays", order)
            return
        held = [h for h in self._knowledge.on(worker) if h.instance is not None]
        lines = [line for h in held if (line := self._line(h.order.model)) is not None]
        require(bool(lines), "stages get cores whose policy gives some", order, held)
        promised = {w: max(self._told[w], self._open.get(w, 0)) for w in self._told}
        used = sum(promised[w] for w in self._on(self._hosts[worker]))
        most = min(line.cores_max for line in lines)
        require(used <= most, "hosts have no more cores than they may", order, promised, most)

    def _check_reclaim(self, decided: commands.ScaleDecided) -> None:
        """Instances that stay have told of the cores that make up for the one that goes."""
        wanted, before = decided.values.get("to_cores", 0), decided.values.get("cores", 0)
        # Where workers were lost, there may be fewer than were to stay.
        if wanted <= before or decided.to_instances >= decided.from_instances:
            return
        known = self._knowledge
        staying = [i for i in known.holders(decided.model) if i not in known.draining]
        ranks = [known.ranks(decided.model, instance).values() for instance in staying]
        told = sum(all(self._told[held.member] >= wanted for held in one) for one in ranks)
        rule = "replicas go when their cores are there"
        require(told >= decided.values["to_replicas"], rule, decided, told)

    def _line(self, model: str) -> StagesByQueue | None:
        """What the stage scales by, if that gives cores."""
        policy = self._knowledge.policies.get(model)
        scaling = (policy.scaling or self._scaling) if policy is not None else None
        has_cores = isinstance(scaling, StagesByQueue) and scaling.cores is not None
        return scaling if has_cores and isinstance(scaling, StagesByQueue) else None

    def _most(self) -> int:
        """What any policy allows."""
        lines = [self._line(model) for model in self._knowledge.policies]
        return max((line.cores_max for line in lines if line is not None), default=0)

    def _on(self, host: str) -> list[WorkerRef]:
        return [worker for worker, its in self._hosts.items() if its == host]

    def _lost(self, worker: WorkerRef) -> None:
        self._hosts.pop(worker, None)
        for known in (self._told, self._own, self._open):
            known.pop(worker, None)
