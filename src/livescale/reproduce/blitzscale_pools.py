"""Claims about whole pools, simulated with the production controller and Batcher.

BlitzScale's and one of QUART's. Runs that several claims look at are made once.
"""

from __future__ import annotations

import bisect
import functools
import io
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from livescale.latency.shapes import LLAMA_3_8B
from livescale.latency.work import LinearLatency
from livescale.reproduce.claim import Conditions, Curve, Measured, Picture
from livescale.reproduce.models import cluster_of
from livescale.reproduce.multicasts import NS_PER_S
from livescale.sim.config import SimConfig
from livescale.sim.pools.configs import PooledModel, build_config, tokens_max
from livescale.sim.pools.runs import PoolRun, fit_rows, lead_ns, run_pool
from livescale.sim.pools.systems import SYSTEMS
from livescale.slo import percentile
from livescale.telemetry.history.reading import read_history
from livescale.telemetry.host_memory import host_copy_use
from livescale.telemetry.record import read_record
from livescale.traces import TraceRow, rotate, summary, upscale

_BURST_TRACE = "burstgpt2gpt4_5539015_5min"
_MODEL = "llama-2-7b"
_CLUSTER = "blitzscale-b"
"""The paper's cluster for models on one GPU (§6)."""
_SHARED_CLUSTER = "blitzscale-a"
"""The one with more hosts."""
_SHARING = 12
_SATURATING = 200
"""Requests per instance that saturate a pool; below the length of a gateway's queue in sum."""


@dataclass(frozen=True, slots=True)
class _HalfLoad:
    """A trace scaled to half of what a whole pool can serve, in requests per second."""

    rows: tuple[TraceRow, ...]
    capacity: float


def cache_misses(conditions: Conditions) -> Measured:
    """BlitzScale §3, Figure 4: with ServerlessLLM's host caches (kept for 5 min) 20 to 46 % of the
    instances that BurstGPT calls for miss, mostly where several are added at once.

    Twelve models share the cluster, each with the trace as it was recorded, one after the other
    shifted by a twelfth of it. An instance hits when its own host's memory has the model.
    """
    run, _ = _shared_run("serverlessllm", conditions)
    alone, together = [0, 0], [0, 0]
    hits, misses = [(0.0, 0.0)], [(0.0, 0.0)]
    for line in sorted(run.result.scales, key=lambda line: line.decided_ns):
        if line.decided_ns < run.started_ns or not line.loads:
            continue
        kind = together if len(line.loads) > 1 else alone
        missed = sum(not load.upstream.startswith("h") for load in line.loads)
        kind[0] += missed
        kind[1] += len(line.loads)
        at_s = (line.decided_ns - run.started_ns) / NS_PER_S
        misses.append((at_s, misses[-1][1] + missed))
        hits.append((at_s, hits[-1][1] + len(line.loads) - missed))
    figures = {
        "loads": alone[1] + together[1],
        "percent": 100 * (alone[0] + together[0]) / max(alone[1] + together[1], 1),
        "percent_alone": 100 * alone[0] / max(alone[1], 1),
        "percent_together": 100 * together[0] / max(together[1], 1),
    }
    curves = (Curve("misses", tuple(misses), True), Curve("hits", tuple(hits), True))
    picture = Picture("Host caches: loads so far", "time (s)", "instances", curves)
    return Measured(figures, (picture,))


def host_copies(conditions: Conditions) -> Measured:
    """BlitzScale §5.3, Figure 19: at most one host copy of a model, where ServerlessLLM's grow with
    the hosts that it uses. The most of any of the twelve models, at any time."""
    _, ours = _shared_run("livescale", conditions)
    _, theirs = _shared_run("serverlessllm", conditions)
    return Measured({"ours_max": ours, "serverlessllm_max": theirs})


def kv_need(conditions: Conditions) -> Measured:
    """BlitzScale §2.2, Figure 1 (c): decoding BurstGPT with Llama2-7B keeps 190 to 760 GB of KV, 3
    to 12 times what one instance holds.

    KV of the requests that have begun to decode and have not ended, prompt and answer so far, at
    each second of the run with all instances there. The lowest figure is that of seconds with
    any.
    """
    run = _run("fixed-full", conditions)
    spec = run.config.spec(_MODEL)
    device = run.config.device(0)
    stop_s = (run.ended_ns - run.started_ns) // NS_PER_S
    held = [_kv_tokens(run, run.started_ns + s * NS_PER_S) for s in range(stop_s + 1)]
    busy = [tokens for tokens in held if tokens]
    token_gb = spec.kv_bytes_per_token / 1e9
    one_gb = run.config.batcher(spec, device).kv_blocks * run.config.block_tokens * token_gb
    figures = {
        "gb_min": min(busy) * token_gb,
        "gb_mean": sum(busy) / len(busy) * token_gb,
        "gb_max": max(busy) * token_gb,
        "instances_max": max(busy) * token_gb / one_gb,
    }
    points = tuple((float(s), tokens * token_gb) for s, tokens in enumerate(held))
    picture = Picture("KV of Llama-2-7B", "time (s)", "GB", (Curve("in use", points, True),))
    return Measured(figures, (picture,))


