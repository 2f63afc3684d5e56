"""Warm spares: parameters that stay on released devices until another model needs the memory.

An instance that is released leaves its copy where it is. The next instance of the model on these
workers loads nothing (`take_up`), and meanwhile the copy is one more holder for multicasts, with
idle links. Another model takes the memory of the spares that are least worth keeping.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from livescale.control.config import ControllerConfig
from livescale.control.fleet import Fleet
from livescale.control.holdings import Copy
from livescale.control.instance import Instance
from livescale.control.model_state import ModelState
from livescale.control.planning import Planning
from livescale.control.pool import ParameterPool
from livescale.messages.commands import AnyCommand, DropHolding
from livescale.types import WorkerRef

# A link without a limit is the fastest.
_UNLIMITED = 1 << 62


class Spares:
    """Which copies are kept, which are used again, and which give way. Orders only drops."""

    def __init__(
        self, config: ControllerConfig, fleet: Fleet, pool: ParameterPool, planning: Planning
    ) -> None:
        self._keeping = config.warm_spares
        self._fleet = fleet
        self._pool = pool
        self._planning = planning

    def keeps(self, instance: Instance) -> bool:
        """The instance's parameters stay when it is released."""
        is_wanted = self._keeping != "off" and not self._pool.is_retired(instance.model)
        return is_wanted and instance.copy.is_complete

    def drop_unwanted(self) -> list[DropHolding]:
        """Orders for spares of models that leave the pool (for all, if none are to be kept)."""
        pool = self._pool
        unwanted = [
            copy for copy in pool.spares() if self._keeping == "off" or pool.is_retired(copy.model)
        ]
        # One after the other: the last one that is needed stays.
        return [o for c in unwanted if pool.can_drop(c) for o in pool.drop(c, "not kept")]

    def to_wake(self, state: ModelState, count: int) -> list[Copy]:
        """At most so many spares that become instances of their model: those that others read
        last, because these will serve on busy links; then those that were used last."""
        own = self._pool.spares(state.spec.name)[::-1]
        own.sort(key=lambda copy: max(self._pool.readers(member) for member in copy.members))
        return own[:count]

    def to_load_ahead(self, wall_ns: int, states: Iterable[ModelState]) -> ModelState | None:
        """The model that workers which hold nothing should get: of those that serve and could have
        more instances than there are copies, the one with the fewest copies for its instances."""
        found: list[tuple[int, int, ModelState]] = []
        for state in states if self._keeping != "off" else ():
            copies = len(self._pool.holders(state.spec.name))
            is_failing = bool(state.load_failures.in_a_row)
            has_room = copies < state.limits(wall_ns)[1]
            workers = self._fleet.spare(state.spec.size_bytes) if has_room else []
            if len(workers) < state.spec.tp_size or is_failing or state.is_leaving:
                continue
            if self._fleet.serving(state.part):
                share = copies * 1000 // self._fleet.tally(state.part).capacity
                found.append((share, state.number, state))
        return min(found, key=lambda entry: entry[:2])[2] if found else None

    def workers_for(self, state: ModelState) -> int:
        """How many workers the model can have at once: those that hold nothing, those whose spares
        may go, and those with spares of its own."""
        found = dict.fromkeys(record.ref for record in self._fleet.spare(state.spec.size_bytes))
        copies = [*self._giving_way(state), *self._pool.spares(state.spec.name)]
        return len(found | dict.fromkeys(worker for copy in copies for worker in copy.members))

    def targets_for(self, state: ModelState, workers: int) -> list[WorkerRef]:
        """Where so many ranks of new instances may go, or fewer: to workers that hold nothing, and
        where these are too few, to those whose spares are least worth keeping."""
        found = [record.ref for record in self._fleet.spare(state.spec.size_bytes)]
        for copy in self._giving_way(state):
            if len(found) >= workers:
                break
            found += copy.members
        return sorted(found)

    def give_way(self, targets: Sequence[Sequence[WorkerRef]], model: str) -> list[AnyCommand]:
        """The targets' memory is taken: orders to drop the spares that lie there."""
        taken = dict.fromkeys(worker for workers in targets for worker in workers)
        going = [c for c in self._pool.spares() if any(member in taken for member in c.members)]
        reason = f"makes room for {model}"
        return [order for copy in going for order in self._pool.drop(copy, reason)]

    # -- helpers ------------------------------------------------------------------------------

    def _giving_way(self, state: ModelState) -> list[Copy]:
        """Spares that may go together and whose workers have room for the model, the one that is
        least worth keeping first."""
        arenas = {worker.ref: worker.device.arena_bytes for worker in self._fleet.workers.values()}
        found = [
            copy
            for copy in self._pool.spares_to_drop()
            if all(arenas[member] >= state.spec.size_bytes for member in copy.members)
        ]
        if self._keeping == "slow-links":
            found.sort(key=lambda copy: -self._rate(copy))
        return found

    def _rate(self, copy: Copy) -> int:
        """How fast the model would come back to these devices (bytes per second)."""
        devices = self._planning.topology.devices
        rates = [devices[member].downlink_bytes_per_s for member in copy.members]
        return min(_UNLIMITED if rate is None else rate for rate in rates)
