"""Hosts that come when the pool asks its cluster for them: the cluster, in virtual time.

Which are asked for and given back is decided by `control/cluster/wanted_hosts.py`, as their numbers
are by `control/cluster/host_ledger.py`. Here a claim gets a machine, and its host comes and goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from livescale.control.cluster.host_ledger import HostEntry, HostLedger
from livescale.control.cluster.wanted_hosts import (
    HostClaim,
    HostLimits,
    PoolNeed,
    WantedHosts,
    need_of,
)
from livescale.sim.base.clock import Clock
from livescale.sim.base.config import HostDemand, SimConfig
from livescale.sim.checkers.invariants import require
from livescale.sim.world.all_members import Members
from livescale.sim.world.host_stays import HostStays
from livescale.sim.world.life import ControllerLife


class ClaimedHosts:
    """Of a world with a demand for hosts. Make it before the members come to life."""

    def __init__(
        self,
        config: SimConfig,
        demand: HostDemand,
        clock: Clock,
        members: Members,
        stays: HostStays,
    ) -> None:
        self._config, self._demand = config, demand
        self._clock, self._members, self._stays = clock, members, stays
        places = {host: sum(not r.is_agent for r in config.on_host(host)) for host in demand.hosts}
        self._places = places
        limits = HostLimits(demand.hosts_min, len(places), min(places.values()), demand.idle_ns)
        self._wanted = WantedHosts(limits)
        self._ledger = self._new_ledger(())
        #: by number, the host of each claim once it has one
        self._claims: dict[int, str | None] = {}
        self._count = 0
        #: as the controller said last
        self._need = PoolNeed()
        members.away_until_ns |= dict.fromkeys(demand.hosts)
        clock.after(0, self._look)

    def meet(self, _: ControllerLife) -> None:
        """A controller is there: the ledger of before was kept for it."""
        self._ledger = self._new_ledger(self._ledger.entries)

    def stepped(self, life: ControllerLife) -> None:
        """The controller has decided."""
        if life is not self._members.life:
            return
        refs = [member.ref for member in self._members.living()]
        is_there = life.incarnations.is_there
        hosts = {ref: self._config.host_of(ref) for ref in refs if is_there(ref)}
        lacking, busy = life.controller.lacking_workers(), life.controller.busy_workers()
        self._need = need_of(lacking, hosts, busy)

    # -- helpers --------------------------------------------------------------------------------

    def _new_ledger(self, entries: Sequence[HostEntry]) -> HostLedger:
        config, joining = self._config, {*self._demand.hosts}
        own = {config.device(number).host for number in range(config.workers)} - joining
        own |= {host.name for host in config.hosts} - joining
        return HostLedger(sorted(own), config.workers - sum(self._places.values()), entries)

    def _look(self) -> None:
        claims = [HostClaim(number, host) for number, host in self._claims.items()]
        orders = self._wanted.step(self._clock.now_ns, claims, self._need, machines=0)
        for _ in range(orders.ask):
            self._claims[self._count] = None
            self._clock.after(self._demand.placing_ns, partial(self._place, self._count))
            self._count += 1
        require(len(self._claims) <= len(self._places), "no more hosts than allowed", self._claims)
        for number in orders.give_back:
            self._give_back(number)
        if not (self._clock.is_empty() and self._is_at_rest()):
            self._clock.after(self._demand.look_ns, self._look)

    def _is_at_rest(self) -> bool:
        """Nothing is asked for or given back if nothing else happens."""
        idle = [host for host in self._claims.values() if host not in self._need.busy]
        is_least = len(self._claims) <= self._demand.hosts_min
        return not self._need.lacking_workers and (is_least or not idle)

    def _place(self, number: int) -> None:
        """There is a machine for the claim, and the host joins."""
        if number not in self._claims:
            return
        taken = [*self._claims.values()]
        host = next(host for host in self._places if host not in taken)
        self._claims[number] = host
        numbers = self._ledger.admit(host, self._places[host], self._clock.now_ns)
        workers = [ref.worker for ref in self._config.on_host(host) if not ref.is_agent]
        require(numbers.first_worker == workers[0], "hosts keep their numbers", host, numbers)
        self._members.come(host, numbers.first_life)

    def _give_back(self, number: int) -> None:
        host = self._claims[number]
        if host is None:
            del self._claims[number]
        else:
            self._stays.want(host, self._demand.patience_ns, partial(self._gone, number, host))

    def _gone(self, number: int, host: str) -> None:
        self._ledger.leave(host)
        del self._claims[number]
