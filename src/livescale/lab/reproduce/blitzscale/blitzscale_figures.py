"""BlitzScale's Figures 3, 4 and 17 to 24, from simulated pools.

Where the paper compares systems it has prefill and decode instances; Figures 4 and 24 are
colocated.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from functools import partial

import msgspec

from livescale.config.slo import SloAbsolute
from livescale.lab.reproduce.base import series
from livescale.lab.reproduce.base.claim import Claim, Conditions, Curve, Picture, Verdict
from livescale.lab.reproduce.base.experiments import BASELINES, NAMES, OURS, SETUPS, STEPS
from livescale.lab.reproduce.base.half_loads import (
    Setup,
    half_load,
    half_loaded,
    mean_instances,
    tbt_mean_s,
    ttft_mean_s,
    violations_percent,
)
from livescale.lab.reproduce.base.paper_figures import PaperFigure, Printed
from livescale.lab.reproduce.base.sharing import shared
from livescale.lab.reproduce.blitzscale import blitzscale_baselines as baselines
from livescale.lab.reproduce.blitzscale import blitzscale_bursts as bursts
from livescale.lab.reproduce.blitzscale import blitzscale_network as network
from livescale.lab.reproduce.blitzscale import blitzscale_pools as pools
from livescale.sim.pools.runs import PoolRun, lead_ns, recorded, run_pool
from livescale.telemetry.history.reading import read_history
from livescale.telemetry.record.record import TrafficLine
from livescale.telemetry.timeline import host_copy_use
from livescale.values.units import NS_PER_MS, NS_PER_S

_SYSTEMS = {"LiveScale": OURS, "ServerlessLLM": BASELINES["sllm"], "AllCache": "allcache"}
_STEP_NAMES = ("S-LLM", "+Network", "+Multicast", "+ZigZag")
_TIME, _SECONDS, _TBT = "time (s)", "s", "ms"
_PART_NS = 250 * NS_PER_MS
"""Figure 21 counts prompts in each."""
_ANY_NS = 10**18
"""No request waits so long."""
_SIX = {"LiveScale": ("ours", bursts.SIX["ours"]), "AllCache": ("host", bursts.SIX["host"])}


def figure_3(conditions: Conditions) -> PaperFigure:
    """§3: violations by the speed of loading, and KV on the network at the highest rate."""
    panels = [
        _by_bandwidth("72B", SETUPS["burstgpt"], network.SLO_72B, conditions),
        _by_bandwidth("8B", network.SETUP_8B, network.SLO_8B, conditions),
    ]
    use = [
        Picture(
            f"{name}: KV on the network at capacity",
            _TIME,
            "% of all NICs",
            (series.kv_percents(half_loaded(setup, "fixed-full", conditions, 1.0), "KV"),),
        )
        for name, setup in (("72B", SETUPS["burstgpt"]), ("8B", network.SETUP_8B))
    ]
    printed = tuple(
        _printed(claim, conditions)
        for claim in (network.violations_by_bandwidth, network.peak_network_use)
    )
    return PaperFigure(3, "why loading speed matters", (tuple(panels), tuple(use)), printed)


def figure_4(conditions: Conditions) -> PaperFigure:
    """§3: loads that miss the host's cache."""
    found = pools.cache_misses.measure(conditions)
    assert found.picture is not None
    return PaperFigure(
        4,
        "ServerlessLLM's host caches on BurstGPT",
        ((found.picture,),),
        (_printed(pools.cache_misses, conditions),),
    )


def figure_17(conditions: Conditions) -> PaperFigure:
    """§6.1: three traces, three systems."""
    rows = []
    for name, setup in SETUPS.items():
        runs = {label: half_loaded(setup, of, conditions) for label, of in _SYSTEMS.items()}
        rate = series.arrivals(runs["LiveScale"], "requests")
        title = NAMES[name]
        rows.append(
            (
                Picture(f"{title}: rate", _TIME, "requests/s", (rate,)),
                _panel(f"{title}: mean TTFT", _TIME, _SECONDS, series.ttft_means, runs),
                _panel(f"{title}: mean TBT", _TIME, _TBT, series.tbt_means, runs),
                _panel(f"{title}: CDF of TTFT", "TTFT (s)", "%", series.ttft_shares, runs),
                _panel(f"{title}: CDF of TBT", "TBT (ms)", "%", series.tbt_shares, runs),
            )
        )
    claims = (
        *(baselines.ttft_on_burstgpt, baselines.tbt_on_burstgpt, baselines.tbt_on_azure),
        *(baselines.spikes_without_copies, baselines.ttft_on_all_traces),
    )
    printed = tuple(_printed(claim, conditions) for claim in claims)
    return PaperFigure(17, "three traces with prefill and decode instances", tuple(rows), printed)


