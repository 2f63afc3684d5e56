"""How long the controller's steps take, by size of the pool.

A simulated pool plays a load and keeps its run record; then fresh controllers are given the steps
of that record, and each step is timed. So no time of the simulated world is in the figures, and
all that a step costs is: many models, many workers, news of all of them.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from livescale.clusters.files import find_cluster, read_topology
from livescale.control.controller import Controller
from livescale.lab.bench.base.errors import BenchError
from livescale.load.arrivals import GammaShape, gamma_trace
from livescale.load.traces import TraceRow
from livescale.report.run.terminal import table
from livescale.sim.base.config import SimConfig
from livescale.sim.pools.configs import build_config, first_devices, tokens_max
from livescale.sim.pools.limits import PooledModel
from livescale.sim.pools.runs import fit_rows, lead_ns, recorded, run_pool
from livescale.sim.pools.systems import System
from livescale.telemetry.record.record import AnyLine, StepLine
from livescale.values.units import NS_PER_MS, NS_PER_S

_CLUSTER = "leaf-spine-1024"
WORKERS_MAX = 1024
"""Of the cluster that the pools are cut from."""
_PRESET = "llama-3-8b"


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """Pools of `workers`, with a model for every `workers_per_model` of them, each with a load of
    `rate` requests per second and coefficient of variation `cv` for so many seconds.

    A step counts with the shortest of its times in `replays` of the record: what is left out is
    what else the machine did.
    """

    system: System
    workers: tuple[int, ...] = (64, 256, 1000)
    workers_per_model: int = 10
    rate: float = 10.0
    cv: float = 3.0
    seconds: int = 10
    replays: int = 2
    seed: int = 0


class StepTimes(msgspec.Struct, frozen=True):
    """Steps of one pool. Those before the load began, `start_ms` in all, do not count in the
    mean and the percentiles: there instances of all models are planned, once."""

    workers: int
    models: int
    requests: int
    steps: int
    steps_per_s: float
    mean_ms: float
    p50_ms: float
    p99_ms: float
    worst_ms: float
    start_ms: float
    start_worst_ms: float


@dataclass(frozen=True, slots=True)
class ControllerReport:
    """What was measured, pool by pool."""

    system: str
    pools: Sequence[StepTimes]

    def text(self) -> str:
        header = ["workers", "models", "requests", "steps", "steps/s", "mean ms", "p50 ms"]
        header += ["p99 ms", "worst ms", "start ms", "worst of the start ms"]
        return table(header, [list(msgspec.structs.astuple(pool)) for pool in self.pools])

    def as_json(self) -> dict[str, object]:
        return {"system": self.system, "pools": msgspec.to_builtins(self.pools)}


def run_controller(options: ControllerOptions, say: Callable[[str], None]) -> ControllerReport:
    """Play, replay and time. Raises BenchError when a record has no step to time."""
    pools = []
    for workers in options.workers:
        say(f"{workers} workers: the load is played …")
        pools.append(_measured(workers, options))
    return ControllerReport(options.system.name, pools)


# -- helpers, in the order used -------------------------------------------------------------------


def _measured(workers: int, options: ControllerOptions) -> StepTimes:
    models = workers // options.workers_per_model
    config = _config(workers, models, options.system)
    loads = {
        policy.spec.name: _load(config, policy.spec.name, number, options)
        for number, policy in enumerate(config.controller.models)
    }
    play = partial(run_pool, config, loads, lead_ns(config), options.seed)
    run, lines = recorded(play, lambda lines: [x for x in lines if isinstance(x, StepLine)])
    times_ns = _shortest([replayed_ns(config, lines) for _ in range(options.replays)])
    start_ms: list[float] = []
    loaded_ms: list[float] = []
    for line, took_ns in zip(lines, times_ns, strict=True):
        (start_ms if line.now_ns < run.started_ns else loaded_ms).append(took_ns / NS_PER_MS)
    if len(loaded_ms) < 2:
        raise BenchError(f"the load of {workers} workers had {len(loaded_ms)} steps: raise --rate")
    percentiles = statistics.quantiles(loaded_ms, n=100, method="inclusive")
    return StepTimes(
        workers=workers,
        models=models,
        requests=sum(map(len, loads.values())),
        steps=len(loaded_ms),
        steps_per_s=len(loaded_ms) * NS_PER_S / max(run.ended_ns - run.started_ns, 1),
        mean_ms=statistics.fmean(loaded_ms),
        p50_ms=percentiles[49],
        p99_ms=percentiles[98],
        worst_ms=max(loaded_ms),
        start_ms=sum(start_ms),
        start_worst_ms=max(start_ms, default=0.0),
    )


def _config(workers: int, models: int, system: System) -> SimConfig:
    cluster = first_devices(read_topology(find_cluster(_CLUSTER)), workers)
    return build_config(cluster, [PooledModel(f"m{n}", _PRESET) for n in range(models)], system)


def _load(config: SimConfig, model: str, number: int, options: ControllerOptions) -> list[TraceRow]:
    seed = options.seed * WORKERS_MAX + number
    rows = gamma_trace(GammaShape(cv=options.cv), options.rate, options.seconds * NS_PER_S, seed)
    return fit_rows(rows, tokens_max(config, model))[0]


def replayed_ns(config: SimConfig, lines: Iterable[AnyLine]) -> list[int]:
    """The time of each step of a fresh controller, in ns."""
    controller = Controller(config.controller)
    gc.collect()
    times_ns = []
    for line in lines:
        if not isinstance(line, StepLine):
            continue
        before_ns = time.perf_counter_ns()
        controller.step(line.now_ns, line.events)
        times_ns.append(time.perf_counter_ns() - before_ns)
    return times_ns


def _shortest(replays: Sequence[Sequence[int]]) -> list[int]:
    return [min(times) for times in zip(*replays, strict=True)]
