"""One life of a simulated controller: its connections, its steps, and who looks at them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from livescale.control.cluster.incarnations import Incarnations
from livescale.control.cluster.next_step import NextStep
from livescale.control.controller import Controller
from livescale.control.state.config import ControllerConfig
from livescale.member.inputs import MemberOrder, receiver_of
from livescale.messages import commands, events
from livescale.messages.epochs import ControllerEpoch, Fenced
from livescale.sim.base.clock import STEP_PRIORITY, Clock
from livescale.sim.checkers.commands import CommandChecker
from livescale.sim.checkers.failures import FailureChecker
from livescale.sim.checkers.invariants import require
from livescale.sim.checkers.tables import TableChecker
from livescale.sim.links.channel import Delays, LossyChannel, SimChannel
from livescale.sim.world.gateway import SimGateway
from livescale.values.types import RequestId, WorkerRef

Stepped = Callable[
    ["ControllerLife", Sequence[events.AnyEvent], Sequence[commands.AnyCommand]], None
]
Peer = WorkerRef | str
"""A member, or the name of a gateway."""


class TakeOrder(Protocol):
    """How a member gets an order of this epoch."""

    def __call__(self, order: MemberOrder, *, epoch: ControllerEpoch) -> None: ...


@dataclass(frozen=True, slots=True)
class LifeWorld:
    """What all lives of the controller share. `stepped` is called with what a step received and
    ordered, before that is checked, and `decided` when all is carried out. The world is over at
    `until_ns`: wake-ups that are due later are left out. `gateway_of` says which gateway answers
    for a request."""

    clock: Clock
    delays: Delays
    step_gap_ns: int
    failures: FailureChecker
    stepped: Stepped
    decided: Callable[[ControllerLife], None]
    until_ns: Callable[[], int]
    gateway_of: Callable[[RequestId], str]


class ControllerLife:
    """Carries out what the controller orders, which begins with these models, until it is killed,
    or is told of a later life."""

    def __init__(self, config: ControllerConfig, world: LifeWorld) -> None:
        self.epoch = ControllerEpoch(number=config.epoch)
        self.controller = Controller(config)
        self.checker = CommandChecker(config, world.failures)
        self.began_ns = world.clock.now_ns
        self.incarnations = Incarnations()
        self._table = TableChecker()
        self._world = world
        self._clock = world.clock
        self._delays = world.delays
        self.is_over = False
        #: it does not receive that there is a later life
        self.is_deaf = False
        #: of every peer that met this controller what comes and what goes there
        self._uplinks: dict[Peer, SimChannel[events.AnyEvent | Fenced]] = {}
        self._orders: dict[Peer, SimChannel[Any]] = {}
        self._next_step = NextStep(world.step_gap_ns)
        self._last_ns = -world.step_gap_ns
        #: when the clock brings the next step, and its ticket (None: it does not)
        self._ahead: tuple[int, int] | None = None

    # -- connections ----------------------------------------------------------------------------

    def meet_gateway(self, gateway: SimGateway) -> None:
        """A connection to the gateway is open."""
        delay, epoch = self._delays.plain_ns, self.epoch
        self._uplinks[gateway.name] = SimChannel(self._clock, delay, self.push)
        take_order = partial(gateway.take_order, epoch=epoch)
        self._orders[gateway.name] = SimChannel(self._clock, delay, take_order)
        gateway.joined(epoch)

    def meet(self, member: WorkerRef, take_order: TakeOrder) -> None:
        """A connection to the member is open."""
        delays = self._delays
        self._uplinks[member] = LossyChannel(
            self._clock, delays.of_worker_ns, self.push, delays.loses
        )
        take_order = partial(take_order, epoch=self.epoch)
        self._orders[member] = SimChannel(self._clock, delays.plain_ns, take_order)

    def report(self, peer: Peer, event: events.AnyEvent | Fenced) -> None:
        """The peer sends an event, or that it has met a later life, if there is a connection."""
        if peer in self._uplinks and not self.is_over:
            self._uplinks[peer].send(event)

    def hold(self, peer: Peer) -> None:
        """Nothing gets through to the peer, or from there, and nothing is lost."""
        for channel in self.channels(peer):
            channel.hold()

    def go_on(self, peer: Peer) -> None:
        """What was held up arrives."""
        for channel in self.channels(peer):
            channel.go_on()

    def lose(self, peer: Peer, lost_after_ns: int) -> None:
        """The peer has died: what it sent after that time is lost, then comes the news."""
        if peer in self._uplinks:
            lost: events.AnyEvent
            if isinstance(peer, str):
                lost = events.GatewayLost(peer)
            else:
                self.incarnations.lose(peer)
                lost = events.WorkerLost(peer, "killed by a fault")
            self._uplinks[peer].cut(lost_after_ns, lambda: self.push(lost))
            self._orders[peer].cut(-1)

    def give_up(self, member: WorkerRef) -> None:
        """The member is silent for too long."""
        self.incarnations.lose(member)
        self._uplinks[member].cut(-1)
        self._orders[member].cut(-1)
        self.push(events.WorkerLost(member, "it is silent"))

    def channels(self, peer: Peer) -> list[SimChannel[Any]]:
        """The connections between the controller and the peer, both ways."""
        found = (self._uplinks.get(peer), self._orders.get(peer))
        return [channel for channel in found if channel is not None]

    def end(self, lost_after_ns: int) -> None:
        """The controller is killed, or stops, if it is not over; what it received and has not acted
        on is lost, and maybe what it has sent after that time. The peers come back only to the next
        life."""
        if self.is_over:
            return
        self.controller.validate()
        self.is_over = True
        for uplink in self._uplinks.values():
            uplink.cut(-1)
        for orders in self._orders.values():
            orders.cut(lost_after_ns)

    # -- stepping -------------------------------------------------------------------------------

    def push(self, event: events.AnyEvent | Fenced) -> None:
        """An event reached the controller: it steps when its gap allows. One that is told of a
        later life stops at once."""
        if self.is_over:
            return
        if isinstance(event, Fenced):
            if not self.is_deaf:
                self.end(self._clock.now_ns)
            return
        self._next_step.push(event)
        self._look_ahead()

    def _look_ahead(self) -> None:
        """The clock brings the next step when it is due, or brings it earlier than before."""
        due_ns = self._next_step.due_ns
        if due_ns is None or self.is_over:
            return
        due_ns = max(due_ns, self._clock.now_ns)
        if self._ahead is not None:
            if self._ahead[0] <= due_ns:
                return
            self._clock.cancel(self._ahead[1])
        self._ahead = due_ns, self._clock.at(due_ns, self._step, STEP_PRIORITY)

    def _step(self) -> None:
        self._ahead = None
        if self.is_over:
            return
        now_ns, gap_ns = self._clock.now_ns, self._world.step_gap_ns
        require(now_ns - self._last_ns >= gap_ns, "steps keep their gap", self._last_ns, now_ns)
        self._last_ns, received = now_ns, self._next_step.begin(now_ns)
        ordered = self.controller.step(now_ns, received)
        self._world.stepped(self, received, ordered)
        self.checker.observe(now_ns, received, ordered)
        self._table.observe(self.controller.fleet, received, ordered)
        for command in ordered:
            self._carry_out(command)
        self._world.decided(self)
        self._look_ahead()

    def _carry_out(self, command: commands.AnyCommand) -> None:
        if isinstance(command, MemberOrder):
            self._orders[receiver_of(command)].send(command)
        elif isinstance(command, commands.Dispatch | commands.FailRequest):
            orders = self._orders.get(self._world.gateway_of(command.request))
            if orders is not None:
                orders.send(command)
        elif isinstance(command, commands.WakeAt) and command.at_ns <= self._world.until_ns():
            self._next_step.wake_at(command.at_ns)
