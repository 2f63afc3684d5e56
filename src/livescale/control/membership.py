"""Members of the pool: workers and agents that join, with what they hold, and that are lost.

After a start, or a restart of the controller, decisions wait until the pool is settled: all
expected members have joined, or `settle_ns` have passed.
"""

from __future__ import annotations

from collections.abc import Mapping

from livescale.control.attempts import Attempts
from livescale.control.config import ControllerConfig
from livescale.control.fleet import AgentRecord, Fleet, WorkerRecord
from livescale.control.host_copies import HostCopies
from livescale.control.loads import Loads
from livescale.control.model_state import ModelState
from livescale.control.planning import Planning
from livescale.control.pool import ParameterPool
from livescale.messages.events import AgentJoined, InstanceReport, WorkerJoined, WorkerLost
from livescale.plans import PlannedLoad
from livescale.types import WorkerRef


class Membership:
    """Keeps fleet, pool and loads true to the members. Handlers return False for late news."""

    def __init__(
        self,
        config: ControllerConfig,
        states: Mapping[str, ModelState],
        fleet: Fleet,
        pool: ParameterPool,
        loads: Loads,
        planning: Planning,
        host_copies: HostCopies,
        attempts: Attempts,
    ) -> None:
        self._config = config
        self._states = states
        self._fleet = fleet
        self._pool = pool
        self._loads = loads
        self._planning = planning
        self._host_copies = host_copies
        self._attempts = attempts
        #: from when on the pool is settled, whatever is missing (None: before the first step)
        self.settled_at_ns: int | None = None
        #: loads were taken over from an earlier life, and their senders not looked at yet
        self._has_adopted = False

    def settle(self, now_ns: int) -> bool:
        """Whether the pool is settled. Completes what was adopted: ranks whose instance cannot
        come together are given up, loads from senders that have died fail."""
        if self.settled_at_ns is None:
            self.settled_at_ns = now_ns + self._config.settle_ns
        if len(self._fleet.workers) >= self._config.workers_expected:
            # No worker is missing that could hold the ranks that were not reported.
            self._fleet.give_up_incomplete()
            if len(self._fleet.agents) >= self._config.agents_expected:
                self.settled_at_ns = min(self.settled_at_ns, now_ns)
        is_settled = now_ns >= self.settled_at_ns
        if is_settled and self._has_adopted:
            self._has_adopted = False
            self._loads.fail_dead(self._fleet.is_alive)
        return is_settled

    def worker_joined(self, event: WorkerJoined, now_ns: int) -> bool:
        before = self._fleet.workers.get(event.worker.worker)
        if not self._replaces(before, event.worker, now_ns):
            return False
        self._fleet.join(event.worker, event.device)
        self._planning.worker_joined(event.worker, event.device)
        if event.report is not None:
            if event.report.model in self._states:
                self._adopt(event.worker, event.report)
            else:
                self._fleet.give_back(event.report, event.worker)
        return True

    def agent_joined(self, event: AgentJoined, now_ns: int) -> bool:
        before = self._fleet.agents.get(event.agent.worker)
        if not self._replaces(before, event.agent, now_ns):
            return False
        self._fleet.agent_joins(event.agent, event.host)
        self._planning.agent_joined(event.agent, event.host)
        for name in dict.fromkeys(report.model for report in event.copies):
            reports = tuple(report for report in event.copies if report.model == name)
            self._has_adopted = True
            self._host_copies.adopt(event.agent, reports, self._states.get(name))
        return True

    def lost(self, event: WorkerLost, _now_ns: int) -> bool:
        """A worker or an agent is gone, with all that it held."""
        if not self._fleet.is_alive(event.worker):
            return False
        if event.worker.is_agent:
            self._host_copies.agent_lost(event.worker)
            del self._fleet.agents[event.worker.worker]
        else:
            self._instance_lost(event)
            self._fleet.leave(event.worker)
        self._planning.member_left(event.worker)
        self._loads.lose(event.worker)
        self._pool.lose(event.worker)
        return True

    def _replaces(
        self, before: WorkerRecord | AgentRecord | None, member: WorkerRef, now_ns: int
    ) -> bool:
        """False if the member is no newer than the incarnation that is known. An older one is lost:
        the end of its connection may be seen after the newer one has joined."""
        if before is None:
            return True
        return member > before.ref and self.lost(
            WorkerLost(before.ref, f"{member} took its place"), now_ns
        )

    def _adopt(self, worker: WorkerRef, report: InstanceReport) -> None:
        """The worker holds a rank of an instance from an earlier controller's life."""
        state = self._states[report.model]
        spec = state.spec
        if not report.is_loaded:
            self._has_adopted = True
            load = PlannedLoad(worker, report.feeds)
            self._loads.begin(report.plan, load, report.model, report.rank)
        instance = self._fleet.adopt(report, worker, spec.layers, spec.tp_size)
        if instance is None:
            return
        self._pool.begin(instance.model, instance.workers, state.instance_bytes)
        for rank in instance.loaded_ranks:
            self._pool.complete(instance.model, instance.worker, rank)

    def _instance_lost(self, event: WorkerLost) -> None:
        """One lost rank loses the instance, and with it what its rank 0 was asked."""
        reason = f"worker {event.worker} was lost: {event.reason}"
        number = self._fleet.workers[event.worker.worker].instance
        instance = self._fleet.instances.get(number) if number is not None else None
        if instance is not None:
            instance.empty_ranks[instance.workers.index(event.worker)] = None
            self._pool.lose(event.worker)
            self._fleet.move(instance, WorkerLost)
            self._attempts.worker_lost(instance.worker, reason)
        self._attempts.worker_lost(event.worker, reason)
