"""Generated loads: the process has the rate and the variation that were asked for."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.load.arrivals import GammaShape, gamma_arrivals, gamma_trace, named_trace
from livescale.load.traces import TraceError, TraceRow, at_rate, burst_trace, rotate
from trace_files import write_trace

S = 1_000_000_000
seeds = st.integers(0, 1 << 32)
variations = st.floats(0.1, 8)
rows = st.lists(
    st.builds(TraceRow, st.integers(0, 99 * S), st.integers(1, 99), st.integers(1, 99)), max_size=30
).map(lambda rows: sorted(rows, key=lambda row: row.arrival_ns))


@given(rate=st.floats(0.01, 50), cv=variations, seed=seeds)
def test_arrivals_ascend_within_the_duration_and_follow_the_seed(
    rate: float, cv: float, seed: int
) -> None:
    times = list(gamma_arrivals(rate, cv, 20 * S, seed))
    assert times == sorted(times)
    assert all(0 <= at < 20 * S for at in times)
    assert times == list(gamma_arrivals(rate, cv, 20 * S, seed))
    early = list(gamma_arrivals(rate, cv, 7 * S, seed))
    assert early == [at for at in times if at < 7 * S]


@pytest.mark.parametrize("cv", [0.1, 0.5, 1, 2, 4, 8])
def test_mean_and_variation_of_the_intervals(cv: float) -> None:
    """Five standard errors: the estimated mean varies by cv / √n of itself, the estimated cv by
    half of √((kurtosis - 1) / n), where a gamma's kurtosis is 3 + 6 cv²."""
    rate, n = 100.0, 150_000
    times = list(gamma_arrivals(rate, cv, int(n / rate) * S, seed=5))
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean * rate / S == pytest.approx(1, abs=5 * cv / math.sqrt(n))
    error = 5 * 0.5 * math.sqrt((2 + 6 * cv**2) / n)
    assert deviation / mean == pytest.approx(cv, rel=error)


@pytest.mark.parametrize("cv", [0.1, 1, 8])
def test_few_requests_have_the_rate_too(cv: float) -> None:
    """Two expected arrivals per trace, within five standard errors. Counted from an arrival a cv
    of 8 would give nineteen, and one of 0.1 only one and a half."""
    runs = 20_000
    counts = [sum(1 for _ in gamma_arrivals(0.2, cv, 10 * S, seed)) for seed in range(runs)]
    mean = sum(counts) / runs
    deviation = math.sqrt(sum((count - mean) ** 2 for count in counts) / runs)
    assert mean == pytest.approx(2, abs=5 * deviation / math.sqrt(runs))


@given(cv=variations, seed=seeds)
def test_lengths_change_no_arrival(cv: float, seed: int) -> None:
    fixed = gamma_trace(GammaShape(cv=cv, input=100, output=7), 5, 20 * S, seed)
    drawn = gamma_trace(GammaShape(cv=cv, input_sigma=1, output_sigma=0.5), 5, 20 * S, seed)
    assert [row.arrival_ns for row in fixed] == [row.arrival_ns for row in drawn]
    assert {(row.input_tokens, row.output_tokens) for row in fixed} <= {(100, 7)}
    assert all(row.input_tokens >= 1 and row.output_tokens >= 1 for row in drawn)


