"""Simulated lines and graphs of pipeline stages: how bursty requests are at each of them.

Gaps and service times are gamma-distributed (gaps are not with `is_lognormal`); a stage serves
first come, first served, on the replica that is free first. Which settings are drawn is a `Grid`;
those of training and of evaluation have no CV, load or number of stages in common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from numba import njit
from numpy.typing import NDArray

from livescale.control.stages.formulas.variation import StageTraits, line

Times = NDArray[np.float64]
_WARM_UP = 10
_PARTS = (0.5, 0.65, 0.8, 0.9)


class Grid(NamedTuple):
    """What is drawn: numbers of stages, CVs of arrivals, loads, CVs of services, replicas."""

    stages: Sequence[int]
    cvs: Sequence[float]
    loads: Sequence[float]
    service_cvs: Sequence[float]
    replicas: Sequence[int] = (1, 2, 3, 4, 5, 6, 7, 8)
    is_lognormal: bool = False


TRAINED = Grid(
    stages=(2, 3, 5, 6, 8),
    cvs=(0.1, 0.2, 0.4, 0.7, 1, 1.4, 2, 2.8, 4, 5.6, 8),
    loads=(0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95),
    service_cvs=(0, 0.1, 0.2, 0.3, 0.4, 0.5),
)
#: of graphs whose ways part and join, as TRAINED
JOINED = TRAINED._replace(stages=(5, 6, 8))
#: between the values of TRAINED
BETWEEN = Grid(
    stages=(4, 7),
    cvs=(0.14, 0.3, 0.55, 0.85, 1.2, 1.7, 2.4, 3.4, 4.8, 6.7),
    loads=(0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.925),
    service_cvs=(0.05, 0.15, 0.25, 0.35, 0.45),
)
#: as BETWEEN, with gaps of another distribution than those of training
LOGNORMAL = BETWEEN._replace(is_lognormal=True)
#: outside of what TRAINED spans, in all respects at once
BEYOND = Grid(
    stages=(9, 10, 12),
    cvs=(0.07, 9, 10),
    loads=(0.2, 0.25, 0.97),
    service_cvs=(0.55, 0.6, 0.7),
    replicas=(9, 10, 12),
)


class SimulatedLine(NamedTuple):
    """The stages of a line or a graph, the CV that its arrivals were drawn with, and the CVs of
    gaps between arrivals at each stage, as measured. One request comes per second."""

    stages: tuple[StageTraits, ...]
    drawn_cv: float
    cvs: tuple[float, ...]


def simulated_lines(
    grid: Grid, lines: int, requests: int, seed: int, say: Callable[[str], None]
) -> list[SimulatedLine]:
    """So many lines of a grid, each with so many requests, of which the first tenth does not count.

    Half of the lines have equal stages, in the others each stage is drawn. Tells every tenth.
    """
    return _simulated(lambda rng: line(_drawn(rng, grid)), grid, lines, requests, seed, say)


def simulated_joins(
    grid: Grid, graphs: int, requests: int, seed: int, say: Callable[[str], None]
) -> list[SimulatedLine]:
    """So many graphs whose first stage sends a part of the requests to one stage and the others to
    a second one, and whose lines of a grid's length go on where both join."""
    return _simulated(lambda rng: _drawn_join(rng, grid), grid, graphs, requests, seed, say)


