"""News of holdings and of the instances that they are part of, as members report them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from livescale.control.planning.guests import Guests
from livescale.control.planning.host_copies import HostCopies
from livescale.control.planning.planning import Planning
from livescale.control.planning.pool_knowledge import OfPool, PoolKnowledge
from livescale.control.state.holdings import Copy, Holding
from livescale.control.state.instance import Instance
from livescale.control.together.team_duties import Teams
from livescale.messages.events import (
    FirstByteArrived,
    HoldingCompleted,
    HoldingDropped,
    HoldingFailed,
    InstanceReported,
    KvTaken,
    LayerArrived,
    LiveStarted,
)
from livescale.values.types import Value


class HoldingNews(OfPool):
    """Keeps the states of holdings and instances true. Handlers return False for late news: of a
    holding or an instance that is gone."""

    def __init__(
        self,
        known: PoolKnowledge,
        planning: Planning,
        host_copies: HostCopies,
        guests: Guests,
        teams: Teams,
    ) -> None:
        super().__init__(known)
        self._planning = planning
        self._host_copies = host_copies
        self._guests = guests
        self._teams = teams

    def of(self, handler: Callable[[Holding, Any, int], bool]) -> Callable[[Any, int], bool]:
        """Takes events that name a holding, which the handler gets, too. Late if it is gone."""

        def handle(event: Any, now_ns: int) -> bool:
            holding = self._pool.find(event.holding)
            return holding is not None and handler(holding, event, now_ns)

        return handle

    def reported(self, event: InstanceReported, _now_ns: int) -> bool:
        # A request may have been started by an instance that is gone by now: both are looked up.
        for request, attempt in event.admitted:
            self._router.admit(request, attempt)
        for request, attempt in event.started:
            self._router.start(request, attempt)
        instance = self._fleet.instances.get(event.instance)
        if instance is None:
            self._fleet.report_early(event)
            return False
        self._states[instance.model].service.add(
            event.prefill_tokens - instance.prefill_tokens, event.prefill_ns - instance.prefill_ns
        )
        self._fleet.report(instance, event)
        self._router.progressed(instance.worker, event)
        return True

    def kv_taken(self, event: KvTaken, _now_ns: int) -> bool:
        """For the run record. The requests are the instance's already."""
        return event.instance in self._fleet.instances

    def live_started(self, holding: Holding, _event: LiveStarted, _now_ns: int) -> bool:
        instance = self._instance_of(self._pool.copy_of(holding))
        # Requests go to rank 0: they must not be there before it knows of the instance.
        is_first = instance is not None and instance.worker == holding.member
        # A leader of a team may have been told to lead when everything was on its way already.
        if instance is not None and is_first and instance.is_loading:
            self._fleet.move(instance, LiveStarted)
        return instance is not None

    def first_byte_arrived(self, holding: Holding, _event: FirstByteArrived, now_ns: int) -> bool:
        instance = self._moved(holding, FirstByteArrived)
        if instance is not None and instance.first_byte_ns is None:
            instance.first_byte_ns = now_ns
        return instance is not None

    def layer_arrived(self, holding: Holding, event: LayerArrived, now_ns: int) -> bool:
        copy = self._pool.copy_of(holding)
        instance, before = self._instance_of(copy), copy.watermark
        holding.layer_came(event.layer, event.watermark)
        if instance is not None:
            self._teams.layer_came(instance)
        if instance is not None and copy.watermark > before:
            instance.layer_ns = now_ns
            if now_ns == instance.first_byte_ns:
                instance.kept_layers = copy.watermark
        self._loads.progressed(event.holding, now_ns)
        self._moved(holding, LayerArrived)
        return True

    def completed(self, holding: Holding, event: HoldingCompleted, now_ns: int) -> bool:
        self._loads.completed(event.holding, now_ns)
        copy = self._pool.move(holding, HoldingCompleted)
        copy.used_ns = now_ns
        instance = self._instance_of(copy)
        if copy.is_complete and holding.member in self._pool.guests:
            self._guests.ended_well(holding.member)
        elif copy.is_complete and copy.is_on_host:
            self._host_copies.ended_well(copy.model)
        elif copy.is_loaded and instance is not None:
            self._fleet.move(instance, HoldingCompleted)
            state = self._states[copy.model]
            state.load_failures.ended_well()
            if instance.due_ns is not None:
                state.load_error_ns = now_ns - instance.due_ns
        return True

    def failed(self, holding: Holding, event: HoldingFailed, now_ns: int) -> bool:
        """One rank that failed fails its copy, and the instance."""
        self._loads.end(event.holding)
        self._loads.fail_readers(holding.member, holding.order.model)
        copy = self._pool.copy_of(holding)
        is_first, instance = not copy.is_given_up, self._instance_of(copy)
        # Of an earlier life's instance a rank may fail before all have joined: its load has failed.
        is_incomplete = copy.instance is not None and self._pool.is_incomplete(copy.instance)
        self._pool.move(holding, HoldingFailed)
        has_copy = False
        if instance is not None and is_first:
            self._fleet.move(instance, HoldingFailed)
        state = self._states.get(copy.model)
        if state is not None and is_first and (instance is not None or is_incomplete):
            failures, has_copy = state.load_failures, self._planning.has_copy(state)
        elif holding.member in self._pool.guests:
            failures = self._guests.failures_of(holding.member)
        elif copy.is_on_host and is_first:
            failures = self._host_copies.failures_of(copy.model)
        else:
            return True
        newest = self._planning.last_id
        failures.failed(now_ns, event.holding.plan, newest, event.reason, has_copy=has_copy)
        return True

    def dropped(self, holding: Holding, event: HoldingDropped, _now_ns: int) -> bool:
        self._loads.end(event.holding)
        copy = self._pool.move(holding, HoldingDropped)
        instance = self._instance_of(copy)
        if instance is not None and not copy.ranks:
            self._fleet.move(instance, HoldingDropped)
        return True

    # -- helpers ------------------------------------------------------------------------------

    def _moved(self, holding: Holding, cause: type[Value]) -> Instance | None:
        """More of the holding is there: it moves, and its instance, which is returned, if any."""
        instance = self._instance_of(self._pool.move(holding, cause))
        if instance is not None:
            self._fleet.move(instance, cause)
        return instance

    def _instance_of(self, copy: Copy) -> Instance | None:
        """The living instance whose copy this is."""
        return None if copy.instance is None else self._fleet.instances.get(copy.instance)