def test_drawn_lengths_have_the_median_and_the_mean_of_a_log_normal() -> None:
    trace = gamma_trace(GammaShape(input=1000, input_sigma=0.8, output=50), 100, 200 * S, seed=1)
    lengths = sorted(row.input_tokens for row in trace)
    assert lengths[len(lengths) // 2] == pytest.approx(1000, rel=0.05)
    assert sum(lengths) / len(lengths) == pytest.approx(1000 * math.exp(0.32), rel=0.05)


def test_names_generate_what_they_say(tmp_path: Path) -> None:
    name = "gamma:rate=6,cv=4,seconds=60,input=512,output=128"
    trace = named_trace(name, None, seed=3)
    assert trace.format == "gamma"
    assert trace.rows == gamma_trace(GammaShape(cv=4, input=512, output=128), 6, 60 * S, 3)
    assert named_trace(f"{name},seed=3", None, seed=9).rows == trace.rows
    assert named_trace("burst", None, 4).rows == burst_trace(4)
    short = named_trace("burst:peak=9,seconds=12,seed=4", None, 0).rows
    assert short == burst_trace(4, 12 * S, peak_per_s=9)
    source = [TraceRow(0, 3, 4), TraceRow(S, 5, 6)]
    write_trace(tmp_path / "t.csv", source)
    taken = named_trace(f"gamma:rate=6,lengths={tmp_path / 't.csv'}", None, 0).rows
    assert [(row.input_tokens, row.output_tokens) for row in taken[:3]] == [(3, 4), (5, 6), (3, 4)]


def test_a_file_wins_over_what_its_name_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_trace(Path("burst"), [TraceRow(5, 6, 7)])
    assert named_trace("burst", None, 0).rows == [TraceRow(5, 6, 7)]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gamma:cv=3", "missing required field `rate`"),
        ("gamma:rate=x", "`$.rate`"),
        ("gamma:rate=2,foo=3", "unknown key 'foo' (nearest known: "),
        ("gamma:rate", "'rate' is not one more KEY=VALUE"),
        ("gamma:rate=1,rate=2", "'rate=2' is not one more KEY=VALUE"),
        ("gamma:rate=0", "0.0 requests per second is no rate"),
        ("gamma:rate=inf", "inf requests per second is no rate"),
        ("gamma:rate=1e9", "more than 50000000 requests"),
        ("gamma:rate=1,cv=0", "cv 0 is not in 0.01 to 32"),
        ("gamma:rate=1,cv=nan", "cv nan is not in"),
        ("gamma:rate=1,input=0", "lengths of 0 and 128 tokens"),
        ("gamma:rate=1,seconds=0", "seconds 0 is not in"),
        ("gamma:rate=1,input_sigma=-1", "input_sigma"),
        ("burst:peak=0", "peak 0 is not in"),
        ("burst:rate=3", "unknown key 'rate'"),
        ("gamma:rate=1,lengths=nowhere", "trace 'nowhere' is not a file"),
        ("gama:rate=1", "trace 'gama:rate=1' is not a file"),
    ],
)
def test_what_cannot_be_generated_is_named(name: str, words: str) -> None:
    with pytest.raises(TraceError) as raised:
        named_trace(name, None, 0)
    assert words in str(raised.value)


# -- rates and times of traces --------------------------------------------------------------------


@given(rows=rows, seed=seeds)
def test_a_rate_is_a_factor_of_the_mean(rows: list[TraceRow], seed: int) -> None:
    if not rows or rows[-1].arrival_ns == 0:
        with pytest.raises(ValueError, match="has no rate"):
            at_rate(rows, 1.0, seed)
        return
    own = len(rows) * S / rows[-1].arrival_ns
    for times in (1, 3):
        scaled = at_rate(rows, own * times, seed)
        # The factor is a quotient of floats: it may miss a whole number by a hair.
        assert abs(len(scaled) - times * len(rows)) <= 1


def test_a_fraction_of_the_rate_is_met_on_average() -> None:
    trace = [TraceRow(n * S // 10, 1, 1) for n in range(1, 20_001)]
    scaled = at_rate(trace, 3.7, seed=2)
    assert len(scaled) == pytest.approx(2000 * 3.7, rel=0.05)


@given(rows=rows, by=st.integers(0, 300 * S))
def test_turning_keeps_requests_and_gaps_around_the_clock(rows: list[TraceRow], by: int) -> None:
    period = 100 * S
    turned = rotate(rows, by, period)
    assert [row.arrival_ns for row in turned] == sorted(row.arrival_ns for row in turned)
    assert all(0 <= row.arrival_ns < period for row in turned)
    back = rotate(turned, -by, period)
    assert sorted(back, key=key) == sorted(rows, key=key)


def key(row: TraceRow) -> tuple[int, int, int]:
    return row.arrival_ns, row.input_tokens, row.output_tokens
