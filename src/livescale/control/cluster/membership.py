"""Members of the pool: workers and agents that join, with what they hold, and that are lost.

After a start, or a restart of the controller, decisions wait until the pool is settled: all
expected members have joined, or `settle_ns` have passed.
"""

from __future__ import annotations

from livescale.control.planning.planning import Planning
from livescale.control.planning.pool_knowledge import OfPool, PoolKnowledge
from livescale.control.requests.attempts import Attempts
from livescale.control.state.fleet import AgentRecord
from livescale.control.state.holdings import Copy, Holding, HoldingState
from livescale.control.state.idle_workers import WorkerRecord
from livescale.messages.commands import ReleaseHolding
from livescale.messages.events import AgentJoined, HoldingReport, WorkerJoined, WorkerLost
from livescale.values.types import Role, WorkerRef


class Membership(OfPool):
    """Keeps fleet, pool and loads true to the members. Handlers return False for late news."""

    def __init__(self, known: PoolKnowledge, planning: Planning, attempts: Attempts) -> None:
        super().__init__(known)
        self._planning = planning
        self._attempts = attempts
        #: from when on the pool is settled, whatever is missing (None: before the first step)
        self.settled_at_ns: int | None = None
        #: orders for the other ranks of warm spares that an earlier life did not release any more
        self._releases: list[ReleaseHolding] = []
        #: loads were taken over from an earlier life, and their senders not looked at yet
        self._has_adopted = False

    def settle(self, now_ns: int) -> bool:
        """Whether the pool is settled. Completes what was adopted: ranks whose instance cannot
        come together are given up, feeds that nothing can come by fail."""
        if self.settled_at_ns is None:
            self.settled_at_ns = now_ns + self._config.settle_ns
        self._fleet.give_up_hopeless(now_ns)
        are_workers_there = len(self._fleet.workers) >= self._config.workers_expected
        # Guests are none of those that are expected.
        agents = len(self._fleet.agents) - len(self._pool.guests)
        if are_workers_there and agents >= self._config.agents_expected:
            self.settled_at_ns = min(self.settled_at_ns, now_ns)
        is_settled = now_ns >= self.settled_at_ns
        if is_settled and self._has_adopted:
            self._has_adopted = False
            self._loads.fail_hopeless()
        return is_settled

    def take_releases(self) -> list[ReleaseHolding]:
        """Orders that complete what an earlier life began."""
        taken, self._releases = self._releases, []
        return taken

    def worker_joined(self, event: WorkerJoined, now_ns: int) -> bool:
        before = self._fleet.workers.get(event.worker.worker)
        if not self._replaces(before, event.worker, now_ns):
            return False
        self._fleet.join(event.worker, event.device, is_engine=event.is_engine)
        self._fleet.cores.joined(event.worker, event.cores, event.own_cores)
        self._planning.cluster.worker_joined(event.worker, event.device)
        for report in event.holdings:
            self._adopt(report, now_ns)
        return True

    def agent_joined(self, event: AgentJoined, now_ns: int) -> bool:
        before = self._fleet.agents.get(event.agent.worker)
        if not self._replaces(before, event.agent, now_ns):
            return False
        self._fleet.agent_joins(event.agent, event.host)
        if event.host.is_guest:
            self._pool.guests[event.agent] = None
        self._planning.cluster.agent_joined(event.agent, event.host)
        # An agent reports all that there is: ranks without the others can never be a whole copy.
        for copy in [self._adopt(report, now_ns) for report in event.holdings]:
            if not copy.is_there:
                self._pool.give_up(copy)
        return True

    def lost(self, event: WorkerLost, now_ns: int) -> bool:
        """A worker or an agent is gone, with all that it held. One that an earlier controller knew
        may be lost before it has joined here: then gateways have announced what it was asked."""
        if not self._fleet.is_alive(event.worker):
            return self._attempts.worker_lost(event.worker, now_ns, _lost(event))
        if not event.worker.is_agent:
            self._instance_lost(event, now_ns)
        self._fleet.leave(event.worker)
        self._fleet.cores.left(event.worker)
        self._planning.cluster.member_left(event.worker)
        self._loads.lose(event.worker)
        self._pool.lose(event.worker)
        self._pool.guests.pop(event.worker, None)
        self._pool.schedule.lose(event.worker)
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

    def _adopt(self, report: HoldingReport, now_ns: int) -> Copy:
        """A member has this from an earlier controller's life. An instance is taken over when all
        its ranks are there; what is left of a model that is served no more is given up. Of a warm
        spare one rank is enough: none of them was asked for anything."""
        holding_state = HoldingState.WHOLE if report.is_whole else HoldingState.ARRIVING
        if report.is_spare:
            holding_state = HoldingState.SPARE
        holding = Holding(report.order, report.watermark, holding_state)
        holding.beyond.update(dict.fromkeys(report.beyond))
        model = self._states.get(report.order.model)
        ranks, size_bytes = (model.spec.tp_size, model.instance_bytes) if model else (1, 0)
        copy = self._pool.add(holding, ranks, size_bytes)
        copy.used_ns = now_ns
        if not report.is_whole:
            self._has_adopted = True
            self._loads.begin(holding)
        if model is None:
            self._pool.give_up(copy)
        elif copy.is_there and copy.is_spare:
            self._releases += self._pool.release(copy, now_ns)
        elif copy.is_there and not copy.is_on_host:
            self._fleet.adopt(model.of_role(_role_of(copy)).part, copy)
        return copy

    def _instance_lost(self, event: WorkerLost, now_ns: int) -> None:
        """One lost rank loses the instance, and with it what its rank 0 was asked. One that was
        loading may be the model's fault; a worker whose host leaves goes for that reason."""
        reason, leaves = _lost(event), self._fleet.is_leaving((event.worker,))
        instance = self._fleet.instance_on(event.worker)
        if instance is not None:
            if instance.is_loading and not leaves:
                plans = [rank.order.holding.plan for rank in instance.copy.ranks.values()]
                failures = self._states[instance.model].load_failures
                failures.died(now_ns, max(plans), self._planning.last_id, reason)
            # Of one that was released the first rank may be in another instance already.
            is_asked = self._fleet.instance_on(instance.worker) is instance
            self._fleet.move(instance, WorkerLost)
            if is_asked:
                self._attempts.worker_lost(instance.worker, now_ns, reason, is_spared=leaves)
            for leader in filter(self._fleet.is_alive, () if leaves else instance.leaders):
                self._attempts.partner_lost(leader, now_ns, reason)
        self._attempts.worker_lost(event.worker, now_ns, reason, is_spared=leaves)


def _role_of(copy: Copy) -> Role:
    duty = copy.ranks[0].order.duty
    return Role.UNIFIED if duty is None else duty.role


def _lost(event: WorkerLost) -> str:
    return f"worker {event.worker} was lost: {event.reason}"
