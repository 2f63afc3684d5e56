"""Hosts that come later, leave in order and come back: what their supervisors do, in virtual time.

When a host is let go is decided by the controller (`control/scaling/leaving.py`,
`control/cluster/departures.py`); here its wish goes there, life by life, and its members end when
they may, or when it has waited for long enough.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from livescale.control.cluster.departures import Departures
from livescale.messages.events import Tick
from livescale.sim.base.clock import Clock
from livescale.sim.base.config import HostStay, SimConfig
from livescale.sim.links.channel import Delays
from livescale.sim.world.all_members import Members
from livescale.sim.world.life import ControllerLife

Gone = Callable[[], int | None]
"""Called when a host has gone: when it will be back (None: when it comes)."""


class HostStays:
    """Hosts of a world that do not stay from its begin to its end. Make it before the members come
    to life."""

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
        self._leaving: dict[str, Gone] = {}
        #: of the controller's present life
        self._departures = Departures()
        for stay in config.stays:
            if stay.from_ns:
                members.away_until_ns[stay.host] = stay.from_ns
            if stay.until_ns is not None:
                gone = partial(self._back_ns, stay)
                clock.at(stay.until_ns, partial(self.want, stay.host, stay.patience_ns, gone))

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
            life.checker.departures.lets_go(
                [ref for ref in there if self._config.host_of(ref) == host]
            )
            go = partial(self._go, host, self._leaving[host], is_let_go=True)
            self._clock.after(self._delays.plain_ns(), go)

    def want(self, host: str, patience_ns: int, gone: Gone) -> None:
        """The host wants to leave, if it is there: it goes once."""
        if host in self._leaving or self._members.is_away(host):
            return
        self._leaving[host] = gone
        if self._members.life is not None:
            ask = partial(self._ask, self._members.life, host)
            self._clock.after(self._delays.plain_ns(), ask)
        self._clock.after(patience_ns, partial(self._go, host, gone, is_let_go=False))

    # -- helpers --------------------------------------------------------------------------------

    def _ask(self, life: ControllerLife, host: str) -> None:
        if self._members.life is life and host in self._leaving:
            self._departures.begin(host, len(self._config.on_host(host)))
            life.push(Tick())

    def _go(self, host: str, gone: Gone, *, is_let_go: bool) -> None:
        """The host's processes end, if it still waits: it was let go, or waited for long enough."""
        if self._leaving.get(host) is gone:
            del self._leaving[host]
            self._departures.end(host)
            self._members.leave(host, gone(), is_let_go=is_let_go)

    def _back_ns(self, stay: HostStay) -> int:
        return self._clock.now_ns + stay.away_ns
