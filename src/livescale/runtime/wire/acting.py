"""How a member, a gateway or a host meets a controller: the controller sends which life it
is before anything is sent to it, and one that is over is told so.
"""

from __future__ import annotations

import asyncio
from typing import Any, Generic, TypeVar

from livescale.member.fence import Fence
from livescale.messages.epochs import Acting, ControllerEpoch, Fenced
from livescale.runtime.wire.wire_channel import Wire

Incoming = TypeVar("Incoming")


class ActingWire(Generic[Incoming]):
    """One wire at a time, to the latest life of the controller that was met, whichever of several
    addresses led there. Two of them may lead to one life: a Service's name and an address of its
    pod. Lives on an event loop."""

    def __init__(self, fence: Fence) -> None:
        self._fence = fence
        #: None while no controller is there
        self.wire: Wire[Incoming] | None = None
        self._epoch: ControllerEpoch | None = None
        self._is_over = asyncio.Event()

    async def meet(self, wire: Wire[Incoming]) -> ControllerEpoch | None:
        """The life at the other end, which this wire is the only one to from now on. None: the life
        is over, or none is there, or there was a wire to it, and that one has ended meanwhile."""
        epoch = await met_on(wire, self._fence)
        if epoch is None:
            return None
        if self.wire is not None and epoch == self._epoch:
            leave(wire, epoch)
            await self._is_over.wait()
            return None
        if self.wire is not None:
            leave(self.wire, epoch)
            self.end(self.wire)
        self.wire, self._epoch, self._is_over = wire, epoch, asyncio.Event()
        return epoch

    def end(self, wire: Wire[Incoming]) -> bool:
        """It has ended. Whether it was the one that counts."""
        if self.wire is not wire:
            return False
        self.wire = None
        self._is_over.set()
        return True


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


def leave(wire: Wire[Any], met: ControllerEpoch) -> None:
    """Tell the controller which life was met: it must not act any more if that is a later one."""
    wire.send(Fenced(met))
    wire.close()
