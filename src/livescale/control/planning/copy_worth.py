"""What copies on devices are worth: which spares go first, and which model should get more.

A copy is worth the more, the likelier its model needs it next. What a model needed lately is taken
for what it will need: of `n` instances that were of use in its last burst, or would have been, had
they been there, the k-th copy counts n / k. So what a burst takes from other models goes back to
them as it is forgotten, and devices are shared as bursts need them.
"""

from __future__ import annotations

from collections.abc import Mapping

from livescale.control.state.holdings import Copy
from livescale.control.state.model_state import ModelState
from livescale.control.state.pool import ParameterPool


class CopyWorth:
    """Of one decision after the other."""

    def __init__(self, models: Mapping[str, ModelState], pool: ParameterPool) -> None:
        self._models, self._pool = models, pool
        self._now_ns = 0
        #: by model: the version of its copies, and what each spare is worth
        self._spares: dict[str, tuple[int, dict[Copy, int]]] = {}

    def begin(self, now_ns: int) -> None:
        """A decision begins."""
        self._now_ns = now_ns
        self._spares = {}

    def lacks(self, state: ModelState) -> int:
        """Copies that the model lacks of what it needed lately."""
        return state.lately.at(self._now_ns) - self._pool.count_holders(state.name)

    def of_next(self, state: ModelState, more: int = 0) -> int:
        """Of the copy that the model would get behind so many more (per mille)."""
        return _worth(self._need(state), self._pool.count_holders(state.name) + more + 1)

    def of_spare(self, copy: Copy) -> int:
        """Per mille. Those of a model count in the order in which they were used last, behind those
        that are in instances."""
        version = self._pool.version_of(copy.model)
        known = self._spares.get(copy.model)
        if known is None or known[0] != version:
            known = self._spares[copy.model] = version, self._of_spares(copy.model)
        return known[1].get(copy, 0)

    # -- helpers --------------------------------------------------------------------------------

    def _of_spares(self, model: str) -> dict[Copy, int]:
        state = self._models.get(model)
        if state is None:
            return {}
        spares = sorted(self._pool.spares(model), key=lambda c: (-c.used_ns, c.holder.worker))
        first = self._pool.count_holders(model) - len(spares) + 1
        need = self._need(state)
        return {spare: _worth(need, first + n) for n, spare in enumerate(spares)}

    def _need(self, state: ModelState) -> int:
        """And one more: so models of which nothing is known are alike."""
        return state.lately.at(self._now_ns) + 1


def _worth(need: int, number: int) -> int:
    return 1000 * need // number