def simulated_cvs(
    rng: np.random.Generator, stages: Sequence[StageTraits], gaps: Times
) -> tuple[float, ...]:
    """CVs of gaps between arrivals at each stage, one request per second coming to the first,
    whose gaps are in proportion to these.

    Chance sends each request that leaves a stage one way, by the parts in `after`.
    """
    source = np.cumsum(gaps / gaps.mean())
    warm = source[len(gaps) // _WARM_UP]
    left: list[Times] = []
    ways: list[Times] = []
    sent = [0.0] * len(stages)
    found = []
    for stage in stages:
        times = source
        if stage.after:
            pieces = []
            for before, part in stage.after:
                first, sent[before] = sent[before], sent[before] + part
                is_ours = (ways[before] >= first) & (ways[before] < sent[before])
                pieces.append(left[before][is_ours])
            times = np.sort(np.concatenate(pieces))
        found.append(_cv_of_gaps(times[times >= warm]))
        services = gamma_times(rng, stage.service_cv, len(times)) / stage.services_per_s
        left.append(departures_of(times, services, stage.replicas))
        ways.append(rng.random(len(times)))
    return tuple(found)


def gamma_times(rng: np.random.Generator, cv: float, count: int) -> Times:
    """With a mean of 1."""
    return rng.gamma(1 / cv**2, cv**2, count) if cv else np.ones(count)


def lognormal_times(rng: np.random.Generator, cv: float, count: int) -> Times:
    """With a mean of 1."""
    variance = np.log1p(cv**2)
    return rng.lognormal(-variance / 2, np.sqrt(variance), count)


def departures_of(arrivals: Times, services: Times, replicas: int) -> Times:
    """When requests leave a stage, in order: first come, first served by what is free first."""
    leave: Times = _ends(arrivals, services, replicas)
    leave.sort()
    return leave


# -- helpers --------------------------------------------------------------------------------------


def _simulated(
    draw: Callable[[np.random.Generator], tuple[StageTraits, ...]],
    grid: Grid,
    count: int,
    requests: int,
    seed: int,
    say: Callable[[str], None],
) -> list[SimulatedLine]:
    rng = np.random.default_rng(seed)
    found = []
    for number in range(1, count + 1):
        cv = float(rng.choice(grid.cvs))
        stages = draw(rng)
        gaps = (lognormal_times if grid.is_lognormal else gamma_times)(rng, cv, requests)
        found.append(SimulatedLine(stages, cv, simulated_cvs(rng, stages, gaps)))
        if number % max(1, count // 10) == 0:
            say(f"{number} of {count} are simulated")
    return found


def _drawn(rng: np.random.Generator, grid: Grid) -> list[StageTraits]:
    count, is_even = int(rng.choice(grid.stages)), rng.random() < 0.5

    def column(values: Sequence[float]) -> list[float]:
        drawn = rng.choice(values, 1 if is_even else count)
        return [float(value) for value in np.resize(drawn, count)]

    columns = [column(values) for values in (grid.loads, grid.service_cvs, grid.replicas)]
    return [
        StageTraits(1 / (load * replicas), cv, int(replicas))
        for load, cv, replicas in zip(*columns, strict=True)
    ]


def _drawn_join(rng: np.random.Generator, grid: Grid) -> tuple[StageTraits, ...]:
    """Two stages share what leaves the first; each has the load that it would have alone."""
    first, *others = _drawn(rng, grid)
    one = float(rng.choice(_PARTS))
    branches = [
        replace(stage, services_per_s=stage.services_per_s * part, after=((0, part),))
        for part, stage in ((one, others[0]), (1 - one, others[1]))
    ]
    joined = replace(others[2], after=((1, 1.0), (2, 1.0)))
    rest = [replace(stage, after=((i, 1.0),)) for i, stage in enumerate(others[3:], 3)]
    return (first, *branches, joined, *rest)


def _cv_of_gaps(times: Times) -> float:
    gaps = np.diff(times)
    return float(gaps.std() / gaps.mean())


def _loop(arrivals: Times, services: Times, replicas: int) -> Times:
    """When each request ends. Kiefer and Wolfowitz: when each replica is free is all there is."""
    ends, free = np.empty_like(arrivals), np.zeros(replicas)
    for number in range(len(arrivals)):
        first = 0
        for other in range(1, replicas):
            if free[other] < free[first]:
                first = other
        free[first] = max(arrivals[number], free[first]) + services[number]
        ends[number] = free[first]
    return ends


_ends: Any = njit(_loop)
