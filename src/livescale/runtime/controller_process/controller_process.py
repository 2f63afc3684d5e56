"""The controller process: feeds events to the pure Controller and carries out its commands.

No decision is made here. Workers and gateways connect to a listening socket that the supervisor
keeps open, so that they can come back at once when this process is replaced.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from livescale.control.cluster.incarnations import Incarnations
from livescale.control.cluster.next_step import NextStep
from livescale.control.controller import Controller
from livescale.member.inputs import receiver_of
from livescale.messages import commands, events
from livescale.messages.epochs import ControllerEpoch, Fenced
from livescale.runtime.controller_process.gateway_wires import GatewayWires
from livescale.runtime.controller_process.joined_gateways import JoinedGateways
from livescale.runtime.controller_process.joined_hosts import JoinedHosts
from livescale.runtime.controller_process.models_ahead import ModelsAhead
from livescale.runtime.controller_process.shown_status import ShownStatus
from livescale.runtime.controller_process.step_news import StepNews
from livescale.runtime.lease.lease_keeper import LeaseKeeper
from livescale.runtime.lease.standing_by import boot_acting, boot_with, keeper_of, wait_for_lease
from livescale.runtime.lease.tenure import Tenure
from livescale.runtime.models.publication import Publication
from livescale.runtime.wire import joining, protocol
from livescale.runtime.wire.boot import (
    ControllerBoot,
    PoolDrains,
    PoolEnds,
    Status,
    answer_parent_from,
    heed_parent,
    read_boot,
    report,
)
from livescale.runtime.wire.doors import CONTROLLER_DOOR, Door, open_credentials
from livescale.runtime.wire.heartbeat import Heartbeats
from livescale.runtime.wire.news import News
from livescale.runtime.wire.wire_channel import Wire
from livescale.telemetry.history.follower import Follower
from livescale.telemetry.record.record import RequestLine
from livescale.telemetry.recording import FLUSH_S, Recording
from livescale.values.types import WorkerRef

_log = logging.getLogger(__name__)


_Member = tuple[Wire[protocol.ToController], protocol.MemberHello]


class ControllerProcess:
    """One life of the controller: its wires, its event queue and its record."""

    def __init__(self, boot: ControllerBoot, tenure: Tenure) -> None:
        self._tenure = tenure
        # Hosts and heads tell the same where it is true: a gateway ends no controller.
        tenure.believes = lambda wire: not self._is_gateways(wire)
        self._next_step = NextStep(boot.pool.step_gap_us * 1000)
        self._controller = Controller(boot.config)
        #: what may be known of it, as of the last step
        self._status = self._controller.status()
        self._follower = Follower()
        self._follower.begin(boot.config)
        self._publication = Publication(
            catalog=boot.catalog,
            config=boot.pool,
            status=lambda: self._status,
            push=self._push,
            announce=self._announce,
            has_agents=boot.config.agents_expected > 0,
        )
        #: what this side of all wires proves who it is with (None: the secret alone)
        self.tls = open_credentials(boot.pool.tls_dir)
        self.hosts = JoinedHosts(boot, self._publication, self._push, self.tls)
        self.joined_gateways = JoinedGateways(boot, self.tls)
        self.heartbeats = Heartbeats(boot.pool.lost_after_ms)
        self._news = StepNews()
        #: what is written down of this life (None: nothing)
        self.recording: Recording | None = None
        if boot.pool.record is not None:
            self.recording = Recording(
                Path(boot.pool.record),
                boot.pool.record_bytes_max,
                boot.config,
                self._follower,
                msgspec.to_builtins(boot.pool),
                boot.start,
            )
        self._has_events = asyncio.Event()
        #: workers and agents: their wires, and where they can be reached
        self._members: dict[WorkerRef, _Member] = {}
        self._ahead = ModelsAhead()
        self._incarnations = Incarnations()
        self._gateways = GatewayWires(
            tenure, self._publication, self._push, self._request_is_over, self._examine
        )
        self.shown = ShownStatus(self._publication, self._gateways.send)
        for model in boot.catalog.models:
            if model.is_leaving:
                self._push(events.ModelRemoved(model.entry.spec.name))

    # -- the step loop --------------------------------------------------------------------------

    async def run(self) -> None:
        """Step the controller whenever an event waits, at most every `step_gap_us`."""
        # An earlier life may have ended between a change and its last word on it.
        await self._publication.keep()
        while True:
            await self._until_due()
            if self._tenure.is_over():
                return
            self._step()

    async def _until_due(self) -> None:
        """Wait for the next step's time. An event makes that earlier, unless one waits already."""
        while (left_s := self._left_s()) is None or left_s > 0:
            if left_s is not None and self._has_events.is_set():
                await asyncio.sleep(left_s)
                continue
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_events.wait(), left_s)

    def _left_s(self) -> float | None:
        due_ns = self._next_step.due_ns
        return None if due_ns is None else (due_ns - time.monotonic_ns()) / 1e9

    def _step(self) -> None:
        now_ns = time.monotonic_ns()
        absorbed = self._next_step.begin(now_ns)
        self._has_events.clear()
        decided = self._controller.step(now_ns, absorbed)
        self._status = self._controller.status()
        changes = self._follower.step(now_ns, absorbed, decided)
        news = self._news.observe(now_ns, changes, self._status.models)
        if news:
            report(Status(news=news))
        for command in decided:
            self._carry_out(command)
        self.shown.absorb(absorbed, decided, self._status.instances)
        self._publication.observe(changes)
        holders = (hello.holder for _, hello in self._members.values())
        there = ((holder.host, holder.ref) for holder in holders)
        self._news.leave(self.hosts.observe(there, self._status.free))
        if self.recording is not None:
            self.recording.step(now_ns, absorbed, decided, changes)
        self.shown.show(self._status, self._is_recording)
        # After the status: a client that receives the failure may ask for its reason at once.
        for command in decided:
            if isinstance(command, commands.FailRequest):
                self._gateways.send_for(command.request, command)

    def _push(self, event: events.AnyEvent) -> None:
        self._next_step.push(event)
        self._has_events.set()

    # -- carrying out commands ------------------------------------------------------------------

    def _carry_out(self, command: commands.AnyCommand) -> None:
        if isinstance(command, commands.StartHolding):
            entry = self._publication.entry(command.model)
            self._order(protocol.Order(command, entry.manifest, entry.directory))
        elif isinstance(
            command,
            commands.AmendHolding
            | commands.ChangeDuty
            | commands.ReleaseHolding
            | commands.DropHolding
            | commands.SetCores,
        ):
            self._order(protocol.Order(command))
        elif isinstance(command, commands.Dispatch):
            self._gateways.send_for(command.request, command)
        elif isinstance(command, commands.WakeAt):
            self._next_step.wake_at(command.at_ns)
        elif isinstance(command, commands.ModelGone):
            self._publication.gone(command.model)
            self.shown.loads.forget(command.model)

    def _order(self, order: protocol.Order) -> None:
        """Send the order. A member who is gone needs none: its WorkerLost is on the way and ends
        everything that it was asked."""
        member = self._members.get(receiver_of(order.command))
        if member is not None:
            member[0].send(order)

    @property
    def _is_recording(self) -> bool | None:
        return self.recording.problem is None if self.recording is not None else None

    def tell_progress(self) -> None:
        """Tell the supervisor how far loads are, if they got on, and which workers it needs."""
        if (loads := self._news.progress(time.monotonic_ns())) is not None:
            report(Status(loads=loads))
        hosts = {ref: hello.holder.host for ref, (_, hello) in self._members.items()}
        lacking, busy = self._controller.lacking_workers(), self._controller.busy_workers()
        self.hosts.tell_need(lacking, hosts, busy)

    # -- what comes in --------------------------------------------------------------------------

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, whose other end is a member, to its end."""
        wire: Wire[protocol.ToController] = Wire(reader, writer, protocol.ToController)
        hello = await self._tenure.hello(wire)
        self.heartbeats.add(wire)
        if isinstance(hello, protocol.MemberHello | joining.HostHello) and self._is_gateways(wire):
            wire.send(
                protocol.Refused(
                    "The certificate of this machine is for a gateway. Make one for a node "
                    "with `livescale cluster member`"
                )
            )
            wire.close()
        elif isinstance(hello, protocol.MemberHello):
            await self._serve_member(hello, wire)
        elif isinstance(hello, protocol.GatewayHello):
            await self._gateways.serve(hello, wire, self._known())
        elif isinstance(hello, joining.HostHello):
            await self.hosts.serve(hello, wire)
        elif isinstance(hello, joining.GatewayJoins):
            await self.joined_gateways.serve(hello, wire)
        elif isinstance(hello, Fenced):
            # Who sends this has another wire, to this life or to a later one.
            wire.close()
        else:
            _log.warning("The controller closed a connection without a greeting (%s)", wire.error)
            wire.close()

    def _is_gateways(self, wire: Wire[protocol.ToController]) -> bool:
        """The certificate at the other end is that of a machine that may be a gateway only."""
        return self.tls is not None and self.tls.is_gateways(wire.certificate)

    async def _serve_member(
        self, hello: protocol.MemberHello, wire: Wire[protocol.ToController]
    ) -> None:
        """A worker or an agent, until its wire ends."""
        ref = hello.holder.ref
        if not self._incarnations.join(ref):
            wire.send(protocol.Refused(f"{ref} was given up before"))
            wire.close()
            return
        self._members[ref] = wire, hello
        self._tell_members()
        self._push(hello.joined)
        async for message in self._tenure.listen(wire):
            if isinstance(message, protocol.Examined):
                self._gateways.examined(message)
                continue
            if not isinstance(
                message, protocol.AgentEvent if ref.is_agent else protocol.WorkerEvent
            ):
                wire.error = f"{ref} sent {type(message).__name__}"
                wire.close()
                break
            self._push(message)
        _log.info("%s is disconnected: %s", ref, wire.error)
        del self._members[ref]
        self._incarnations.lose(ref)
        self._push(events.WorkerLost(ref, wire.error or "connection closed"))
        self._tell_members()

    def _announce(self) -> None:
        """The catalog changed: gateways serve by it, and the next life must know it."""
        self._gateways.send(self._publication.catalog())
        report(Status(catalog=self._publication.kept()))
        self._ahead.tell(self._members, self._publication.models.values())

    def _peers_message(self) -> protocol.Peers:
        hellos = [hello for _, (_, hello) in sorted(self._members.items())]
        return protocol.Peers(
            tuple(
                protocol.Peer(hello.holder.ref, hello.token_address)
                for hello in hellos
                if hello.token_address is not None
            )
        )

    def _tell_members(self) -> None:
        """Who is there: the data planes of all, and to gateways the workers."""
        members = sorted(self._members.items())
        self._to_members(protocol.Holders(tuple(hello.holder for _, (_, hello) in members)))
        self._gateways.send(self._peers_message())
        self._ahead.tell(self._members, self._publication.models.values())

    def _to_members(self, message: protocol.Holders | protocol.Examine) -> None:
        for wire, _ in self._members.values():
            wire.send(message)

    def _known(self) -> list[protocol.Catalog | protocol.Peers | protocol.PoolStatus]:
        """What a gateway is told first."""
        status = [] if self.shown.last is None else [self.shown.last]
        return [self._publication.catalog(), self._peers_message(), *status]

    def _examine(self, question: protocol.Examine) -> Iterable[WorkerRef]:
        self._to_members(question)
        return self._members

    def _request_is_over(self, line: RequestLine) -> None:
        if self.recording is not None:
            self.recording.request(line)

    async def flush_record(self) -> None:
        """Let readers of the record see what was noted, and gateways that it was closed."""
        if self.recording is None:
            return
        models = self._status.models.values()
        await self.recording.flush(one.policy for one in models)
        last = self.shown.last
        if last is not None and last.is_recording != self._is_recording:
            self.shown.show(self._status, self._is_recording)


async def _main(boot: ControllerBoot) -> None:
    listener = socket.socket(fileno=boot.listen_fd)
    stop = asyncio.Event()
    pool_drains, pool_ends = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)

    latest = boot.catalog

    def take(word: PoolDrains | PoolEnds | protocol.Catalog) -> None:
        nonlocal latest
        if isinstance(word, protocol.Catalog):
            latest = word
        elif isinstance(word, PoolDrains):
            pool_drains.set()
        else:
            pool_ends.set()
            stop.set()

    def heed(line: bytes) -> None:
        word = msgspec.json.decode(line, type=PoolDrains | PoolEnds | protocol.Catalog)
        loop.call_soon_threadsafe(take, word)

    heed_parent(heed)
    answer_parent_from(loop)
    report(Status(is_ready=True))
    keeper = keeper_of(boot)
    if keeper is None:
        epoch = ControllerEpoch(boot.start, boot.config.epoch)
        process = await _act(boot, epoch, listener, stop, pool_drains)
        if pool_ends.is_set():
            process.hosts.say_farewell()
    elif await wait_for_lease(listener, keeper, stop):
        # Of several heads the others go on with the hosts.
        acting, epoch = boot_acting(boot_with(boot, latest), keeper.epoch)
        await _act(acting, epoch, listener, stop, pool_drains, keeper)
        if stop.is_set():
            await keeper.give_back()


async def _act(
    boot: ControllerBoot,
    epoch: ControllerEpoch,
    listener: socket.socket,
    stop: asyncio.Event,
    pool_drains: asyncio.Event,
    keeper: LeaseKeeper | None = None,
) -> ControllerProcess:
    """Be the pool's controller until `stop`, or until another one is."""
    tenure = Tenure(epoch) if keeper is None else Tenure(epoch, keeper.holds)
    process = ControllerProcess(boot, tenure)
    door = Door(boot.secret, CONTROLLER_DOOR, process.serve, tls=process.tls)
    server = await asyncio.start_server(door.accept, sock=listener)
    # What was imported lives as long as the process: looking through it again and again would stop
    # decisions for tens of milliseconds.
    gc.collect()
    gc.freeze()

    async def show() -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            process.shown.show_loads()
            process.tell_progress()

    async def flush() -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await process.flush_record()

    async def keep() -> None:
        assert keeper is not None
        tenure.end(f"the lease is lost: {await keeper.lost()}")

    async def drain() -> None:
        await pool_drains.wait()
        process.joined_gateways.say_farewell()
        await stop.wait()

    parts = [process.run(), process.heartbeats.run(), show(), flush(), drain(), stop.wait()]
    if process.tls is not None:
        parts.append(process.tls.run())
    tasks = [asyncio.create_task(part) for part in parts]
    if keeper is not None:
        tasks.append(asyncio.create_task(keep()))
    async with server:
        parties: list[asyncio.Future[Any]] = [*tasks, tenure.over]
        await asyncio.wait(parties, return_when=asyncio.FIRST_COMPLETED)
        done = [task for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        if tenure.over.done():
            report(Status(news=(News(f"the controller stops: {tenure.over.result()}", True),)))
    if process.recording is not None:
        process.recording.finish()
    for task in done:
        task.result()  # a bug in the controller ends the process with its traceback
    return process


def main() -> None:
    """Run until the pool ends, until SIGTERM, which ends this life alone, or until standard input
    ends because the supervisor is gone."""
    asyncio.run(_main(read_boot(ControllerBoot)))