def figure_18(conditions: Conditions) -> PaperFigure:
    """§6.2: 24B on AzureConv, latencies and device time."""
    runs = baselines.conv_runs(conditions)
    named = {
        "LiveScale": runs["ours"],
        "ServerlessLLM": runs["sllm"],
        "DistServe (full)": runs["full"],
        "DistServe (half)": runs["mean"],
    }
    held = [
        Picture(
            f"Devices: {label}",
            _TIME,
            "devices",
            (
                series.devices(named[label], "all"),
                series.devices(named[label], "prefill", decode=False),
                series.devices(named[label], "decode", decode=True),
                series.devices(named["DistServe (full)"], "DistServe (full)"),
                series.devices(named["DistServe (half)"], "DistServe (half)"),
            ),
        )
        for label in ("ServerlessLLM", "LiveScale")
    ]
    row = (
        _panel("CDF of TTFT", "TTFT (s)", "%", series.ttft_shares, named),
        _panel("CDF of TBT", "TBT (ms)", "%", series.tbt_shares, named),
        *held,
    )
    claims = (
        *(baselines.violations_on_azureconv, baselines.beside_mean_instances),
        *(baselines.beside_host_caches, baselines.device_time_beside_all),
        baselines.device_time_beside_caches,
    )
    prefill, decode = mean_instances(runs["ours"])
    return PaperFigure(
        18,
        "24B on AzureConv",
        (row,),
        tuple(_printed(claim, conditions) for claim in claims),
        f"DistServe (half) has {prefill} prefill and {decode} decode instances",
    )


def figure_19(conditions: Conditions) -> PaperFigure:
    """§6.2: copies in host memory."""
    curves = []
    for label in ("LiveScale", "ServerlessLLM"):
        copies = [_recorded(setup, _SYSTEMS[label], conditions)[0] for setup in SETUPS.values()]
        curves.append(Curve(label, tuple((float(i), n) for i, n in enumerate(copies))))
    names = tuple(NAMES.values())
    panel = Picture("Copies in host memory, on average", "", "models", tuple(curves), names=names)
    return PaperFigure(19, "host cache", ((panel,),), (_printed(pools.host_copies, conditions),))


def figure_20(conditions: Conditions) -> PaperFigure:
    """§6.3: the ablation."""
    panels = []
    for title, unit, of in (
        ("Mean TTFT", _SECONDS, ttft_mean_s),
        ("Mean TBT", _TBT, lambda run: 1000 * tbt_mean_s(run)),
    ):
        curves = tuple(
            Curve(
                NAMES[name],
                tuple(
                    (float(i), of(half_loaded(setup, system, conditions)))
                    for i, system in enumerate(STEPS.values())
                ),
            )
            for name, setup in SETUPS.items()
        )
        panels.append(Picture(title, "", unit, curves, names=_STEP_NAMES))
    printed = (_printed(bursts.ablation, conditions),)
    return PaperFigure(20, "ablation", (tuple(panels),), printed)


def figure_21(conditions: Conditions) -> PaperFigure:
    """§6.3: prompts computed while six instances load."""
    curves = []
    for label, (name, _) in _SIX.items():
        run = bursts.six(name, conditions)
        line = bursts.six_loads(run)
        parts = Counter(
            (request.token_ns[0] - line.decided_ns) // _PART_NS for request in run.result.requests
        )
        per_part = bursts.SIX_PROMPT_TOKENS * NS_PER_S / _PART_NS
        points = tuple(
            (part * _PART_NS / NS_PER_S, parts[part] * per_part)
            for part in range(min(parts), max(parts) + 1)
        )
        curves.append(Curve(label, points, is_step=True))
    panel = Picture(
        "Prompt tokens of first tokens", "time since the decision (s)", "tokens/s", tuple(curves)
    )
    printed = (_printed(bursts.scaling_of_six, conditions),)
    return PaperFigure(21, "six prefill instances at once", ((panel,),), printed)


def figure_22(conditions: Conditions) -> PaperFigure:
    """§6.3: parameters and KV on the network."""
    panels = []
    for name, setup in SETUPS.items():
        curves = []
        for label in ("LiveScale", "ServerlessLLM"):
            run = half_loaded(setup, _SYSTEMS[label], conditions)
            carried = _recorded(setup, _SYSTEMS[label], conditions)[1]
            curves.append(series.kv_percents(run, f"{label}: KV"))
            curves.append(series.per_second(run, carried, f"{label}: parameters"))
        panels.append(Picture(NAMES[name], _TIME, "% of all NICs", tuple(curves)))
    printed = (_printed(network.network_use, conditions),)
    return PaperFigure(22, "network use", (tuple(panels),), printed)


