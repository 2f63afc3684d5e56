"""How a worker or an agent stays in touch with the controller, and how it meets the others.

One wire at a time, to whichever life of the controller listens; data planes are introduced to each
other, and a few of the ways between them are tried. What orders mean is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from livescale.member.fence import Fence
from livescale.messages.epochs import ControllerEpoch
from livescale.messages.events import AnyEvent, LinkMeasured
from livescale.runtime.wire import protocol
from livescale.runtime.wire.acting import ActingWire
from livescale.runtime.wire.doors import CONTROLLER_DOOR
from livescale.runtime.wire.heartbeat import Heartbeats
from livescale.runtime.wire.wire_channel import Wire, stay_connected
from livescale.transfer.plane.data_plane import DataPlane
from livescale.values.types import WorkerRef

if TYPE_CHECKING:
    from livescale.common.credentials import Credentials

_log = logging.getLogger(__name__)
# Two ways tell what this member's link carries; all of them would be a storm when many join.
_PROBED_MAX = 2
_PROBE_BYTES = 4 << 20


@dataclass(eq=False)
class ControllerLink:
    """The wire to the controller: to the latest life that was met, where there are several
    `controllers`. Lives on the event loop that runs `run`.

    `hello` says who this is and what it holds: a restarted controller builds its state from that.
    `refused` is called when the controller will not talk to this incarnation, `gone` with members
    that the controller lost, whatever their connections seem to be. A controller that is silent is
    given up by `heartbeats`.
    """

    controllers: Sequence[protocol.Address]
    secret: str
    acquaintances: Acquaintances
    hello: Callable[[ControllerEpoch], Sequence[protocol.MemberHello]]
    obey: Callable[[protocol.Order | protocol.Examine | protocol.MayCome, ControllerEpoch], None]
    refused: Callable[[str], None]
    gone: Callable[[WorkerRef], None]
    heartbeats: Heartbeats
    tls: Credentials | None = None
    _acting: ActingWire[protocol.ToWorker] = field(init=False)

    def __post_init__(self) -> None:
        self._acting = ActingWire(Fence())

    def send(self, event: AnyEvent | protocol.Examined) -> None:
        """Tell the controller. While none is there events are dropped: the next one gets a full
        report."""
        if self._acting.wire is not None:
            self._acting.wire.send(event)

    async def run(self) -> None:
        """Stay connected, for ever."""
        ways = (
            stay_connected(
                address,
                protocol.ToWorker,
                secret=self.secret,
                door=CONTROLLER_DOOR,
                serve=self._listen,
                tls=self.tls,
            )
            for address in self.controllers
        )
        await asyncio.gather(*ways)

    async def _listen(self, wire: Wire[protocol.ToWorker]) -> None:
        self.heartbeats.add(wire)
        epoch = await self._acting.meet(wire)
        if epoch is None:
            return
        for greeting in self.hello(epoch):
            wire.send(greeting)
        # Of this life of the controller: a new one learns of them one by one.
        living: set[WorkerRef] = set()
        async for message in wire:
            if self._acting.wire is not wire:
                break
            if isinstance(message, protocol.Holders):
                refs = {holder.ref for holder in message.holders}
                for member in sorted(living - refs | self.acquaintances.displaced(refs)):
                    self.acquaintances.lose(member)
                    self.gone(member)
                living = refs
                # Before the next order is read, which may name one of them.
                await asyncio.to_thread(self.acquaintances.meet, message)
                if not self.acquaintances.has_probed:
                    self._probing = asyncio.create_task(self._probe())
            elif isinstance(message, (protocol.Order, protocol.Examine, protocol.MayCome)):
                self.obey(message, epoch)
            elif isinstance(message, protocol.Refused):
                self.refused(message.reason)
        self._acting.end(wire)
        _log.info("The controller is disconnected: %s", wire.error)

    async def _probe(self) -> None:
        for event in await asyncio.to_thread(self.acquaintances.probe):
            self.send(event)


class Acquaintances:
    """The holders that this member's data plane knows, and what is known of the ways to them."""

    def __init__(
        self, own: WorkerRef, host: str, data_plane: DataPlane, measures_links: bool
    ) -> None:
        self._own = own
        self._host = host
        self._data_plane = data_plane
        #: by number: a restarted member takes the place of its last life
        self._known: dict[int, protocol.Holder] = {}
        self.has_probed = not measures_links
        self._probing = threading.Lock()

    def meet(self, message: protocol.Holders) -> None:
        """Introduce every new holder to the data plane. Blocks while connections are made.

        Nothing is closed here: a restarted controller learns of the others one by one, and a
        dead one's connection breaks by itself.
        """
        for holder in message.holders:
            if holder.ref == self._own or self._known.get(holder.ref.worker) == holder:
                continue
            self._known[holder.ref.worker] = holder
            address = (holder.data_address.host, holder.data_address.port)
            shm_path = holder.shm_path if holder.host == self._host else None
            try:
                self._data_plane.introduce(holder.ref, address, shm_path)
            except OSError as error:
                # It may have died meanwhile; if not, a feed from it fails and says so.
                _log.warning("%s cannot reach %s: %s", self._own, holder.ref, error)

    def displaced(self, living: Collection[WorkerRef]) -> set[WorkerRef]:
        """Members whose number one of `living` has from an earlier incarnation on: a head that
        began anew gave it to another host, before theirs had come back."""
        latest = {ref.worker: ref for ref in sorted(living)}
        known = [self._known[worker].ref for worker in latest if worker in self._known]
        return {ref for ref in known if ref > latest[ref.worker]}

    def lose(self, member: WorkerRef) -> None:
        """The controller gave the member up. It may live on and not know it: nothing more comes
        from there."""
        known = self._known.get(member.worker)
        if known is not None and known.ref == member:
            del self._known[member.worker]
        self._data_plane.disconnect(member)

    def probe(self) -> list[LinkMeasured]:
        """Try the ways from the nearest in number, those of other hosts first. Blocks; once."""
        with self._probing:
            # Members that joined one soon after the other have this called twice.
            if self.has_probed:
                return []
            others = sorted(
                (h for h in self._known.values() if h.ref.is_agent == self._own.is_agent),
                key=lambda h: (h.host == self._host, abs(h.ref.worker - self._own.worker), h.ref),
            )
            self.has_probed = bool(others)
        found = []
        for holder in others[:_PROBED_MAX]:
            try:
                rate = self._data_plane.probe(holder.ref, _PROBE_BYTES)
            except OSError as error:
                _log.info("%s cannot probe %s: %s", self._own, holder.ref, error)
            else:
                found.append(LinkMeasured(holder.ref, self._own, rate))
        return found
