"""Which model gets parameters on devices before it needs them, and on which.

Workers that hold nothing get some. What is loaded are instances, which serve if there is a need by
then, and else go and leave warm spares.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from livescale.control.planning.copy_worth import CopyWorth
from livescale.control.planning.pool_knowledge import OfPool, PoolKnowledge
from livescale.control.planning.spares import NEEDED, Spares
from livescale.control.state.model_state import ModelState
from livescale.values.types import WorkerRef


@dataclass(frozen=True, slots=True)
class Ahead:
    """At most so many instances of the model, on some of these workers."""

    state: ModelState
    count: int
    workers: Sequence[WorkerRef]


class SparesAhead(OfPool):
    """Chooses; orders nothing."""

    def __init__(self, known: PoolKnowledge, spares: Spares, worth: CopyWorth) -> None:
        super().__init__(known)
        self._keeping = known.config.warm_spares
        self._spares = spares
        self._worth = worth

    def choose(self, wall_ns: int, states: Iterable[ModelState]) -> Ahead | None:
        """Of the models that serve and could have more instances than there are copies. With the
        strategy "needed" spares that are worth less give way to copies that a model lacks."""
        if self._keeping == "off":
            return None
        able = {state: room for state in states if (room := self._room(wall_ns, state)) > 0}
        roomy = {state: self._spares.roomy(state) for state in able}
        fitting = [state for state in able if len(roomy[state]) >= state.spec.tp_size]
        if not fitting:
            return self._instead_of_others(able) if self._keeping == NEEDED else None
        if self._keeping == NEEDED:
            chosen, count = self._dealt(able, fitting, max(map(len, roomy.values())))
        else:
            chosen = min(fitting, key=lambda state: (self._share(state), state.number))
            count = able[chosen]
        count = min(count, len(roomy[chosen]) // chosen.spec.tp_size)
        return Ahead(chosen, count, roomy[chosen])

    # -- helpers, in the order used -------------------------------------------------------------

    def _room(self, wall_ns: int, state: ModelState) -> int:
        """Copies that it could use, and has not got."""
        is_well = not state.load_failures.in_a_row and not state.is_leaving
        if not is_well or not any(map(self._fleet.serving, state.keys)):
            return 0
        return state.limits(wall_ns)[1] - self._pool.count_holders(state.name)

    def _dealt(
        self, able: dict[ModelState, int], fitting: Sequence[ModelState], workers: int
    ) -> tuple[ModelState, int]:
        """All of these workers dealt one after the other to the model whose next copy is worth
        most: the one that comes first, and its instances."""
        counts = dict.fromkeys(fitting, 0)
        order: list[ModelState] = []
        while True:
            left = [s for s in fitting if s.spec.tp_size <= workers and counts[s] < able[s]]
            if not left:
                return order[0], counts[order[0]]
            best = max(left, key=lambda s: (self._worth.of_next(s, counts[s]), -s.number))
            order.append(best)
            counts[best] += 1
            workers -= best.spec.tp_size

    def _instead_of_others(self, able: dict[ModelState, int]) -> Ahead | None:
        """The model that lacks what is worth most, where spares that are worth less lie."""
        lacking = [state for state in able if self._worth.lacks(state) > 0]
        lacking.sort(key=lambda state: (-self._worth.of_next(state), state.number))
        for state in lacking:
            most = min(able[state], self._worth.lacks(state))
            workers = self._worth_less(state, most)
            if len(workers) >= state.spec.tp_size:
                return Ahead(state, len(workers) // state.spec.tp_size, workers)
        return None

    def _worth_less(self, state: ModelState, most: int) -> list[WorkerRef]:
        """Workers for at most so many copies of it, whose spares are each worth less than the copy
        that comes in their place."""
        found: list[WorkerRef] = []
        for worker, lost in self._spares.worth_of_rooms(state):
            before = len(found) // state.spec.tp_size
            if before == most or lost >= self._worth.of_next(state, before):
                break
            found.append(worker)
        return found

    def _share(self, state: ModelState) -> int:
        """Copies for its instances."""
        capacity = sum(self._fleet.tally(part).capacity for part in state.keys)
        return self._pool.count_holders(state.name) * 1000 // capacity
