"""The simulated world: it carries out what the controller orders, in virtual time.

The world makes no decisions. It owns the clock, the connections and the lives of controller and
workers; the run record it writes is of the same kind as a real pool's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any

import msgspec

from livescale.control.controller import Controller
from livescale.control.liveness import look_gap_ns
from livescale.member.inputs import ControllerMet, GatewayGone, GatewayUnknown, MemberOrder
from livescale.member.member import Member
from livescale.messages import commands, events
from livescale.messages.attempts import AttemptTaken
from livescale.sim.checkers.commands import CommandChecker
from livescale.sim.checkers.failures import FailureChecker
from livescale.sim.checkers.invariants import Checkers
from livescale.sim.checkers.layers import LayerChecker
from livescale.sim.checkers.live import LiveChecker
from livescale.sim.checkers.requests import RequestChecker
from livescale.sim.checkers.tables import TableChecker
from livescale.sim.clock import STEP_PRIORITY, Clock
from livescale.sim.config import ModelChange, SimConfig
from livescale.sim.faults import Delays, FaultPlan, FaultSite
from livescale.sim.gateway import GatewayEvent, GatewayOrder, Row, SimGateway
from livescale.sim.links.channel import SimChannel
from livescale.sim.links.live_link import LiveLink
from livescale.sim.links.lossy import LossyChannel
from livescale.sim.links.transfers import Transfers
from livescale.sim.member import GATEWAY, SimMember
from livescale.sim.member_world import MemberWorld
from livescale.sim.refusals import Refusals
from livescale.sim.run_notes import RunNotes
from livescale.sim.silence import Silences, Watcher
from livescale.sim.worker_messages import FromWorkerMessage, ToWorkerMessage
from livescale.telemetry.history.follower import Follower
from livescale.telemetry.scale_events import ScaleTracker
from livescale.topology import Topology
from livescale.types import AGENT_NUMBERS_FROM, RequestId, WorkerRef, agent_ref

#: when parameters begin or end to move, what links have carried is noted
_BYTES_MOVE = (commands.StartHolding, events.HoldingCompleted, events.HoldingFailed)


@dataclass(slots=True)
class _Life:
    """One life of the controller and the connections made to it."""

    controller: Controller
    checker: CommandChecker
    table: TableChecker
    follower: Follower
    tracker: ScaleTracker
    #: of every member that met this controller: what comes from there and what goes there
    uplinks: dict[WorkerRef, SimChannel[events.AnyEvent]]
    orders: dict[WorkerRef, SimChannel[MemberOrder]]
    #: incarnations that were silent: refused if they come back
    lost: dict[WorkerRef, None] = field(default_factory=dict)
    began_ns: int = 0
    gateway_uplink: SimChannel[GatewayEvent] | None = None
    gateway_orders: SimChannel[GatewayOrder] | None = None


class SimWorld:
    """One run. Schedule requests with `arrive_at`, then `run`."""

    def __init__(
        self,
        config: SimConfig,
        plan: FaultPlan,
        delays: Delays,
        record_file: IO[bytes] | None,
        make_member: Callable[..., Member] = Member,
    ) -> None:
        """`make_member` takes the arguments of a Member."""
        self.config = config
        self.clock = Clock()
        self.notes = RunNotes(record_file)
        self.steps = 0
        self.stale_events = 0
        self._delays = delays
        self._make_member = make_member
        #: models that are served, withdrawn ones included until they are gone
        self._policies = {policy.spec.name: policy for policy in config.controller.models}
        self._leaving: dict[str, None] = {}
        self._topology = Topology(
            leaves={leaf.name: leaf for leaf in config.controller.leaves},
            group_bytes_per_s=config.controller.group_bytes_per_s,
            remote_storage_bytes_per_s=config.controller.remote_storage_bytes_per_s,
        )
        self._transfers = Transfers(
            self.clock,
            self._topology,
            config.holder_wait_ns,
            config.stall_ns,
            config.load_ns,
            config.controller.parameter_share_percent,
        )
        self._refusals = Refusals(self.clock)
        self._failures = FailureChecker(config.controller, self._may_loads_fail)
        self._requests = RequestChecker(config, self._failures)
        self._checkers = Checkers(config.policies)
        self._live_link = LiveLink(
            self.clock, self._transfers.serving, self._worker_delay_ns, self._hand_over
        )
        self._live_checker = LiveChecker(config, self._live_link.free_ns)
        specs = {policy.spec.name: policy.spec for policy in config.policies}
        self._layers = LayerChecker(specs, self._transfers.missing_bytes)
        self._gateway = SimGateway(
            self.clock,
            config,
            self._requests,
            self._gateway_says,
            self.notes.request,
        )
        for name in self._policies:
            self._gateway.serve(name)
        #: living members, by number
        self._workers: dict[int, SimMember] = {}
        self._agents: dict[int, SimMember] = {}
        #: connections of living workers to the gateway
        self._emitting: dict[WorkerRef, SimChannel[FromWorkerMessage]] = {}
        self._life: _Life | None = None
        self._lives = 0
        self._inbox: list[events.AnyEvent] = []
        self._has_step_ahead = False
        self._last_step_ns = -config.step_gap_ns
        faults = config.faults
        self._silences = Silences(
            clock=self.clock,
            lost_after_ns=faults.lost_after_ns,
            until_ns=faults.until_ns + faults.silence_ns_max,
            goes_on=self._goes_on,
        )
        self._horizon_ns = max(config.faults.until_ns, *(c.at_ns for c in config.changes), 0)
        self._begin_life()
        refs = [WorkerRef(number) for number in range(config.workers)]
        refs += [agent_ref(number) for number in range(len(config.hosts))]
        for ref in refs:
            self.clock.after(delays.reconnect_ns(), partial(self._start_member, ref))
        self._schedule(plan)
        for number, watcher in enumerate(self._watchers() if plan.silences else ()):
            self._silences.watch(watcher, (number + 1) * look_gap_ns(faults.lost_after_ns) // 4)

    # -- for whoever drives the world -----------------------------------------------------------

    def arrive_at(self, request: RequestId, model: str, row: Row) -> None:
        """Let the request come at its time."""
        self._horizon_ns = max(self._horizon_ns, row.arrival_ns)
        self.clock.at(row.arrival_ns, lambda: self._gateway.arrive(request, model, row))

    def run(self) -> None:
        """Run until nothing is left to happen, then demand that everything ended well."""
        limit_ns = self._horizon_ns + self.config.grace_ns
        while self.clock.now_ns <= limit_ns and self.clock.run_next():
            pass
        self._requests.all_ended()
        assert not self._leaving, f"{list(self._leaving)} were withdrawn and are not gone"
        assert self._life is not None
        self._life.checker.all_answered()
        assert self.clock.now_ns <= limit_ns, f"{self!r} does not come to rest"
        self._life.controller.validate()
        self._life.checker.at_rest(
            {member.ref: member.reports for member in self._living()},
            {name: policy.instances_min for name, policy in self._policies.items()},
        )
        self._transfers.check_links()
        for worker in self._workers.values():
            worker.come_to_rest()
        self._flush(self._life)

    def __repr__(self) -> str:
        controller = self._life.controller if self._life is not None else "no controller"
        return f"<SimWorld {self.clock!r}, {len(self._workers)} workers, {controller!r}>"

    # -- the controller's lives -----------------------------------------------------------------

    def _begin_life(self) -> None:
        models = tuple(self._policies.values())
        config = msgspec.structs.replace(self.config.controller, epoch=self._lives, models=models)
        self._lives += 1
        self._life = _Life(
            Controller(config),
            CommandChecker(config, self._failures),
            TableChecker(),
            Follower(),
            ScaleTracker(),
            uplinks={},
            orders={},
            began_ns=self.clock.now_ns,
        )
        self._life.follower.begin(config)
        self.notes.begin(config, {"sim": msgspec.to_builtins(self.config)})
        for name in self._leaving:
            self._push(events.ModelRemoved(name))
        self.clock.after(self._delays.reconnect_ns(), partial(self._connect_gateway, self._life))
        for member in self._living():
            delay_ns = self._delays.reconnect_ns()
            self.clock.after(delay_ns, partial(self._connect_member, self._life, member))

    def _end_life(self) -> None:
        """The controller is killed; what it was told and has not acted on is lost."""
        life = self._life
        if life is None:
            return
        life.controller.validate()
        now_ns = self.clock.now_ns
        # What it sent last may be lost too. The peers come back only to the next life.
        lost_after_ns = now_ns - self._delays.loss_window_ns()
        for channel in (*life.uplinks.values(), life.gateway_uplink):
            if channel is not None:
                channel.cut(-1)
        for orders in (*life.orders.values(), life.gateway_orders):
            if orders is not None:
                orders.cut(lost_after_ns)
        self._life = None
        self._inbox = []
        self._flush(life)
        self.clock.after(self.config.faults.downtime_ns, self._begin_life)

    def _flush(self, life: _Life) -> None:
        self.stale_events += life.controller.stale_events
        self.notes.scales_of(life.tracker.flush())

    # -- stepping -------------------------------------------------------------------------------

    def _push(self, event: events.AnyEvent) -> None:
        """An event reached the controller: it steps when its gap allows."""
        self._inbox.append(event)
        if not self._has_step_ahead:
            self._has_step_ahead = True
            step_ns = max(self.clock.now_ns, self._last_step_ns + self.config.step_gap_ns)
            self.clock.at(step_ns, self._step, STEP_PRIORITY)

    def _step(self) -> None:
        self._has_step_ahead = False
        life = self._life
        if life is None or not self._inbox:
            return
        received, self._inbox = self._inbox, []
        now_ns = self._last_step_ns = self.clock.now_ns
        self.steps += 1
        ordered = life.controller.step(now_ns, received)
        self.notes.step(now_ns, received, ordered)
        life.checker.observe(now_ns, received, ordered)
        life.table.observe(life.controller.fleet, received, ordered)
        self._layers.ordered(ordered)
        self._silences.ordered(ordered, life.began_ns)
        changes = life.follower.step(now_ns, received, ordered)
        self.notes.scales_of(life.tracker.observe(now_ns, changes, now_ns))
        for command in ordered:
            self._carry_out(life, command)
        self.notes.count_instances(now_ns, life.controller)
        if any(isinstance(news, _BYTES_MOVE) for news in (*received, *ordered)):
            self.notes.traffic(now_ns, self._transfers.carried_bytes())

    def _carry_out(self, life: _Life, command: commands.AnyCommand) -> None:
        if isinstance(command, MemberOrder):
            life.orders[command.holding.member].send(command)
        elif isinstance(command, commands.Dispatch | commands.FailRequest):
            # The controller knows requests from this gateway only, so it is connected.
            assert life.gateway_orders is not None
            life.gateway_orders.send(command)
        elif isinstance(command, commands.WakeAt):
            self.clock.at(command.at_ns, partial(self._wake, life))
        elif isinstance(command, commands.ModelGone):
            del self._policies[command.model], self._leaving[command.model]
            self._checkers.gone(command.model)

    def _wake(self, life: _Life) -> None:
        if self._life is life:
            self._push(events.Tick())

    # -- models ---------------------------------------------------------------------------------

    def _change_models(self, change: ModelChange) -> None:
        """Without a controller nothing is lost: the next one is told what is served."""
        if change.added is not None:
            self._policies[change.added.spec.name] = change.added
            self._gateway.serve(change.added.spec.name)
            event: events.AnyEvent = events.ModelAdded(change.added)
        elif change.changed is not None:
            name = change.changed.spec.name
            if name not in self._policies or name in self._leaving:
                return
            self._policies[name] = change.changed
            event = events.ModelChanged(change.changed)
        else:
            self._leaving[change.removed] = None
            self._gateway.withdraw(change.removed)
            event = events.ModelRemoved(change.removed)
        if self._life is not None:
            self._push(event)

    # -- connections ----------------------------------------------------------------------------

    def _deliver_to(self, life: _Life, event: events.AnyEvent) -> None:
        if self._life is life:
            self._push(event)

    def _worker_delay_ns(self) -> int:
        return self._delays.of_worker_ns(self.clock.now_ns)

    def _uplink(self, life: _Life) -> LossyChannel:
        """A member's way to this life of the controller."""
        return LossyChannel(
            self.clock,
            self._worker_delay_ns,
            partial(self._deliver_to, life),
            lambda: self._delays.loses(self.clock.now_ns),
        )

    def _connect_gateway(self, life: _Life) -> None:
        if self._life is not life:
            return
        delay = self._delays.plain_ns
        life.gateway_uplink = SimChannel(self.clock, delay, partial(self._deliver_to, life))
        life.gateway_orders = SimChannel(self.clock, delay, self._gateway.take_order)
        self._gateway.joined()

    def _connect_member(self, life: _Life, member: SimMember) -> None:
        ref = member.ref
        if self._life is not life or self._fellows(ref).get(ref.worker) is not member:
            return
        if self._silences.is_silent(ref) or ref in life.uplinks:
            return
        uplink = life.uplinks[ref] = self._uplink(life)
        life.orders[ref] = SimChannel(self.clock, self._delays.plain_ns, member.take_order)
        if member.host is not None:
            uplink.send(events.AgentJoined(ref, member.host, member.reports))
        elif member.device is not None:
            self._live_link.join(ref, member)
            uplink.send(events.WorkerJoined(ref, member.device, member.reports))
        member.put(ControllerMet())

    def _gateway_says(self, event: GatewayEvent) -> None:
        self._requests.said(event)
        # Without a controller nothing is lost: the next one hears of every transcript.
        if self._life is not None and self._life.gateway_uplink is not None:
            self._life.gateway_uplink.send(event)

    def _member_reports(self, ref: WorkerRef, event: events.AnyEvent) -> None:
        self._layers.says(ref, event)
        # The next controller learns from WorkerJoined what is left of it.
        if self._life is not None and ref in self._life.uplinks:
            self._life.uplinks[ref].send(event)

    # -- members --------------------------------------------------------------------------------

    def _fellows(self, ref: WorkerRef) -> dict[int, SimMember]:
        """The living members of its kind."""
        return self._agents if ref.is_agent else self._workers

    def _start_member(self, ref: WorkerRef) -> None:
        device = host = None
        if ref.is_agent:
            host = self.config.hosts[ref.worker - AGENT_NUMBERS_FROM]
            self._topology.agents[ref] = host
        else:
            device = self._topology.devices[ref] = self.config.device(ref.worker)
        around = MemberWorld(
            ref=ref,
            config=self.config,
            clock=self.clock,
            transfers=self._transfers,
            refusals=self._refusals,
            checkers=self._checkers,
            live_checker=self._live_checker,
            report=partial(self._member_reports, ref),
            emit=partial(self._emit, ref),
            tell=partial(self._live_link.send, ref),
            make_member=self._make_member,
            device=device,
            host=host,
        )
        member = self._fellows(ref)[ref.worker] = SimMember(around)
        if not ref.is_agent:
            self._live_link.join(ref, member)
            self._meet_gateway(member)
        if self._life is not None:
            self._connect_member(self._life, member)

    def _meet_gateway(self, worker: SimMember) -> None:
        """A connection between the two is open."""
        self._emitting[worker.ref] = SimChannel(
            self.clock, self._worker_delay_ns, partial(self._gateway.take_message, worker.ref)
        )
        requests: SimChannel[ToWorkerMessage] = SimChannel(
            self.clock, self._delays.plain_ns, worker.take_request
        )
        self._gateway.meet(worker.ref, requests)

    def _emit(self, ref: WorkerRef, message: FromWorkerMessage) -> None:
        """A worker tells the gateway, if there is a connection."""
        if ref in self._emitting:
            self._emitting[ref].send(message)
        elif isinstance(message, AttemptTaken):
            unknown = GatewayUnknown(GATEWAY, message.request, message.attempt)
            self._workers[ref.worker].put(unknown)

    def _lose_member(self, number: int) -> None:
        """The member dies: the last of what it sent is lost, then both sides see the end."""
        fellows = self._fellows(WorkerRef(number))
        member = fellows.pop(number, None)
        if member is None:
            return
        ref = member.ref
        lost_after_ns = self.clock.now_ns - self._delays.loss_window_ns()
        member.die()
        self._silences.died(ref)
        self._live_link.leave(ref)
        if ref.is_agent:
            del self._topology.agents[ref]
        else:
            del self._topology.devices[ref]
        if ref in self._emitting:
            gone = partial(self._gateway.worker_gone, ref)
            self._emitting.pop(ref).cut(lost_after_ns, gone)
        life = self._life
        if life is not None and ref in life.uplinks:
            lost = events.WorkerLost(ref, "killed by a fault")
            life.uplinks[ref].cut(lost_after_ns, partial(self._deliver_to, life, lost))
            life.orders[ref].cut(-1)
        successor = WorkerRef(number, ref.incarnation + 1)
        self.clock.after(self.config.faults.rejoin_ns, partial(self._start_member, successor))

    def _hand_over(self, sender: WorkerRef, receiver: WorkerRef) -> None:
        """A live batch goes over; maybe one of both is lost meanwhile."""
        loss = self._delays.pair_loss(self.clock.now_ns)
        if loss is not None:
            which, after_ns = loss
            number = (sender, receiver)[which].worker
            self.clock.after(after_ns, partial(self._lose_member, number))

    # -- members that are silent ----------------------------------------------------------------

    def _watchers(self) -> list[Watcher]:
        return [
            Watcher("controller", self._met_by_controller, self._controller_gives_up),
            Watcher("gateway", self._met_by_gateway, self._gateway_gives_up),
            Watcher(
                "supervisor",
                lambda: [member.ref for member in self._living()],
                self._lose,
                is_local=True,
            ),
        ]

    def _living(self) -> list[SimMember]:
        return [*self._workers.values(), *self._agents.values()]

    def _find(self, ref: WorkerRef) -> SimMember | None:
        """This life of a member, unless it is over."""
        member = self._fellows(ref).get(ref.worker)
        return member if member is not None and member.ref == ref else None

    def _met_by_controller(self) -> list[WorkerRef]:
        life = self._life
        if life is None:
            return []
        refs = [member.ref for member in self._living()]
        return [ref for ref in refs if ref in life.uplinks and ref not in life.lost]

    def _met_by_gateway(self) -> list[WorkerRef]:
        for worker in self._gateway.workers_with_requests():
            # Of one that is dead the end is on its way.
            if worker in self._emitting:
                self._silences.left_with(worker, "requests")
        return list(self._emitting)

    def _channels(self, ref: WorkerRef) -> list[SimChannel[Any]]:
        """The connections of a member."""
        found: list[SimChannel[Any] | None] = [
            self._emitting.get(ref),
            self._gateway.channel_to(ref),
        ]
        if self._life is not None:
            life = self._life
            found += [life.uplinks.get(ref), life.orders.get(ref)]
        return [channel for channel in found if channel is not None]

    def _silence(self, ref: WorkerRef, silent_ns: int, is_stopped: bool) -> None:
        if not self._silences.is_silent(ref):
            self._silences.begin(ref, silent_ns, is_stopped=is_stopped)
            self._live_link.hold(ref)
            for channel in self._channels(ref):
                channel.hold()

    def _goes_on(self, ref: WorkerRef) -> None:
        """What was held up arrives. A member that was given up finds that out."""
        self._live_link.go_on(ref)
        for channel in self._channels(ref):
            channel.go_on()
        life, member = self._life, self._find(ref)
        delay_ns = self._delays.reconnect_ns()
        if life is not None and ref in life.lost:
            self.clock.after(delay_ns, partial(self._lose, ref))
        elif member is not None:
            if not ref.is_agent and ref not in self._emitting:
                member.put(GatewayGone(GATEWAY))
                self.clock.after(delay_ns, partial(self._come_back_to_gateway, member))
            if life is not None:
                self.clock.after(delay_ns, partial(self._connect_member, life, member))

    def _come_back_to_gateway(self, worker: SimMember) -> None:
        is_living = self._find(worker.ref) is worker
        if is_living and worker.ref not in self._emitting:
            self._meet_gateway(worker)
            if self._silences.is_silent(worker.ref):
                for channel in self._channels(worker.ref):
                    channel.hold()

    def _controller_gives_up(self, ref: WorkerRef) -> None:
        life = self._life
        assert life is not None, f"no watcher gives {ref} up"
        life.lost[ref] = None
        life.uplinks[ref].cut(-1)
        life.orders[ref].cut(-1)
        self._live_link.leave(ref)
        self._push(events.WorkerLost(ref, "it is silent"))

    def _gateway_gives_up(self, ref: WorkerRef) -> None:
        self._emitting.pop(ref).cut(-1)
        self._gateway.worker_gone(ref)

    def _lose(self, ref: WorkerRef) -> None:
        """This incarnation ends, if it lives."""
        if self._find(ref) is not None:
            self._lose_member(ref.worker)

    def _may_loads_fail(self, model: str, since_ns: int) -> bool:
        """Files of the model were wrong, or a member refused the model, since then."""
        were_wrong = self._transfers.were_files_wrong(model, since_ns)
        return were_wrong or self._refusals.were_there(model, since_ns)

    def _schedule(self, plan: FaultPlan) -> None:
        """Let every change and every fault come at its time."""
        for change in self.config.changes:
            self.clock.at(change.at_ns, partial(self._change_models, change))
        site = FaultSite(
            config=self.config,
            clock=self.clock,
            transfers=self._transfers,
            refusals=self._refusals,
            workers=self._workers,
            agents=self._agents,
            lose=self._lose_member,
            end_life=self._end_life,
            cancel=self._gateway.cancel,
            silence=self._silence,
        )
        site.schedule(plan)
