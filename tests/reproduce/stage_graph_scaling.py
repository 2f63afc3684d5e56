"""A graph of stages whose replicas are decided once per period (QUART §5), by the pool's own rules.

The world of `stage_graphs.py`, period by period: what a stage did becomes its load, and
`LineScaling` (Corrector, Smoother, limits) says how many replicas it gets. Each replica has a
device, of which there are `replicas_total`; a new one serves when it is loaded, one that goes gives
its device back when it has served its request.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from stage_graphs import GraphRun

from livescale.control.stages.corrector import StageDecision
from livescale.control.stages.formulas.graph import StageGraph
from livescale.control.stages.formulas.stage_load import StageLoad
from livescale.control.stages.line_scaling import LineScaling
from livescale.values.scaling_policies import StagesByQueue
from livescale.values.units import NS_PER_S

Times = NDArray[np.float64]
_COUNTED_MIN = 8
"""Fewer gaps or services say nothing of how they vary."""


@dataclass(frozen=True)
class ScaledRun:
    """Times in seconds. `held` are the stage, begin and end of each replica's device; `decided` has
    what was decided, at the end of each period."""

    run: GraphRun
    held: tuple[tuple[int, float, float], ...]
    decided: tuple[tuple[StageDecision, ...], ...]

    @property
    def device_s(self) -> float:
        """All devices together."""
        return sum(stop - start for _, start, stop in self.held)


@dataclass
class _Stage:
    """One stage: its replicas by the time at which each is free, and what waits or is done."""

    number: int
    services: Times
    comes: Times
    begins: Times
    leaves: Times
    #: when each replica is free, and since when it has its device
    free: list[tuple[float, float]] = field(default_factory=list)
    #: what has come, or will: when, and which request
    line: list[tuple[float, int]] = field(default_factory=list)
    served: int = 0

    def serve(self, until: float) -> list[int]:
        """All that begins before this time. Returns the requests, in their order."""
        begun = []
        while self.line and self.free and max(self.line[0][0], self.free[0][0]) < until:
            come, request = heapq.heappop(self.line)
            begin = max(come, self.free[0][0])
            leave = begin + float(self.services[self.served])
            self.served += 1
            self.begins[request], self.leaves[request] = begin, leave
            heapq.heapreplace(self.free, (leave, self.free[0][1]))
            begun.append(request)
        return begun


class ScaledPool(NamedTuple):
    """What stages begin with, how many `replicas_total` there may be, and how long a load takes."""

    policy: StagesByQueue
    replicas: Sequence[int]
    replicas_total: int
    load_s: float


def play_scaled(
    arrivals: Times, graph: StageGraph, services: Sequence[Times | float], pool: ScaledPool
) -> ScaledRun:
    """Plays requests that arrive at these times (in seconds, in order). `services` are as those of
    `play_graph`."""
    world = _World(arrivals, graph, services, pool)
    period_s, now = pool.policy.period_ns / NS_PER_S, 0.0
    while world.is_busy:
        now += period_s
        world.play(now)
        world.decide(now, period_s)
    return world.result(now)


class _World:
    def __init__(
        self,
        arrivals: Times,
        graph: StageGraph,
        services: Sequence[Times | float],
        pool: ScaledPool,
    ) -> None:
        policy, replicas, replicas_total, load_s = pool
        if sum(replicas) > replicas_total:
            raise ValueError(f"{sum(replicas)} replicas to begin with, {replicas_total} in all")
        self._graph, self._total, self._load_s = graph, replicas_total, load_s
        self._scaling = LineScaling(policy, graph)
        never = np.full_like(arrivals, np.inf)
        self._stages = [
            _Stage(
                number=number,
                services=np.broadcast_to(np.asarray(service, dtype=np.float64), arrivals.shape),
                comes=never.copy(),
                begins=never.copy(),
                leaves=never.copy(),
                free=[(0.0, 0.0)] * replicas[number],
            )
            for number, service in enumerate(services)
        ]
        #: when each device is free that no replica has
        self._devices = [0.0] * (replicas_total - sum(replicas))
        self._held: list[tuple[int, float, float]] = []
        self._decided: list[tuple[StageDecision, ...]] = []
        self._known: dict[int, StageLoad] = {}
        for stage in self._stages:
            if not graph.before(stage.number):
                for request, come in enumerate(arrivals.tolist()):
                    self._come(stage, request, come)

    @property
    def is_busy(self) -> bool:
        """Not all requests were begun everywhere."""
        return any(stage.served < len(stage.services) for stage in self._stages)

    def play(self, until: float) -> None:
        """All that begins before this time, stage by stage: nothing goes back."""
        for stage in self._stages:
            for request in stage.serve(until):
                for after in self._graph.followers[stage.number]:
                    before = self._graph.before(after)
                    come = max(float(self._stages[i].leaves[request]) for i in before)
                    if come < np.inf:
                        self._come(self._stages[after], request, come)

    def decide(self, now: float, period_s: float) -> None:
        """The period is over. Nothing is decided before all stages have served something."""
        for stage in self._stages:
            self._look(stage, now, period_s)
        if len(self._known) < len(self._stages):
            return
        loads = [self._known[stage.number] for stage in self._stages]
        limits = [(1, self._total)] * len(loads)
        decided = self._scaling.step(round(now * NS_PER_S), loads, limits, self._total)
        self._decided.append(tuple(decided))
        for its, stage in zip(decided, self._stages, strict=True):
            for _ in range(its.from_replicas - its.to_replicas):
                self._end(stage, now)
        for its, stage in zip(decided, self._stages, strict=True):
            for _ in range(its.to_replicas - its.from_replicas):
                begin = max(heapq.heappop(self._devices), now)
                heapq.heappush(stage.free, (begin + self._load_s, begin))

    def result(self, now: float) -> ScaledRun:
        stages = self._stages
        end = max(now, *(float(stage.leaves.max()) for stage in stages))
        living = [(stage.number, since, end) for stage in stages for _, since in stage.free]
        columns = ([getattr(s, name) for s in stages] for name in ("comes", "begins", "leaves"))
        return ScaledRun(
            GraphRun(*map(tuple, columns)), (*self._held, *living), tuple(self._decided)
        )

    # -- helpers, in the order used -------------------------------------------------------------

    def _come(self, stage: _Stage, request: int, come: float) -> None:
        stage.comes[request] = come
        heapq.heappush(stage.line, (come, request))

    def _look(self, stage: _Stage, now: float, period_s: float) -> None:
        """Its load in the period, as far as that says something new."""
        start = now - period_s
        came = np.sort(stage.comes[(stage.comes >= start) & (stage.comes < now)])
        begun = (stage.begins >= start) & (stage.begins < now)
        waited = np.minimum(stage.begins, now) - np.clip(stage.comes, start, now)
        times = stage.leaves[begun] - stage.begins[begun]
        known = self._known.get(stage.number)
        if len(times):
            service_ns = round(float(times.mean()) * NS_PER_S)
        elif known is not None:
            service_ns = known.service_ns
        else:
            return
        self._known[stage.number] = StageLoad(
            stage=stage.number,
            replicas=len(stage.free),
            arrivals_per_s=len(came) / period_s,
            service_ns=max(service_ns, 1),
            waiting=round(float(np.maximum(waited, 0.0).sum()) / period_s),
            arrival_cv=_cv(np.diff(came)),
            service_cv=_cv(times),
        )

    def _end(self, stage: _Stage, now: float) -> None:
        """One replica less: one that is free, else the one that will be last, as one that is
        loaded."""
        idle = [replica for replica in stage.free if replica[0] <= now]
        gone = min(idle) if idle else max(stage.free)
        stage.free.remove(gone)
        heapq.heapify(stage.free)
        free, since = gone
        # A load that is not over ends at once.
        until = now if free <= now or free == since + self._load_s else free
        until = max(until, since)
        self._held.append((stage.number, since, until))
        heapq.heappush(self._devices, until)


def _cv(values: Times) -> float | None:
    if len(values) < _COUNTED_MIN or values.mean() <= 0:
        return None
    return float(values.std() / values.mean())
