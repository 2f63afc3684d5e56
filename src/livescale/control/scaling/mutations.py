"""Mutation: instances that change their role, so that nothing is loaded (BlitzScale §5.4).

Where the one part has more instances than its load needs, or than it may have, and the other has
less, instances go over: neither drains what the other would wake or load (the ratio of P/D-Serve).
Decode also grows by prefill instances that are needed, as long as one stays and others can be
loaded in their place: those work while they load, which a decode instance cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from livescale.control.planning.pool_knowledge import PoolKnowledge
from livescale.control.planning.spares import Spares
from livescale.control.scaling.wishes import Wish
from livescale.control.state.instance import Instance
from livescale.control.together.pairing import Pairings
from livescale.control.together.roles import Roles
from livescale.messages.commands import ScaleDecided
from livescale.values.types import Role

_REASON = "mutation"


class Mutations:
    """Moves instances between the parts of a model."""

    def __init__(
        self, known: PoolKnowledge, roles: Roles, pairings: Pairings, spares: Spares
    ) -> None:
        self._is_mutating = known.config.mutations
        self._fleet = known.fleet
        self._roles = roles
        self._pairings = pairings
        self._spares = spares

    def decide(self, wishes: Sequence[Wish]) -> tuple[list[Wish], list[ScaleDecided]]:
        """The wishes after what was moved, and what is told of that."""
        found: list[Wish] = []
        notices: list[ScaleDecided] = []
        waiting: dict[str, Wish] = {}
        for wish in wishes:
            role, model = wish.part.role, wish.part.model
            if role is Role.UNIFIED or not self._is_mutating:
                found.append(wish)
            elif model not in waiting:
                waiting[model] = wish
            else:
                pair, told = self._move(waiting.pop(model), wish)
                found += pair
                notices += told
        return found, notices

    # -- helpers, in the order used -------------------------------------------------------------

    def _move(self, prefill: Wish, decode: Wish) -> tuple[list[Wish], list[ScaleDecided]]:
        """Both wishes of a model, in this order."""
        model = prefill.state.model
        loadable = self._spares.workers_for(model) // model.spec.tp_size
        count = self._may_move(prefill, decode, loadable)
        if count > 0:
            (prefill, decode), notices = self._change(prefill, decode, count)
            return [prefill, decode], notices
        count = self._may_move(decode, prefill, 0)
        if count > 0:
            (decode, prefill), notices = self._change(decode, prefill, count)
            return [prefill, decode], notices
        return [prefill, decode], []

    def _may_move(self, giving: Wish, taking: Wish, loadable: int) -> int:
        """Those that the one part can do without, or has to, and the other one wants. For what the
        other one would have to load otherwise: as many as can be loaded in their place, and one if
        it has none. One stays."""
        wanted = taking.wanted - taking.capacity
        if wanted <= 0:
            return 0
        beyond = min(wanted, max(giving.spare_instances, giving.capacity - giving.wanted))
        replaced = min(self._missing(taking), max(loadable, int(not taking.capacity)))
        return min(len(self._free(giving)) - 1, max(beyond, replaced))

    def _missing(self, wish: Wish) -> int:
        """Instances that it wants, and that neither serve on nor wake from warm spares."""
        missing = wish.wanted - wish.capacity - self._fleet.resumable(wish.part)
        if missing <= 0:
            return 0
        return missing - len(self._spares.to_wake(wish.state.model, missing))

    def _free(self, wish: Wish) -> list[Instance]:
        """Instances that serve and belong to no live pair."""
        unpaired = self._pairings.unpaired(wish.part)
        return [i for i in unpaired if not self._fleet.is_leaving(i.workers)]

    def _change(
        self, giving: Wish, taking: Wish, count: int
    ) -> tuple[tuple[Wish, Wish], list[ScaleDecided]]:
        """So many instances go from one part to the other, those with the least work first."""
        free = self._free(giving)
        free.sort(key=lambda i: (i.running, i.queued_prefill_tokens, -i.id))
        for instance in free[:count]:
            self._roles.mutate(instance, taking.part)
        notices = [
            giving.notice(giving.capacity, giving.capacity - count, _REASON),
            taking.notice(taking.capacity, taking.capacity + count, _REASON),
        ]
        left = giving.capacity - count
        # What went beyond its need is not replaced.
        wanted = min(giving.wanted, max(left, giving.kept))
        after = (
            replace(giving, capacity=left, wanted=wanted, reason=_REASON),
            replace(taking, capacity=taking.capacity + count),
        )
        return after, notices
