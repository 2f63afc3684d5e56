"""Series over time against slow recounts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reported_records import STARTED_NS, S, reported, requests, simulated

from livescale.config.slo import percentile
from livescale.report.pictures.series import (
    band,
    bin_edges,
    capacity_steps,
    cumulative,
    device_steps,
    host_copy_steps,
    rates,
    request_series,
    sampled,
    stacked,
    traffic_rates,
)
from livescale.telemetry.record.record import AnyLine, RequestLine, TrafficLine

times = st.lists(st.integers(0, 10_000), max_size=60)
counts = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 9)), max_size=20).map(
    lambda steps: [(float(at), float(n)) for at, n in sorted(dict(steps).items())]
)


@given(st.floats(1e-3, 1e6), st.integers(1, 500))
def test_bins_are_round_and_few_and_cover_all(until_s: float, bins_max: int) -> None:
    edges = bin_edges(until_s, bins_max)
    width = edges[1] - edges[0]
    assert len(edges) - 1 <= bins_max
    assert edges[0] == 0
    assert edges[-1] >= until_s * (1 - 1e-9)
    assert edges[-1] - width < until_s
    mantissa = width / 10 ** math.floor(math.log10(width) + 1e-9)
    assert any(mantissa == pytest.approx(round_one) for round_one in (1, 2, 5, 10))


@given(times)
def test_rates_count_everything_once(at: list[int]) -> None:
    edges = bin_edges(10_000, 7)
    counted = rates(np.array(at, dtype=float), edges) * np.diff(edges)
    assert counted.sum() == pytest.approx(len(at))


@given(st.lists(st.tuples(st.integers(0, 120), st.integers(0, 1000)), max_size=80))
def test_bands_are_nearest_rank_percentiles_of_their_bins(pairs: list[tuple[int, int]]) -> None:
    at, values = (np.array([pair[i] for pair in pairs], dtype=float) for i in (0, 1))
    found = band(at, values, np.array([0.0, 10.0, 50.0, 100.0]))
    inside = [
        [value for when, value in pairs if start <= when < stop]
        for start, stop in ((0, 10), (10, 50), (50, 100))
    ]
    assert found.is_empty == (not any(inside))
    for q, values_of_bins in ((50, found.p50), (99, found.p99)):
        expected = [percentile(part, q) if part else math.nan for part in inside]
        assert values_of_bins.tolist() == pytest.approx(expected, nan_ok=True)


@given(st.lists(st.integers(0, 50), max_size=700), st.integers(2, 400))
def test_distributions_are_thinned_and_exact(values: list[int], points_max: int) -> None:
    found, shares = cumulative(np.array(values, dtype=float), points_max)
    assert len(found) <= points_max
    for value, share in zip(found, shares, strict=True):
        below = sum(v < value for v in values)
        upto = sum(v <= value for v in values)
        assert below < round(share * len(values)) <= upto
    if values:
        assert (found[0], found[-1], shares[-1]) == (min(values), max(values), 1)


@given(st.lists(counts, max_size=4), st.integers(1, 120))
def test_stacks_hold_the_sum_at_every_time(
    of_all: list[list[tuple[float, float]]], until: int
) -> None:
    edges, total = stacked(of_all, float(until))
    assert (edges[0], edges[-1], len(total)) == (0, until, len(edges) - 1)
    for at in range(until):
        held = sum(([0.0] + [n for when, n in steps if when <= at])[-1] for steps in of_all)
        assert total[np.searchsorted(edges, at, side="right") - 1] == held


def test_requests_are_judged_and_gaps_are_those_of_good_requests() -> None:
    run = reported("a", simulated())
    series = request_series(run)
    s = run.summary
    assert (len(series.due_s), int(series.is_met.sum())) == (s.requests, s.slo_met)
    assert series.is_ok.all()
    assert s.ttft is not None
    assert s.tbt is not None
    assert series.good_ttft_s.mean() == pytest.approx(s.ttft.mean_s)
    assert series.gap_s.mean() == pytest.approx(s.tbt.mean_s)
    assert len(series.gap_s) == 100 * 19
    assert (series.due_s == np.sort(series.due_s)).all()


def test_a_request_without_tokens_has_neither_ttft_nor_gaps() -> None:
    lines: tuple[AnyLine, ...] = requests(3, tokens=1)
    series = request_series(reported("a", lines))
    assert len(series.gap_s) == 0
    failed = [line for line in requests(2, tokens=0) if isinstance(line, RequestLine)]
    series = request_series(reported("a", tuple(failed)))
    assert np.isnan(series.ttft_s).all()
    assert not series.is_met.any()
    assert series.good_ttft_s.tolist() == []


def test_capacity_is_that_of_serving_instances() -> None:
    run = reported("a", simulated())
    steps = capacity_steps(run)
    assert steps is not None
    # Nothing is known of the time after the last line.
    at_s = np.linspace(0, (run.history.end_ns - run.started_ns) / S, 50, endpoint=False)
    serving = [(at_ns / S, float(count)) for at_ns, count in run.instances]
    assert (sampled(steps, at_s) == 15_000 * sampled(serving, at_s)).all()
    assert (sampled(device_steps(run), at_s) >= sampled(serving, at_s)).all()


def test_host_copies_over_time_have_the_record_s_maximum() -> None:
    run = reported("a", simulated())
    use = run.host_copies
    found = host_copy_steps(run)
    assert {model: max(n for _, n in steps) for model, steps in found.items()} == {
        model: of.copies_max for model, of in use.items()
    }


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1000)), min_size=1, max_size=20))
def test_traffic_is_spread_and_none_is_lost(growth: list[tuple[int, int]]) -> None:
    lines, now_s, total = [], 0, 0
    for passed_s, amount in growth:
        now_s, total = now_s + passed_s, total + amount
        lines.append(TrafficLine(STARTED_NS + now_s * S, {"nic": total}))
    run = reported("a", tuple(lines))
    edges = np.arange(0.0, now_s + 2)
    rate = traffic_rates(run, edges).get("nic", np.zeros(1))
    assert run.carried_bytes.get("nic", 0) == total
    assert rate.sum() == pytest.approx(total)
    assert (rate >= 0).all()


def test_what_was_moved_before_the_load_is_not_drawn() -> None:
    at_ns = (STARTED_NS - 5 * S, STARTED_NS - S, STARTED_NS + S)
    lines = tuple(TrafficLine(t, {"host": n}) for t, n in zip(at_ns, (70, 90, 100), strict=True))
    run = reported("a", lines)
    assert traffic_rates(run, np.arange(0.0, 4))["host"].tolist() == [5, 0, 0]


def test_counters_that_begin_anew_add_up() -> None:
    amounts = (100, 300, 50)
    lines = tuple(TrafficLine(STARTED_NS + k * S, {"nic": n}) for k, n in enumerate(amounts))
    run = reported("a", lines)
    assert run.carried_bytes == {"nic": 350}
    # The first amount came at the load's very start, the others in the second before their line.
    assert traffic_rates(run, np.arange(0.0, 4))["nic"].tolist() == [300, 50, 0]
