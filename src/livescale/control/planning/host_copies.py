"""Copies in host memory: made, lost, given up, as the placement strategy suggests.

One host copy per model, spread over the hosts, keeps every model in the cluster's memory at O(1)
per model (BlitzScale §5.3); the strategies of other systems are here for comparison.
"""

from __future__ import annotations

from collections.abc import Iterable

from livescale.control.planning.planning import Planning
from livescale.control.planning.pool_knowledge import OfPool, PoolKnowledge
from livescale.control.policy.placement import (
    Discard,
    HostRoom,
    Keep,
    ModelCopies,
    room_for,
    suggest,
)
from livescale.control.state.holdings import Copy, Holding
from livescale.control.state.instance import Instance
from livescale.control.state.load_failures import LoadFailures
from livescale.control.state.model_state import ModelState
from livescale.messages.commands import AnyCommand, PlanMade, StartHolding
from livescale.messages.scale_plan import ScalePlan
from livescale.values.copy_strategies import AllCopies, CacheCopies, KeyStageCopies, SpreadCopies
from livescale.values.types import HoldingId, InstanceState, WorkerRef


class HostCopies(OfPool):
    """Turns suggestions into orders to agents, and keeps the pool true."""

    def __init__(self, known: PoolKnowledge, planning: Planning) -> None:
        super().__init__(known)
        self._strategy = known.config.placement
        self._planning = planning
        #: of models whose copies have failed
        self._failures: dict[str, LoadFailures] = {}
        self._now_ns = 0
        #: by model: what stood when its copies were last looked at, and what was found
        self._known: dict[str, tuple[tuple[int, int, bool], ModelCopies]] = {}
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
        commands: list[AnyCommand] = []
        for suggestion in suggest(self._strategy, now_ns, self._models(), self._rooms()):
            state = self._states[suggestion.model]
            if isinstance(suggestion, Keep):
                commands += self._start(state, suggestion)
            else:
                commands += self._drop(suggestion)
        self._seen, self._due_ns = seen, self.deadline_ns()
        return commands

    def _versions(self) -> tuple[int, ...]:
        """Whatever a decision depends on, besides time, changes one of these."""
        key = self._pool.schedule.version
        return (self._pool.version, self._fleet.version, key, len(self._states))

    def preferred_targets(
        self, state: ModelState, spare: list[WorkerRef], count: int
    ) -> tuple[tuple[WorkerRef, ...], ...] | None:
        """Where a strategy that reads host memory wants its instances (None: no preference)."""
        if not isinstance(self._strategy, CacheCopies | AllCopies | KeyStageCopies):
            return None
        topology = self._planning.topology
        hosts = {
            topology.agents[copy.holder].name for copy in self._pool.host_copies(state.spec.name)
        }
        if not hosts and isinstance(self._strategy, KeyStageCopies):
            return None
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
            if record.host.name not in wanted or record.ref in self._fleet.leaving:
                continue
            copy = self._pool.on_host(state.spec.name, record.ref)
            if copy is not None:
                copy.used_ns = self._now_ns
                continue
            room = next(room for room in self._rooms() if room.agent == record.ref)
            discards = room_for(state.instance_bytes, room, self._models())
            if discards is None or any(self._droppable(d) is None for d in discards):
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
                copy.used_ns + self._strategy.ttl_ns
                for copy in self._pool.on_hosts()
                if not copy.is_given_up and copy.holder not in self._pool.guests
            ]
        return min(times, default=None)

    # -- what happened ------------------------------------------------------------------------

    def failures_of(self, model: str) -> LoadFailures:
        """To be told of the failures of copies of the model."""
        return self._failures.setdefault(model, LoadFailures(self._config))

    def ended_well(self, model: str) -> None:
        """Devices can load from a whole copy, whatever became of their loads before."""
        if model in self._failures:
            self._failures[model].ended_well()
        self._states[model].load_failures.ended_well()

    def failures(self, model: str) -> LoadFailures | None:
        """Of copies of the model (None: there were none)."""
        return self._failures.get(model)

    def forget_model(self, model: str) -> None:
        """The model leaves the pool."""
        self._failures.pop(model, None)
        self._known.pop(model, None)
        self._pool.schedule.forget_model(model)

    def has_any(self, model: str) -> bool:
        """Something of the model is in the memory of some host that stays."""
        return any(not self._fleet.is_leaving(copy.members) for copy in self._of_model(model))

    # -- helpers ------------------------------------------------------------------------------

    def _of_model(self, model: str) -> list[Copy]:
        guests = self._pool.guests
        found = [copy for copy in self._pool.on_hosts() if copy.holder not in guests]
        return [copy for copy in found if copy.model == model]

    def _rooms(self) -> list[HostRoom]:
        """What is free on each host, in id order of the agents."""
        rooms = {
            record.ref: HostRoom(
                record.ref,
                record.host.memory_bytes,
                reads_files=record.host.reads_files,
                memory_bytes=record.host.memory_bytes,
            )
            for record in self._fleet.living_agents()
            if record.ref not in self._fleet.leaving and not record.host.is_guest
        }
        for copy in self._pool.on_hosts():
            if copy.holder not in rooms:
                continue
            rooms[copy.holder].free_bytes -= copy.size_bytes
            rooms[copy.holder].leaving_bytes += copy.size_bytes if copy.is_given_up else 0
        return list(rooms.values())

    def _models(self) -> list[ModelCopies]:
        return [self._model_as_known(state) for state in self._states.values()]

    def _model_as_known(self, state: ModelState) -> ModelCopies:
        """Looked at again where something changed: most steps change one of many models."""
        if self._fleet.leaving or isinstance(self._strategy, CacheCopies | KeyStageCopies):
            # What leaves counts for no model, and these look at times.
            return self._model(state)
        name = state.name
        version = max(self._fleet.version_of(part) for part in state.keys)
        stand = self._pool.version_of(name), version, state.is_leaving
        known = self._known.get(name)
        if known is None or known[0] != stand:
            known = self._known[name] = stand, self._model(state)
        return known[1]

    def _model(self, state: ModelState) -> ModelCopies:
        name = state.spec.name
        instances = self._fleet.of_parts(state.keys)
        copies = self._pool.host_copies(name)
        copies = [copy for copy in copies if not self._fleet.is_leaving(copy.members)]
        schedule = self._pool.schedule
        used_ns = {c.holder: max(c.used_ns, schedule.given_ns(name, c.holder)) for c in copies}
        whole = {copy.holder: copy.is_complete for copy in copies}
        is_held = self._pool.count_holders(name) > 0
        is_going = is_held and all(i.state is InstanceState.DRAINING for i in instances)
        return ModelCopies(
            model=name,
            size_bytes=state.instance_bytes,
            is_on_devices=is_held,
            needs_copy=is_going,
            is_leaving=state.is_leaving and not instances,
            # Whole ones come first: they are kept.
            agents=tuple(sorted(used_ns, key=lambda agent: (not whole[agent], agent))),
            # One that is arriving is in use.
            used_ns={a: used_ns[a] if whole[a] else self._now_ns for a in used_ns},
            has_copy=self._planning.has_copy(state),
            key_reason=schedule.key_reason(self._now_ns, name),
            given_ns=self._given_ns(name, instances),
        )

    def _given_ns(self, name: str, instances: Iterable[Instance]) -> dict[WorkerRef, int]:
        """The agents of the hosts that these instances are on, and when each was given one last."""
        if not isinstance(self._strategy, KeyStageCopies):
            return {}
        # One of an instance's workers may be gone.
        known = self._planning.topology.devices
        workers = (worker for i in instances for worker in i.workers if worker in known)
        hosts = {known[worker].host: None for worker in workers}
        return {
            record.ref: self._pool.schedule.given_ns(name, record.ref)
            for record in self._fleet.living_agents()
            if record.host.name in hosts
        }

    def _start(self, state: ModelState, keep: Keep) -> list[AnyCommand]:
        name, spec = keep.model, state.spec
        is_there = self._pool.on_host(name, keep.agent) is not None
        failures = self._failures.get(name)
        is_blocked = failures is not None and self._now_ns < failures.blocked_until_ns
        if is_there or is_blocked:
            return []
        if isinstance(self._strategy, SpreadCopies) and self.has_any(name):
            return []  # the memory of one that goes is counted until it is free
        plans = [self._planning.plan_copy(state, keep.agent, rank) for rank in range(spec.tp_size)]
        found = [plan for plan in plans if plan is not None]
        commands: list[AnyCommand] = []
        for rank, plan in enumerate(found if len(found) == len(plans) else ()):
            commands += [PlanMade(plan, ()), self.order(self._now_ns, state, plan, keep, rank)]
        return commands

    def order(
        self, now_ns: int, state: ModelState, plan: ScalePlan, keep: Keep, rank: int = 0
    ) -> StartHolding:
        """One rank of a copy comes to an agent by the plan."""
        load = plan.load_of(keep.agent)
        order = StartHolding(
            holding=HoldingId(plan.plan, keep.agent),
            model=keep.model,
            span=state.entry.part.span,
            feeds=load.feeds,
            chunk_bytes=plan.chunk_bytes,
            rank=rank,
            reason=keep.reason,
        )
        holding = Holding(order)
        self._pool.add(holding, state.spec.tp_size, state.instance_bytes).used_ns = now_ns
        self._loads.begin(holding, load.completed_ns)
        return order

    def _droppable(self, discard: Discard) -> Copy | None:
        """The copy, if it may go."""
        copy = self._pool.on_host(discard.model, discard.agent)
        return copy if copy is not None and self._pool.can_drop(copy) else None

    def _drop(self, discard: Discard) -> list[AnyCommand]:
        copy = self._droppable(discard)
        return [] if copy is None else [*self._pool.drop(copy, discard.reason)]
