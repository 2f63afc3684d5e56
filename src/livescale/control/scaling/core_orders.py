"""Orders that give workers the cores that their stages should have, within those of their hosts.

A worker that no stage wants cores for gets back what it began with. An order raises a worker's
cores only where its host has room for them, beside all that others have or were promised; where a
worker joins a host that is full, others give some back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from livescale.control.stages.core_budget import CoresOf, CoresSeen, StageCores
from livescale.control.state.fleet import Fleet
from livescale.control.state.instance import Instance
from livescale.messages.commands import AnyCommand, SetCores
from livescale.values.scaling_policies import LinePolicy
from livescale.values.types import InstanceState, Part, Value, WorkerRef


class CoreLevel(Value, frozen=True):
    """So many instances of a stage are to have so many cores each."""

    keep: int
    cores: int


class CoreLine(Protocol):
    """A line of stages, as far as cores go."""

    policy: LinePolicy
    parts: Sequence[Part]
    #: None: it needs no cores
    due_ns: int | None

    @property
    def levels(self) -> Sequence[CoreLevel] | None:
        """By stage (None: nothing is decided, all keep what they have)."""
        ...


class CoreOrders:
    """Reads the fleet, and writes to its cores."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._cores = fleet.cores
        #: versions of fleet, cores and decisions when all was in order
        self._stand = (-1, -1, -1)

    def seen(self, parts: Sequence[Part], policy: LinePolicy) -> CoresSeen | None:
        """What the stages have now (None: their cores are left alone)."""
        if policy.cores is None:
            return None
        stages = tuple(self._stage(part, policy.cores_max) for part in parts)
        free = {host: policy.cores_max - held for host, held in self._held().items()}
        return CoresSeen(stages, free)

    def decide(self, decisions: int, lines: Iterable[CoreLine]) -> list[AnyCommand]:
        """Orders by what the lines want now; `decisions` grows when that may have changed."""
        stand = self._fleet.version, self._cores.version, decisions
        if stand == self._stand:
            return []
        wanted: dict[WorkerRef, tuple[int, int]] = {}
        for line in lines:
            if line.policy.cores is not None and line.due_ns is not None:
                self._want(line, wanted)
        for worker in self._cores.raised():
            wanted.setdefault(worker, (self._cores.own(worker), 0))
        orders = self._orders(wanted) if wanted else []
        self._stand = self._fleet.version, self._cores.version, decisions
        return [*orders]

    # -- helpers ------------------------------------------------------------------------------

    def _stage(self, part: Part, cores_max: int) -> StageCores:
        staying = self._staying(part)
        own = [self._cores.own(worker) for instance in staying for worker in instance.workers]
        instances = (
            CoresOf(
                min(map(self._cores.now, instance.workers)),
                min(self._cores.most(worker, cores_max) for worker in instance.workers),
                tuple(map(self._host, instance.workers)),
            )
            for instance in staying
        )
        return StageCores(min(own, default=1), tuple(instances))

    def _staying(self, part: Part) -> list[Instance]:
        """Instances that serve; those with most cores stay longest, the oldest of equals."""
        serving = [i for i in self._fleet.of_part(part) if i.state is InstanceState.SERVING]
        return sorted(serving, key=lambda i: (-min(map(self._cores.now, i.workers)), i.id))

    def _host(self, worker: WorkerRef) -> str:
        return self._fleet.workers[worker.worker].device.host

    def _held(self) -> dict[str, int]:
        """By host, what its workers have or were promised."""
        held: dict[str, int] = {}
        for _, record in sorted(self._fleet.workers.items()):
            host = record.device.host
            held[host] = held.get(host, 0) + self._cores.held(record.ref)
        return held

    def _want(self, line: CoreLine, wanted: dict[WorkerRef, tuple[int, int]]) -> None:
        """Those that are to go, or drain, get no more and keep what they have: their requests are
        still there."""
        most = line.policy.cores_max
        for number, part in enumerate(line.parts):
            for instance in self._fleet.of_part(part):
                if not instance.is_released:
                    for worker in instance.workers:
                        wanted[worker] = self._cores.now(worker), most
            if line.levels is None:
                continue
            level = line.levels[number]
            for place, instance in enumerate(self._staying(part)):
                for worker in instance.workers:
                    cores = max(level.cores, self._cores.own(worker))
                    if place >= level.keep:
                        cores = min(cores, self._cores.now(worker))
                    wanted[worker] = cores, most

    def _orders(self, wanted: dict[WorkerRef, tuple[int, int]]) -> list[SetCores]:
        """In id order. `held` is what counts where cores are given, `left` what will be when those
        that go are gone."""
        orders: list[SetCores] = []
        held = self._held()
        left = dict(held)
        for worker, (cores, most) in sorted(wanted.items()):
            if self._cores.is_waiting(worker):
                continue
            host, now, own = self._host(worker), self._cores.now(worker), self._cores.own(worker)
            if cores > now:
                room = max(most - held[host], 0)
                cores = max(min(cores, now + room, self._cores.most(worker, most)), now)
            over = left[host] - most if most else 0
            cores = max(min(cores, now - over), own) if over > 0 and cores > own else cores
            if cores != now:
                orders.append(self._cores.order(worker, cores))
                held[host] += max(cores - now, 0)
                left[host] += cores - now
        return orders
