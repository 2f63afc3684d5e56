"""Hosts that come later, leave in order and come back: what their supervisors do, in virtual time.

When a host is let go is decided by the controller (`control/scaling/leaving.py`,
`control/cluster/departures.py`); here its wish goes there, life by life, and its members end when
they may, or when it has waited for long enough.
"""

from __future__ import annotations

from functools import partial

from livescale.control.cluster.departures import Departures
from livescale.messages.events import Tick
from livescale.sim.base.clock import Clock
from livescale.sim.base.config import HostStay, SimConfig
from livescale.sim.links.channel import Delays
from livescale.sim.world.all_members import Members
from livescale.sim.world.life import ControllerLife


class HostStays:
    """Hosts of a world that do not stay from its begin to its end."""

    def __init__(
        self,
        config: SimConfig,
        clock: Clock,
        delays: Delays,
        members: Members,
    ) -> None:
        self._config = config
        self._clock = clock
        self._delays = delays
        self._members = members
        #: hosts that want to leave
        self._leaving: dict[str, HostStay] = {}
        #: of the controller's present life
        self._departures = Departures()

    def schedule(self) -> None:
        """Before the members come to life."""
        for stay in self._config.stays:
            if stay.from_ns:
                self._members.away_until_ns[stay.host] = stay.from_ns
            if stay.until_ns is not None:
                self._clock.at(stay.until_ns, partial(self._want, stay))

    def meet(self, life: ControllerLife) -> None:
        """A controller is there: hosts that want to leave say so again."""
        self._departures = Departures()
        for host in self._leaving:
            self._clock.after(self._delays.reconnect_ns(), partial(self._ask, life, host))

    def stepped(self, life: ControllerLife) -> None:
        """The controller has decided: hosts that may go are told so."""
        if not self._leaving or life is not self._members.life:
            return
        is_known = life.controller.fleet.is_alive
        there = [member.ref for member in self._members.living() if is_known(member.ref)]
        telling, going = self._departures.look(
            [(self._config.host_of(ref), ref) for ref in there],
            life.controller.leaving.free(),
        )
        for event in telling:
            life.push(event)
        for host in going:
            life.checker.lets_go([ref for ref in there if self._config.host_of(ref) == host])
            go = partial(self._go, self._leaving[host], is_let_go=True)
            self._clock.after(self._delays.plain_ns(), go)

    # -- helpers --------------------------------------------------------------------------------

    def _want(self, stay: HostStay) -> None:
        if stay.host in self._leaving or self._members.is_away(stay.host):
            return
        self._leaving[stay.host] = stay
        if self._members.life is not None:
            ask = partial(self._ask, self._members.life, stay.host)
            self._clock.after(self._delays.plain_ns(), ask)
        self._clock.after(stay.patience_ns, partial(self._go, stay))

    def _ask(self, life: ControllerLife, host: str) -> None:
        if self._members.life is life and host in self._leaving:
            self._departures.begin(host, len(self._config.on_host(host)))
            life.push(Tick())

    def _go(self, stay: HostStay, *, is_let_go: bool = False) -> None:
        """The host's processes end, and it comes back after a while."""
        if self._leaving.get(stay.host) is not stay:
            return
        del self._leaving[stay.host]
        self._departures.end(stay.host)
        back_ns = self._clock.now_ns + stay.away_ns
        self._members.leave(stay.host, back_ns, is_let_go=is_let_go)
