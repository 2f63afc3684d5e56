"""BlitzScale's claims about whole pools that serve while parameters arrive, in simulated pools.

The colocated form: every instance prefills and decodes. Runs that several claims look at are made
once.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from livescale.reproduce.blitzscale_pools import saturated_rate
from livescale.reproduce.claim import Conditions, Curve, Measured, Picture
from livescale.reproduce.models import NS_PER_MS, cluster_of
from livescale.reproduce.multicasts import NS_PER_S
from livescale.sim.config import SimConfig
from livescale.sim.pools.configs import PooledModel, build_config, tokens_max
from livescale.sim.pools.runs import PoolRun, fit_rows, lead_ns, run_pool
from livescale.sim.pools.systems import SYSTEMS
from livescale.slo import percentile
from livescale.telemetry.record import ScaleLine
from livescale.traces import TraceRow, summary, upscale, window

_MODEL = "m"
_PLAYED_NS = 60 * NS_PER_S
"""Of each trace: its first minute, so that all claims can be measured in minutes."""


@dataclass(frozen=True, slots=True)
class _Setup:
    """One of the paper's experiments (its Figure 17)."""

    trace: str
    preset: str
    tp_size: int
    cluster: str


_SETUPS = {
    "burstgpt": _Setup("burstgpt2gpt4_5539015_5min", "qwen2.5-72b", 4, "blitzscale-a"),
    "azurecode": _Setup("azurecode_1320_5min", "llama-3-8b", 1, "blitzscale-b"),
    "azureconv": _Setup("azureconv_1270_8min", "mistral-24b", 2, "blitzscale-b"),
}
_STEPS = {
    "sllm": "serverlessllm-30s",
    "network": "unicast",
    "multicast": "livescale-stop",
    "zigzag": "livescale",
}
"""Figure 20's steps, as systems: host caches and storage; the network, one copy to each; chains;
live."""


def scaling_of_six(conditions: Conditions) -> Measured:
    """BlitzScale §6.3, Figure 21: six 24B instances are added, along two chains of three whose
    tails help while they load: 1200 ms until all serve, where loading from host memory takes about
    2000; tokens come from 500 ms on.

    Two instances that serve, and 200 prompts of 2,000 tokens at once; times from the decision. On
    the paper's cluster with NVLink and on the one without.
    """
    figures = {}
    for name, system, cluster in (
        ("ours", "livescale", "blitzscale-a"),
        ("host", "allcache", "blitzscale-a"),
        ("pcie", "livescale", "blitzscale-b"),
    ):
        model = PooledModel(_MODEL, "mistral-24b", 2, instances_min=2, instances_max=8)
        config = build_config(cluster_of(cluster), [model], SYSTEMS[system])
        load = [TraceRow(0, 2_000, 16)] * 200
        run = run_pool(config, {_MODEL: load}, lead_ns(config), conditions.seed)
        line = next(line for line in _scale_ups(run) if len(line.loads) == 12)
        loaded = [load.loaded_ns for load in line.loads if load.loaded_ns is not None]
        begun = [load.first_token_ns for load in line.loads if load.first_token_ns is not None]
        begun += [load.first_help_ns for load in line.loads if load.first_help_ns is not None]
        figures[f"{name}_ms"] = (max(loaded) - line.decided_ns) / NS_PER_MS
        figures[f"{name}_first_ms"] = (min(begun) - line.decided_ns) / NS_PER_MS
    return Measured(figures)


def ablation(conditions: Conditions) -> Measured:
    """BlitzScale §6.3, Figure 20: ServerlessLLM, then with the network, with multicast, with
    ZigZag: each is better than the one before in TTFT on three traces. Multicast gains little on
    BurstGPT (eight instances at most), ZigZag most on AzureCode.

    The first minute of each trace at half of the cluster's capacity.
    """
    figures: dict[str, float] = {}
    curves = []
    for name in _SETUPS:
        means = {
            step: _ttft_mean_s(_run(name, system, conditions)) for step, system in _STEPS.items()
        }
        figures |= {f"{name}_{step}_s": mean for step, mean in means.items()}
        points = tuple((float(i), mean) for i, mean in enumerate(means.values()))
        curves.append(Curve(name, points))
        figures[f"{name}_is_falling"] = float(
            list(means.values()) == sorted(means.values(), reverse=True)
        )
    steps = "ServerlessLLM, +Network, +Multicast, +ZigZag"
    picture = Picture("Mean TTFT, step by step", steps, "s", tuple(curves))
    return Measured(figures, (picture,))


def tail_with_zigzag(conditions: Conditions) -> Measured:
    """BlitzScale §1: live execution alone halves the tail latency under bursts. P99 TTFT against
    the same system that waits for all parameters, on the first minute of AzureCode."""
    stop, live = (
        _ttft_p99_s(_run("azurecode", system, conditions))
        for system in ("livescale-stop", "livescale")
    )
    return Measured({"stop_s": stop, "live_s": live, "ratio": live / stop})


def beside_full_caches(conditions: Conditions) -> Measured:
    """BlitzScale §6.1, Figure 17: TTFT is always below AllCache's, where every host has every model
    in memory. Mean TTFT on three traces, the first minute of each."""
    figures: dict[str, float] = {}
    for name in _SETUPS:
        ours, theirs = (
            _ttft_mean_s(_run(name, system, conditions)) for system in ("livescale", "allcache")
        )
        figures |= {f"{name}_s": ours, f"{name}_allcache_s": theirs, f"{name}_ratio": ours / theirs}
    return Measured(figures)


# -- helpers --------------------------------------------------------------------------------------


def _scale_ups(run: PoolRun) -> list[ScaleLine]:
    return [s for s in run.result.scales if s.decided_ns >= run.started_ns and s.loads]


def _config(setup: _Setup, system: str) -> SimConfig:
    model = PooledModel(_MODEL, setup.preset, setup.tp_size)
    return build_config(cluster_of(setup.cluster), [model], SYSTEMS[system])


@functools.lru_cache(maxsize=4)
def _load(name: str, conditions: Conditions) -> Sequence[TraceRow]:
    """The first minute of the trace at half of what the cluster can serve."""
    setup = _SETUPS[name]
    config = _config(setup, "fixed-full")
    rows, _ = fit_rows(conditions.trace(setup.trace), tokens_max(config, _MODEL))
    rate = summary(rows).requests_per_s_mean
    assert rate is not None, "the trace lasts"
    capacity = saturated_rate(rows, config, conditions.seed)
    return window(upscale(rows, capacity / 2 / rate, conditions.seed), 0, _PLAYED_NS)


@functools.lru_cache(maxsize=16)
def _run(name: str, system: str, conditions: Conditions) -> PoolRun:
    config = _config(_SETUPS[name], system)
    load = {_MODEL: _load(name, conditions)}
    return run_pool(config, load, lead_ns(config), conditions.seed)


def _ttfts_ns(run: PoolRun) -> list[int]:
    return [t.ttft_ns for t in run.timings() if t.ttft_ns is not None]


def _ttft_mean_s(run: PoolRun) -> float:
    times = _ttfts_ns(run)
    return sum(times) / len(times) / NS_PER_S


def _ttft_p99_s(run: PoolRun) -> float:
    return percentile(_ttfts_ns(run), 99) / NS_PER_S
