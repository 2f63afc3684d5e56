"""Models that were withdrawn, until nothing is left of them."""

from __future__ import annotations

from livescale.control.planning.host_copies import HostCopies
from livescale.control.planning.planning import Planning
from livescale.control.planning.pool_knowledge import OfPool, PoolKnowledge
from livescale.control.scaling.wishes import Wishes
from livescale.control.state.model_state import ModelState
from livescale.messages.commands import ModelGone
from livescale.messages.events import ModelRemoved


class Withdrawals(OfPool):
    """Which models leave the pool. Those that are gone leave the `states`, too."""

    def __init__(
        self, known: PoolKnowledge, planning: Planning, wishes: Wishes, host_copies: HostCopies
    ) -> None:
        super().__init__(known)
        self._planning = planning
        self._wishes = wishes
        self._host_copies = host_copies
        self._leaving: dict[str, None] = {}

    def model_removed(self, event: ModelRemoved, _now_ns: int) -> bool:
        """Its unfinished requests are served, and then it goes."""
        state = self._states.get(event.model)
        if state is None or state.is_leaving:
            return False
        state.is_leaving = True
        self._leaving[event.model] = None
        self._wishes.look_again(state)
        self._pool.retire(event.model)
        return True

    def let_go(self) -> list[ModelGone]:
        """Models of which nothing is left are forgotten: stages together with the last of their
        line, since a request that is still announced needs all of them."""
        leaving = [self._states[name] for name in self._leaving]
        staying = {model.spec.offered_as: None for model in leaving if self._is_left(model)}
        gone = [model for model in leaving if model.spec.offered_as not in staying]
        for model in gone:
            self._forget(model)
        return [ModelGone(model.name) for model in gone]

    # -- helpers --------------------------------------------------------------------------------

    def _is_left(self, model: ModelState) -> bool:
        """Requests need the model, or bytes of it are somewhere."""
        is_busy = bool(self._wishes.requests_of(model, self._states))
        return is_busy or self._pool.has_any(model.name)

    def _forget(self, model: ModelState) -> None:
        name = model.name
        del self._states[name], self._leaving[name]
        self._wishes.forget_model(model)
        self._host_copies.forget_model(name)
        self._pool.forget_model(name)
        for part in model.keys:
            self._fleet.forget_part(part)
        self._planning.forget_model(name)

    def __repr__(self) -> str:
        return f"<Withdrawals {', '.join(self._leaving) or 'none'}>"
