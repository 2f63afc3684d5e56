"""The worker process: warm and weightless at its start, an instance when it is told so.

Main thread: WorkerThread (the device). One more thread runs the sockets to the controller and to
the gateways; the DataPlane has its own threads for parameters.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable

from livescale.engine.base.run_result import InstanceExecutor
from livescale.engine.timed import TimedExecutor
from livescale.member.inputs import GatewayGone, GatewayUnknown
from livescale.messages.attempts import AttemptTaken
from livescale.runtime.member_process.member_process import MemberSocket, open_data_plane
from livescale.runtime.member_process.worker_thread import WorkerThread
from livescale.runtime.wire import protocol
from livescale.runtime.wire.boot import WorkerBoot, read_boot
from livescale.runtime.wire.doors import Door, token_door
from livescale.runtime.wire.gateway_rights import is_its_request, may_have_name
from livescale.runtime.wire.wire_channel import Wire
from livescale.telemetry.recording import member_maker
from livescale.transfer.memory.arena import Arena
from livescale.transfer.plane.data_plane import DataPlane

_log = logging.getLogger(__name__)
# Python hands the interpreter to a waiting thread only after this long: transfers and sockets
# share this process with the engine's loop (the default is 5 ms).
SWITCH_INTERVAL_S = 0.0005


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
            _log.warning("The worker closed a connection without a greeting (%s)", wire.error)
            wire.close()
            return
        name = hello.gateway
        if not may_have_name(name, wire, self._gateways):
            _log.warning("A second gateway named %s was disconnected", name)
            wire.close()
            return
        self._heartbeats.add(wire)
        self._gateways[name] = wire
        async for message in wire:
            if isinstance(message, protocol.GatewayHello) or not is_its_request(
                name, message.request
            ):
                _log.warning(
                    "The worker disconnected gateway %s: it sent orders for requests of "
                    "another gateway",
                    name,
                )
                wire.close()
                break
            if isinstance(message, protocol.Submit):
                self.thread.submit(name, message)
            else:
                self.thread.post(message)
        if self._gateways.get(name) is wire:
            del self._gateways[name]
            self.thread.post(GatewayGone(name))


def main(watch: Callable[[InstanceExecutor], InstanceExecutor] | None = None) -> None:
    """Run until SIGTERM, or until standard input ends because the supervisor is gone. `watch` may
    put something between the instance and its executor."""
    boot = read_boot(WorkerBoot)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
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
        return TimedExecutor(place.kv_bytes, pool.block_tokens, boot.latency, boot.cores)
    if place.kind == "vllm":
        return _vllm_executor(boot)
    # Imported here: torch takes a second and 200 MiB, which a timed worker does not need.
    import torch

    from livescale.engine.base.compute_cores import ComputeCores
    from livescale.engine.executor import TorchExecutor
    from livescale.engine.products.linear_choice import weights_layout
    from livescale.engine.warm_up import warm_up

    torch.set_num_threads(pool.worker_threads)
    device = place.kind
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                "device cuda is invalid: torch finds no GPU on this machine. Install a "
                "CUDA driver, or set another device"
            )
        device = f"cuda:{boot.member.worker % torch.cuda.device_count()}"
    executor = TorchExecutor(
        place.kv_bytes,
        pool.block_tokens,
        device,
        weights_layout=weights_layout(pool.weights_layout),
        parameter_bytes=0 if device == "cpu" else place.arena_bytes,
        cores=ComputeCores(boot.member.worker) if device == "cpu" else None,
    )
    warm_up(times_linears=device == "cpu" and pool.weights_layout == "auto")
    return executor


def _vllm_executor(boot: WorkerBoot) -> InstanceExecutor:
    """With engines for models that may come."""
    # Imported here: only this worker's interpreter has vLLM, which reads its environment then.
    from livescale.vllm_engine.environment import set_environment

    pool = boot.pool
    set_environment(pool.log_level)

    from livescale.vllm_engine.executor import VllmExecutor
    from livescale.vllm_engine.skeleton import EngineTerms

    terms = EngineTerms(
        kv_bytes=boot.place.kv_bytes,
        block_tokens=pool.block_tokens,
        run_tokens_max=pool.run_tokens_max,
        sequences_max=pool.sequences_max,
        binds_views=pool.weights_layout == "plain",
    )
    executor = VllmExecutor(terms, pool.vllm_engines_max, pool.vllm_engines_bytes)
    for manifest in boot.ahead:
        executor.prepare(manifest)
    return executor
