"""Warm spares: whole copies on devices that are no instance's. Which of them are worth keeping is
decided elsewhere (`spares.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from livescale.control.state.holdings import Copy
from livescale.values.types import InstanceId, WorkerRef


def by_use(copy: Copy) -> tuple[int, WorkerRef]:
    """The key that sorts the least recently used first."""
    return copy.used_ns, copy.holder


class SpareCopies:
    """All warm spares, by the instance that each was made for, and those of each model."""

    def __init__(self) -> None:
        self._all: dict[InstanceId, Copy] = {}
        self._of_model: dict[str, dict[InstanceId, Copy]] = {}
        #: models whose spares changed since that was last asked
        self._changed: dict[str, None] = {}

    def add(self, copy: Copy, instance: InstanceId) -> None:
        """The instance has ended, and the copy stays."""
        self._all[instance] = copy
        self._of_model.setdefault(copy.model, {})[instance] = copy
        self._changed[copy.model] = None

    def remove(self, instance: InstanceId) -> None:
        """Nothing happens if there is no spare of the instance."""
        copy = self._all.pop(instance, None)
        if copy is None:
            return
        del self._of_model[copy.model][instance]
        if not self._of_model[copy.model]:
            del self._of_model[copy.model]
        self._changed[copy.model] = None

    def __contains__(self, instance: InstanceId | None) -> bool:
        return instance in self._all

    def listed(self, model: str | None) -> list[Copy]:
        """Those of the model (None: all), least recently used first."""
        found = self._all if model is None else self._of_model.get(model, {})
        return sorted(found.values(), key=by_use)

    def of(self, model: str) -> Iterable[Copy]:
        """Those of the model, in no order that means anything."""
        return self._of_model.get(model, {}).values()

    def take_changed(self) -> dict[str, None]:
        """Models whose spares changed since the last call."""
        changed, self._changed = self._changed, {}
        return changed
