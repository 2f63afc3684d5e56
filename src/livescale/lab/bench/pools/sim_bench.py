"""How fast the simulator is: virtual time over real time, with and without coalescing.

One load per accelerator throughout, half of what the pool can serve, so that sizes compare: a
pool 32 times as large gets 32 times the requests. One process, one core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from livescale.clusters.files import NamedTopology, find_cluster, read_topology
from livescale.lab.bench.base.errors import BenchError
from livescale.load.traces import TraceRow, upscale, window
from livescale.report.run.terminal import table
from livescale.sim.base.config import SimConfig
from livescale.sim.pools.capacity import measure_capacity
from livescale.sim.pools.configs import build_config, first_hosts, tokens_max
from livescale.sim.pools.limits import PooledModel
from livescale.sim.pools.runs import fit_rows, lead_ns, run_pool
from livescale.sim.pools.systems import find_system
from livescale.values.units import NS_PER_S

_MODEL = "model"
_SMALL, _LARGE = "blitzscale-a", "leaf-spine-1024"


@dataclass(frozen=True, slots=True)
class SimBenchOptions:
    """The load of the pool of 32; `seconds` is how much of it the pools of other sizes get.

    `hosts` are the sizes of the sweep, in hosts of eight accelerators.
    """

    rows: Sequence[TraceRow]
    preset: str = "qwen2.5-72b"
    tp_size: int = 4
    seconds: int = 30
    hosts: tuple[int, ...] = (4, 16, 64, 128)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SimSpeed:
    """One simulation: what it did, and how long that took. The factor counts the virtual time from
    the load's first moment to the end of its last request."""

    name: str
    devices: int
    requests: int
    failed: int
    tokens: int
    events: int
    steps: int
    virtual_s: float
    elapsed_s: float

    @property
    def real_time_factor(self) -> float:
        return self.virtual_s / self.elapsed_s

    @property
    def us_per_event(self) -> float:
        return 1e6 * self.elapsed_s / self.events


def run_sim_bench(options: SimBenchOptions, say: Callable[[str], None]) -> dict[str, object]:
    """Measure, print a table, and return the figures. Raises BenchError."""
    if not options.rows:
        raise BenchError("the load has no requests")
    small = read_topology(find_cluster(_SMALL))
    config = _config(small, options)
    rows, clipped = fit_rows(options.rows, tokens_max(config, _MODEL))
    capacity = measure_capacity({_MODEL: rows}, config, options.seed)
    half = capacity.factor / 2
    say(
        f"{_SMALL}: serves {capacity.requests_per_s:.2f} requests/s of this load at most (found in"
        f" {capacity.simulations} simulations); it gets half, {clipped} rows clipped"
    )
    load = upscale(rows, half, options.seed)
    coalesced = _timed("32, coalesced", config, load, options)
    uncoalesced = msgspec.structs.replace(config, coalesces=False)
    single = _timed("32, step by step", uncoalesced, load, options)
    sweep = [_of_size(hosts, half, rows, options) for hosts in options.hosts]
    say(_table([coalesced, single, *sweep]))
    growth = sweep[-1].us_per_event / sweep[0].us_per_event
    say(f"an event of the largest pool takes {growth:.2f} times as long as one of the smallest")
    figures: dict[str, object] = {
        "events_per_s": coalesced.events / coalesced.elapsed_s,
        "real_time_factor_32_gpus": coalesced.real_time_factor,
        "real_time_factor_32_gpus_uncoalesced": single.real_time_factor,
        "capacity_requests_per_s": capacity.requests_per_s,
        "event_time_growth": growth,
        "rows": [msgspec.to_builtins(speed) for speed in (coalesced, single, *sweep)],
    }
    for speed in sweep:
        if speed.devices == 1024:
            figures["real_time_factor_1024_gpus"] = speed.real_time_factor
    return figures


# -- helpers, in the order used -------------------------------------------------------------------


def _config(cluster: NamedTopology, options: SimBenchOptions) -> SimConfig:
    model = PooledModel(_MODEL, options.preset, options.tp_size)
    return build_config(cluster, [model], find_system("livescale-bounds"))


def _of_size(
    hosts: int, half: float, rows: Sequence[TraceRow], options: SimBenchOptions
) -> SimSpeed:
    """A pool of so many hosts like those of the large cluster, with its share of the load."""
    config = _config(first_hosts(read_topology(find_cluster(_LARGE)), hosts), options)
    part = window(rows, 0, options.seconds * NS_PER_S)
    load = upscale(part, half * len(config.devices) / 32, options.seed)
    return _timed(f"{len(config.devices)}, {options.seconds} s", config, load, options)


def _timed(
    name: str, config: SimConfig, load: Sequence[TraceRow], options: SimBenchOptions
) -> SimSpeed:
    started_s = time.perf_counter()
    run = run_pool(config, {_MODEL: load}, lead_ns(config), options.seed)
    elapsed_s = time.perf_counter() - started_s
    return SimSpeed(
        name=name,
        devices=len(config.devices),
        requests=len(load),
        failed=run.failed,
        tokens=sum(len(line.token_ns) for line in run.result.requests),
        events=run.result.actions,
        steps=run.result.steps,
        virtual_s=(run.ended_ns - run.started_ns) / NS_PER_S,
        elapsed_s=elapsed_s,
    )


def _table(speeds: Sequence[SimSpeed]) -> str:
    rows: list[list[object]] = [
        [
            speed.name,
            speed.requests,
            speed.failed,
            speed.tokens,
            speed.events,
            speed.steps,
            f"{speed.virtual_s:.0f}",
            f"{speed.elapsed_s:.2f}",
            f"{speed.real_time_factor:.1f}",
            f"{speed.us_per_event:.0f}",
        ]
        for speed in speeds
    ]
    header = ["accelerators", "requests", "failed", "tokens", "events", "steps"]
    return table([*header, "virtual s", "real s", "x real time", "us/event"], rows)
