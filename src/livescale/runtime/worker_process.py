"""The worker process: warm and weightless at its start, an instance when it is told so.

Main thread: InstanceHost (the device). One more thread runs the sockets to the controller and to
the gateways; the DataPlane has its own threads for parameters.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import sys
import threading
from functools import partial

from livescale.engine.run_result import InstanceExecutor
from livescale.engine.timed import TimedExecutor
from livescale.messages.commands import StartLoad, StartSend
from livescale.runtime.boot import Status, WorkerBoot, read_boot, report
from livescale.runtime.instance_host import InstanceHost
from livescale.runtime.wire import (
    Address,
    AttemptFailed,
    Cancel,
    GatewayHello,
    Order,
    Peers,
    Refused,
    Submit,
    Tokens,
    ToTokenServer,
    ToWorker,
    Wire,
    WorkerEvent,
    WorkerHello,
    open_wire,
)
from livescale.transfer.arena import Arena
from livescale.transfer.data_plane import DataPlane
from livescale.types import WorkerRef

_log = logging.getLogger(__name__)
_HOST = "127.0.0.1"
_HELLO_TIMEOUT_S = 10.0
_RECONNECT_S = (0.05, 1.0)
# Python hands the interpreter to a waiting thread only after this long: transfers and sockets
# share this process with the engine's loop (the default is 5 ms).
_SWITCH_INTERVAL_S = 0.0005


class WorkerSockets:
    """The socket thread: one wire to the controller, one from every gateway. It is the Outbox."""

    def __init__(self, boot: WorkerBoot, data_plane: DataPlane) -> None:
        self._boot = boot
        self._data_plane = data_plane
        self._loop = asyncio.new_event_loop()
        self._controller: Wire[ToWorker] | None = None
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

    # -- Outbox (any thread) --------------------------------------------------------------------

    def to_controller(self, event: WorkerEvent) -> None:
        self._loop.call_soon_threadsafe(self._send_to_controller, event)

    def to_gateway(self, gateway: str, message: Tokens | AttemptFailed) -> None:
        self._loop.call_soon_threadsafe(self._send_to_gateway, gateway, message)

    def _send_to_controller(self, event: WorkerEvent) -> None:
        # While no controller is there events are dropped: the next one gets a full report.
        if self._controller is not None:
            self._controller.send(event)

    def _send_to_gateway(self, gateway: str, message: Tokens | AttemptFailed) -> None:
        wire = self._gateways.get(gateway)
        if wire is not None:
            wire.send(message)

    # -- the socket thread ----------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept_gateway, _HOST, 0)
        host, port = server.sockets[0].getsockname()[:2]
        pause_s = _RECONNECT_S[0]
        while True:
            try:
                wire: Wire[ToWorker] = await open_wire(self._boot.controller, ToWorker)
            except OSError:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _RECONNECT_S[1])
                continue
            pause_s = _RECONNECT_S[0]
            self._introduce(wire, Address(host, port))
            await self._obey(wire)
            await asyncio.sleep(pause_s)

    def _introduce(self, wire: Wire[ToWorker], token_address: Address) -> None:
        """Say who this is and what it holds; a restarted controller builds its state from that."""
        data_host, data_port = self._data_plane.address
        wire.send(
            WorkerHello(
                self._boot.secret,
                self._boot.worker,
                self._boot.device,
                Address(data_host, data_port),
                token_address,
                self.host.report,
            )
        )
        if self.host.capacity is not None:
            wire.send(self.host.capacity)
        self._controller = wire
        self.host.post(self.host.report_again)

    async def _obey(self, wire: Wire[ToWorker]) -> None:
        async for message in wire:
            if isinstance(message, Peers):
                await asyncio.to_thread(self._meet, message)
            elif isinstance(message, Order):
                self._hand_over(message)
            elif isinstance(message, Refused):
                _log.warning("%s ends: %s", self._boot.worker, message.reason)
                self.host.stop()
                return
        self._controller = None
        _log.info("%s lost its controller: %s", self._boot.worker, wire.error)

    def _hand_over(self, order: Order) -> None:
        if isinstance(order.command, StartLoad):
            self.host.post(partial(self.host.load, order))
        elif isinstance(order.command, StartSend):
            self.host.post(partial(self.host.send, order))
        else:
            self.host.post(partial(self.host.release, order))

    def _meet(self, message: Peers) -> None:
        """Open a connection to every new worker before anything is sent over it.

        Nothing is closed here: a restarted controller learns of the workers one by one, and a
        dead worker's connection breaks by itself.
        """
        for peer in message.peers:
            if peer.worker != self._boot.worker:
                self._connect(peer.worker, peer.data_address)

    def _connect(self, worker: WorkerRef, address: Address) -> None:
        try:
            self._data_plane.connect(worker, (address.host, address.port))
        except OSError as error:
            # It may have died meanwhile; if not, a send to it fails and says so.
            _log.warning("%s cannot reach %s: %s", self._boot.worker, worker, error)

    async def _accept_gateway(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        wire: Wire[ToTokenServer] = Wire(reader, writer, ToTokenServer)
        try:
            hello = await asyncio.wait_for(wire.receive(), _HELLO_TIMEOUT_S)
        except TimeoutError:
            hello = None
        if not isinstance(hello, GatewayHello) or not secrets.compare_digest(
            hello.secret, self._boot.secret
        ):
            _log.warning("a connection without a valid hello was closed (%s)", wire.error)
            wire.close()
            return
        self._gateways[hello.gateway] = wire
        async for message in wire:
            if isinstance(message, Submit):
                self.host.post(partial(self.host.submit, hello.gateway, message))
            elif isinstance(message, Cancel):
                self.host.post(partial(self.host.cancel, message.request, message.attempt))
        if self._gateways.get(hello.gateway) is wire:
            del self._gateways[hello.gateway]
            self.host.post(partial(self.host.gateway_gone, hello.gateway))


def main() -> None:
    """Run until SIGTERM, or until standard input ends because the supervisor is gone."""
    boot = read_boot(WorkerBoot)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    arena = Arena(boot.device.arena_bytes)
    executor = _executor(boot)
    data_plane = DataPlane(
        boot.worker,
        arena,
        host=_HOST,
        chunk_bytes=boot.chunk_bytes,
        uplink_bytes_per_s=boot.device.uplink_bytes_per_s,
        downlink_bytes_per_s=boot.device.downlink_bytes_per_s,
    )
    sockets = WorkerSockets(boot, data_plane)
    host = InstanceHost(boot, arena, executor, data_plane, sockets)
    signal.signal(signal.SIGTERM, lambda *_: host.stop())
    sockets.start(host)
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
    if device == "cuda" and torch.cuda.is_available():
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
