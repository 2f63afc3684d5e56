"""What a record says over time, as arrays that can be drawn.

Times are seconds since the load began. Only what the record has is returned; a series that it
lacks is None or empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from livescale.report.run.reported_run import ReportedRun
from livescale.telemetry.history.device_time import DeviceUse, device_stretches
from livescale.telemetry.timeline import copies_over_time
from livescale.values.types import InstanceState
from livescale.values.units import NS_PER_S

Floats = NDArray[np.float64]
Steps = list[tuple[float, float]]
"""(time, value from then on), in ascending time."""

_COLUMNS_MAX = 400


@dataclass(frozen=True, slots=True)
class RequestSeries:
    """Requests of a run in the order in which they were due, and their gaps between tokens.

    `ttft_s` is NaN without a token. `is_met` is judged by the run's SLO; all False without one.
    `gap_s` are the gaps between tokens of requests that ended well, at `gap_at_s`.
    """

    due_s: Floats
    ttft_s: Floats
    is_ok: NDArray[np.bool_]
    is_met: NDArray[np.bool_]
    prompt_tokens: Floats
    gap_at_s: Floats
    gap_s: Floats

    @property
    def good_due_s(self) -> Floats:
        """When the requests that ended well were due."""
        return self.due_s[self.is_ok]

    @property
    def good_ttft_s(self) -> Floats:
        """TTFT of the requests that ended well."""
        return self.ttft_s[self.is_ok]


@dataclass(frozen=True, slots=True)
class Band:
    """Median and 99th percentile by nearest rank between edges; NaN where there is nothing."""

    edges: Floats
    p50: Floats
    p99: Floats

    @property
    def is_empty(self) -> bool:
        return bool(np.isnan(self.p50).all())


def request_series(run: ReportedRun) -> RequestSeries:
    """The requests that were due after the load's start. A request is due when the client meant
    to send it, or, where the record does not know, when it arrived."""
    started_ns = run.started_ns
    found = [line for line in run.history.requests if line.due_ns >= started_ns]
    found.sort(key=lambda line: (line.due_ns, line.request))
    timings = [line.timing() for line in found]
    ttfts = [np.nan if t.ttft_ns is None else t.ttft_ns / NS_PER_S for t in timings]
    gap_at_s, gap_s = _gaps([t.token_ns for t in timings if t.ok], started_ns)
    return RequestSeries(
        due_s=np.array([(t.scheduled_ns - started_ns) / NS_PER_S for t in timings]),
        ttft_s=np.array(ttfts),
        is_ok=np.array([t.ok and bool(t.token_ns) for t in timings], dtype=bool),
        is_met=np.array([run.slo is not None and run.slo.is_met(t) for t in timings], dtype=bool),
        prompt_tokens=np.array([float(line.prompt_tokens) for line in found]),
        gap_at_s=gap_at_s,
        gap_s=gap_s,
    )


def bin_edges(until_s: float, bins_max: int) -> Floats:
    """Edges of equal bins over [0, until_s] with a round width: 1, 2 or 5 times a power of ten."""
    span_s = max(until_s, 1e-3)
    exact = span_s / bins_max
    power = float(10.0 ** np.floor(np.log10(exact)))
    width = next(f * power for f in (1.0, 2.0, 5.0, 10.0) if f * power >= exact * (1 - 1e-9))
    count = max(int(np.ceil(span_s / width - 1e-9)), 1)
    return np.linspace(0, count * width, count + 1)


def rates(at_s: Floats, edges: Floats, weights: Floats | None = None) -> Floats:
    """How many per second in each bin, or how much of `weights`."""
    totals, _ = np.histogram(at_s, edges, weights=weights)
    return np.asarray(totals / np.diff(edges), dtype=np.float64)


def band(at_s: Floats, values: Floats, edges: Floats) -> Band:
    """Percentiles of the values of each bin; values outside of all bins are left out."""
    index = np.searchsorted(edges, at_s, side="right") - 1
    is_inside = (index >= 0) & (index < len(edges) - 1)
    index, values = index[is_inside].astype(np.int16), values[is_inside]
    order = np.argsort(index, kind="stable")
    ordered, bins = values[order], np.arange(len(edges))
    bounds = np.searchsorted(index[order], bins)
    parts = [ordered[start:stop] for start, stop in pairwise(bounds)]
    p50, p99 = (
        np.array([_nearest_rank(part, q) if len(part) else np.nan for part in parts])
        for q in (50, 99)
    )
    return Band(edges, p50, p99)


def cumulative(values: Floats, points_max: int = 300) -> tuple[Floats, Floats]:
    """The distribution: values in ascending order and the share that does not exceed each.

    Thinned out to so many points; the smallest and the largest stay.
    """
    ordered = np.sort(values)
    if not len(ordered):
        return ordered, ordered
    kept = np.unique(np.linspace(0, len(ordered) - 1, points_max).astype(int))
    return ordered[kept], (kept + 1) / len(ordered)


def capacity_steps(run: ReportedRun) -> Steps | None:
    """Prompt tokens per second that the serving instances can compute, over time.

    An instance's capacity is the configured one of its model, else the newest that was measured.
    None if an instance served of which neither is on record.
    """
    of = run.history.prefill_tokens_per_s
    changes: list[tuple[int, int]] = []
    for instance in run.history.instances:
        capacity = of.get(instance.model)
        for state, start_ns, stop_ns in instance.stretches(run.history.end_ns):
            if state is not InstanceState.SERVING:
                continue
            if capacity is None:
                return None
            # Measurements hold for all times: they come once, when a first instance warms up.
            changes += [(start_ns, capacity), (stop_ns, -capacity)]
    return _summed(changes, run.started_ns)


def device_steps(run: ReportedRun) -> Steps:
    """Devices that instances hold, loading included, over time."""
    changes: list[tuple[int, int]] = []
    for held in run.history.holdings:
        changes.append((held.begun_ns, 1))
        if held.ended_ns is not None:
            changes.append((held.ended_ns, -1))
    return _summed(changes, run.started_ns)


def use_steps(run: ReportedRun) -> dict[str, dict[DeviceUse, Steps]]:
    """What devices do over time, by the model whose parameters they have ("": none), and by use:
    how many do so. All of it together is the number of devices, at any time of the load."""
    changes: dict[str, dict[DeviceUse, list[tuple[int, int]]]] = {}
    until_ns = run.started_ns + run.end_ns
    for stretches in device_stretches(run.history, run.started_ns, until_ns).values():
        for start_ns, stop_ns, use, model in stretches:
            of_use = changes.setdefault(model, {}).setdefault(use, [])
            of_use += [(start_ns, 1), (stop_ns, -1)]
    return {
        model: {use: _summed(of_use, run.started_ns) for use, of_use in of_model.items()}
        for model, of_model in changes.items()
    }


def traffic_rates(run: ReportedRun, edges: Floats) -> dict[str, Floats]:
    """Bytes per second that links carried in each bin, by kind of link.

    Between two lines of the record the bytes are taken to have come evenly.
    """
    totals = {kind: np.zeros(len(edges) - 1) for kind in run.carried_bytes}
    before_ns = run.started_ns
    for now_ns, carried_bytes in run.traffic:
        # Before the load, and after a clock that began anew, there is no span to spread over.
        span_ns = (min(before_ns, now_ns), now_ns)
        start_s, stop_s = ((at_ns - run.started_ns) / NS_PER_S for at_ns in span_ns)
        for kind, new_bytes in carried_bytes.items():
            if new_bytes:
                _spread(totals[kind], edges, start_s, stop_s, new_bytes)
        before_ns = now_ns
    return {kind: total / np.diff(edges) for kind, total in totals.items()}


def host_copy_steps(run: ReportedRun) -> dict[str, Steps]:
    """Copies in host memory over time, by model."""
    return {
        model: [((at_ns - run.started_ns) / NS_PER_S, float(n)) for at_ns, n in changes]
        for model, changes in copies_over_time(run.history).items()
    }


def sampled(steps: Sequence[tuple[float, float]], at_s: Floats) -> Floats:
    """The value that holds at each time; 0 before the first."""
    times = np.array([at for at, _ in steps])
    values = np.array([0.0, *(value for _, value in steps)])
    found: Floats = values[np.searchsorted(times, at_s, side="right")]
    return found


def stacked(of_all: Iterable[Steps], until_s: float) -> tuple[Floats, Floats]:
    """Edges between which none of the counts changes, from 0 on, and their sum between them.

    Where there are more changes than a screen has columns, a column shows what holds at its start.
    """
    parts = list(of_all)
    changes = {at for steps in parts for at, _ in steps if 0 < at < until_s}
    edges = np.array([0.0, *sorted(changes), until_s])
    if len(edges) > _COLUMNS_MAX:
        edges = np.linspace(0, until_s, _COLUMNS_MAX)
    total = np.zeros(len(edges) - 1)
    for steps in parts:
        total += sampled(steps, edges[:-1])
    return edges, total


# -- helpers, in the order used -------------------------------------------------------------------


def _gaps(token_ns: Sequence[tuple[int, ...]], started_ns: int) -> tuple[Floats, Floats]:
    """When each token after a request's first came, and how long after the one before it."""
    counts = np.array([len(tokens) for tokens in token_ns], dtype=np.int64)
    total = int(counts.sum())
    flat = np.fromiter(chain.from_iterable(token_ns), dtype=np.int64, count=total)
    is_later = np.ones(total, dtype=bool)
    firsts = np.cumsum(counts) - counts
    is_later[firsts[counts > 0]] = False
    gaps = np.diff(flat, prepend=0)
    return (flat[is_later] - started_ns) / NS_PER_S, gaps[is_later] / NS_PER_S


def _nearest_rank(values: Floats, q: int) -> float:
    """As `slo.percentile`: always one of the values."""
    rank = max(-(-q * len(values) // 100), 1) - 1
    return float(np.partition(values, rank)[rank])


def _summed(changes: Sequence[tuple[int, int]], zero_ns: int) -> Steps:
    """The sum of (ns, change) over time; of several values at one time the last one holds."""
    total, steps = 0, dict[float, float]()
    for at_ns, change in sorted(changes):
        total += change
        steps[(at_ns - zero_ns) / NS_PER_S] = float(total)
    return list(steps.items())


def _spread(total: Floats, edges: Floats, start_s: float, stop_s: float, amount: float) -> None:
    """Add an amount to the bins between two times; outside of all bins it is left out."""
    first, last = np.clip(np.searchsorted(edges, (start_s, stop_s), side="right") - 1, 0, None)
    if stop_s <= start_s:
        if start_s >= edges[0] and first < len(total):
            total[first] += amount
        return
    part = slice(first, last + 1)
    overlap = np.minimum(edges[1:][part], stop_s) - np.maximum(edges[:-1][part], start_s)
    total[part] += amount * np.clip(overlap, 0, None) / (stop_s - start_s)
