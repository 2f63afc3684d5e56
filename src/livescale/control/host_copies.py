"""Copies in host memory: made, lost, given up, as the placement strategy suggests.

One host copy per model, spread over the hosts, keeps every model in the cluster's memory at O(1)
per model (BlitzScale §5.3); the strategies of other systems are here for comparison.
"""

from __future__ import annotations

from collections.abc import Mapping

from livescale.control.config import ControllerConfig
from livescale.control.fleet import Fleet
from livescale.control.host_memory import HostCopy, HostMemory
from livescale.control.load_failures import LoadFailures
from livescale.control.loads import Loads
from livescale.control.model_state import ModelState
from livescale.control.placement import Discard, Keep, ModelCopies, room_for, suggest
from livescale.control.planning import Planning
from livescale.control.pool import ParameterPool
from livescale.messages.commands import AnyCommand, PlanMade, StartCopy
from livescale.messages.events import (
    CopyCompleted,
    CopyDropped,
    CopyFailed,
    CopyLayerArrived,
    CopyReport,
)
from livescale.placements import AllCopies, CacheCopies, SpreadCopies
from livescale.plans import PlannedLoad
from livescale.types import InstanceState, WorkerRef


class HostCopies:
    """Turns suggestions into orders to agents, and keeps the pool true."""

    def __init__(
        self,
        config: ControllerConfig,
        fleet: Fleet,
        pool: ParameterPool,
        loads: Loads,
        planning: Planning,
        states: Mapping[str, ModelState],
    ) -> None:
        self._config = config
        self._states = states
        self._strategy = config.placement
        self._fleet = fleet
        self._pool = pool
        self._loads = loads
        self._planning = planning
        self._memory = HostMemory(fleet)
        #: of models whose copies have failed
        self._failures: dict[str, LoadFailures] = {}
        self._now_ns = 0
        #: what the last decision saw, and until when it stands if nothing changes
        self._seen: tuple[int, ...] = ()
        self._due_ns: int | None = None

    # -- what to do ---------------------------------------------------------------------------

    def decide(self, now_ns: int) -> list[AnyCommand]:
        """Orders that bring the copies to where the strategy wants them."""
        self._now_ns = now_ns
        seen = self._versions()
        is_due = self._due_ns is not None and now_ns >= self._due_ns
        if not self._fleet.agents or (seen == self._seen and not is_due):
            return []
        commands = self._drop_remainders()
        for suggestion in suggest(self._strategy, now_ns, self._models(), self._memory.rooms()):
            state = self._states[suggestion.model]
            if isinstance(suggestion, Keep):
                commands += self._start(state, suggestion)
            else:
                commands += self._drop(suggestion)
        self._seen, self._due_ns = seen, self.deadline_ns()
        return commands

    def _versions(self) -> tuple[int, ...]:
        """Whatever a decision depends on, besides time, changes one of these."""
        return (self._pool.version, self._fleet.version, self._memory.changes, len(self._states))

    def preferred_targets(
        self, state: ModelState, spare: list[WorkerRef], count: int
    ) -> tuple[tuple[WorkerRef, ...], ...] | None:
        """Where a strategy that reads host memory wants its instances (None: no preference)."""
        if not isinstance(self._strategy, CacheCopies | AllCopies):
            return None
        topology = self._planning.topology
        hosts = {
            topology.agents[copy.holder].name for copy in self._pool.host_copies(state.spec.name)
        }
        ordered = sorted(spare, key=lambda w: (topology.host_of(w) not in hosts, w))
        size = state.spec.tp_size
        return tuple(tuple(ordered[i * size : (i + 1) * size]) for i in range(count))

    def fill_caches(
        self, state: ModelState, targets: tuple[tuple[WorkerRef, ...], ...]
    ) -> list[AnyCommand]:
        """A cache keeps what its host loads: copies for the targets' hosts that lack one."""
        if not isinstance(self._strategy, CacheCopies):
            return []
        commands: list[AnyCommand] = []
        topology = self._planning.topology
        wanted = {topology.host_of(worker): None for workers in targets for worker in workers}
        for record in self._fleet.living_agents():
            if record.host.name not in wanted:
                continue
            copy = self._memory.find(state.spec.name, record.ref)
            if copy is not None:
                copy.used_ns = self._now_ns
                continue
            room = next(room for room in self._memory.rooms() if room.agent == record.ref)
            discards = room_for(state.instance_bytes, room, self._models())
            if discards is None or any(not self._can_drop(d) for d in discards):
                continue
            for discard in discards:
                commands += self._drop(discard)
            commands += self._start(state, Keep(state.spec.name, record.ref, "cache miss"))
        return commands

    def deadline_ns(self) -> int | None:
        """When a copy outlives its time, or a failed one may be tried again."""
        times = [f.blocked_until_ns for f in self._failures.values()]
        times = [time_ns for time_ns in times if time_ns > self._now_ns]
        if isinstance(self._strategy, CacheCopies):
            times += [
                copy.used_ns + self._strategy.ttl_ns for copy in self._memory if not copy.is_leaving
            ]
        return min(times, default=None)

    # -- what happened ------------------------------------------------------------------------

    def adopt(
        self, agent: WorkerRef, reports: tuple[CopyReport, ...], state: ModelState | None
    ) -> None:
        """The agent holds this of one model, from an earlier controller's life.

        What can never become a whole copy is dropped: ranks without the others, and copies of a
        model that is served no more (`state` None).
        """
        model = reports[0].model
        plans = {report.rank: report.plan for report in reports}
        size = state.instance_bytes if state is not None else 0
        is_leaving = state is None or len(reports) < state.spec.tp_size
        self._memory.add(HostCopy(model, agent, size, plans, is_leaving, self._now_ns))
        if state is not None and not is_leaving:
            ranks = (agent,) * state.spec.tp_size
            self._pool.begin(model, ranks, state.instance_bytes)
        for report in reports:
            if report.is_complete:
                self._pool.complete(model, agent, report.rank)
            else:
                load = PlannedLoad(agent, report.feeds)
                self._loads.begin(report.plan, load, model, report.rank)

    def layer_arrived(self, event: CopyLayerArrived, now_ns: int) -> bool:
        """False for late news."""
        if self._current(event) is None:
            return False
        self._loads.progressed(event.plan, event.agent, now_ns)
        return True

    def completed(self, event: CopyCompleted, now_ns: int) -> bool:
        """A rank of a copy is whole. False for late news."""
        copy = self._current(event)
        if copy is None:
            return False
        self._loads.completed(event.plan, event.agent, now_ns)
        copy.used_ns = now_ns
        if not copy.is_leaving:
            self._pool.complete(event.model, event.agent, event.rank)
            self._ended_well(event.model, event.agent)
        return True

    def failed(self, event: CopyFailed, now_ns: int) -> bool:
        """A rank could not be brought: the whole copy is given up. False for late news."""
        copy = self._current(event)
        if copy is None:
            return False
        self._loads.end(event.plan, event.agent)
        self._loads.fail_readers(event.agent, event.model)
        if event.rank not in copy.dropping:
            copy.gone[event.rank] = None
        if not copy.is_leaving:
            copy.is_leaving = True
            self._pool.forget(event.model, event.agent)
            failures = self._failures.setdefault(event.model, LoadFailures(self._config))
            failures.failed(now_ns, event.plan, self._planning.last_id, event.reason)
        self._forget_if_gone(copy)
        return True

    def dropped(self, event: CopyDropped, _now_ns: int) -> bool:
        """A rank's memory is free again. False for late news."""
        copy = self._current(event)
        if copy is None:
            return False
        self._loads.end(event.plan, event.agent)
        copy.gone[event.rank] = None
        self._forget_if_gone(copy)
        return True

    def agent_lost(self, agent: WorkerRef) -> None:
        """Its host's copies are gone; the pool was told."""
        self._memory.lose(agent)

    def failures(self, model: str) -> LoadFailures | None:
        """Of copies of the model (None: there were none)."""
        return self._failures.get(model)

    def forget_model(self, model: str) -> None:
        """The model leaves the pool."""
        self._failures.pop(model, None)

    def has_any(self, model: str) -> bool:
        """Something of the model is in some host's memory."""
        return bool(self._memory.of_model(model))

    # -- helpers ------------------------------------------------------------------------------

    def _ended_well(self, model: str, agent: WorkerRef) -> None:
        """Devices can load from a whole copy, whatever became of their loads before."""
        if not self._is_whole(model, agent):
            return
        if model in self._failures:
            self._failures[model].ended_well()
        if model in self._states:
            self._states[model].load_failures.ended_well()

    def _models(self) -> list[ModelCopies]:
        return [self._model(state) for state in self._states.values()]

    def _model(self, state: ModelState) -> ModelCopies:
        name = state.spec.name
        instances = self._fleet.of_model(name)
        used_ns = {c.agent: c.used_ns for c in self._memory.of_model(name) if not c.is_leaving}
        whole = {agent: self._is_whole(name, agent) for agent in used_ns}
        holders = self._pool.holders(name)
        is_going = bool(holders) and all(i.state is InstanceState.DRAINING for i in instances)
        return ModelCopies(
            model=name,
            size_bytes=state.instance_bytes,
            is_on_devices=bool(holders),
            needs_copy=is_going,
            is_leaving=state.is_leaving and not instances,
            # Whole ones come first: they are kept.
            agents=tuple(sorted(used_ns, key=lambda agent: (not whole[agent], agent))),
            # One that is arriving is in use.
            used_ns={a: used_ns[a] if whole[a] else self._now_ns for a in used_ns},
        )

    def _is_whole(self, model: str, agent: WorkerRef) -> bool:
        copy = self._pool.find(model, agent)
        return copy is not None and copy.is_complete

    def _start(self, state: ModelState, keep: Keep) -> list[AnyCommand]:
        name, spec = keep.model, state.spec
        is_there = self._memory.find(name, keep.agent) is not None
        failures = self._failures.get(name)
        is_blocked = failures is not None and self._now_ns < failures.blocked_until_ns
        if is_there or is_blocked:
            return []
        if isinstance(self._strategy, SpreadCopies) and self.has_any(name):
            return []  # the memory of one that goes is counted until it is free
        plans = [self._planning.plan_copy(state, keep.agent, rank) for rank in range(spec.tp_size)]
        self._pool.begin(name, (keep.agent,) * spec.tp_size, state.instance_bytes)
        plan_ids = {rank: plan.plan for rank, plan in enumerate(plans)}
        size = state.instance_bytes
        self._memory.add(HostCopy(name, keep.agent, size, plan_ids, used_ns=self._now_ns))
        commands: list[AnyCommand] = []
        for rank, plan in enumerate(plans):
            load = plan.load_of(keep.agent)
            self._loads.begin(plan.plan, load, name, rank)
            start = StartCopy(
                model=name,
                agent=keep.agent,
                plan=plan.plan,
                feeds=load.feeds,
                chunk_bytes=plan.chunk_bytes,
                reason=keep.reason,
                rank=rank,
            )
            commands += [PlanMade(plan, ()), start]
        return commands

    def _can_drop(self, discard: Discard) -> bool:
        return self._pool.can_drop(discard.model, discard.agent)

    def _drop(self, discard: Discard) -> list[AnyCommand]:
        copy = self._memory.find(discard.model, discard.agent)
        if copy is None or copy.is_leaving or not self._can_drop(discard):
            return []
        self._pool.drop(discard.model, discard.agent)
        copy.is_leaving = True
        return copy.drop(discard.reason)

    def _drop_remainders(self) -> list[AnyCommand]:
        """Ranks of copies that can never be whole."""
        return [
            command
            for copy in self._memory
            if copy.is_leaving
            for command in copy.drop("the copy can never be whole")
        ]

    def _current(
        self, event: CopyLayerArrived | CopyCompleted | CopyFailed | CopyDropped
    ) -> HostCopy | None:
        """The copy that news is about, unless the news is late."""
        copy = self._memory.find(event.model, event.agent)
        return copy if copy is not None and copy.plans.get(event.rank) == event.plan else None

    def _forget_if_gone(self, copy: HostCopy) -> None:
        if len(copy.gone) == len(copy.plans):
            self._memory.remove(copy)
