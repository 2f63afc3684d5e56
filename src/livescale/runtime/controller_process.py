"""The controller process: feeds events to the pure Controller and carries out its commands.

No decision is made here. Workers and gateways connect to a listening socket that the supervisor
keeps open, so that they can come back at once when this process is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
import time
from pathlib import Path

import msgspec

from livescale.control.controller import Controller
from livescale.messages.commands import (
    AnyCommand,
    Dispatch,
    FailRequest,
    Release,
    StartLoad,
    StartSend,
    WakeAt,
)
from livescale.messages.events import (
    AnyEvent,
    InstanceReported,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from livescale.runtime.boot import CatalogEntry, ControllerBoot, Status, read_boot, report
from livescale.runtime.model_loads import ModelLoads
from livescale.runtime.wire import (
    GatewayHello,
    Order,
    Peer,
    Peers,
    PoolStatus,
    Refused,
    RequestTimed,
    ToController,
    Wire,
    WorkerEvent,
    WorkerHello,
)
from livescale.telemetry.record import RecordWriter, append_to_record
from livescale.telemetry.scale_events import ScaleTracker
from livescale.types import FromStorage, Outcome, RequestId, WorkerRef

_log = logging.getLogger(__name__)
# A peer that connects must say who it is within this time.
_HELLO_TIMEOUT_S = 10.0
_FLUSH_S = 0.2


class ControllerProcess:
    """One life of the controller: its wires, its event queue and its record."""

    def __init__(self, boot: ControllerBoot, record: RecordWriter | None) -> None:
        self._boot = boot
        self._controller = Controller(boot.config)
        self._catalog: dict[str, CatalogEntry] = {m.spec.name: m for m in boot.models}
        self._record = record
        self._tracker = ScaleTracker()
        self._events: list[AnyEvent] = []
        self._has_events = asyncio.Event()
        self._wake_at_ns: int | None = None
        self._workers: dict[WorkerRef, Wire[ToController]] = {}
        self._peers: dict[WorkerRef, Peer] = {}
        #: incarnations that were lost: they are told to end if they come back
        self._lost: dict[WorkerRef, None] = {}
        self._gateways: dict[str, Wire[ToController]] = {}
        #: unfinished requests and the gateway that answers for them
        self._gateway_of: dict[RequestId, str] = {}
        self._loads = ModelLoads(self._catalog)
        self._last_status: PoolStatus | None = None

    # -- the step loop --------------------------------------------------------------------------

    async def run(self) -> None:
        """Step the controller whenever an event waits, at most every `step_gap_ns`."""
        if self._record is not None:
            self._record.begin("real", self._boot.config, self._boot.settings)
        last_ns = 0
        while True:
            await self._wait_for_events()
            gap_ns = last_ns + self._boot.step_gap_ns - time.monotonic_ns()
            if gap_ns > 0:
                await asyncio.sleep(gap_ns / 1e9)
            last_ns = self._step()

    async def _wait_for_events(self) -> None:
        timeout = None
        if self._wake_at_ns is not None:
            timeout = max(0, self._wake_at_ns - time.monotonic_ns()) / 1e9
        try:
            await asyncio.wait_for(self._has_events.wait(), timeout)
        except TimeoutError:
            self._wake_at_ns = None
            self._events.append(Tick())

    def _step(self) -> int:
        events, self._events = self._events, []
        self._has_events.clear()
        now_ns = time.monotonic_ns()
        if self._wake_at_ns is not None and self._wake_at_ns <= now_ns:
            # This step is the promised call: a later WakeAt must not be taken for a worse one.
            self._wake_at_ns = None
        commands = self._controller.step(now_ns, events)
        for command in commands:
            self._carry_out(command)
        for event in events:
            if isinstance(event, InstanceReported):
                self._loads.absorb(event, self._controller.fleet.instances)
        done_ns = time.monotonic_ns()
        if self._record is not None:
            self._record.step(now_ns, events, commands, done_ns)
            for line in self._tracker.observe(now_ns, events, commands, done_ns):
                self._record.write(line)
        self._show_status()
        return now_ns

    def _push(self, event: AnyEvent) -> None:
        self._events.append(event)
        self._has_events.set()

    # -- carrying out commands ------------------------------------------------------------------

    def _carry_out(self, command: AnyCommand) -> None:
        if isinstance(command, StartLoad):
            self._order(command.worker, command)
        elif isinstance(command, StartSend):
            self._order(command.source, command)
        elif isinstance(command, Release):
            self._order(command.worker, command)
        elif isinstance(command, Dispatch):
            self._dispatch(command)
        elif isinstance(command, FailRequest):
            self._to_gateway(command.request, command)
        elif isinstance(command, WakeAt):
            earlier = self._wake_at_ns is None or command.at_ns < self._wake_at_ns
            self._wake_at_ns = command.at_ns if earlier else self._wake_at_ns

    def _order(self, worker: WorkerRef, command: StartLoad | StartSend | Release) -> None:
        """Send the order with what only the world knows. A worker that is gone needs none: its
        WorkerLost is on the way and ends everything that it was asked."""
        wire = self._workers.get(worker)
        if wire is None:
            return
        manifest = directory = None
        if isinstance(command, StartLoad):
            entry = self._catalog[command.model]
            manifest = entry.manifest
            directory = entry.directory if isinstance(command.upstream, FromStorage) else None
        wire.send(Order(command, manifest, directory))

    def _dispatch(self, command: Dispatch) -> None:
        if not self._to_gateway(command.request, command):
            self._push(RequestEnded(command.request, command.attempt, Outcome.CANCELLED))

    def _to_gateway(self, request: RequestId, command: Dispatch | FailRequest) -> bool:
        gateway = self._gateway_of.get(request)
        wire = self._gateways.get(gateway) if gateway is not None else None
        if wire is None:
            return False
        wire.send(command)
        return True

    def _show_status(self) -> None:
        """Tell the gateways what the pool looks like, when it changed."""
        fleet = self._controller.fleet
        instances: dict[str, dict[str, int]] = {model: {} for model in self._catalog}
        for instance in fleet.instances.values():
            states = instances[instance.model]
            states[instance.state.value] = states.get(instance.state.value, 0) + 1
        last = self._last_status
        if last is None or (instances, len(fleet.workers)) != (last.instances, last.workers):
            loads = self._loads.shown(fleet.instances)
            self._send_status(PoolStatus(instances, len(fleet.workers), loads))

    def show_loads(self) -> None:
        """Tell the gateways what the instances hold, if it changed. It does all the time: not to
        be called at every step."""
        last, loads = self._last_status, self._loads.shown(self._controller.fleet.instances)
        if last is not None and loads != last.loads:
            self._send_status(msgspec.structs.replace(last, loads=loads))

    def _send_status(self, status: PoolStatus) -> None:
        self._last_status = status
        for wire in self._gateways.values():
            wire.send(status)

    # -- what comes in --------------------------------------------------------------------------

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end."""
        # Cancelled only when the process ends; asyncio would log that as an error.
        with contextlib.suppress(asyncio.CancelledError):
            await self._serve(Wire(reader, writer, ToController))

    async def _serve(self, wire: Wire[ToController]) -> None:
        try:
            hello = await asyncio.wait_for(wire.receive(), _HELLO_TIMEOUT_S)
        except TimeoutError:
            hello = None
        if not isinstance(hello, (WorkerHello, GatewayHello)) or not secrets.compare_digest(
            hello.secret, self._boot.secret
        ):
            _log.warning("a connection without a valid hello was closed (%s)", wire.error)
            wire.close()
        elif isinstance(hello, WorkerHello):
            await self._serve_worker(hello, wire)
        else:
            await self._serve_gateway(hello, wire)

    async def _serve_worker(self, hello: WorkerHello, wire: Wire[ToController]) -> None:
        if hello.worker in self._lost or hello.worker in self._workers:
            wire.send(Refused(f"{hello.worker} was given up before"))
            wire.close()
            return
        self._workers[hello.worker] = wire
        self._peers[hello.worker] = Peer(hello.worker, hello.data_address, hello.token_address)
        self._tell_peers()
        self._push(WorkerJoined(hello.worker, hello.device, hello.report))
        async for message in wire:
            if not isinstance(message, WorkerEvent):
                wire.error = f"a worker sent {type(message).__name__}"
                wire.close()
                break
            self._push(message)
        _log.info("worker %s is gone: %s", hello.worker, wire.error)
        del self._workers[hello.worker], self._peers[hello.worker]
        self._lost[hello.worker] = None
        self._push(WorkerLost(hello.worker, wire.error or "connection closed"))
        self._tell_peers()

    async def _serve_gateway(self, hello: GatewayHello, wire: Wire[ToController]) -> None:
        name = hello.gateway
        self._gateways[name] = wire
        wire.send(self._peers_message())
        if self._last_status is not None:
            wire.send(self._last_status)
        async for message in wire:
            if isinstance(message, RequestTimed):
                self._gateway_of.pop(message.line.request, None)
                if self._record is not None:
                    self._record.write(message.line)
            elif isinstance(message, (RequestArrived, RequestCancelled, RequestEnded)):
                if isinstance(message, RequestArrived):
                    self._gateway_of[message.request] = name
                self._push(message)
            else:
                wire.error = f"a gateway sent {type(message).__name__}"
                wire.close()
                break
        _log.info("gateway %s is gone: %s", name, wire.error)
        if self._gateways.get(name) is wire:
            del self._gateways[name]
            for request in [r for r, g in self._gateway_of.items() if g == name]:
                del self._gateway_of[request]
                self._push(RequestCancelled(request))

    def _peers_message(self) -> Peers:
        return Peers(tuple(self._peers[worker] for worker in sorted(self._peers)))

    def _tell_peers(self) -> None:
        message = self._peers_message()
        for wire in (*self._workers.values(), *self._gateways.values()):
            wire.send(message)

    def finish(self) -> None:
        """Write down the scale events that were still under way."""
        if self._record is not None:
            for line in self._tracker.flush():
                self._record.write(line)


async def _main(boot: ControllerBoot) -> None:
    file = append_to_record(Path(boot.record)) if boot.record else None
    process = ControllerProcess(boot, RecordWriter(file) if file else None)
    server = await asyncio.start_server(process.accept, sock=socket.socket(fileno=boot.listen_fd))
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    report(Status(is_ready=True))

    async def flush() -> None:
        while True:
            await asyncio.sleep(_FLUSH_S)
            process.show_loads()
            if file is not None:
                file.flush()

    tasks = [asyncio.create_task(part) for part in (process.run(), flush(), stop.wait())]
    async with server:
        done, _ = await asyncio.wait(tasks[::2], return_when=asyncio.FIRST_COMPLETED)
    process.finish()
    if file is not None:
        file.close()
    for task in done:
        task.result()  # a bug in the controller ends the process with its traceback


def main() -> None:
    """Run until SIGTERM, or until standard input ends because the supervisor is gone."""
    asyncio.run(_main(read_boot(ControllerBoot)))
