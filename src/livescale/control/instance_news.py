"""News of instances: what their workers report about their loads, their work and their ends."""

from __future__ import annotations

from collections.abc import Mapping

from livescale.control.fleet import Fleet
from livescale.control.instance import Instance
from livescale.control.loads import Loads
from livescale.control.model_state import ModelState
from livescale.control.planning import Planning
from livescale.control.pool import ParameterPool
from livescale.control.router import Router
from livescale.messages.events import (
    InstanceReported,
    LayerArrived,
    LiveStarted,
    LoadCompleted,
    LoadFailed,
    LoadStarted,
    Released,
)
from livescale.types import InstanceId


class InstanceNews:
    """Keeps the instances' states true. Handlers return False for late news: of an attempt that is
    no longer under way."""

    def __init__(
        self,
        states: Mapping[str, ModelState],
        fleet: Fleet,
        pool: ParameterPool,
        router: Router,
        loads: Loads,
        planning: Planning,
    ) -> None:
        self._states = states
        self._fleet = fleet
        self._pool = pool
        self._router = router
        self._loads = loads
        self._planning = planning

    def reported(self, event: InstanceReported, _now_ns: int) -> bool:
        # A request may have been started by an instance that is gone by now: both are looked up.
        for request, attempt in event.started:
            self._router.start(request, attempt)
        instance = self._current(event.instance, event.attempt)
        if instance is None:
            self._fleet.report_early(event)
            return False
        self._fleet.report(instance, event)
        return True

    def live_started(self, event: LiveStarted, _now_ns: int) -> bool:
        instance = self._current(event.instance, event.attempt)
        if instance is None:
            return False
        # Requests go to rank 0: they must not be there before it knows of the instance.
        if event.rank == 0:
            self._fleet.move(instance, LiveStarted)
        return True

    def load_started(self, event: LoadStarted, now_ns: int) -> bool:
        instance = self._current(event.instance, event.attempt)
        if instance is None:
            return False
        self._fleet.move(instance, LoadStarted)
        if instance.first_byte_ns is None:
            instance.first_byte_ns = now_ns
        return True

    def layer_arrived(self, event: LayerArrived, now_ns: int) -> bool:
        reported = self._fleet.reported_load(event)
        if reported is not None:
            self._loads.progressed(*reported, now_ns)
            return True
        instance = self._current(event.instance, event.attempt)
        if instance is None:
            return False
        self._fleet.move(instance, LayerArrived)
        known = instance.watermarks.get(event.rank, 0)
        instance.watermarks[event.rank] = max(known, event.watermark)
        self._loads.progressed(instance.plan, instance.workers[event.rank], now_ns)
        return True

    def load_completed(self, event: LoadCompleted, now_ns: int) -> bool:
        reported = self._fleet.reported_load(event)
        if reported is not None:
            self._loads.completed(*reported, now_ns)
            return True
        if self._is_over_for_remnant(event):
            return True
        instance = self._current(event.instance, event.attempt)
        if instance is None:
            return False
        instance.watermarks[event.rank] = instance.layers
        instance.loaded_ranks[event.rank] = None
        self._loads.completed(instance.plan, instance.workers[event.rank], now_ns)
        self._pool.complete(instance.model, instance.worker, event.rank)
        if len(instance.loaded_ranks) == len(instance.workers):
            self._fleet.move(instance, LoadCompleted)
            self._states[instance.model].load_failures.ended_well()
        return True

    def load_failed(self, event: LoadFailed, now_ns: int) -> bool:
        reported = self._fleet.reported_load(event)
        if reported is not None:
            self._loads.end(*reported)
            return True
        if self._is_over_for_remnant(event):
            return True
        instance = self._current(event.instance, event.attempt)
        if instance is None:
            return False
        instance.empty_ranks[event.rank] = None
        # Other ranks read until they are released.
        self._loads.end(instance.plan, instance.workers[event.rank])
        self._loads.fail_readers(instance.workers[event.rank], instance.model)
        self._pool.forget(instance.model, instance.worker)
        self._fleet.move(instance, LoadFailed)
        failures = self._states[instance.model].load_failures
        failures.failed(now_ns, instance.plan, self._planning.last_id, event.reason)
        return True

    def released(self, event: Released, _now_ns: int) -> bool:
        remnant = self._fleet.remnants.get((event.instance, event.rank))
        if remnant is not None:
            self._loads.end_of(remnant.worker)
            self._fleet.free((event.instance, event.rank))
            return True
        instance = self._current(event.instance, event.attempt)
        if instance is None:
            return False
        instance.empty_ranks[event.rank] = None
        if len(instance.empty_ranks) == len(instance.workers):
            self._fleet.move(instance, Released)
        return True

    def _current(self, number: InstanceId, attempt: int) -> Instance | None:
        """The living instance if this attempt is the one under way."""
        instance = self._fleet.instances.get(number)
        return instance if instance is not None and instance.attempt == attempt else None

    def _is_over_for_remnant(self, event: LoadCompleted | LoadFailed) -> bool:
        """The load of a rank whose instance has ended otherwise needs no other feeds any more."""
        remnant = self._fleet.remnants.get((event.instance, event.rank))
        if remnant is None or remnant.attempt != event.attempt:
            return False
        self._loads.end_of(remnant.worker)
        return True
