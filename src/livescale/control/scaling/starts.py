"""New instances: the orders by which workers load a model, or take up what they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from livescale.control.planning.planning import Planning
from livescale.control.planning.pool_knowledge import OfPool, PoolKnowledge
from livescale.control.planning.spares import Spares
from livescale.control.state.holdings import Copy, Holding
from livescale.control.state.instance import Instance
from livescale.control.state.model_state import PartState
from livescale.control.together.pairing import Pairings
from livescale.messages.commands import AnyCommand, Paired, PlanMade, StartHolding
from livescale.messages.scale_plan import ScalePlan
from livescale.values.routes import Duty
from livescale.values.types import FromStorage, FromWorker, HoldingId, PlanId, WorkerRef


class Starts(OfPool):
    """Adds instances to fleet and pool, and orders what makes them."""

    def __init__(
        self, known: PoolKnowledge, planning: Planning, spares: Spares, pairings: Pairings
    ) -> None:
        super().__init__(known)
        self._planning = planning
        self._spares = spares
        self._pairings = pairings

    def wake(self, now_ns: int, state: PartState, spare: Copy) -> list[AnyCommand]:
        """A warm spare becomes an instance: its workers take the model over, nothing is loaded."""
        drops = self._spares.clear_for(spare)
        state.model.starts += 1
        state.model.warm_starts += 1
        number, plan = self._planning.next_id(), self._planning.next_id()
        duty = Duty(number, spare.members, state.part.role)
        orders = [
            msgspec.structs.replace(
                self._start(state, plan, duty, rank),
                spare=spare.ranks[rank].id.plan,
                offset_bytes=spare.ranks[rank].order.offset_bytes,
            )
            for rank in range(len(spare.members))
        ]
        copy = self._pool.take_up(spare, orders)
        self._note(now_ns, state, spare.members)
        self._fleet.add(Instance(state.part, duty, copy, predicted_ns=0))
        return [*drops, *orders]

    def load(
        self,
        now_ns: int,
        state: PartState,
        plan: ScalePlan,
        offsets: Mapping[WorkerRef, int],
        reasons: Mapping[WorkerRef, str] | None = None,
    ) -> list[AnyCommand]:
        """Order every target to load to its offset, and to work meanwhile. `reasons` say why the
        instance comes to this target, where more than the plan decided that."""
        slow = {FromStorage(), *(FromWorker(load.receiver) for load in self._loads.open.values())}
        numbers = []
        paired: list[Paired] = []
        starts: list[StartHolding] = []
        for workers, choice in zip(
            plan.instances, self._pairings.of_plan(state, plan), strict=True
        ):
            number, role = self._planning.next_id(), state.part.role
            duty = Duty(number, workers, role, choice.live_order, choice.gives_to)
            orders = [
                msgspec.structs.replace(
                    self._start(state, plan.plan, duty, rank),
                    feeds=plan.load_of(worker).feeds,
                    chunk_bytes=plan.chunk_bytes,
                    offset_bytes=offsets[worker],
                    reason=reasons.get(worker, "") if reasons is not None else "",
                )
                for rank, worker in enumerate(workers)
            ]
            holdings = [Holding(order) for order in orders]
            for holding in holdings:
                copy = self._pool.add(holding, len(workers), state.model.instance_bytes)
                self._loads.begin(holding, plan.load_of(holding.member).completed_ns)
            instance = Instance(state.part, duty, copy, predicted_ns=plan.predicted_ns)
            own = [plan.load_of(worker) for worker in workers]
            upstreams = {feed.upstream for load in own for feed in load.feeds}
            # Loads from storage, or behind one that is under way, say nothing of others.
            if plan.predicted_ns is not None and not upstreams & slow:
                instance.due_ns = now_ns + max(load.completed_ns or 0 for load in own)
            self._fleet.add(instance)
            self._note(now_ns, state, workers)
            state.model.starts += 1
            numbers.append(duty.instance)
            if self._pairings.is_live:
                notice = Paired(number, choice.live_order, choice.gives_to, choice.reason)
                paired.append(notice)
            starts += orders
        return [PlanMade(plan, tuple(numbers)), *paired, *starts]

    def _note(self, now_ns: int, state: PartState, workers: Sequence[WorkerRef]) -> None:
        """The workers' hosts are given an instance of a stage."""
        if state.spec.stage is None:
            return
        topology = self._planning.topology
        hosts = {topology.host_of(worker): None for worker in workers}
        for agent, host in topology.agents.items():
            if host.name in hosts:
                self._pool.schedule.given(state.spec.name, agent, now_ns)

    def _start(self, state: PartState, plan: PlanId, duty: Duty, rank: int) -> StartHolding:
        """The order for one rank, without feeds."""
        model = state.model
        is_measured = model.prefill_tokens_per_s is not None and model.kv_blocks is not None
        return StartHolding(
            holding=HoldingId(plan, duty.workers[rank]),
            model=state.spec.name,
            span=state.part.span,
            feeds=(),
            chunk_bytes=self._config.chunk_bytes,
            rank=rank,
            duty=duty,
            measure_capacity=not is_measured,
        )
