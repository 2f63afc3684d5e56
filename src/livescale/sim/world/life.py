"""One life of a simulated controller: its connections, its steps, and who looks at them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from livescale.control.controller import Controller
from livescale.control.state.config import ControllerConfig
from livescale.member.inputs import MemberOrder, receiver_of
from livescale.messages import commands, events
from livescale.messages.epochs import ControllerEpoch, Fenced
from livescale.sim.base.clock import STEP_PRIORITY, Clock
from livescale.sim.checkers.commands import CommandChecker
from livescale.sim.checkers.failures import FailureChecker
from livescale.sim.checkers.tables import TableChecker
from livescale.sim.links.channel import Delays, LossyChannel, SimChannel
from livescale.sim.world.gateway import SimGateway
from livescale.values.types import WorkerRef

Stepped = Callable[
    ["ControllerLife", Sequence[events.AnyEvent], Sequence[commands.AnyCommand]], None
]


class TakeOrder(Protocol):
    """How a member gets an order of this epoch."""

    def __call__(self, order: MemberOrder, *, epoch: ControllerEpoch) -> None: ...


class ControllerLife:
    """Carries out what the controller orders, which begins with these models, until it is killed,
    or is told of a later life."""

    def __init__(
        self,
        config: ControllerConfig,
        clock: Clock,
        delays: Delays,
        step_gap_ns: int,
        failures: FailureChecker,
        stepped: Stepped,
        decided: Callable[[ControllerLife], None],
        until_ns: Callable[[], int],
    ) -> None:
        """`stepped` is called with what a step received and ordered, before that is checked, and
        `decided` when all is carried out. The world is over at `until_ns`: wake-ups
        that are due later are left out."""
        self.epoch = ControllerEpoch(number=config.epoch)
        self.controller = Controller(config)
        self.checker = CommandChecker(config, failures)
        self.began_ns = clock.now_ns
        #: incarnations that were silent: refused if they come back
        self.lost: dict[WorkerRef, None] = {}
        self._table = TableChecker()
        self._clock = clock
        self._delays = delays
        self._step_gap_ns = step_gap_ns
        self._stepped = stepped
        self._decided = decided
        self._until_ns = until_ns
        self.is_over = False
        #: it does not receive that there is a later life
        self.is_deaf = False
        #: of every peer that met this controller (None: the gateway) what comes and what goes there
        self._uplinks: dict[WorkerRef | None, SimChannel[events.AnyEvent | Fenced]] = {}
        self._orders: dict[WorkerRef | None, SimChannel[Any]] = {}
        self._inbox: list[events.AnyEvent] = []
        self._has_step_ahead = False
        self._last_step_ns = -step_gap_ns

    # -- connections ----------------------------------------------------------------------------

    def meet_gateway(self, gateway: SimGateway) -> None:
        """A connection to the gateway is open."""
        delay, epoch = self._delays.plain_ns, self.epoch
        self._uplinks[None] = SimChannel(self._clock, delay, self.push)
        take_order = partial(gateway.take_order, epoch=epoch)
        self._orders[None] = SimChannel(self._clock, delay, take_order)
        gateway.joined(epoch)

    def meet(self, member: WorkerRef, take_order: TakeOrder) -> None:
        """A connection to the member is open."""
        delays = self._delays
        self._uplinks[member] = LossyChannel(
            self._clock, delays.of_worker_ns, self.push, delays.loses
        )
        take_order = partial(take_order, epoch=self.epoch)
        self._orders[member] = SimChannel(self._clock, delays.plain_ns, take_order)

    def has_met(self, member: WorkerRef) -> bool:
        return member in self._uplinks

    def report(self, peer: WorkerRef | None, event: events.AnyEvent) -> None:
        """A member, or the gateway (None), sends an event, if there is a connection."""
        if peer in self._uplinks and not self.is_over:
            self._uplinks[peer].send(event)

    def fence(self, peer: WorkerRef | None, later: ControllerEpoch) -> None:
        """A member, or the gateway (None), has met a later life, and tells this one."""
        if peer in self._uplinks and not self.is_over:
            self._uplinks[peer].send(Fenced(later))

    def hold(self, peer: WorkerRef | None) -> None:
        """Nothing gets through to the peer, or from there, and nothing is lost."""
        for channel in self.channels(peer):
            channel.hold()

    def go_on(self, peer: WorkerRef | None) -> None:
        """What was held up arrives."""
        for channel in self.channels(peer):
            channel.go_on()

    def lose(self, member: WorkerRef, lost_after_ns: int) -> None:
        """The member has died: what it sent after that time is lost, then comes the news."""
        if member in self._uplinks:
            lost = events.WorkerLost(member, "killed by a fault")
            self._uplinks[member].cut(lost_after_ns, lambda: self.push(lost))
            self._orders[member].cut(-1)

    def give_up(self, member: WorkerRef) -> None:
        """The member is silent for too long."""
        self.lost[member] = None
        self._uplinks[member].cut(-1)
        self._orders[member].cut(-1)
        self.push(events.WorkerLost(member, "it is silent"))

    def channels(self, peer: WorkerRef | None) -> list[SimChannel[Any]]:
        """The connections between the controller and the member, or the gateway (None)."""
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
        self._inbox.append(event)
        if not self._has_step_ahead:
            self._has_step_ahead = True
            step_ns = max(self._clock.now_ns, self._last_step_ns + self._step_gap_ns)
            self._clock.at(step_ns, self._step, STEP_PRIORITY)

    def _step(self) -> None:
        self._has_step_ahead = False
        if self.is_over:
            return
        received, self._inbox = self._inbox, []
        now_ns = self._last_step_ns = self._clock.now_ns
        ordered = self.controller.step(now_ns, received)
        self._stepped(self, received, ordered)
        self.checker.observe(now_ns, received, ordered)
        self._table.observe(self.controller.fleet, received, ordered)
        for command in ordered:
            self._carry_out(command)
        self._decided(self)

    def _carry_out(self, command: commands.AnyCommand) -> None:
        if isinstance(command, MemberOrder):
            self._orders[receiver_of(command)].send(command)
        elif isinstance(command, commands.Dispatch | commands.FailRequest):
            # The controller knows requests from this gateway only, so it is connected.
            self._orders[None].send(command)
        elif isinstance(command, commands.WakeAt) and command.at_ns <= self._until_ns():
            self._clock.at(command.at_ns, lambda: self.push(events.Tick()))
