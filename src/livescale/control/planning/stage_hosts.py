"""Which hosts new instances of stages come to (QUART §6.2): what fleet, pool and spares know, as
`stages/stage_placement.py` wants it told, and back.

How many instances a stage gets is decided elsewhere: whatever the placement, there are as many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from livescale.control.planning.planning import Planning
from livescale.control.planning.pool_knowledge import OfPool, PoolKnowledge
from livescale.control.planning.spares import Spares
from livescale.control.stages.stage_placement import (
    StageHost,
    StageNeed,
    StagePlaced,
    place,
    place_spread,
)
from livescale.control.state.model_state import ModelState
from livescale.values.types import InstanceState, WorkerRef

_PLACES = {"quart": place, "spread": place_spread}


class StageHosts(OfPool):
    """Chooses workers for new instances of stages, if `ControllerConfig.stage_placement` does."""

    def __init__(self, known: PoolKnowledge, planning: Planning, spares: Spares) -> None:
        super().__init__(known)
        self._place = _PLACES.get(known.config.stage_placement)
        self._planning = planning
        self._spares = spares
        #: of this step, by number of the model: stages that grow and have no workers yet
        self._needs: dict[int, StageNeed] = {}
        #: the same, by name: which number a stage has
        self._numbers: Mapping[str, int] = {}

    def begin(
        self,
        now_ns: int,
        states: Mapping[str, ModelState],
        growing: Sequence[tuple[ModelState, int]],
    ) -> None:
        """A step of decisions: these models are to get so many instances more."""
        if self._place is None or not growing:
            return
        stages = [state for state in states.values() if state.spec.stage is not None]
        self._numbers = {state.name: state.number for state in stages}
        counts = {state.name: count for state, count in growing}
        key = self._pool.schedule.key_reason
        needs = [
            StageNeed(state.number, counts.get(state.name, 0), bool(key(now_ns, state.name)))
            for state in stages
        ]
        self._needs = {need.stage: need for need in needs if need.count or need.is_key}

    def targets(self, state: ModelState, count: int) -> dict[WorkerRef, str] | None:
        """Workers for at most `count` new instances of a stage, each with the reason; None where
        the plan is to choose. Stages that grow later in this step find theirs left, as far as
        there are enough for both."""
        if self._place is None or state.spec.stage is None:
            return None
        need = self._needs.pop(state.number, StageNeed(state.number, 0))
        need = StageNeed(state.number, count, need.is_key)
        free: dict[str, list[WorkerRef]] = {}
        devices = self._planning.topology.devices
        rooms = self._spares.rooms_for(state)
        for worker in rooms:
            free.setdefault(devices[worker].host, []).append(worker)
        hosts = self._hosts(free)
        placed = self._place(list(hosts.values()), [need, *self._needs.values()])
        if need.is_key:
            self._needs[state.number] = StageNeed(state.number, 0, is_key=True)
        names = {room.host: name for name, room in hosts.items()}
        chosen = self._workers([its for its in placed if its.stage == state.number], names, free)
        for worker in rooms:
            if len(chosen) < count:
                chosen.setdefault(worker, "left_over")
        return chosen

    # -- helpers, in the order used -------------------------------------------------------------

    def _hosts(self, free: Mapping[str, Sequence[WorkerRef]]) -> dict[str, StageHost]:
        """All hosts by name, numbered in the order of their first workers."""
        fleet, topology = self._fleet, self._planning.topology
        workers = [record for _, record in sorted(fleet.workers.items())]
        devices = Counter(record.device.host for record in workers)
        replicas: dict[str, Counter[int]] = {name: Counter() for name in devices}
        for instance in fleet.instances.values():
            number = self._numbers.get(instance.model)
            if number is not None and instance.state is not InstanceState.DRAINING:
                replicas[topology.host_of(instance.worker)][number] += 1
        copies: dict[str, list[int]] = {name: [] for name in devices}
        for copy in self._pool.on_hosts():
            name = topology.host_of(copy.holder)
            if copy.is_complete and copy.model in self._numbers and name in copies:
                copies[name].append(self._numbers[copy.model])
        return {
            name: StageHost(
                host, count, len(free.get(name, ())), dict(replicas[name]), (*copies[name],)
            )
            for host, (name, count) in enumerate(devices.items())
        }

    @staticmethod
    def _workers(
        placed: Sequence[StagePlaced],
        names: Mapping[int, str],
        free: Mapping[str, list[WorkerRef]],
    ) -> dict[WorkerRef, str]:
        """Of each host those first that lose least."""
        left = {name: iter(workers) for name, workers in free.items()}
        return {next(left[names[its.host]]): its.reason for its in placed}
