"""How a member, a gateway or a host meets a controller: the controller sends which life it
is before anything is sent to it, and one that is over is told so.
"""

from __future__ import annotations

from typing import Any

from livescale.member.fence import Fence
from livescale.messages.epochs import Acting, ControllerEpoch, Fenced
from livescale.runtime.wire_channel import Wire


async def met_on(wire: Wire[Any], fence: Fence) -> ControllerEpoch | None:
    """The life of the controller at the other end, which is the latest that was met (None: there is
    none, or it is over; then the wire is closed)."""
    message = await wire.receive()
    if not isinstance(message, Acting):
        if message is not None:
            wire.break_off("a controller begins with its epoch")
        return None
    later = fence.meet(message.epoch)
    if later is None:
        return message.epoch
    wire.error = f"its epoch {message.epoch.number} is over: {later.number} has been met"
    leave(wire, later)
    return None


def leave(wire: Wire[Any], later: ControllerEpoch) -> None:
    """Tell the controller that it must not act any more."""
    wire.send(Fenced(later))
    wire.close()
