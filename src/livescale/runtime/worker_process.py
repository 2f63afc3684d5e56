"""The worker process: warm and weightless at its start, an instance when it is told so.

Main thread: WorkerThread (the device). One more thread runs the sockets to the controller and to
the gateways; the DataPlane has its own threads for parameters.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable

from livescale.engine.run_result import InstanceExecutor
from livescale.engine.timed import TimedExecutor
from livescale.member.inputs import GatewayGone, GatewayUnknown
from livescale.messages.attempts import AttemptTaken, Cancel, Disown
from livescale.runtime.boot import WorkerBoot, read_boot
from livescale.runtime.doors import Door, token_door
from livescale.runtime.member_process import MemberSocket, open_data_plane
from livescale.runtime.recording import member_maker
from livescale.runtime.wire import (
    Address,
    FromTokenServer,
    GatewayHello,
    Submit,
    ToTokenServer,
)
from livescale.runtime.wire_channel import Wire
from livescale.runtime.worker_thread import WorkerThread
from livescale.transfer.arena import Arena
from livescale.transfer.data_plane import DataPlane

_log = logging.getLogger(__name__)
_HELLO_TIMEOUT_S = 10.0
# Python hands the interpreter to a waiting thread only after this long: transfers and sockets
# share this process with the engine's loop (the default is 5 ms).
_SWITCH_INTERVAL_S = 0.0005


class WorkerSockets(MemberSocket):
    """The socket thread of a worker: also a wire from every gateway. It is the Reporter."""

    def __init__(self, boot: WorkerBoot, data_plane: DataPlane) -> None:
        super().__init__(boot, boot.worker, boot.device, data_plane)
        self._token_host = boot.token_host
        self._gateways: dict[str, Wire[ToTokenServer]] = {}

    @property
    def host(self) -> WorkerThread:
        thread = self.thread
        assert isinstance(thread, WorkerThread)
        return thread

    # -- Reporter (any thread) --------------------------------------------------------------------

    def to_gateway(self, gateway: str, message: FromTokenServer) -> None:
        self.loop.call_soon_threadsafe(self._send_to_gateway, gateway, message)

    def _send_to_gateway(self, gateway: str, message: FromTokenServer) -> None:
        wire = self._gateways.get(gateway)
        if wire is not None:
            wire.send(message)
        elif isinstance(message, AttemptTaken):
            self.host.post(GatewayUnknown(gateway, message.request, message.attempt))

    # -- the socket thread ----------------------------------------------------------------------

    async def _talk(self) -> None:
        door = Door(self._boot.secret, token_door(self._member), self._serve_gateway)
        server = await asyncio.start_server(door.accept, self._token_host, 0)
        self.token_address = Address(*server.sockets[0].getsockname()[:2])
        await super()._talk()

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
        async for message in wire:
            if isinstance(message, Submit):
                self.host.submit(hello.gateway, message)
            elif isinstance(message, Cancel | Disown):
                self.host.post(message)
        if self._gateways.get(hello.gateway) is wire:
            del self._gateways[hello.gateway]
            self.host.post(GatewayGone(hello.gateway))


def main(watch: Callable[[InstanceExecutor], InstanceExecutor] | None = None) -> None:
    """Run until SIGTERM, or until standard input ends because the supervisor is gone. `watch` may
    put something between the instance and its executor."""
    boot = read_boot(WorkerBoot)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    arena = Arena(boot.device.arena_bytes)
    executor = _executor(boot) if watch is None else watch(_executor(boot))
    data_plane = open_data_plane(boot, boot.worker, boot.device, arena)
    sockets = WorkerSockets(boot, data_plane)
    with member_maker(boot.record_members, boot.worker) as make_member:
        sockets.serve(WorkerThread(boot, arena, executor, data_plane, sockets, make_member))


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
