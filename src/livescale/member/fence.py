"""The fence around every member and every gateway: of several controllers only the latest counts.

A controller that was replaced may not know it: its process was stopped, or its link was cut. So
each receiver of orders keeps the highest epoch that was met, and refuses those of a lower one.
"""

from __future__ import annotations

from livescale.messages.epochs import ControllerEpoch


class Fence:
    """What one life of a member or of a gateway has met. Lines that have no epochs in common say
    nothing of each other: there the life that was met last counts."""

    def __init__(self) -> None:
        #: the life whose orders count (None: none was met yet)
        self.current: ControllerEpoch | None = None
        #: by line
        self._highest: dict[str, int] = {}

    def meet(self, epoch: ControllerEpoch) -> ControllerEpoch | None:
        """A life presents itself. None: from now on its orders count, and no other's; else the
        later life for which it is refused."""
        highest = self._highest.get(epoch.line, epoch.number)
        if epoch.number < highest:
            return ControllerEpoch(epoch.line, highest)
        self._highest[epoch.line] = epoch.number
        self.current = epoch
        return None

    def admits(self, epoch: ControllerEpoch) -> bool:
        """An order of this life counts."""
        return self.current is None or self.current == epoch

    def __repr__(self) -> str:
        return f"<Fence at {self.current}>"


def why_refused(epoch: ControllerEpoch, later: ControllerEpoch | None) -> str:
    """For people: an order, or a wire, of a life of the controller does not count."""
    number = "another life" if later is None else f"epoch {later.number}"
    return f"the controller's epoch {epoch.number} is over: {number} has been met"
