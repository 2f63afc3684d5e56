"""Two controllers never both act: what members and gateways carry out, and in which life it was
ordered. Shares no code with what it checks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from livescale.member.inputs import MemberInput, Ordered
from livescale.messages.epochs import ControllerEpoch
from livescale.sim.checkers.invariants import require


class FenceChecker:
    """All members and gateways of a world. A member is shown what it was ordered, what it
    refused, and after every step what still waits: the rest was carried out."""

    def __init__(self) -> None:
        #: by member or gateway, the highest epoch that it has met
        self._met: dict[Hashable, int] = {}
        #: orders on which nothing is known yet, with their epochs, in order
        self._ordered: dict[Hashable, list[tuple[object, int]]] = {}

    def met(self, who: Hashable, epoch: ControllerEpoch) -> None:
        """A controller was met, and reported to. One that gave this incarnation up refuses it."""
        highest = self._met.get(who, -1)
        is_newest = epoch.number >= highest
        require(is_newest, "no member reports to an older controller", who, epoch, highest)
        require(epoch.number > highest, "an incarnation joins a controller once", who, epoch)
        self._met[who] = epoch.number

    def ordered(self, member: Hashable, order: object, epoch: ControllerEpoch) -> None:
        """The order has reached the member."""
        self._ordered.setdefault(member, []).append((order, epoch.number))

    def refused(self, member: Hashable, order: object) -> None:
        """The member says that it did not carry the order out."""
        ordered = self._ordered.get(member, [])
        self._ordered[member] = [one for one in ordered if one[0] is not order]

    def stepped(self, member: Hashable, *waiting: Sequence[MemberInput]) -> None:
        """The member has stepped; this still waits."""
        if member not in self._ordered:
            return
        left = [one.command for news in waiting for one in news if isinstance(one, Ordered)]
        known = self._ordered.pop(member)
        for order, number in known:
            if not any(order is one for one in left):
                self.carried_out(member, order, number)
        if left:
            self._ordered[member] = [one for one in known if any(one[0] is o for o in left)]

    def carried_out(self, who: Hashable, order: object, number: int) -> None:
        """Something followed from the order, which a controller of this epoch gave."""
        met = self._met.get(who, number)
        require(number >= met, "only the latest controller acts", who, order, number, met)
