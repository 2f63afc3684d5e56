"""Which members are in use: they hold more than warm spares, or get something."""

from __future__ import annotations

from collections.abc import Iterable

from livescale.control.state.holdings import Holding, HoldingState
from livescale.values.types import WorkerRef


class MembersInUse:
    """Those that were found to be, as of the last look at each."""

    def __init__(self) -> None:
        self._members: dict[WorkerRef, None] = {}
        self._changed: dict[WorkerRef, None] = {}

    def look(self, member: WorkerRef, holdings: Iterable[Holding]) -> None:
        """What the member holds, or gets, may have changed: it is this now."""
        is_in_use = any(holding.state is not HoldingState.SPARE for holding in holdings)
        if is_in_use == (member in self._members):
            return
        self._changed[member] = None
        if is_in_use:
            self._members[member] = None
        else:
            del self._members[member]

    def has_any_of(self, members: Iterable[WorkerRef]) -> bool:
        """One of them is in use."""
        return not self._members.keys().isdisjoint(members)

    def take_changed(self) -> dict[WorkerRef, None]:
        """Members that came into use, or went out of it, since the last call."""
        changed, self._changed = self._changed, {}
        return changed
