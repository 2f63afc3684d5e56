"""QUART's cluster under load: its five models, the systems it compares, two kinds of loads.

What the paper leaves open is set for all systems alike: how uneven stages are, how much comes, and
that every system begins with one replica of all (§8.3). What several claims look at is simulated
once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from msgspec.structs import replace

from livescale.lab.reproduce.base.claim import Conditions
from livescale.lab.reproduce.base.half_loads import ttfts_ns
from livescale.lab.reproduce.base.models import cluster_of
from livescale.lab.reproduce.base.sharing import shared
from livescale.latency.shapes import EXECUTED
from livescale.load.arrivals import gamma_arrivals
from livescale.load.traces import TraceRow, burst_trace
from livescale.sim.pools.equal_time import play_equal
from livescale.sim.pools.runs import PoolRun, lead_ns, run_pool
from livescale.sim.pools.stage_pools import PooledStages, stage_config
from livescale.sim.pools.stage_systems import STAGE_SYSTEMS, StageSystem
from livescale.sim.pools.systems import System
from livescale.values.units import NS_PER_S

CLUSTER = "quart"
EVEN = (2,) * 8
UNEVEN = (2, 2, 2, 3, 2, 2, 2, 2)
"""What part of the time each stage takes. The paper divides its models evenly (§8.1), and even
stages of constant time give a policy nothing to choose (Friedman 1965): one that takes 1.5 times as
long as the others is assumed. All together they take what Table 1 says, either way."""
MODELS = {
    "bert-21b": "BERT",
    "llama-7b": "LLAMA",
    "whisper-9b": "Whisper",
    "opt-66b": "OPT",
    "wideresnet": "WideResNet",
}
BASELINES = ("infless", "inferline", "cocktail")
ALL = ("quart", *BASELINES)
LABELS = {"quart": "QUART", "infless": "INFless", "inferline": "InferLine", "cocktail": "Cocktail"}
CVS = (0.1, 1.0, 2.0, 4.0, 8.0)
LOADS_AS = "bert-21b"
"""The model whose loads the paper timed: 0.8 s per stage from host memory (§4.2), 45 s for all of
it from disk (§2.2)."""
SLO_PERCENT = 150
"""Of a model's time alone: what Q3 is judged by, and what policies that know an SLO aim at."""
_BURSTS_NS, _BURSTS = 30 * NS_PER_S, 2
_PEAK = 0.5
"""Of what all devices together can do: the rate at the top of a burst, as half of capacity is that
of the other papers' loads. The paper gives no rate."""
_GAMMA_NS, _GAMMA_PART = 30 * NS_PER_S, 0.1
"""How long gamma arrivals come, and their mean rate."""


@dataclass(frozen=True, slots=True)
class StageSetup:
    """A model under a load: bursts (`cv` None), or gamma arrivals. Hosts have `memory_bytes` for
    copies (None: 1,024 GB). The model has `size_bytes` (None: those of Table 1)."""

    model: str
    cv: float | None = None
    shares: tuple[int, ...] = UNEVEN
    memory_bytes: int | None = None
    size_bytes: int | None = None

    @property
    def pooled(self) -> PooledStages:
        model = EXECUTED[self.model]
        if self.size_bytes is not None:
            model = replace(model, size_bytes=self.size_bytes)
        return PooledStages(model, self.shares, self.memory_bytes)

    def as_timed(self) -> StageSetup:
        """The same, but the model loads in the times that the paper has of one."""
        size_bytes = None if self.model == LOADS_AS else EXECUTED[LOADS_AS].size_bytes
        return dataclasses.replace(self, size_bytes=size_bytes)

    @property
    def executed_ns(self) -> int:
        """What a request takes that never waits, all stages together."""
        return EXECUTED[self.model].executed_ns

    @property
    def policy_slo_ns(self) -> int | None:
        """What policies aim at: with gamma arrivals the SLO is lenient (§8.3), and their own."""
        return self.executed_ns * SLO_PERCENT // 100 if self.cv is None else None

    def rows(self, seed: int) -> list[TraceRow]:
        """The load."""
        capacity = self.pooled.capacity_per_s(len(cluster_of(CLUSTER).topology.devices))
        if self.cv is not None:
            rate = capacity * _GAMMA_PART
            times = list(gamma_arrivals(rate, self.cv, _GAMMA_NS, seed))
        else:
            bursts = [
                burst_trace(_BURSTS * seed + number, _BURSTS_NS, peak_per_s=capacity * _PEAK)
                for number in range(_BURSTS)
            ]
            times = [
                number * _BURSTS_NS + row.arrival_ns
                for number, rows in enumerate(bursts)
                for row in rows
            ]
        return [TraceRow(at_ns, self.pooled.request_tokens, 1) for at_ns in times]


@shared(PoolRun)
def played(setup: StageSetup, system: str, conditions: Conditions) -> PoolRun:
    """The load on the system of that name."""
    return _play(setup, STAGE_SYSTEMS[system], conditions)


@shared(PoolRun)
def played_planned(setup: StageSetup, system: str, conditions: Conditions) -> PoolRun:
    """The same where the system was told the mean rate before, if it can plan for one."""
    rows = setup.rows(conditions.seed)
    rate = len(rows) * NS_PER_S / max(rows[-1].arrival_ns, 1)
    return _play(setup, STAGE_SYSTEMS[system].planned_for(rate), conditions)


@shared(PoolRun)
def played_fixed(setup: StageSetup, conditions: Conditions) -> PoolRun:
    """The same on a fixed pool of the device time that `quart` took."""
    like = played(setup, "quart", conditions)

    def play(system: System) -> PoolRun:
        assert isinstance(system, StageSystem)
        return _play(setup, system, conditions)

    return play_equal(STAGE_SYSTEMS["fixed-stages"], like, like.config.workers, 1, play)[1]


def second_burst_s(run: PoolRun) -> float:
    """Mean latency of the requests of the second burst."""
    from_ns = run.started_ns + _BURSTS_NS
    times = [
        t.ttft_ns for t in run.timings() if t.scheduled_ns >= from_ns and t.ttft_ns is not None
    ]
    return fmean(times) / NS_PER_S


def within_percent(run: PoolRun, slo_ns: int) -> float:
    """Of all requests, how many were answered in that time."""
    return 100 * sum(ns <= slo_ns for ns in ttfts_ns(run)) / len(run.result.requests)


def devices_held(run: PoolRun) -> float:
    """On average, from the first arrival to the last answer."""
    return run.device_ns() / (run.ended_ns - run.started_ns)


def good_per_device_s(run: PoolRun, slo_ns: int) -> float:
    """Requests within that time per second of devices."""
    return sum(ns <= slo_ns for ns in ttfts_ns(run)) * NS_PER_S / run.device_ns()


def failed(runs: Mapping[str, Mapping[Any, PoolRun]]) -> float:
    """Requests that failed, of all these runs."""
    return float(sum(run.failed for its in runs.values() for run in its.values()))


def less_percent(ours: float, theirs: float) -> float:
    """How much less ours is."""
    return 100 * (1 - ours / theirs)


# -- helpers --------------------------------------------------------------------------------------


def _play(setup: StageSetup, system: StageSystem, conditions: Conditions) -> PoolRun:
    config = stage_config(cluster_of(CLUSTER), setup.pooled, system.with_slo(setup.policy_slo_ns))
    rows = {setup.model: setup.rows(conditions.seed)}
    return run_pool(config, rows, lead_ns(config), conditions.seed)