def tail_beside_fixed(conditions: Conditions) -> Measured:
    """BlitzScale §6.4, Figure 24: P99 TTFT of Llama2-7B with prompts and answers on the same
    instances, beside vLLM with half of the instances and with all of them."""
    runs = {name: _run(name, conditions) for name in ("livescale", "fixed-half", "fixed-full")}
    tails = {name: _ttft_p99_s(run) for name, run in runs.items()}
    return Measured(
        {
            "ours_s": tails["livescale"],
            "half_s": tails["fixed-half"],
            "full_s": tails["fixed-full"],
            "ratio_to_half": tails["livescale"] / tails["fixed-half"],
            "ratio_to_full": tails["livescale"] / tails["fixed-full"],
            "device_percent": 100 * runs["livescale"].device_ns() / runs["fixed-full"].device_ns(),
        }
    )


def scaled_rate(conditions: Conditions) -> Measured:
    """BlitzScale §6: traces are scaled with TraceUpscaler so that the mean rate is half of what the
    cluster can serve at most; the capacity is measured in the simulator, on a saturated pool."""
    load = _half_load(conditions)
    rate = summary(load.rows).requests_per_s_mean
    assert rate is not None, "the trace lasts"
    percent = 100 * rate / load.capacity
    return Measured({"rate": rate, "capacity": load.capacity, "percent": percent})


def replicated_stage(conditions: Conditions) -> Measured:
    """QUART §5.1: four replicas of a stage that does 5 requests/s do 20.

    Four instances of one model that takes 200 ms for a request, one request at a time, saturated.
    """
    count, requests = 4, 400
    config = SimConfig.default(LLAMA_3_8B, workers=count)
    policy = msgspec.structs.replace(config.controller.models[0], instances_min=count)
    config = msgspec.structs.replace(
        config,
        controller=msgspec.structs.replace(config.controller, models=(policy,), sequences_max=1),
        latency={"": LinearLatency(200_000_000, 0)},
    )
    rows = [TraceRow(0, 100, 1)] * requests
    run = run_pool(config, {LLAMA_3_8B.name: rows}, 2 * lead_ns(config), conditions.seed)
    seconds = (run.ended_ns - run.started_ns) / NS_PER_S
    return Measured({"requests_per_s": requests / seconds})


def saturated_rate(rows: Sequence[TraceRow], config: SimConfig, seed: int) -> float:
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


# -- helpers --------------------------------------------------------------------------------------


def _config(system: str) -> SimConfig:
    return build_config(cluster_of(_CLUSTER), [PooledModel(_MODEL, _MODEL)], SYSTEMS[system])


@functools.lru_cache(maxsize=2)
def _half_load(conditions: Conditions) -> _HalfLoad:
    """BurstGPT at half of the capacity of all instances together."""
    config = _config("fixed-full")
    rows, _ = fit_rows(conditions.trace(_BURST_TRACE), tokens_max(config, _MODEL))
    capacity = saturated_rate(rows, config, conditions.seed)
    rate = summary(rows).requests_per_s_mean
    assert rate is not None, "the trace lasts"
    return _HalfLoad(tuple(upscale(rows, capacity / 2 / rate, conditions.seed)), capacity)


@functools.lru_cache(maxsize=8)
def _run(system: str, conditions: Conditions) -> PoolRun:
    """The half load on the system."""
    config = _config(system)
    load = {_MODEL: _half_load(conditions).rows}
    return run_pool(config, load, lead_ns(config), conditions.seed)


@functools.lru_cache(maxsize=4)
def _shared_run(system: str, conditions: Conditions) -> tuple[PoolRun, int]:
    """Twelve models on one cluster, and the most host copies of one of them at any time."""
    names = [f"{_MODEL}-{number}" for number in range(_SHARING)]
    models = [PooledModel(name, _MODEL, instances_min=0) for name in names]
    config = build_config(cluster_of(_SHARED_CLUSTER), models, SYSTEMS[system])
    rows, _ = fit_rows(conditions.trace(_BURST_TRACE), tokens_max(config, names[0]))
    period_ns = rows[-1].arrival_ns + NS_PER_S
    loads = {
        name: rotate(rows, period_ns * number // _SHARING, period_ns)
        for number, name in enumerate(names)
    }
    record = io.BytesIO()
    run = run_pool(config, loads, lead_ns(config), conditions.seed, record)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        path.write_bytes(record.getvalue())
        uses = host_copy_use(read_history(read_record(path)))
    return run, max(use.copies_max for use in uses.values())


def _kv_tokens(run: PoolRun, now_ns: int) -> int:
    """Tokens of KV that decoding requests hold then."""
    return sum(
        line.prompt_tokens + bisect.bisect_right(line.token_ns, now_ns)
        for line in run.result.requests
        if line.token_ns and line.token_ns[0] <= now_ns < line.finished_ns
    )


def _ttft_p99_s(run: PoolRun) -> float:
    return percentile([t.ttft_ns for t in run.timings() if t.ttft_ns is not None], 99) / NS_PER_S
