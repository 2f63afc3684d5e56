"""What the processes of workers and host agents share: a data plane, a thread, a socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from livescale.clusters.topology import Device, Host
from livescale.member.inputs import ControllerMet
from livescale.messages.epochs import ControllerEpoch
from livescale.messages.events import AgentJoined, AnyEvent, WorkerJoined
from livescale.runtime.member_process.controller_link import Acquaintances, ControllerLink
from livescale.runtime.member_process.member_thread import MemberThread
from livescale.runtime.wire.boot import (
    AgentBoot,
    Status,
    WorkerBoot,
    answer_parent_from,
    report,
)
from livescale.runtime.wire.doors import open_credentials
from livescale.runtime.wire.heartbeat import Heartbeats
from livescale.runtime.wire.protocol import Address, Examined, Holder, MemberHello
from livescale.transfer.links.exchange import ConnectionTerms
from livescale.transfer.memory.arena import Arena
from livescale.transfer.plane.data_plane import DataPlane
from livescale.transfer.plane.options import PlaneOptions

if TYPE_CHECKING:
    from livescale.transfer.formats.sealing import Protection

_log = logging.getLogger(__name__)


def open_data_plane(boot: WorkerBoot | AgentBoot, memory: Arena) -> DataPlane:
    """The data plane of a member."""
    place, pool = boot.place, boot.pool
    options = PlaneOptions(
        host=boot.data_host,
        host_name=host_name(place),
        connections=ConnectionTerms(boot.secret),
        protection=_protection(boot),
        carrier=pool.carrier,
        shm_directory=Path(boot.shm_directory),
        uplink_bytes_per_s=place.uplink_bytes_per_s if boot.keeps_rates else None,
        downlink_bytes_per_s=place.downlink_bytes_per_s if boot.keeps_rates else None,
        parameter_share_percent=pool.parameter_share_percent,
        stall_s=pool.stall_ms / 1000,
    )
    return DataPlane(boot.member, memory, options)


def close_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Close an event loop that does not run any more, with the sockets that it had."""
    loop.run_until_complete(loop.shutdown_asyncgens())
    # Those that were closed just now are gone after a turn.
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def _protection(boot: WorkerBoot | AgentBoot) -> Protection | None:
    """Of the data plane; None in a pool without certificates."""
    credentials = open_credentials(boot.pool.tls_dir)
    if credentials is None:
        return None
    from livescale.transfer.formats.sealing import Protection

    mode = boot.pool.data_plane_tls
    return Protection(
        credentials, boot.secret, lambda here: mode == "on" or (mode == "auto" and not here)
    )


def host_name(place: Device | Host) -> str:
    """The host that it is, or is on."""
    return place.host if isinstance(place, Device) else place.name


class MemberSocket:
    """The socket thread of a member: its wire to the controller."""

    #: of the member's rules, which `serve` is given
    thread: MemberThread

    def __init__(self, boot: WorkerBoot | AgentBoot, data_plane: DataPlane) -> None:
        self._boot = boot
        #: where gateways reach a worker
        self.token_address: Address | None = None
        self._data_plane = data_plane
        self.loop = asyncio.new_event_loop()
        acquaintances = Acquaintances(
            boot.member,
            host_name(boot.place),
            data_plane,
            measures_links=boot.place.downlink_bytes_per_s is None,
        )
        self._heartbeats = Heartbeats(
            boot.pool.lost_after_ms, lambda: self.thread.pulse.is_working()
        )
        self._tls = open_credentials(boot.pool.tls_dir)
        self._link = ControllerLink(
            (boot.controller, *boot.other_controllers),
            boot.secret,
            acquaintances,
            hello=self._greet,
            obey=lambda order, epoch: self.thread.obey(order, epoch),
            refused=self._end,
            gone=lambda peer: self.thread.lose_peer(peer),
            heartbeats=self._heartbeats,
            tls=self._tls,
        )

    def to_controller(self, event: AnyEvent | Examined) -> None:
        """Send the event to the controller. From any thread; never blocks."""
        self.loop.call_soon_threadsafe(self._link.send, event)

    def serve(self, thread: MemberThread) -> None:
        """Begin to talk, and run the member's thread here until SIGTERM."""
        signal.signal(signal.SIGTERM, lambda *_: thread.stop())
        self.begin(thread)
        answer_parent_from(self.loop, thread.pulse.is_working)
        report(Status(is_ready=True))
        thread.run()
        self._data_plane.close()

    def begin(self, thread: MemberThread) -> None:
        """Begin to talk; who calls runs the member's thread."""
        self.thread = thread
        self._sockets = threading.Thread(target=self._run, name="sockets", daemon=True)
        self._sockets.start()

    def end(self) -> None:
        """Talk no more. Afterwards the controller knows that the member is gone."""
        self.loop.call_soon_threadsafe(self._stop)
        self._sockets.join()
        close_loop(self.loop)

    # -- the socket thread ----------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        with contextlib.suppress(asyncio.CancelledError):
            self.loop.run_until_complete(self._talk())

    def _stop(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()

    async def _talk(self) -> None:
        parts = [self._link.run(), self._heartbeats.run()]
        if self._tls is not None:
            parts.append(self._tls.run())
        await asyncio.gather(*parts)

    def _greet(self, epoch: ControllerEpoch) -> list[MemberHello]:
        """Who this is and what it holds; a restarted controller builds its state from that."""
        self.thread.post(ControllerMet(epoch))
        member, place, holdings = self._boot.member, self._boot.place, self.thread.member.reports
        cores, is_engine = self.thread.member.cores, self.thread.is_engine
        joined = (
            WorkerJoined(member, place, holdings, cores.now, cores.own, is_engine)
            if isinstance(place, Device)
            else AgentJoined(member, place, holdings)
        )
        address = Address(*self._data_plane.address)
        holder = Holder(member, address, host_name(place), self._data_plane.shm_path)
        return [MemberHello(joined, holder, self.token_address)]

    def _end(self, reason: str) -> None:
        _log.warning("%s ends: %s", self._boot.member, reason)
        self.thread.stop()
