"""Which models the next controller of a head begins with: those of the controller that acts, on
whichever head that is. From another head they come through this head's own gateway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from livescale.runtime.children.pool_process import Child
from livescale.runtime.supervisor.child_boots import ChildBoots
from livescale.runtime.wire.boot import Status


class KnownCatalog:
    """Keeps the catalog of `boots` up to date, and that of the controller which waits for the
    lease."""

    def __init__(self, boots: ChildBoots, controllers: Callable[[], Iterable[Child]]) -> None:
        self._boots = boots
        self._controllers = controllers
        #: the controller of this head acts: its own word counts, and comes before its gateway's
        self._is_acting = False

    def heed(self, child: Child, status: Status) -> None:
        """The controller or the gateway of this head has reported."""
        if child.kind == "controller":
            # A new process waits for the lease first, where there is one.
            self._is_acting = status.is_acting or (self._is_acting and not status.is_ready)
        if status.catalog is None:
            return
        if child.kind == "controller":
            self._boots.catalog = status.catalog
        elif not self._is_acting:
            self._boots.catalog = status.catalog
            for controller in self._controllers():
                controller.tell(status.catalog)

    def __repr__(self) -> str:
        whose = "its own" if self._is_acting else "another head's"
        return f"<KnownCatalog {whose}, {len(self._boots.catalog.models)} models>"
