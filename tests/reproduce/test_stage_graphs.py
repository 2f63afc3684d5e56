"""Graphs of stages: a line is the special case, the formula says how bursty arrivals are, and the
pool's rules keep within the total."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_graph_scaling import ScaledPool, play_scaled
from stage_graphs import play_graph
from stage_lines import play_line

from effort import examples
from livescale.control.stages.formulas.graph import StageGraph, line
from livescale.control.stages.formulas.variation import (
    StageTraits,
    arrivals,
    flows_in,
    gather,
    graph_of,
)
from livescale.control.stages.formulas.variation import line as line_of
from livescale.lab.reproduce.quart.quart import gamma_gaps
from livescale.values.scaling_policies import StagesByQueue

arrivals_of = st.lists(st.floats(0, 20), min_size=1, max_size=60).map(
    lambda gaps: np.cumsum(np.array(gaps))
)
seeds = st.integers(0, 1 << 32)
DIAMOND = StageGraph(((1, 2), (3,), (3,), ()))


def draw_graph(rng: random.Random, stages: int) -> StageGraph:
    """Up to three followers each, of the next four stages."""
    followers = []
    for stage in range(stages):
        later = range(stage + 1, min(stage + 5, stages))
        count = min(len(later), rng.choice((1, 1, 2, 2, 3)))
        followers.append(tuple(sorted(rng.sample(later, count))))
    return StageGraph(tuple(followers))


@given(came=arrivals_of, replicas=st.lists(st.integers(1, 4), min_size=1, max_size=6), seed=seeds)
def test_a_line_is_the_special_case(came: np.ndarray, replicas: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    services = [rng.exponential(1.0, len(came)) for _ in replicas]
    run = play_graph(came, line(len(replicas)), services, replicas)
    expected = play_line(came, services, replicas)
    assert run.waits == pytest.approx(expected.waits, abs=1e-9)
    np.testing.assert_allclose(np.sort(run.ends), expected.leaves, rtol=1e-12)


@given(came=arrivals_of, seed=seeds, stages=st.integers(1, 7))
def test_requests_go_to_all_followers_and_wait_for_all_before(
    came: np.ndarray, seed: int, stages: int
) -> None:
    rng = np.random.default_rng(seed)
    graph = draw_graph(random.Random(seed), stages)
    replicas = [int(n) for n in rng.integers(1, 4, stages)]
    services = [rng.exponential(1.0, len(came)) for _ in replicas]
    run = play_graph(came, graph, services, replicas)
    for stage in range(stages):
        before = [run.leaves[i] for i in graph.before(stage)]
        expected = np.max(before, axis=0) if before else came
        np.testing.assert_array_equal(run.comes[stage], expected)
        assert (run.begins[stage] >= run.comes[stage]).all()
        # No more are served at once than there are replicas, and none waits beside a free one.
        for begin in run.begins[stage]:
            busy = ((run.begins[stage] <= begin) & (run.leaves[stage] > begin)).sum()
            assert busy <= replicas[stage]
        waited = run.begins[stage] > run.comes[stage]
        assert np.isin(run.begins[stage][waited], run.leaves[stage]).all()
        order = np.argsort(run.comes[stage], kind="stable")
        assert (np.diff(run.begins[stage][order]) >= 0).all()


def test_the_graph_of_a_line_has_the_flows_of_a_line() -> None:
    stages = [StageTraits(2.0, 0.4, 3), StageTraits(1.5, 1.0, 2), StageTraits(4.0, 0.0, 1)]
    source = arrivals(2.0, 3.0)
    assert flows_in(graph_of(stages, line(3)), source) == flows_in(line_of(stages), source)


def test_all_requests_come_where_ways_meet() -> None:
    """None twice: as many as leave the slower way."""
    stages = [StageTraits(10, 0.3, 1), StageTraits(10, 0.3, 1), StageTraits(2, 0.3, 1)]
    stages.append(StageTraits(10, 0.3, 1))
    flows = flows_in(graph_of(stages, DIAMOND), arrivals(1.9, 4.0))
    assert [flow.rate_per_s for flow in flows] == [1.9] * 4
    assert flows[3].cv < flows[1].cv
    overloaded = flows_in(graph_of(stages, DIAMOND), arrivals(3.0, 4.0))
    assert overloaded[3].rate_per_s == 2.0
    assert gather([flows[1]]) == flows[1]


def test_the_formula_predicts_how_bursty_arrivals_are() -> None:
    """Forty graphs of 4 to 7 stages, gamma gaps of CV 0.5 to 4, loads of 30 to 90 %, services of CV
    0 to 1: the mean relative error of CVs is at most 10 %, and 13 % where ways meet."""
    errors, meeting = [], []
    for seed in range(40):
        drawn, rng = random.Random(seed), np.random.default_rng(seed)
        graph = draw_graph(drawn, drawn.randint(4, 7))
        cv, count = drawn.choice((0.5, 1, 2, 4)), 20_000
        came = np.cumsum(gamma_gaps(rng, cv, 1.0, count))
        traits, services = [], []
        for _ in range(graph.stages):
            replicas, busy = drawn.randint(1, 6), drawn.uniform(0.3, 0.9)
            service_cv, mean = drawn.choice((0, 0.3, 0.6, 1)), busy * replicas
            traits.append(StageTraits(1 / mean, service_cv, replicas))
            services.append(gamma_gaps(rng, service_cv, mean, count) if service_cv else mean)
        run = play_graph(came, graph, services, [its.replicas for its in traits])
        flows = flows_in(graph_of(traits, graph), arrivals(1, cv))
        for stage in range(graph.stages):
            if graph.before(stage):
                found = run.arrival_cv(stage)
                errors.append(abs(flows[stage].cv - found) / found)
                meeting += errors[-1:] * (len(graph.before(stage)) > 1)
    assert np.mean(errors) <= 0.10
    assert np.mean(meeting) <= 0.13


@given(seed=seeds, rate=st.floats(1, 40), total=st.integers(8, 24), smooths=st.booleans())
@settings(max_examples=examples(80), deadline=None)
def test_the_total_holds_at_every_moment(seed: int, rate: float, total: int, smooths: bool) -> None:
    """Whatever comes; all requests go through all stages."""
    drawn, rng = random.Random(seed), np.random.default_rng(seed)
    graph = draw_graph(drawn, drawn.randint(1, 7))
    came = np.cumsum(gamma_gaps(rng, drawn.choice((0.3, 1, 3)), 1 / rate, 300))
    services = [rng.exponential(drawn.uniform(0.02, 0.3), 300) for _ in range(graph.stages)]
    scaled = play_scaled(
        came,
        graph,
        services,
        ScaledPool(
            StagesByQueue(smooths=smooths), [1] * graph.stages, total, drawn.choice((0.0, 0.5, 3.0))
        ),
    )
    assert np.isfinite(scaled.run.leaves).all()
    for decided in scaled.decided:
        assert sum(its.to_replicas for its in decided) <= total
        assert all(its.to_replicas >= 1 for its in decided)
    edges = sorted([edge for _, start, stop in scaled.held for edge in ((start, 1), (stop, -1))])
    devices = 0
    for _, change in edges:
        devices += change
        assert devices <= total


def test_replicas_that_stay_serve_as_in_the_world_without_decisions() -> None:
    rng = np.random.default_rng(3)
    came = np.cumsum(gamma_gaps(rng, 1.0, 0.5, 400))
    services = [rng.exponential(0.4, 400) for _ in range(4)]
    scaled = play_scaled(
        came,
        DIAMOND,
        services,
        ScaledPool(StagesByQueue(smooths=False), [1] * 4, 4, load_s=1.0),
    )
    run = play_graph(came, DIAMOND, services, [1] * 4)
    np.testing.assert_allclose(scaled.run.leaves, run.leaves)


@pytest.mark.parametrize("slow", [1, 2])
def test_of_two_ways_the_slow_one_grows(slow: int) -> None:
    """In a burst that the other stages serve; a request is through when both ways are."""
    services = [0.05] * 4
    services[slow] = 0.15
    rng = np.random.default_rng(5)
    gaps = np.concatenate([rng.exponential(1 / rate, 300) for rate in (3, 10, 3)])
    scaled, fixed = (
        play_scaled(
            np.cumsum(gaps), DIAMOND, services, ScaledPool(StagesByQueue(), [1] * 4, total, 0.5)
        )
        for total in (8, 4)
    )
    grown = {its.stage for step in scaled.decided for its in step if its.to_replicas > 1}
    assert slow in grown
    assert 3 - slow not in grown
    waits = [float((its.run.ends - np.cumsum(gaps)).mean()) for its in (scaled, fixed)]
    assert waits[0] < 0.1 * waits[1]
    assert scaled.device_s < 1.3 * fixed.device_s
