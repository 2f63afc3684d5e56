"""Which parameters stay on devices that several models share."""

from __future__ import annotations

import functools

import msgspec
import pytest
from pool_plays import CLUSTER, MS, S, cluster

from livescale.config.slo import SloAbsolute
from livescale.load.traces import TraceRow
from livescale.sim.pools.configs import build_config
from livescale.sim.pools.limits import PooledModel
from livescale.sim.pools.runs import lead_ns, run_pool
from livescale.sim.pools.systems import SYSTEMS

DEVICES = CLUSTER.replace("count: 2, kind", "count: 8, kind")
"""Sixteen."""
SMALL = DEVICES.replace("memory: 80GB", "memory: 45GB")
"""As many, with room for one model."""
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
    config = build_config(cluster(SMALL), [BUSY, RARE], SYSTEMS[system])
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


def test_devices_have_room_for_as_many_models_as_leave_enough_for_kv() -> None:
    alone = build_config(cluster(DEVICES), [BUSY], SYSTEMS["livescale"]).device(0)
    models = [msgspec.structs.replace(BUSY, name=f"m{number}") for number in range(6)]
    for count, room in ((2, 2), (3, 3), (6, 3)):
        shared = build_config(cluster(DEVICES), models[:count], SYSTEMS["livescale"]).device(0)
        assert shared.arena_bytes == room * alone.arena_bytes
        assert shared.arena_bytes + shared.kv_bytes == alone.arena_bytes + alone.kv_bytes
        without = build_config(cluster(DEVICES), models[:count], SYSTEMS["allcache"]).device(0)
        assert without.kv_bytes == alone.kv_bytes, "what keeps no spares has all of it for KV"
    # A rank of this one leaves KV no room for eight requests of the greatest length.
    large = PooledModel("large", "qwen2.5-72b", 4)
    shared = build_config(cluster(DEVICES), [BUSY, large], SYSTEMS["livescale"])
    assert shared.device(0).arena_bytes == shared.spec("large").size_bytes


@functools.cache
def late_share(tbt_ms: int | None) -> float:
    """Of answers beside long prompts on one instance: those whose mean time between tokens is above
    60 ms."""
    slo = SloAbsolute(60 * S, tbt_ms * MS) if tbt_ms else None
    model = PooledModel("m", "llama-3-8b", instances_max=1, slo=slo)
    config = build_config(cluster(), [model], SYSTEMS["livescale"])
    prompts = [TraceRow(n * S // 3, 6_000, 2) for n in range(40)]
    answers = [TraceRow(n * S // 3 + 100 * MS, 16, 20) for n in range(40)]
    rows = sorted(prompts + answers, key=lambda row: row.arrival_ns)
    run = run_pool(config, {"m": rows}, lead_ns(config), 0)
    found = [timing.tbt_mean_ns for timing in run.timings() if len(timing.token_ns) == 20]
    return sum(ns is None or ns > 60 * MS for ns in found) / len(found)


def test_promised_times_between_tokens_are_kept_beside_long_prompts() -> None:
    assert late_share(None) > 0.5
    assert late_share(60) < 0.05
