"""Which parameters stay on devices that several models share."""

from __future__ import annotations

import functools

import pytest
from pool_plays import CLUSTER, MS, S, cluster

from livescale.load.traces import TraceRow
from livescale.sim.pools.configs import build_config
from livescale.sim.pools.limits import PooledModel
from livescale.sim.pools.runs import lead_ns, run_pool
from livescale.sim.pools.systems import SYSTEMS

DEVICES = CLUSTER.replace("count: 2, kind", "count: 8, kind")
"""Sixteen."""
BUSY, RARE = PooledModel("busy", "llama-3-8b"), PooledModel("rare", "llama-3-8b")


def steady(seconds: int) -> list[TraceRow]:
    """Three requests a second, which one instance serves."""
    return [TraceRow(n * S // 3, 1_000, 20) for n in range(3 * seconds)]


def bursts(seconds: int) -> list[TraceRow]:
    """Eight prompts at once, every ten seconds: over before more parameters could be loaded."""
    return [TraceRow(at_s * S, 2_000, 8) for at_s in range(10, seconds, 10) for _ in range(8)]


@functools.cache
def slowest_ns(system: str) -> dict[str, int]:
    """By model, the TTFT that nine of ten requests are within, of bursts after the first one."""
    config = build_config(cluster(DEVICES), [BUSY, RARE], SYSTEMS[system])
    loads = {"busy": steady(60), "rare": bursts(60)}
    run = run_pool(config, loads, lead_ns(config), 0)
    found = {}
    for model in loads:
        lines = [line for line in run.result.requests if line.model == model]
        late = [r.timing() for r in lines if r.due_ns > run.started_ns + 15 * S]
        values = sorted(timing.ttft_ns or 1 << 62 for timing in late)
        found[model] = values[len(values) * 9 // 10]
    return found


def test_a_model_with_rare_bursts_keeps_the_copies_that_they_need() -> None:
    """Where the first model gets all that is empty, the bursts wait for one or two instances."""
    recent, needed = slowest_ns("livescale-recent"), slowest_ns("livescale")
    assert needed["rare"] <= recent["rare"] / 2
    assert needed["rare"] <= 400 * MS


@pytest.mark.parametrize("system", ["livescale", "livescale-recent"])
def test_the_other_model_has_what_it_needs(system: str) -> None:
    assert slowest_ns(system)["busy"] <= 300 * MS
