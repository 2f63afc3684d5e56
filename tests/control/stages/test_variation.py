"""How burstiness travels along stages: exact cases of the formulas, and what always holds."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.control.stages.formulas.variation import (
    Flow,
    StageTraits,
    arrivals,
    departures,
    flows_in,
    join,
    kept_variance,
    line,
    load,
    qna_departures,
    queued_variance,
    split,
)

cvs = st.floats(0, 10)
loads = st.floats(0, 1.5)
counts = st.integers(1, 16)
formulas = pytest.mark.parametrize("leave", [departures, qna_departures])


def stage(busy: float, cv: float, replicas: int = 1) -> StageTraits:
    """With that load if one request comes per second."""
    return StageTraits(1 / (busy * replicas) if busy else math.inf, cv, replicas)


@st.composite
def graphs(draw: st.DrawFn) -> list[StageTraits]:
    """Up to six stages; each is fed by a part of some earlier ones, or by the graph's arrivals."""
    found: list[StageTraits] = []
    for number in range(draw(st.integers(1, 6))):
        before = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        after = tuple((index, draw(st.floats(0.1, 1))) for index in sorted(before))
        own = stage(draw(st.floats(0.05, 1.2)), draw(st.floats(0, 2)), draw(counts))
        found.append(msgspec.structs.replace(own, after=after))
    return found


@formulas
@given(busy=loads, replicas=counts)
def test_exponential_services_leave_chance_alone(leave, busy: float, replicas: int) -> None:
    """Burke's theorem: what leaves M/M/m is Poisson."""
    assert leave(arrivals(1, 1), stage(min(busy, 1), 1, replicas)).cv == pytest.approx(1)


@given(busy=st.floats(0, 1))
def test_constant_services_of_one_server(busy: float) -> None:
    """M/D/1 is exact: a gap is a service, and with the chance 1 - r an idle time as well."""
    assert departures(arrivals(1, 1), stage(busy, 0)).cv ** 2 == pytest.approx(1 - busy**2)


@formulas
@given(cv=cvs, service_cv=st.floats(0, 2), replicas=counts)
def test_an_idle_stage_changes_nothing(leave, cv: float, service_cv: float, replicas: int) -> None:
    assert leave(arrivals(1, cv), stage(0, service_cv, replicas)).cv == pytest.approx(cv)


@given(cv=cvs, service_cv=st.floats(0, 2), busy=st.floats(1, 3))
def test_a_full_server_leaves_the_variation_of_its_services(
    cv: float, service_cv: float, busy: float
) -> None:
    assert departures(arrivals(1, cv), stage(busy, service_cv)).cv == pytest.approx(service_cv)
    least = max(service_cv, math.sqrt(0.2))
    assert qna_departures(arrivals(1, cv), stage(busy, service_cv)).cv == pytest.approx(least)


@given(replicas=counts)
def test_full_constant_servers_end_like_points_on_a_circle(replicas: int) -> None:
    expected = (replicas - 1) / (replicas + 1)
    assert departures(arrivals(1, 3), stage(1, 0, replicas)).cv ** 2 == pytest.approx(expected)


@given(cv=cvs, busy=st.floats(0.1, 1), replicas=counts, further=st.integers(1, 5))
def test_equal_constant_stages_wait_once(
    cv: float, busy: float, replicas: int, further: int
) -> None:
    """Friedman: behind a stage of constant servers an equal one lets everything pass."""
    stages = line([stage(busy, 0, replicas)] * (2 + further))
    found = [flow.cv for flow in flows_in(stages, arrivals(1, cv))]
    assert found[2:] == pytest.approx([found[1]] * further)


@given(cv=cvs, over=st.floats(1, 3), busy=st.floats(0, 0.99))
def test_behind_a_full_stage_there_are_no_bursts(cv: float, over: float, busy: float) -> None:
    """What a server without idle times lets out passes a constant one unchanged."""
    stages = line([stage(over, 0.3), stage(busy * over, 0), stage(busy * over, 0)])
    assert [flow.cv for flow in flows_in(stages, arrivals(1, cv))][1:] == pytest.approx([0.3] * 2)


