"""The worker process: warm and weightless at its start, an instance when it is told so.

Main thread: InstanceHost (the device). One more thread runs the sockets to the controller and to
the gateways; the DataPlane has its own threads for parameters.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from livescale.engine.run_result import InstanceExecutor
from livescale.engine.timed import TimedExecutor
from livescale.messages.commands import AmendLoad, Release, StartLoad
from livescale.runtime.boot import Status, WorkerBoot, answer_parent_from, read_boot, report
from livescale.runtime.controller_link import Acquaintances, ControllerLink
from livescale.runtime.doors import Door, token_door
from livescale.runtime.heartbeat import Heartbeats
from livescale.runtime.instance_host import InstanceHost
from livescale.runtime.wire import (
    Address,
    AttemptTaken,
    Cancel,
    Disown,
    Examine,
    Examined,
    FromTokenServer,
    GatewayHello,
    Order,
    Submit,
    ToTokenServer,
    Wire,
    WorkerEvent,
    WorkerHello,
)
from livescale.transfer.arena import Arena
from livescale.transfer.data_plane import DataPlane
from livescale.types import WorkerRef

_log = logging.getLogger(__name__)
_HELLO_TIMEOUT_S = 10.0
# Python hands the interpreter to a waiting thread only after this long: transfers and sockets
# share this process with the engine's loop (the default is 5 ms).
_SWITCH_INTERVAL_S = 0.0005


class WorkerSockets:
    """The socket thread: one wire to the controller, one from every gateway. It is the Reporter."""

    def __init__(self, boot: WorkerBoot, data_plane: DataPlane) -> None:
        self._boot = boot
        self._data_plane = data_plane
        self.loop = asyncio.new_event_loop()
        acquaintances = Acquaintances(
            boot.worker,
            boot.device.host,
            data_plane,
            measures_links=boot.device.downlink_bytes_per_s is None,
        )
        self._heartbeats = Heartbeats(boot.lost_after_ms, lambda: self.host.pulse.is_working())
        self._link = ControllerLink(
            boot.controller,
            boot.secret,
            acquaintances,
            hello=self._hello,
            obey=self._hand_over,
            refused=self._end,
            gone=self._gone,
            heartbeats=self._heartbeats,
        )
        self._token_address = Address("", 0)
        self._gateways: dict[str, Wire[ToTokenServer]] = {}
        self._host: InstanceHost | None = None

    @property
    def host(self) -> InstanceHost:
        assert self._host is not None, "start() comes first"
        return self._host

    def start(self, host: InstanceHost) -> None:
        """Begin to talk; `host` gets the work."""
        self._host = host
        threading.Thread(target=self._run, name="sockets", daemon=True).start()

    # -- Reporter (any thread) --------------------------------------------------------------------

    def to_controller(self, event: WorkerEvent | Examined) -> None:
        self.loop.call_soon_threadsafe(self._link.send, event)

    def to_gateway(self, gateway: str, message: FromTokenServer) -> None:
        self.loop.call_soon_threadsafe(self._send_to_gateway, gateway, message)

    def _send_to_gateway(self, gateway: str, message: FromTokenServer) -> None:
        wire = self._gateways.get(gateway)
        if wire is not None:
            wire.send(message)
        elif isinstance(message, AttemptTaken):
            unknown = self.host.attempts.gateway_unknown
            self.host.post(partial(unknown, gateway, message.request, message.attempt))

    # -- the socket thread ----------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        door = Door(self._boot.secret, token_door(self._boot.worker), self._serve_gateway)
        server = await asyncio.start_server(door.accept, self._boot.token_host, 0)
        host, port = server.sockets[0].getsockname()[:2]
        self._token_address = Address(host, port)
        await asyncio.gather(self._link.run(), self._heartbeats.run())

    def _hello(self) -> list[WorkerHello | WorkerEvent]:
        """Who this is and what it holds; a restarted controller builds its state from that."""
        host, port = self._data_plane.address
        hello = WorkerHello(
            worker=self._boot.worker,
            device=self._boot.device,
            data_address=Address(host, port),
            token_address=self._token_address,
            report=self.host.report,
            shm_path=self._data_plane.shm_path,
        )
        self.host.post(self.host.report_again)
        return [hello, self.host.capacity] if self.host.capacity is not None else [hello]

    def _hand_over(self, order: Order | Examine) -> None:
        if isinstance(order, Examine):
            self.host.post(partial(self.host.examine, order))
        elif isinstance(order.command, StartLoad):
            self.host.post(partial(self.host.load, order))
        elif isinstance(order.command, AmendLoad):
            self.host.post(partial(self.host.amend, order))
        elif isinstance(order.command, Release):
            self.host.post(partial(self.host.release, order))
        else:
            _log.error("%s is told to %s", self._boot.worker, type(order.command).__name__)

    def _gone(self, member: WorkerRef) -> None:
        self.host.post(partial(self.host.peer_lost, member))

    def _end(self, reason: str) -> None:
        _log.warning("%s ends: %s", self._boot.worker, reason)
        self.host.stop()

    async def _serve_gateway(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        wire: Wire[ToTokenServer] = Wire(reader, writer, ToTokenServer)
        try:
            hello = await asyncio.wait_for(wire.receive(), _HELLO_TIMEOUT_S)
        except TimeoutError:
            hello = None
        if not isinstance(hello, GatewayHello):
            _log.warning("a connection without a hello was closed (%s)", wire.error)
            wire.close()
            return
        self._heartbeats.add(wire)
        self._gateways[hello.gateway] = wire
        attempts = self.host.attempts
        async for message in wire:
            if isinstance(message, Submit):
                self.host.post(partial(attempts.submit, hello.gateway, message))
            elif isinstance(message, Cancel):
                self.host.post(partial(attempts.cancel, message.request, message.attempt))
            elif isinstance(message, Disown):
                self.host.post(partial(attempts.disown, message.request, message.attempt))
        if self._gateways.get(hello.gateway) is wire:
            del self._gateways[hello.gateway]
            self.host.post(partial(attempts.gateway_gone, hello.gateway))


def main(watch: Callable[[InstanceExecutor], InstanceExecutor] | None = None) -> None:
    """Run until SIGTERM, or until standard input ends because the supervisor is gone. `watch` may
    put something between the instance and its executor."""
    boot = read_boot(WorkerBoot)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    arena = Arena(boot.device.arena_bytes)
    executor = _executor(boot) if watch is None else watch(_executor(boot))
    data_plane = DataPlane(
        boot.worker,
        arena,
        host=boot.data_host,
        host_name=boot.device.host,
        secret=boot.secret,
        carrier=boot.carrier,
        shm_directory=Path(boot.shm_directory),
        uplink_bytes_per_s=boot.device.uplink_bytes_per_s if boot.keeps_rates else None,
        downlink_bytes_per_s=boot.device.downlink_bytes_per_s if boot.keeps_rates else None,
        parameter_share_percent=boot.parameter_share_percent,
        stall_s=boot.stall_ms / 1000,
    )
    sockets = WorkerSockets(boot, data_plane)
    host = InstanceHost(boot, arena, executor, data_plane, sockets)
    signal.signal(signal.SIGTERM, lambda *_: host.stop())
    sockets.start(host)
    answer_parent_from(sockets.loop, host.pulse.is_working)
    report(Status(is_ready=True))
    host.run()
    data_plane.close()


def _executor(boot: WorkerBoot) -> InstanceExecutor:
    """What the device is run with, warm."""
    if boot.device.kind == "timed":
        return TimedExecutor(boot.device.kv_bytes, boot.block_tokens, boot.latency)
    # Imported here: torch takes a second and 200 MiB, which a timed worker does not need.
    import torch

    from livescale.engine.executor import TorchExecutor
    from livescale.engine.warm_up import warm_up

    torch.set_num_threads(boot.threads)
    device = boot.device.kind
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("device cuda: this machine has no GPU that torch can use")
        device = f"cuda:{boot.worker.worker % torch.cuda.device_count()}"
    executor = TorchExecutor(
        boot.device.kv_bytes,
        boot.block_tokens,
        device,
        packed_weights=boot.weights_layout == "packed",
        parameter_bytes=0 if device == "cpu" else boot.device.arena_bytes,
    )
    warm_up()
    return executor
