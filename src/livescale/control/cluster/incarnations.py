"""Which incarnations of members one life of the controller has met: each of them joins once.

One whose connection has ended counts as lost, and what it was asked goes elsewhere. It may live on
and not know it: if it comes back it is refused, and ends. Its next incarnation joins.
"""

from __future__ import annotations

from livescale.values.types import WorkerRef


class Incarnations:
    """Those that joined, and which of them are there."""

    def __init__(self) -> None:
        self._is_there: dict[WorkerRef, bool] = {}

    def join(self, member: WorkerRef) -> bool:
        """The member is there from now on. False if it has joined before: it is refused."""
        if member in self._is_there:
            return False
        self._is_there[member] = True
        return True

    def lose(self, member: WorkerRef) -> None:
        """Its connection has ended, or it was silent for too long."""
        self._is_there[member] = False

    def is_there(self, member: WorkerRef) -> bool:
        return self._is_there.get(member, False)

    def is_lost(self, member: WorkerRef) -> bool:
        return not self._is_there.get(member, True)

    def __repr__(self) -> str:
        return f"<Incarnations {sum(self._is_there.values())} of {len(self._is_there)} are there>"
