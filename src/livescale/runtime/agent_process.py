"""The host agent's process: a host's memory, and what moves models into it. No torch.

Main thread: HostStore. One more thread runs the wire to the controller; the DataPlane has its own
threads for parameters.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from functools import partial
from pathlib import Path

from livescale.messages.commands import AmendLoad, DropCopy, StartCopy
from livescale.runtime.boot import AgentBoot, Status, answer_parent_from, read_boot, report
from livescale.runtime.controller_link import Acquaintances, ControllerLink
from livescale.runtime.heartbeat import Heartbeats
from livescale.runtime.host_store import HostStore
from livescale.runtime.wire import Address, AgentEvent, AgentHello, Examine, Examined, Order
from livescale.transfer.arena import Arena
from livescale.transfer.data_plane import DataPlane

_log = logging.getLogger(__name__)


class AgentSocket:
    """The socket thread: the wire to the controller."""

    def __init__(self, boot: AgentBoot, data_plane: DataPlane) -> None:
        self._boot = boot
        self._data_plane = data_plane
        self.loop = asyncio.new_event_loop()
        host = boot.host
        acquaintances = Acquaintances(
            boot.agent, host.name, data_plane, measures_links=host.downlink_bytes_per_s is None
        )
        self._heartbeats = Heartbeats(boot.lost_after_ms, lambda: self.store.pulse.is_working())
        self._link = ControllerLink(
            boot.controller,
            boot.secret,
            acquaintances,
            hello=self._hello,
            obey=self._hand_over,
            refused=self._end,
            heartbeats=self._heartbeats,
        )
        self._store: HostStore | None = None

    @property
    def store(self) -> HostStore:
        assert self._store is not None, "start() comes first"
        return self._store

    def start(self, store: HostStore) -> None:
        """Begin to talk; `store` gets the work."""
        self._store = store
        threading.Thread(target=self._run, name="socket", daemon=True).start()

    def tell(self, event: AgentEvent | Examined) -> None:
        """Tell the controller. From any thread; never blocks."""
        self.loop.call_soon_threadsafe(self._link.send, event)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        await asyncio.gather(self._link.run(), self._heartbeats.run())

    def _hello(self) -> list[AgentHello]:
        host, port = self._data_plane.address
        self.store.post(self.store.report_again)
        return [
            AgentHello(
                agent=self._boot.agent,
                host=self._boot.host,
                data_address=Address(host, port),
                copies=self.store.reports,
                shm_path=self._data_plane.shm_path,
            )
        ]

    def _hand_over(self, order: Order | Examine) -> None:
        if isinstance(order, Examine):
            self.store.post(partial(self.store.examine, order))
        elif isinstance(order.command, StartCopy):
            self.store.post(partial(self.store.copy, order))
        elif isinstance(order.command, AmendLoad):
            self.store.post(partial(self.store.amend, order))
        elif isinstance(order.command, DropCopy):
            self.store.post(partial(self.store.drop, order))
        else:
            _log.error("%s is told to %s", self._boot.agent, type(order.command).__name__)

    def _end(self, reason: str) -> None:
        _log.warning("%s ends: %s", self._boot.agent, reason)
        self.store.stop()


def main() -> None:
    """Run until SIGTERM, or until standard input ends because the supervisor is gone."""
    boot = read_boot(AgentBoot)
    memory = Arena(boot.host.memory_bytes, boot.touched_bytes)
    data_plane = DataPlane(
        boot.agent,
        memory,
        host=boot.data_host,
        host_name=boot.host.name,
        secret=boot.secret,
        carrier=boot.carrier,
        shm_directory=Path(boot.shm_directory),
        uplink_bytes_per_s=boot.host.uplink_bytes_per_s if boot.keeps_rates else None,
        downlink_bytes_per_s=boot.host.downlink_bytes_per_s if boot.keeps_rates else None,
        parameter_share_percent=boot.parameter_share_percent,
        stall_s=boot.stall_ms / 1000,
    )
    socket = AgentSocket(boot, data_plane)
    store = HostStore(
        agent=boot.agent,
        memory=memory,
        data_plane=data_plane,
        tell=socket.tell,
        storage_bytes_per_s=boot.host.storage_bytes_per_s,
        lost_after_ms=boot.lost_after_ms,
        stuck_after_ms=boot.stuck_after_ms,
    )
    signal.signal(signal.SIGTERM, lambda *_: store.stop())
    socket.start(store)
    answer_parent_from(socket.loop, store.pulse.is_working)
    report(Status(is_ready=True))
    store.run()
    data_plane.close()
