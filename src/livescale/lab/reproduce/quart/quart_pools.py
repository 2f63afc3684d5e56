"""QUART's claims about its five models under a bursty load (§8.2, Figure 6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean

from livescale.lab.reproduce.base.claim import (
    Conditions,
    Curve,
    Figures,
    Measured,
    Picture,
    claim,
)
from livescale.lab.reproduce.base.half_loads import ttft_mean_s, ttft_percentile_s
from livescale.lab.reproduce.quart.quart_loads import (
    ALL,
    BASELINES,
    LABELS,
    MODELS,
    SLO_PERCENT,
    StageSetup,
    failed,
    good_per_device_s,
    less_percent,
    played,
    within_percent,
)
from livescale.sim.pools.runs import PoolRun

_ASSUMED = (
    "one of the eight stages takes 1.5 × as long as another (assumed); generated bursts in place of"
    " MAF's; all five load in the times that the paper has of BERT; the baselines' policies by"
    " their papers' rules, loading from disk"
)
_SLO_PERCENTS = range(100, 325, 25)
_SETUP = "five models, 8 stages, 12 hosts of 4 devices, one minute with two bursts"
_MEMORY_NOTE = "N9 has the same systems with QUART's host memory"


def _q1_agrees(f: Figures) -> bool:
    ours = [f[name] for name in BASELINES]
    return min(ours) >= 20 and ours == sorted(ours, reverse=True)


@claim(
    id="Q1",
    judges="pool",
    corrected=_ASSUMED,
    setup=f"{_SETUP}: mean latency",
    paper="87.1, 70.5, 36.7 % less than INFless, InferLine, Cocktail",
    tolerance="the same order, and at least 20 % less",
    ours="{infless:.1f}, {inferline:.1f}, {cocktail:.1f} % less; in {infless_devices:.0f},"
    " {inferline_devices:.0f}, {cocktail_devices:.0f} % of their device time",
    is_within=_q1_agrees,
    note="mean of the five models' reductions. In the first burst the others wait for the disk; in"
    f" the second they still have what they loaded; {_MEMORY_NOTE}",
)
def mean_latency(conditions: Conditions) -> Measured:
    """QUART §8.2, Figure 6 (a)."""
    runs = _runs(conditions)
    means = {name: {m: ttft_mean_s(run) for m, run in its.items()} for name, its in runs.items()}
    figures = {"failed": failed(runs)}
    for name in BASELINES:
        figures[name] = fmean([less_percent(means["quart"][m], means[name][m]) for m in MODELS])
        figures[f"{name}_devices"] = 100 * _device_ns(runs["quart"]) / _device_ns(runs[name])
    for name in ALL:
        for model, label in MODELS.items():
            figures[f"{name}_{label.lower()}_s"] = means[name][model]
    return Measured(figures, _bars("Mean latency under bursts (Figure 6a)", runs, ttft_mean_s))


@claim(
    id="Q2",
    judges="pool",
    corrected=f"{_ASSUMED}; shorter for each model, and by a fifth on average",
    setup=f"{_SETUP}: mean latency of each model",
    paper="BERT 16.2, LLAMA 9.1, Whisper 10.2, OPT 61.2, WideResNet 41 % less than Cocktail",
    tolerance="less for each model, and at least 20 % on average",
    ours="{bert:.1f}, {llama:.1f}, {whisper:.1f}, {opt:.1f}, {wideresnet:.1f} % (mean {mean:.1f})",
    is_within=lambda f: min(f[label.lower()] for label in MODELS.values()) > 0 and f["mean"] >= 20,
    note="36.7 % is called the mean of these five, which is 27.5 %",
)
def beside_cocktail(conditions: Conditions) -> Measured:
    """QUART §8.2, Figure 6 (a); 75th and 99th percentiles as in Figures 6 (c) and (d)."""
    runs = _runs(conditions)
    figures = {"failed": failed(runs)}
    for model, label in MODELS.items():
        ours, theirs = runs["quart"][model], runs["cocktail"][model]
        figures[label.lower()] = less_percent(ttft_mean_s(ours), ttft_mean_s(theirs))
        for q in (75, 99):
            figures[f"{label.lower()}_p{q}"] = less_percent(
                ttft_percentile_s(ours, q), ttft_percentile_s(theirs, q)
            )
    figures["mean"] = fmean([figures[label.lower()] for label in MODELS.values()])
    title = "99th percentile under bursts (Figure 6d)"
    return Measured(figures, _bars(title, runs, lambda run: ttft_percentile_s(run, 99)))


@claim(
    id="Q3",
    judges="pool",
    corrected=_ASSUMED,
    setup=f"{_SETUP}: requests within 1.5 × the model's time alone",
    paper="47.5 %; 2.19, 2.37, 2.09 × INFless, InferLine, Cocktail",
    tolerance="each within a factor of 1.5",
    ours="{quart:.1f} %; {infless_ratio:.2f}, {inferline_ratio:.2f}, {cocktail_ratio:.2f} ×; per"
    " second of devices {infless_per_device:.2f}, {inferline_per_device:.2f},"
    " {cocktail_per_device:.2f} ×",
    is_within=lambda f: all(
        value / 1.5 <= f[name] <= value * 1.5
        for name, value in (
            ("quart", 47.5),
            ("infless_ratio", 2.19),
            ("inferline_ratio", 2.37),
            ("cocktail_ratio", 2.09),
        )
    ),
    note="mean of the five models; QUART's policy is told this SLO. QUART's share and the ratio to"
    " Cocktail agree; InferLine keeps it as often, in more devices: its second burst finds all that"
    " the first one loaded. INFless's whole models load longer than a burst lasts",
)
def within_slo(conditions: Conditions) -> Measured:
    """QUART §8.2, Figure 6 (b): SLOs from 1 to 3 times the time of a request that never waits."""
    runs = _runs(conditions)
    shares = {
        name: {percent: _share(its, percent) for percent in _SLO_PERCENTS}
        for name, its in runs.items()
    }
    judged = {name: its[SLO_PERCENT] for name, its in shares.items()}
    figures = {"failed": failed(runs), **judged}
    for name in BASELINES:
        figures[f"{name}_ratio"] = judged["quart"] / max(judged[name], 0.01)
        figures[f"{name}_per_device"] = _per_device(runs["quart"]) / _per_device(runs[name])
    curves = tuple(
        Curve(LABELS[name], tuple((p / 100, share) for p, share in shares[name].items()))
        for name in ALL
    )
    picture = Picture(
        "Requests within the SLO (Figure 6b)", "SLO, in times alone", "percent", curves
    )
    return Measured(figures, picture)


# -- helpers --------------------------------------------------------------------------------------

_Runs = Mapping[str, Mapping[str, PoolRun]]


def _runs(conditions: Conditions) -> _Runs:
    """By system and model."""
    return {
        name: {model: played(StageSetup(model).as_timed(), name, conditions) for model in MODELS}
        for name in ALL
    }


def _bars(title: str, runs: _Runs, figure: Callable[[PoolRun], float]) -> Picture:
    """By model, of each system."""
    curves = tuple(
        Curve(LABELS[name], tuple((float(i), figure(its[m])) for i, m in enumerate(MODELS)))
        for name, its in runs.items()
    )
    return Picture(title, "", "s", curves, names=tuple(MODELS.values()))


def _device_ns(runs: Mapping[str, PoolRun]) -> float:
    return float(sum(run.device_ns() for run in runs.values()))


def _per_device(runs: Mapping[str, PoolRun]) -> float:
    """Requests within the SLO per second of devices, the mean of all models."""
    return fmean(
        good_per_device_s(run, StageSetup(model).executed_ns * SLO_PERCENT // 100)
        for model, run in runs.items()
    )


def _share(runs: Mapping[str, PoolRun], percent: int) -> float:
    """Percent of requests within that SLO, the mean of all models."""
    return fmean(
        within_percent(run, StageSetup(model).executed_ns * percent // 100)
        for model, run in runs.items()
    )
