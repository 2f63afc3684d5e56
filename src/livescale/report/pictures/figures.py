"""The figures of a report but the lanes: load, latencies, goodput, network and host memory.

Every figure, given a name for its ids, is one inline SVG. Arrays come from `series.py`; nothing is
measured here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from livescale.report.pictures import canvas
from livescale.report.pictures.series import Band, Floats, Steps

_LEAST_S = 1e-6
"""A logarithmic axis has no 0."""
_STEPS_MAX = 1000


@canvas.figure("Requests per second over time", height_in=1.5)
def arrivals(axes: Axes, per_s: Floats, edges: Floats, largest: float) -> None:
    """Requests per second as they arrive."""
    axes.stairs(per_s, edges, fill=True, color=canvas.LOAD)
    canvas.time_axis(axes, float(edges[-1]))
    canvas.amount_axis(axes, "requests/s", largest)


@canvas.figure("Prompt tokens per second against capacity over time", height_in=1.9)
def load_and_capacity(
    axes: Axes, tokens_per_s: Floats, edges: Floats, capacity: Steps | None, largest: float
) -> None:
    """Prompt tokens that arrive, and what the serving instances can compute."""
    axes.stairs(tokens_per_s, edges, fill=True, color=canvas.LOAD)
    if capacity is not None:
        canvas.step_line(axes, capacity, float(edges[-1]), color=canvas.ACCENT, linewidth=1.5)
    canvas.time_axis(axes, float(edges[-1]))
    canvas.amount_axis(axes, "prompt tokens/s", largest)


@canvas.figure("Devices held by instances over time", width_in=canvas.THIRD_IN)
def devices(axes: Axes, of_runs: Sequence[Steps], until_s: float) -> None:
    """Devices that instances hold, one line per run."""
    for number, steps in enumerate(of_runs):
        canvas.step_line(axes, steps, until_s, **canvas.line_look(number, len(of_runs)))
    canvas.time_axis(axes, until_s)
    largest = max((value for steps in of_runs for _, value in steps), default=1)
    canvas.amount_axis(axes, "devices", largest, is_count=True)


def _uses(axes: Axes, layers: Sequence[tuple[str, Floats]], edges: Floats, devices: float) -> None:
    """Devices by what they do, one use on top of the other: a colour and counts between edges for
    each."""
    _stack(axes, layers, edges, alpha=0.9)
    canvas.time_axis(axes, float(edges[-1]))
    canvas.amount_axis(axes, "devices", devices, is_count=True)


_OF_USES = "Devices by what they do over time"
pool_uses = canvas.figure(_OF_USES, height_in=2.3)(_uses)
model_uses = canvas.figure(_OF_USES, width_in=canvas.HALF_IN, height_in=1.7)(_uses)
"""The same for one of several models."""


@canvas.figure("{} over time: median and 99th percentile", width_in=canvas.HALF_IN)
def latency_over_time(
    axes: Axes,
    what: str,
    of: Band,
    slo_s: float | None,
    span_s: tuple[float, float],
    until_s: float,
) -> None:
    """Median and 99th percentile in bins on a logarithmic axis, with the SLO."""
    p50, p99 = (np.maximum(values, _LEAST_S) for values in (of.p50, of.p99))
    axes.stairs(p99, of.edges, baseline=p50, fill=True, color=canvas.ACCENT, alpha=0.16)
    axes.stairs(p99, of.edges, baseline=None, color=canvas.ACCENT, linewidth=0.8, alpha=0.75)
    axes.stairs(p50, of.edges, baseline=None, color=canvas.ACCENT, linewidth=1.5)
    if slo_s is not None:
        axes.axhline(slo_s, color=canvas.LIMIT, linewidth=1, linestyle=canvas.DASHES[1])
    canvas.time_axis(axes, until_s)
    axes.set_yscale("log")
    axes.set_ylim(*span_s)
    canvas.duration_ticks(axes.yaxis, span_s)
    axes.set_ylabel(what)


def _distributions(
    axes: Axes,
    what: str,
    share_of: str,
    of_runs: Sequence[tuple[Floats, Floats]],
    slos_s: Sequence[float | None],
    span_s: tuple[float, float],
) -> None:
    """Cumulative distributions of all runs; a vertical line for the SLO that they share."""
    for number, (values, shares) in enumerate(of_runs):
        look = canvas.line_look(number, len(of_runs))
        axes.step(np.maximum(values, _LEAST_S), shares, where="post", **look)
    for number, slo_s in enumerate(dict.fromkeys(slos_s)):
        if slo_s is not None:
            is_shared = len(set(slos_s)) == 1
            colour = canvas.LIMIT if is_shared else canvas.COLOURS[number % len(canvas.COLOURS)]
            axes.axvline(slo_s, color=colour, linewidth=1, linestyle=canvas.DASHES[1])
    axes.set_xscale("log")
    axes.set_xlim(*span_s)
    canvas.duration_ticks(axes.xaxis, span_s)
    axes.set_xlabel(what)
    axes.set_ylim(0, 1.01)
    axes.set_ylabel(f"share of {share_of}")


_OF_DISTRIBUTIONS = "Cumulative distribution of {}"
distributions = canvas.figure(_OF_DISTRIBUTIONS, width_in=canvas.HALF_IN, height_in=2.6)(
    _distributions
)
first_tokens = canvas.figure(_OF_DISTRIBUTIONS, width_in=canvas.THIRD_IN)(_distributions)
"""The same in the first row of a page."""


@canvas.figure("Requests per second that met the SLO over time")
def goodput(axes: Axes, per_s: Floats, met_per_s: Sequence[Floats], edges: Floats) -> None:
    """Requests that met the SLO, by when they were due, before all that were due."""
    axes.stairs(per_s, edges, fill=True, color=canvas.LOAD, alpha=0.55)
    for number, met in enumerate(met_per_s):
        axes.stairs(met, edges, baseline=None, **canvas.line_look(number, len(met_per_s)))
    canvas.time_axis(axes, float(edges[-1]))
    canvas.amount_axis(axes, "requests/s", float(per_s.max()))


@canvas.figure("Requests that have failed or missed the SLO so far", width_in=canvas.THIRD_IN)
def missed(axes: Axes, of_runs: Sequence[Floats], until_s: float) -> None:
    """How many requests have failed or missed the SLO so far, by when they were due."""
    for number, due_s in enumerate(of_runs):
        steps = _thinned([(float(at), float(n)) for n, at in enumerate(due_s, 1)])
        canvas.step_line(axes, steps, until_s, **canvas.line_look(number, len(of_runs)))
    canvas.time_axis(axes, until_s)
    largest = max(len(due_s) for due_s in of_runs)
    canvas.amount_axis(axes, "requests", largest, is_count=True)


@canvas.figure("Parameters on links over time by kind of link", height_in=1.7)
def network(axes: Axes, by_kind: Sequence[Floats], edges: Floats, largest: float) -> None:
    """Bytes per second by kind of link, one on top of the other."""
    looks = zip(itertools.cycle(canvas.COLOURS), by_kind, strict=False)
    _stack(axes, [(colour, rates / 1e9) for colour, rates in looks], edges, alpha=0.85)
    canvas.time_axis(axes, float(edges[-1]))
    canvas.amount_axis(axes, "GB/s", largest / 1e9)


@canvas.figure("Copies in host memory over time by model", height_in=1.7)
def copies(
    axes: Axes,
    by_model: Sequence[tuple[str, Floats]],
    edges: Floats,
    largest: float,
) -> None:
    """Copies in host memory one on top of the other: a colour and counts between edges for each."""
    _stack(axes, by_model, edges, alpha=0.8)
    canvas.time_axis(axes, float(edges[-1]))
    canvas.amount_axis(axes, "copies", largest, is_count=True)


def span_of(arrays: Sequence[Floats], limits: Sequence[float | None]) -> tuple[float, float]:
    """From where to where a logarithmic axis has to go for these values and limits."""
    known = [float(v) for a in arrays if len(a) for v in (np.nanmin(a), np.nanmax(a))]
    known += [limit for limit in limits if limit is not None]
    if not known:
        return 1e-3, 1.0
    low, high = max(min(known), _LEAST_S), max(*known, _LEAST_S)
    return low / 1.5, high * 1.5


# -- helpers --------------------------------------------------------------------------------------


def _stack(
    axes: Axes, layers: Sequence[tuple[str, Floats]], edges: Floats, *, alpha: float
) -> None:
    """Amounts between edges one on top of the other, each in its colour."""
    base = np.zeros(len(edges) - 1)
    for colour, amounts in layers:
        top = base + amounts
        axes.stairs(top, edges, baseline=base, fill=True, color=colour, alpha=alpha)
        base = top


def _thinned(steps: Steps) -> Steps:
    """Fewer of them, the last one kept."""
    stride = -(-len(steps) // _STEPS_MAX) or 1
    return [*steps[::stride], steps[-1]] if steps else []