def figure_23(conditions: Conditions) -> PaperFigure:
    """§6.3: what an instance waits for before its parameters come, and for these."""
    run = half_loaded(SETUPS["azurecode"], "livescale-cold", conditions)
    loads = [
        (line.decided_ns, load.first_byte_ns, load.loaded_ns)
        for line in run.result.scales
        for load in line.loads
        if line.decided_ns >= run.started_ns
    ]
    times = [(b - a, c - b) for a, b, c in loads if b is not None and c is not None]
    control_ms, data_ms = (statistics.fmean(part) / NS_PER_MS for part in zip(*times, strict=True))
    bars = Curve("8B, mean of all loads", ((0.0, control_ms), (1.0, data_ms)))
    names = ("order to first byte", "first to last byte")
    panel = Picture("Parts of a load", "", _TBT, (bars,), names=names)
    printed = (
        Printed("creating a CUDA context, where none is pooled", "about 500 ms", "not simulated"),
        Printed("forming a communication group, where none is pooled", "100 ms", "not simulated"),
        Printed("control plane beside data plane", "-", f"{control_ms:.1f} of {data_ms:.0f} ms"),
    )
    note = (
        "the simulator has no CUDA contexts: the first bar is the order, its way, and the first"
        " chunk's. Released devices keep nothing here, so that all loads cross links"
    )
    return PaperFigure(23, "control and data plane", ((panel,),), printed, note)


def figure_24(conditions: Conditions) -> PaperFigure:
    """§6.4: colocated, beside all and half of the instances."""
    systems = {"LiveScale": OURS, "vLLM (full)": "fixed-full", "vLLM (avg)": "fixed-half"}
    runs = {name: half_loaded(pools.SETUP, of, conditions) for name, of in systems.items()}
    row = (
        _panel("Mean TTFT", _TIME, _SECONDS, series.ttft_means, runs),
        _panel("CDF of TTFT", "TTFT (s)", "%", series.ttft_shares, runs),
        _panel("CDF of TBT", "TBT (ms)", "%", series.tbt_shares, runs),
    )
    printed = (_printed(pools.tail_beside_fixed, conditions),)
    return PaperFigure(24, "Llama2-7B on BurstGPT, colocated", (row,), printed)


FIGURES: dict[int, Callable[[Conditions], PaperFigure]] = {
    3: figure_3,
    4: figure_4,
    17: figure_17,
    18: figure_18,
    19: figure_19,
    20: figure_20,
    21: figure_21,
    22: figure_22,
    23: figure_23,
    24: figure_24,
}


# -- helpers, in the order used -------------------------------------------------------------------


def _by_bandwidth(name: str, setup: Setup, slo: SloAbsolute, conditions: Conditions) -> Picture:
    """Violations of the SLO, and of its two bounds apart."""
    runs = network.delayed_runs(setup, conditions)
    apart = {
        "TTFT": msgspec.structs.replace(slo, tbt_ns=None),
        "TBT": msgspec.structs.replace(slo, ttft_ns=_ANY_NS),
        "either": slo,
    }
    curves = tuple(
        Curve(label, tuple((float(g), violations_percent(run, of)) for g, run in runs.items()))
        for label, of in apart.items()
    )
    title = f"{name} on BurstGPT: SLO violations"
    return Picture(title, "Gbit/s per GPU", "% of requests", curves, is_log_x=True)


def _panel(
    title: str,
    x: str,
    y: str,
    curve: Callable[[PoolRun, str], Curve],
    runs: dict[str, PoolRun],
) -> Picture:
    return Picture(title, x, y, tuple(curve(run, label) for label, run in runs.items()))


def _printed(claim: Claim, conditions: Conditions) -> Printed:
    """What the claim compares."""
    verdict = Verdict.of(claim, claim.measure(conditions))
    words = "agrees" if verdict.within else "does not agree"
    return Printed(f"{claim.id} ({words})", claim.paper, verdict.ours)


@shared(tuple[float, dict[int, int]])
def _recorded(setup: Setup, system: str, conditions: Conditions) -> tuple[float, dict[int, int]]:
    """Host copies of the model on average, and parameters that NICs had carried by each time."""
    config = setup.config(system)
    rows, _ = half_load(setup, conditions)
    play = partial(run_pool, config, {setup.preset: rows}, lead_ns(config), conditions.seed)
    lines = recorded(play, list)[1]
    (use,) = host_copy_use(read_history(lines)).values()
    traffic = (line for line in lines if isinstance(line, TrafficLine))
    return use.copies_mean, {t.now_ns: t.carried_bytes.get("nic", 0) for t in traffic}
