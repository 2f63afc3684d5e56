"""BlitzScale's claims about whole pools beside other systems: latencies, violations, device time.

The paper's experiments, with instances that prefill or decode.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from livescale.config.slo import SloMultipleOfMean
from livescale.lab.reproduce.base.claim import Conditions, Measured, claim
from livescale.lab.reproduce.base.experiments import BASELINES, OURS, SETUPS, TWO_BURSTS, WHOLE
from livescale.lab.reproduce.base.half_loads import (
    Setup,
    half_loaded,
    mean_instances,
    tbt_mean_s,
    ttft_mean_s,
    violations_percent,
)
from livescale.sim.pools.runs import PoolRun
from livescale.values.units import NS_PER_S

_SPIKE = 1.25
_WINDOW = "the first minute of the trace is played"
_CONV = WHOLE["azureconv"]
"""All eight minutes, as in the paper: in the first, every host loads the model for the first time,
and the pool grows from one instance of each kind, which is most of what a minute would show."""


@claim(
    id="B18",
    judges="pool",
    setup="72B on BurstGPT at half of capacity: mean TTFT",
    paper="75.5 % shorter than ServerlessLLM's, 21.1 % than AllCache's",
    tolerance="± 15 percentage points",
    ours="{sllm:.1f} % and {allcache:.1f} % shorter",
    is_within=lambda f: abs(f["sllm"] - 75.5) <= 15 and abs(f["allcache"] - 21.1) <= 15,
    note="from a copy on the same host NVLink brings 72B in 0.2 s, where host memory takes 2.3. "
    + _WINDOW,
)
def ttft_on_burstgpt(conditions: Conditions) -> Measured:
    """BlitzScale §6.1, Figure 17."""
    runs = _beside(SETUPS["burstgpt"], conditions)
    figures = {name: _shorter_percent(ttft_mean_s(runs[name]), runs) for name in BASELINES}
    return Measured({**figures, "failed": _failed(runs.values())})


@claim(
    id="B19",
    judges="pool",
    setup="72B on BurstGPT at half of capacity: mean TBT",
    paper="7.4 % shorter than ServerlessLLM's, 5.1 % than AllCache's",
    tolerance="shorter, by at most 20 %",
    ours="{sllm:.1f} % and {allcache:.1f} % shorter",
    is_within=lambda f: all(0 < f[name] <= 20 for name in BASELINES),
    note=_WINDOW,
)
def tbt_on_burstgpt(conditions: Conditions) -> Measured:
    """BlitzScale §6.1, Figure 17."""
    return _tbt(SETUPS["burstgpt"], conditions)


@claim(
    id="B20",
    judges="pool",
    setup="8B on AzureCode, 24B on AzureConv at half of capacity: mean TBT beside ServerlessLLM and"
    " AllCache",
    paper="88.3 to 94.1 % shorter on AzureCode, 0.7 to 1.8 % on AzureConv",
    tolerance="at least 50 % on AzureCode; shorter by at most 5 % on AzureConv",
    ours="{code_sllm:.1f} and {code_allcache:.1f} % shorter on AzureCode, {conv_sllm:.1f} and"
    " {conv_allcache:.1f} % on AzureConv",
    is_within=lambda f: all(
        f[f"code_{name}"] >= 50 and 0 < f[f"conv_{name}"] <= 5 for name in BASELINES
    ),
    note="model of instances: on AzureCode the paper's decode instances are added too late; here"
    " two have room for all that decodes, for every system. Of AzureCode the first minute is"
    " played, of AzureConv all of it",
)
def tbt_on_azure(conditions: Conditions) -> Measured:
    """BlitzScale §6.1, §6.3, Figure 17."""
    code, conv = (_tbt(setup, conditions).figures for setup in (SETUPS["azurecode"], _CONV))
    figures = {f"code_{name}": code[name] for name in BASELINES}
    figures |= {f"conv_{name}": conv[name] for name in BASELINES}
    return Measured({**figures, "failed": code["failed"] + conv["failed"]})


@claim(
    id="B21",
    judges="pool",
    setup="ServerlessLLM (30 s) beside AllCache at half of capacity: TTFT in bursts (BurstGPT:"
    " first minute; the other traces: all of them)",
    paper="AzureCode spikes in both bursts, as the cache was evicted between them; BurstGPT in the"
    " first only; AzureConv as AllCache",
    tolerance="direction: a spike is 1.25 × AllCache's mean",
    ours="AzureCode × {code_first:.2f} and × {code_second:.2f}; BurstGPT × {burst_first:.2f}, later"
    " × {burst_later:.2f}; AzureConv × {conv:.2f}",
    is_within=lambda f: (
        min(f["code_first"], f["code_second"], f["burst_first"]) >= _SPIKE
        and max(f["burst_later"], f["conv"]) < _SPIKE
    ),
    note="of BurstGPT the first minute is played",
)
def spikes_without_copies(conditions: Conditions) -> Measured:
    """BlitzScale §6.1, Figure 17. AzureCode's bursts are those of the paper, at 0:05 and 3:40
    here."""
    code = [half_loaded(TWO_BURSTS, name, conditions) for name in BASELINES.values()]
    burst, conv = (
        [half_loaded(setup, system, conditions) for system in BASELINES.values()]
        for setup in (SETUPS["burstgpt"], _CONV)
    )
    return Measured(
        {
            "code_first": _ttft_ratio(code, 0, 30),
            "code_second": _ttft_ratio(code, 215, 245),
            "burst_first": _ttft_ratio(burst, 0, 20),
            "burst_later": _ttft_ratio(burst, 20, 60),
            "conv": _ttft_ratio(conv, 0, 480),
            "failed": _failed([*code, *burst, *conv]),
        }
    )


@claim(
    id="B22",
    judges="pool",
    setup="three traces at half of capacity: mean TTFT beside ServerlessLLM's",
    paper="47 to 75 % shorter",
    tolerance="35 to 85 % on every trace",
    ours="{burstgpt:.0f} % (BurstGPT), {azurecode:.0f} % (AzureCode), {azureconv:.0f} %"
    " (AzureConv)",
    is_within=lambda f: all(35 <= f[name] <= 85 for name in SETUPS),
    note=_WINDOW,
)
def ttft_on_all_traces(conditions: Conditions) -> Measured:
    """BlitzScale §1."""
    figures, failed = {}, 0
    for name, setup in SETUPS.items():
        runs = _beside(setup, conditions)
        figures[name] = _shorter_percent(ttft_mean_s(runs["sllm"]), runs)
        failed += _failed(runs.values())
    return Measured({**figures, "failed": failed})


@claim(
    id="B23",
    judges="pool",
    setup="24B on AzureConv at half of capacity: TTFT and TBT above 5 times their means",
    paper="none, as with all instances; ServerlessLLM 18.7 % of the requests",
    tolerance="at most 1 %; ServerlessLLM 10 to 30 %",
    ours="{ours:.1f} %, with all instances {full:.1f} %; ServerlessLLM {sllm:.1f} %",
    is_within=lambda f: max(f["ours"], f["full"]) <= 1 and 10 <= f["sllm"] <= 30,
    note="the means are those with all instances: one bound for all",
)
def violations_on_azureconv(conditions: Conditions) -> Measured:
    """BlitzScale §6.2, Figure 18."""
    runs = conv_runs(conditions)
    slo = SloMultipleOfMean(5).resolve(runs["full"].timings())
    figures = {name: violations_percent(runs[name], slo) for name in ("ours", "full", "sllm")}
    return Measured({**figures, "failed": _failed(runs.values())})


@claim(
    id="B24",
    judges="pool",
    setup="24B on AzureConv at half of capacity, beside as many instances as ours has on average",
    paper="TTFT 95.8 % shorter, TBT 1 %",
    tolerance="mean TTFT at least 80 % shorter",
    ours="TTFT × {ttft_ratio:.2f}, TBT × {tbt_ratio:.2f}, beside {instances:.0f} instances",
    is_within=lambda f: f["ttft_ratio"] <= 0.2,
    note="load: a fixed pool of the mean is not overloaded here, so that little can be gained",
)
def beside_mean_instances(conditions: Conditions) -> Measured:
    """BlitzScale §6.2, Figure 18: DistServe (half)."""
    runs = conv_runs(conditions)
    return Measured(
        {
            "ttft_ratio": ttft_mean_s(runs["ours"]) / ttft_mean_s(runs["mean"]),
            "tbt_ratio": tbt_mean_s(runs["ours"]) / tbt_mean_s(runs["mean"]),
            "instances": float(runs["mean"].config.policies[0].instances_max),
            "failed": _failed(runs.values()),
        }
    )


@claim(
    id="B25",
    judges="pool",
    setup="24B on AzureConv at half of capacity, beside ServerlessLLM",
    paper="TTFT 48.1 % shorter, TBT 1.8 %",
    tolerance="± 15 percentage points",
    ours="TTFT {ttft:.1f} % shorter, TBT {tbt:.1f} %",
    is_within=lambda f: abs(f["ttft"] - 48.1) <= 15 and abs(f["tbt"] - 1.8) <= 15,
)
def beside_host_caches(conditions: Conditions) -> Measured:
    """BlitzScale §6.2, Figure 18."""
    runs = _beside(_CONV, conditions)
    return Measured(
        {
            "ttft": _shorter_percent(ttft_mean_s(runs["sllm"]), runs),
            "tbt": 100 * (1 - tbt_mean_s(runs["ours"]) / tbt_mean_s(runs["sllm"])),
            "failed": _failed(runs.values()),
        }
    )


@claim(
    id="B26",
    judges="pool",
    setup="24B on AzureConv at half of capacity: device time beside all instances",
    paper="half of it, with the same SLO",
    tolerance="40 to 60 % less, and B23's violations at most 1 %",
    ours="{saved:.1f} % less, {violations:.1f} % violations",
    is_within=lambda f: 40 <= f["saved"] <= 60 and f["violations"] <= 1,
    note="load: at half of what a saturated pool does, instances have work most of the time",
)
def device_time_beside_all(conditions: Conditions) -> Measured:
    """BlitzScale §6.2, Figure 18. Loading counts, as all that a device is held for."""
    runs = conv_runs(conditions)
    slo = SloMultipleOfMean(5).resolve(runs["full"].timings())
    return Measured(
        {
            "saved": 100 * (1 - runs["ours"].device_ns() / runs["full"].device_ns()),
            "violations": violations_percent(runs["ours"], slo),
            "failed": _failed(runs.values()),
        }
    )


@claim(
    id="B27",
    judges="pool",
    setup="24B on AzureConv at half of capacity: device time beside ServerlessLLM",
    paper="19.46 % less",
    tolerance="10 to 30 % less",
    ours="{saved:.1f} % less",
    is_within=lambda f: 10 <= f["saved"] <= 30,
)
def device_time_beside_caches(conditions: Conditions) -> Measured:
    """BlitzScale §6.2, Figure 18."""
    runs = _beside(_CONV, conditions)
    saved = 100 * (1 - runs["ours"].device_ns() / runs["sllm"].device_ns())
    return Measured({"saved": saved, "failed": _failed(runs.values())})


# -- helpers, in the order used -------------------------------------------------------------------


def _beside(setup: Setup, conditions: Conditions) -> dict[str, PoolRun]:
    """One of the experiments on our system ("ours") and on the baselines."""
    systems = {"ours": OURS, **BASELINES}
    return {key: half_loaded(setup, system, conditions) for key, system in systems.items()}


def _shorter_percent(theirs_s: float, runs: dict[str, PoolRun]) -> float:
    """By how much our mean TTFT is shorter."""
    return 100 * (1 - ttft_mean_s(runs["ours"]) / theirs_s)


def _failed(runs: Iterable[PoolRun]) -> int:
    return sum(run.failed for run in runs)


def _ttft_ratio(runs: Sequence[PoolRun], from_s: int, to_s: int) -> float:
    """Mean TTFT of what arrived in these seconds of the load: the first run's over the second's."""
    means = []
    for run in runs:
        begin, end = (run.started_ns + s * NS_PER_S for s in (from_s, to_s))
        timings = (t for t in run.timings() if begin <= t.scheduled_ns < end)
        means.append(statistics.fmean(t.ttft_ns for t in timings if t.ttft_ns is not None))
    return means[0] / means[1]


def _tbt(setup: Setup, conditions: Conditions) -> Measured:
    """By how much our mean TBT is shorter than the baselines', in percent."""
    runs = _beside(setup, conditions)
    ours_s = tbt_mean_s(runs["ours"])
    figures = {key: 100 * (1 - ours_s / tbt_mean_s(runs[key])) for key in BASELINES}
    return Measured({**figures, "failed": _failed(runs.values())})


def conv_runs(conditions: Conditions) -> dict[str, PoolRun]:
    """AzureConv on ours, ServerlessLLM, all instances, and as many of each role as ours has on
    average."""
    runs = _beside(_CONV, conditions)
    prefill, decode = mean_instances(runs["ours"])
    runs["full"] = half_loaded(_CONV, "fixed-full", conditions)
    runs["mean"] = half_loaded(_CONV, f"fixed:{prefill}+{decode}", conditions)
    return runs
