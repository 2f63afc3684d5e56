"""Pools under half of what they can serve, as in BlitzScale's experiments: a public trace, scaled.

And under less, where scaling happens: at half of capacity bursts take all devices.

What several claims look at is simulated once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import msgspec

from livescale.config.slo import SloAbsolute, percentile
from livescale.lab.reproduce.base.claim import Conditions
from livescale.lab.reproduce.base.models import cluster_of
from livescale.lab.reproduce.base.sharing import shared
from livescale.load.traces import TraceRow, summary, upscale, window
from livescale.sim.base.config import SimConfig
from livescale.sim.pools.configs import build_config, tokens_max
from livescale.sim.pools.equal_time import play_equal
from livescale.sim.pools.limits import PooledModel, PooledRoles
from livescale.sim.pools.runs import PoolRun, fit_rows, lead_ns, run_pool
from livescale.sim.pools.systems import System, find_system
from livescale.values.units import NS_PER_S

_SATURATING = 200
"""Requests per instance that saturate a pool; below the length of a gateway's queue in sum."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A trace, the model that answers it, and its cluster. Only what arrives in the first
    `played_ns` is played (None: all). With `roles` each instance prefills or decodes. The pool
    knows an SLO of `slo_ns` (TTFT, TBT), if there is one."""

    trace: str
    preset: str
    cluster: str
    tp_size: int = 1
    played_ns: int | None = None
    roles: PooledRoles | None = None
    slo_ns: tuple[int, int] | None = None

    def config(self, system: str) -> SimConfig:
        return self.config_of(find_system(system))

    def config_of(self, system: System) -> SimConfig:
        slo = None if self.slo_ns is None else SloAbsolute(*self.slo_ns)
        model = PooledModel(self.preset, self.preset, self.tp_size, roles=self.roles, slo=slo)
        return kv_behind(build_config(cluster_of(self.cluster), [model], system))


def kv_behind(config: SimConfig) -> SimConfig:
    """KV of a prompt follows the request, as in the papers' systems: none of them sends layers of
    one that is still computed, or from two instances."""
    live = msgspec.structs.replace(config.live, kv_ahead=False, kv_straight=False)
    return msgspec.structs.replace(config, live=live)


PARTS = (0.25, 0.08)
"""Of capacity, besides the papers' half."""


@shared(tuple[list[TraceRow], float])
def half_load(
    setup: Setup, conditions: Conditions, part: float = 0.5
) -> tuple[list[TraceRow], float]:
    """The trace scaled to half (or another part) of what all instances together can serve; and
    that capacity, in requests per second."""
    # What all instances can serve depends neither on how much is played nor on what is promised.
    rows, capacity = _rows_and_capacity(replace(setup, played_ns=None, slo_ns=None), conditions)
    rows = upscale(rows, capacity * part / rate_of(rows), conditions.seed)
    return rows if setup.played_ns is None else window(rows, 0, setup.played_ns), capacity


@shared(PoolRun)
def half_loaded(setup: Setup, system: str, conditions: Conditions, part: float = 0.5) -> PoolRun:
    """The half load, or that of another part, on the system, whose name may carry a parameter
    ("fixed:6")."""
    config = setup.config(system)
    rows, _ = half_load(setup, conditions, part)
    return run_pool(config, {setup.preset: rows}, lead_ns(config), conditions.seed)


@shared(PoolRun)
def fixed_beside(setup: Setup, system: str, conditions: Conditions, part: float = 0.5) -> PoolRun:
    """The same load on a fixed pool of the system's device time, in whole instances."""
    rows, _ = half_load(setup, conditions, part)

    def play(system: System) -> PoolRun:
        config = setup.config_of(system)
        return run_pool(config, {setup.preset: rows}, lead_ns(config), conditions.seed)

    like = half_loaded(setup, system, conditions, part)
    devices = len(like.config.devices)
    return play_equal(find_system(f"fixed:auto={system}"), like, devices, setup.tp_size, play)[1]


def rate_of(rows: Sequence[TraceRow]) -> float:
    """Requests per second on average."""
    rate = summary(rows).requests_per_s_mean
    assert rate is not None, "the trace lasts"
    return rate


def ttfts_ns(run: PoolRun) -> list[int]:
    """Of all requests that were answered."""
    return [t.ttft_ns for t in run.timings() if t.ttft_ns is not None]


def ttft_mean_s(run: PoolRun) -> float:
    return fmean(ttfts_ns(run)) / NS_PER_S


def ttft_percentile_s(run: PoolRun, q: int) -> float:
    return percentile(ttfts_ns(run), q) / NS_PER_S


def ttft_p99_s(run: PoolRun) -> float:
    return ttft_percentile_s(run, 99)


def tbt_mean_s(run: PoolRun) -> float:
    """Of all gaps between tokens."""
    return fmean(gap for timing in run.timings() for gap in timing.tbt_ns) / NS_PER_S


def violations_percent(run: PoolRun, slo: SloAbsolute) -> float:
    """Of the requests, those that missed the SLO or failed."""
    timings = run.timings()
    return 100 * sum(not slo.is_met(timing) for timing in timings) / len(timings)


def mean_instances(run: PoolRun) -> tuple[int, int]:
    """Prefill and decode instances on average while there were requests, loading included, in whole
    numbers: one of each at least, and together as many as on average."""
    held = {"living": 0, "decode": 0}
    living = decode = 0
    last_ns = run.started_ns
    for count in run.result.instances:
        at_ns = min(max(count.now_ns, run.started_ns), run.ended_ns)
        held["living"] += living * (at_ns - last_ns)
        held["decode"] += decode * (at_ns - last_ns)
        last_ns, living, decode = at_ns, count.living, count.decode
    span_ns = max(run.ended_ns - run.started_ns, 1)
    held["living"] += living * (run.ended_ns - last_ns)
    held["decode"] += decode * (run.ended_ns - last_ns)
    total = max(round(held["living"] / span_ns), 2)
    decodes = min(max(round(held["decode"] / span_ns), 1), total - 1)
    return total - decodes, decodes


def suffix(part: float) -> str:
    """Behind the names of figures at that part of capacity."""
    return "" if part == 0.5 else f"_at_{round(100 * part)}"


# -- helpers --------------------------------------------------------------------------------------


@shared(tuple[list[TraceRow], float])
def _rows_and_capacity(setup: Setup, conditions: Conditions) -> tuple[list[TraceRow], float]:
    config = setup.config("fixed-full")
    rows, _ = fit_rows(conditions.trace(setup.trace), tokens_max(config, setup.preset))
    return rows, _saturated_rate(rows, config, conditions.seed)


def _saturated_rate(rows: Sequence[TraceRow], config: SimConfig, seed: int) -> float:
    """Requests per second of the one model while every instance always has some waiting.

    Requests of these lengths are all there at once; the first and the last tenth to end, when
    instances fill and run dry, do not count. The rate at which a trace's bursts still meet some
    bound on latency would be lower: that depends on the bursts, this on the pool alone.
    """
    (policy,) = config.policies
    count = _SATURATING * config.workers // policy.spec.tp_size
    load = [msgspec.structs.replace(rows[i % len(rows)], arrival_ns=0) for i in range(count)]
    run = run_pool(config, {policy.spec.name: load}, lead_ns(config), seed)
    ends = sorted(line.finished_ns for line in run.result.requests)
    first, last = count // 10, count * 9 // 10
    return (last - first) * NS_PER_S / (ends[last] - ends[first])