@given(cv=cvs, busy=st.floats(0, 1), replicas=counts)
def test_busier_stages_keep_less(cv: float, busy: float, replicas: int) -> None:
    kept = kept_variance(busy, cv, replicas)
    assert 0 <= kept <= 1
    if cv >= 1:
        assert kept >= kept_variance(min(1, busy + 0.05), cv, replicas)
        assert 1 - busy <= kept <= 1 - busy**2 + 1e-12


@given(service_cv=st.floats(0, 1), replicas=counts)
def test_many_replicas_end_like_chance(service_cv: float, replicas: int) -> None:
    here, there = (queued_variance(stage(1, service_cv, m)) for m in (replicas, replicas + 1))
    assert here <= there + 1e-12 <= 1 + 1e-9


@formulas
@given(rate=st.floats(0, 5), cv=cvs, busy=st.floats(0.1, 1))
def test_no_more_leaves_than_comes_or_fits(leave, rate: float, cv: float, busy: float) -> None:
    left = leave(arrivals(rate, cv), stage(busy, 0.3))
    assert left.rate_per_s == min(rate, 1 / busy)


@given(stages=graphs(), cv=cvs, is_qna=st.booleans())
def test_flows_of_graphs_are_sound(stages: list[StageTraits], cv: float, is_qna: bool) -> None:
    found = flows_in(stages, arrivals(1, cv), is_qna=is_qna)
    assert len(found) == len(stages)
    for flow, own in zip(found, stages, strict=True):
        assert math.isfinite(flow.cv)
        assert flow.cv >= 0
        assert 0 <= flow.kept <= 1 + 1e-12
        assert 0 <= load(flow, own) <= 1


@given(part=st.floats(0.01, 1))
def test_chance_stays_chance_where_ways_part_and_join(part: float) -> None:
    pieces = [split(arrivals(1, 1), part), split(arrivals(1, 1), 1 - part)]
    joined = join(pieces, stage(0.5, 0.2))
    assert [flow.cv for flow in (*pieces, joined)] == pytest.approx([1, 1, 1])
    assert joined.rate_per_s == pytest.approx(1)


@given(cv=cvs, part=st.floats(0.01, 1))
def test_few_of_many_requests_come_by_chance(cv: float, part: float) -> None:
    off, before = abs(split(arrivals(1, cv), part).cv ** 2 - 1), abs(cv**2 - 1)
    assert off == pytest.approx(part * before)


@given(values=st.lists(cvs, min_size=1, max_size=5), busy=st.floats(0.1, 1))
def test_joined_flows_are_between_their_mean_and_chance(values: list[float], busy: float) -> None:
    joined = join([arrivals(1 / len(values), cv) for cv in values], stage(busy, 0.2))
    mean = math.fsum(cv**2 for cv in values) / len(values)
    low, high = sorted((1.0, mean))
    if len(values) > 1:
        assert low - 1e-9 <= joined.cv**2 <= high + 1e-9
    else:
        assert joined.cv == values[0]


def test_a_flow_of_its_own_is_returned_as_it_is() -> None:
    flow = Flow(2.0, 0.5, 3.0, 0.1)
    assert join([flow], stage(0.5, 0.2)) is flow
    assert split(flow, 1.0) is flow


def test_a_stage_cannot_be_fed_from_behind() -> None:
    with pytest.raises(ValueError, match="stage 0 is fed by one that stands behind"):
        flows_in([StageTraits(1, 0, 1, after=((1, 1.0),))], arrivals(0.5, 1))


@pytest.mark.parametrize(("rate", "cv"), [(-1, 1), (1, -1), (math.nan, 1)])
def test_arrivals_have_no_negative_figures(rate: float, cv: float) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        arrivals(rate, cv)
