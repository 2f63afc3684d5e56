"""Which hosts a pool asks its cluster for, and which it gives back: pure, for any engine that can
place a process on a machine.

A host is asked for by a *claim*. One that no machine is found for waits, and is what the engine's
own autoscaler adds machines for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from livescale.values.types import Value, WorkerRef


class PoolNeed(Value, frozen=True):
    """What the controller says of its workers: so many more would get an instance at once, there
    are some on the hosts `there`, and instances on the hosts `busy`."""

    lacking_workers: int = 0
    busy: tuple[str, ...] = ()
    there: tuple[str, ...] = ()


def need_of(
    lacking_workers: int, hosts: Mapping[WorkerRef, str], busy: Collection[WorkerRef]
) -> PoolNeed:
    """With the hosts of all members that are there, and the workers that an instance is on."""
    used = {hosts[ref] for ref in busy if ref in hosts}
    there = {host for ref, host in hosts.items() if not ref.is_agent}
    return PoolNeed(lacking_workers, tuple(sorted(used)), tuple(sorted(there)))


class HostClaim(Value, frozen=True):
    """A host that was asked for, with its name once it has one (None: it is awaited)."""

    number: int
    host: str | None


class HostLimits(Value, frozen=True):
    """With a `hosts_max` the pool asks by its need; without, for every machine that is there. A
    host that nothing needs for `idle_ns` is given back."""

    hosts_min: int
    hosts_max: int | None
    workers_per_host: int
    idle_ns: int


class HostOrders(Value, frozen=True):
    """So many new claims, and the numbers of those that are given up."""

    ask: int
    give_back: tuple[int, ...]


class WantedHosts:
    """The rule, with since when each claim has not been needed."""

    def __init__(self, limits: HostLimits) -> None:
        self._limits = limits
        self._unneeded_since_ns: dict[int, int] = {}

    def step(
        self, now_ns: int, claims: Collection[HostClaim], need: PoolNeed, machines: int
    ) -> HostOrders:
        """What follows from the need; `machines` could be hosts."""
        limits = self._limits
        if limits.hosts_max is None:
            # Those of machines that were lost stay: another one, or the same again, takes them.
            return HostOrders(max(max(machines, limits.hosts_min) - len(claims), 0), ())
        # A host has a name before its workers are ready.
        awaited = sum(claim.host not in need.there for claim in claims)
        missing = -(-need.lacking_workers // limits.workers_per_host) - awaited
        wanted = max(len(claims) + max(missing, 0), limits.hosts_min)
        wanted = min(wanted, max(limits.hosts_max, limits.hosts_min))
        self._note(now_ns, claims, need)
        return HostOrders(max(wanted - len(claims), 0), self._idle(now_ns, len(claims)))

    # -- helpers --------------------------------------------------------------------------------

    def _note(self, now_ns: int, claims: Collection[HostClaim], need: PoolNeed) -> None:
        """While workers are lacking no host goes: it may be the one that has just come."""
        unneeded = [
            claim.number
            for claim in claims
            if not need.lacking_workers and claim.host not in need.busy
        ]
        known = self._unneeded_since_ns
        self._unneeded_since_ns = {number: known.get(number, now_ns) for number in unneeded}

    def _idle(self, now_ns: int, claims: int) -> tuple[int, ...]:
        """Those that nothing needed for long enough, the longest first, the newest of equals."""
        due_ns = now_ns - self._limits.idle_ns
        idle = [(since, -number) for number, since in self._unneeded_since_ns.items()]
        spare = max(claims - self._limits.hosts_min, 0)
        return tuple(-negative for since, negative in sorted(idle)[:spare] if since <= due_ns)

    def __repr__(self) -> str:
        return f"<WantedHosts: {len(self._unneeded_since_ns)} not needed>"
