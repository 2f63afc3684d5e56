"""Summaries of runs, down to the runs of which there is nothing to say."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.config.slo import RequestTiming, SloAbsolute, SloMultipleOfMean
from livescale.report.run.summary import Latency, summarize

S = 1_000_000_000


def timing(scheduled_s: float, *token_s: float, ok: bool = True) -> RequestTiming:
    scheduled_ns, *token_ns = (round(at_s * S) for at_s in (scheduled_s, *token_s))
    finished_ns = token_ns[-1] if token_ns else scheduled_ns
    return RequestTiming("r", scheduled_ns, scheduled_ns, tuple(token_ns), finished_ns, ok)


timings = st.builds(
    lambda scheduled, gaps, ok: timing(
        scheduled, *(scheduled + sum(gaps[: k + 1]) for k in range(len(gaps))), ok=ok
    ),
    st.integers(0, 50),
    st.lists(st.integers(0, 9), max_size=5),
    st.booleans(),
)


def test_a_small_run_by_hand() -> None:
    run = [timing(0, 1, 2, 4), timing(1, 4), timing(2, 3, 3.5, ok=False), timing(5, 6, 10)]
    summary = summarize(run, SloAbsolute(2 * S, 2 * S))
    assert (summary.requests, summary.failed, summary.slo_met) == (4, 1, 1)
    assert summary.duration_s == 10
    assert summary.goodput_per_s == 0.1
    assert summary.slo_attainment == 0.25
    assert summary.ttft == Latency(mean_s=pytest.approx(5 / 3), p50_s=1, p90_s=3, p99_s=3)
    assert summary.tbt == Latency(mean_s=pytest.approx(7 / 3), p50_s=2, p90_s=4, p99_s=4)


def test_no_requests() -> None:
    summary = summarize([], SloMultipleOfMean(5))
    assert (summary.requests, summary.failed, summary.slo_met) == (0, 0, 0)
    figures = ("duration_s", "ttft", "tbt", "slo", "slo_attainment", "goodput_per_s")
    assert [getattr(summary, name) for name in figures] == [None] * len(figures)


@pytest.mark.parametrize("rule", [SloMultipleOfMean(5), SloAbsolute(S)])
def test_all_failed(rule: SloAbsolute | SloMultipleOfMean) -> None:
    summary = summarize([timing(0, 1, 2, ok=False), timing(1, ok=False)], rule)
    assert (summary.requests, summary.failed, summary.slo_met) == (2, 2, 0)
    assert (summary.slo_attainment, summary.goodput_per_s) == (0, 0)
    assert summary.ttft is None
    assert summary.tbt is None


def test_single_tokens_have_no_tbt() -> None:
    summary = summarize([timing(0, 1)], SloMultipleOfMean(5))
    assert summary.tbt is None
    assert summary.slo == SloAbsolute(5 * S, None)
    assert summary.slo_attainment == 1


@given(st.lists(timings, max_size=20))
def test_figures_agree_with_one_another(run: list[RequestTiming]) -> None:
    summary = summarize(run, SloMultipleOfMean(2))
    assert 0 <= summary.slo_met <= summary.requests - summary.failed
    if summary.duration_s:
        assert summary.goodput_per_s == pytest.approx(summary.slo_met / summary.duration_s)
    for latency in (summary.ttft, summary.tbt):
        if latency is not None:
            assert latency.p50_s <= latency.p90_s <= latency.p99_s
    assert dataclasses.asdict(summary)["requests"] == len(run)
