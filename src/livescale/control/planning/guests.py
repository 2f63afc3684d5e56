"""Copies for guests: members of other systems that join for one model (`Host.wants`), load it as
all others do, pass it on, and serve nothing.

Guests that ask at about the same time get the model by one plan, and one that comes later may read
from those. They come and go as they like: nothing of the pool relies on their copies.
"""

from __future__ import annotations

from livescale.control.planning.host_copies import HostCopies
from livescale.control.planning.planning import Planning
from livescale.control.planning.pool_knowledge import OfPool, PoolKnowledge
from livescale.control.policy.placement import Keep
from livescale.control.state.load_failures import LoadFailures
from livescale.control.state.model_state import ModelState
from livescale.messages.commands import AnyCommand, PlanMade
from livescale.values.types import WorkerRef

REASON = "a guest wants it"


class Guests(OfPool):
    """Orders what guests want, and takes away what is served no more."""

    def __init__(self, known: PoolKnowledge, planning: Planning, host_copies: HostCopies) -> None:
        super().__init__(known)
        self._planning = planning
        self._host_copies = host_copies
        #: of those whose loads failed
        self._failures: dict[WorkerRef, LoadFailures] = {}
        self._now_ns = 0
        #: what the last decision saw, and until when it stands if nothing changes
        self._seen: tuple[int, ...] = ()
        self._due_ns: int | None = None

    def decide(self, now_ns: int) -> list[AnyCommand]:
        """Orders for guests that lack what they want, and for copies of withdrawn models."""
        if not self._pool.guests:
            return []
        seen = (self._pool.version, self._fleet.version, len(self._states))
        is_due = self._due_ns is not None and now_ns >= self._due_ns
        if seen == self._seen and not is_due:
            return []
        self._now_ns = now_ns
        commands: list[AnyCommand] = []
        for model, agents in self._lacking().items():
            commands += self._load(self._states[model], agents)
        for copy in list(self._pool.on_hosts()):
            state = self._states.get(copy.model)
            is_withdrawn = state is None or state.is_leaving
            if is_withdrawn and copy.holder in self._pool.guests and self._pool.can_drop(copy):
                commands += self._pool.drop(copy, "withdrawn")
        self._seen, self._due_ns = seen, self.deadline_ns()
        return commands

    def deadline_ns(self) -> int | None:
        """When a load that failed may be tried again."""
        times = (failures.blocked_until_ns for failures in self._failures.values())
        return min((time_ns for time_ns in times if time_ns > self._now_ns), default=None)

    def failures_of(self, agent: WorkerRef) -> LoadFailures:
        """To be told of the failures of a guest's loads."""
        return self._failures.setdefault(agent, LoadFailures(self._config))

    def ended_well(self, agent: WorkerRef) -> None:
        """The guest has what it wants."""
        self._failures.pop(agent, None)

    # -- helpers, in the order used -------------------------------------------------------------

    def _lacking(self) -> dict[str, list[WorkerRef]]:
        """By model of the pool, the guests that want it and have nothing of it."""
        self._failures = {a: f for a, f in self._failures.items() if a in self._pool.guests}
        found: dict[str, list[WorkerRef]] = {}
        for record in self._fleet.living_agents():
            agent, model = record.ref, record.host.wants
            state = self._states.get(model)
            # A guest wants all of a model as one copy.
            is_whole = state is not None and state.spec.stage is None and state.spec.tp_size == 1
            if state is None or state.is_leaving or not is_whole:
                continue
            failures = self._failures.get(agent)
            is_blocked = failures is not None and self._now_ns < failures.blocked_until_ns
            is_there = self._pool.on_host(model, agent) is not None
            if not (is_blocked or is_there or agent in self._fleet.leaving):
                found.setdefault(model, []).append(agent)
        return found

    def _load(self, state: ModelState, agents: list[WorkerRef]) -> list[AnyCommand]:
        """All by one plan. Where nothing is in memory those begin that can read the files."""
        plan = self._planning.plan_guests(state, agents)
        if plan is None:
            readers = [a for a in agents if self._planning.topology.reads_files(a)]
            plan = self._planning.plan_guests(state, readers) if readers else None
        if plan is None:
            return []
        keeps = [Keep(state.name, load.receiver, REASON) for load in plan.loads]
        order = self._host_copies.order
        return [PlanMade(plan, ()), *(order(self._now_ns, state, plan, keep) for keep in keeps)]

    def __repr__(self) -> str:
        return f"<Guests {', '.join(map(str, self._pool.guests)) or 'none'}>"
