"""The time in which one life of the controller may act: what it says of itself on every wire, and
how it learns that it is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from livescale.messages.epochs import Acting, ControllerEpoch, Fenced
from livescale.runtime.wire import protocol
from livescale.runtime.wire.boot import Status, report
from livescale.runtime.wire.wire_channel import Wire


class Tenure:
    """Lives on the controller's event loop. `over` has the reason when it is."""

    def __init__(
        self, epoch: ControllerEpoch, holds_lease: Callable[[], bool] = lambda: True
    ) -> None:
        self.epoch = epoch
        self._holds_lease = holds_lease
        #: whether who is at the other end of a wire is believed that a later life was met
        self.believes: Callable[[Wire[protocol.ToController]], bool] = lambda wire: True
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def is_over(self) -> bool:
        """Asked before every step: nothing is ordered from then on."""
        if not self._holds_lease():
            self.end("its lease expired")
        return self.over.done()

    def end(self, reason: str) -> None:
        if not self.over.done():
            self.over.set_result(reason)

    async def hello(self, wire: Wire[protocol.ToController]) -> protocol.ToController | None:
        """Say which life this is, and get the first message (None: there is none, or no use)."""
        wire.send(Acting(self.epoch))
        hello = await wire.hello()
        if isinstance(hello, Fenced):
            self._heed(hello, wire)
        return hello

    async def listen(
        self, wire: Wire[protocol.ToController]
    ) -> AsyncIterator[protocol.ToController]:
        """What comes on the wire."""
        async for message in wire:
            if isinstance(message, Fenced):
                self._heed(message, wire)
            else:
                yield message

    def _heed(self, fenced: Fenced, wire: Wire[protocol.ToController]) -> None:
        """A later life was met by who sends this."""
        later = fenced.epoch
        is_later = later.line == self.epoch.line and later.number > self.epoch.number
        if is_later and self.believes(wire):
            # The lease may be a new one: this process's next life begins behind all that were met.
            report(Status(later_epoch=later.number))
            self.end(f"epoch {later.number} has begun, this is {self.epoch.number}")

    def __repr__(self) -> str:
        return f"<Tenure of {self.epoch}{', over' if self.over.done() else ''}>"
