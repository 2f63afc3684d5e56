"""SLO rules against simple restatements of what they mean."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.config.slo import (
    RequestTiming,
    SloAbsolute,
    SloError,
    SloMultipleOfMean,
    SloOfModels,
    parse_slo,
    percentile,
)

MS = 1_000_000


def timing(*token_ns: int, ok: bool = True, scheduled_ns: int = 0) -> RequestTiming:
    last_ns = token_ns[-1] if token_ns else scheduled_ns
    return RequestTiming("r", scheduled_ns, scheduled_ns + 7, token_ns, last_ns, ok)


def test_ttft_counts_from_the_scheduled_time() -> None:
    late = RequestTiming(
        "r", scheduled_ns=100, sent_ns=900, token_ns=(1000,), finished_ns=1, ok=True
    )
    assert late.ttft_ns == 900


def test_gaps_and_their_mean() -> None:
    assert timing(10, 20, 50).tbt_ns == (10, 30)
    assert timing(10, 20, 50).tbt_mean_ns == 20
    assert (timing(10).tbt_ns, timing(10).tbt_mean_ns) == ((), None)
    assert (timing().ttft_ns, timing().tbt_ns) == (None, ())


def test_bounds_are_inclusive() -> None:
    slo = SloAbsolute(100, 20)
    assert slo.is_met(timing(100, 110, 140))  # a gap of 30, but 20 on average
    assert not slo.is_met(timing(101, 110))
    assert not slo.is_met(timing(100, 121))


def test_one_token_has_no_tbt_to_miss() -> None:
    assert SloAbsolute(100, 0).is_met(timing(100))
    assert SloAbsolute(100).is_met(timing(100, 10_000))


@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_failed_or_empty_requests_never_meet_it(ttft_ns: int, tbt_ns: int) -> None:
    slo = SloAbsolute(ttft_ns, tbt_ns)
    assert not slo.is_met(timing(0, 0, ok=False))
    assert not slo.is_met(timing())


def test_multiple_of_the_mean_is_resolved_against_good_requests() -> None:
    rows = [timing(100, 110, 140), timing(200), timing(9999, 99999, ok=False)]
    assert SloMultipleOfMean(5).resolve(rows) == SloAbsolute(750, 100)
    assert SloMultipleOfMean(2).resolve([timing(200)]) == SloAbsolute(400, None)
    with pytest.raises(SloError, match="no request ended well"):
        SloMultipleOfMean().resolve([timing(1, ok=False)])


def test_absolute_bounds_resolve_to_themselves() -> None:
    assert SloAbsolute(1, 2).resolve([]) == SloAbsolute(1, 2)


@given(st.lists(st.integers(1, 10**9), min_size=1), st.integers(1, 9))
def test_at_most_one_in_multiple_misses_a_multiple_of_the_mean(
    ttfts: list[int], multiple: int
) -> None:
    rows = [timing(ttft) for ttft in ttfts]
    slo = SloMultipleOfMean(multiple).resolve(rows)
    misses = sum(not slo.is_met(row) for row in rows)
    assert misses * multiple <= len(rows)  # Markov's inequality


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("5x-mean", SloMultipleOfMean(5)),
        ("12x-mean", SloMultipleOfMean(12)),
        ("ttft=450ms,tbt=150ms", SloAbsolute(450 * MS, 150 * MS)),
        ("tbt=200us, ttft=1.25s", SloAbsolute(1250 * MS, MS // 5)),
        ("ttft=0.1ms", SloAbsolute(100_000, None)),
    ],
)
def test_text_is_parsed(text: str, rule: SloAbsolute | SloMultipleOfMean) -> None:
    assert parse_slo(text) == rule
    assert parse_slo(str(rule)) == rule


@pytest.mark.parametrize(
    "text", ["", "5x", "0x-mean", "-1x-mean", "tbt=1ms", "ttft=1", "ttft=1ms,ttft=2ms", "ttft=1ms,"]
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(SloError, match=r"is not a valid SLO\. Write"):
        parse_slo(text)


@given(st.lists(st.integers(), min_size=1), st.integers(0, 100))
def test_percentile_is_the_least_value_that_covers_q_percent(values: list[int], q: int) -> None:
    covers = [v for v in values if sum(other <= v for other in values) * 100 >= q * len(values)]
    assert percentile(values, q) == min(covers)


@given(st.lists(st.integers(-(10**9), 10**9), min_size=1))
def test_median_is_the_low_median(values: list[int]) -> None:
    assert percentile(values, 50) == statistics.median_low(values)
    assert percentile(values, 100) == max(values)


@pytest.mark.parametrize(("values", "q"), [([], 50), ([1], 101), ([1], -1)])
def test_percentile_of_nothing_is_an_error(values: list[int], q: int) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, q)


def asked_of(model: str, ttft_ns: int, ok: bool = True) -> RequestTiming:
    return RequestTiming("r", 0, 0, (ttft_ns,), ttft_ns, ok, model)


def test_each_model_is_judged_by_its_own_rule() -> None:
    """A multiple of the mean refers to what it judges, and to all where that has no mean."""
    timings = [asked_of("a", 10), asked_of("a", 30), asked_of("b", 100), asked_of("c", 100)]
    twice = SloMultipleOfMean(2)
    slo = SloOfModels(twice, {"a": twice, "b": SloAbsolute(99), "d": twice}).resolve(timings)
    assert (slo.ttft_ns, slo.of_models) == (200, {"a": SloAbsolute(40), "b": SloAbsolute(99)})
    judged = [(model, n) for model in "abcd" for n in (40, 99, 200, 201)]
    met = [(model, n) for model, n in judged if slo.is_met(asked_of(model, n))]
    assert met == [
        *(("a", 40), ("b", 40), ("b", 99)),
        *((model, n) for model in "cd" for n in (40, 99, 200)),
    ]
    lost = [asked_of("a", 10), asked_of("c", 7, ok=False)]
    assert SloOfModels(twice, {"a": SloAbsolute(1)}).resolve(lost).ttft_ns == 20
