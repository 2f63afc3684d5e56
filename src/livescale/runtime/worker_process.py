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
from livescale.runtime import protocol
from livescale.runtime.boot import WorkerBoot, read_boot
from livescale.runtime.doors import Door, token_door
from livescale.runtime.member_process import MemberSocket, open_data_plane
from livescale.runtime.recording import member_maker
from livescale.runtime.wire_channel import Wire
from livescale.runtime.worker_thread import WorkerThread
from livescale.transfer.arena import Arena
from livescale.transfer.data_plane import DataPlane

_log = logging.getLogger(__name__)
# Python hands the interpreter to a waiting thread only after this long: transfers and sockets
# share this process with the engine's loop (the default is 5 ms).
_SWITCH_INTERVAL_S = 0.0005


class WorkerSockets(MemberSocket):
    """The socket thread of a worker: also a wire from every gateway. It is the Reporter."""

    thread: WorkerThread

    def __init__(self, boot: WorkerBoot, data_plane: DataPlane) -> None:
        super().__init__(boot, data_plane)
        self._token_host = boot.token_host
        self._gateways: dict[str, Wire[protocol.ToTokenServer]] = {}

    # -- Reporter (any thread) --------------------------------------------------------------------

    def to_gateway(self, gateway: str, message: protocol.FromTokenServer) -> None:
        self.loop.call_soon_threadsafe(self._send_to_gateway, gateway, message)

    def _send_to_gateway(self, gateway: str, message: protocol.FromTokenServer) -> None:
        wire = self._gateways.get(gateway)
        if wire is not None:
            wire.send(message)
        elif isinstance(message, AttemptTaken):
            self.thread.post(GatewayUnknown(gateway, message.request, message.attempt))

    # -- the socket thread ----------------------------------------------------------------------

    async def _talk(self) -> None:
        door = Door(
            self._boot.secret, token_door(self._boot.member), self._serve_gateway, tls=self._tls
        )
        server = await asyncio.start_server(door.accept, self._token_host, 0)
        self.token_address = protocol.Address(*server.sockets[0].getsockname()[:2])
        await super()._talk()

    async def _serve_gateway(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        wire: Wire[protocol.ToTokenServer] = Wire(reader, writer, protocol.ToTokenServer)
        hello = await wire.hello()
        if not isinstance(hello, protocol.GatewayHello):
            _log.warning("a connection without a hello was closed (%s)", wire.error)
            wire.close()
            return
        self._heartbeats.add(wire)
        self._gateways[hello.gateway] = wire
        async for message in wire:
            if isinstance(message, protocol.Submit):
                self.thread.submit(hello.gateway, message)
            elif isinstance(message, Cancel | Disown):
                self.thread.post(message)
        if self._gateways.get(hello.gateway) is wire:
            del self._gateways[hello.gateway]
            self.thread.post(GatewayGone(hello.gateway))


def main(watch: Callable[[InstanceExecutor], InstanceExecutor] | None = None) -> None:
    """Run until SIGTERM, or until standard input ends because the supervisor is gone. `watch` may
    put something between the instance and its executor."""
    boot = read_boot(WorkerBoot)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    arena = Arena(boot.place.arena_bytes)
    executor = _executor(boot) if watch is None else watch(_executor(boot))
    data_plane = open_data_plane(boot, arena)
    sockets = WorkerSockets(boot, data_plane)
    with member_maker(boot.record_members, boot.member) as make_member:
        sockets.serve(WorkerThread(boot, arena, executor, data_plane, sockets, make_member))


def _executor(boot: WorkerBoot) -> InstanceExecutor:
    """What the device is run with, warm."""
    place, pool = boot.place, boot.pool
    if place.kind == "timed":
        return TimedExecutor(place.kv_bytes, pool.block_tokens, boot.latency)
    # Imported here: torch takes a second and 200 MiB, which a timed worker does not need.
    import torch

    from livescale.engine.executor import TorchExecutor
    from livescale.engine.warm_up import warm_up

    torch.set_num_threads(pool.worker_threads)
    device = place.kind
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("device cuda: this machine has no GPU that torch can use")
        device = f"cuda:{boot.member.worker % torch.cuda.device_count()}"
    executor = TorchExecutor(
        place.kv_bytes,
        pool.block_tokens,
        device,
        packed_weights=pool.weights_layout == "packed",
        parameter_bytes=0 if device == "cpu" else place.arena_bytes,
    )
    warm_up()
    return executor
