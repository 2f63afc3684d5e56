"""The SLO over the stages, and graphs of stages."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.control.stages.formulas.graph import StageGraph, line
from livescale.control.stages.formulas.stage_load import StageLoad
from livescale.control.stages.formulas.targets import split_slo, wait_allowed_ns
from livescale.control.stages.key_stages import KeyStages

services = st.lists(st.integers(1, 10**9), min_size=1, max_size=8)


@st.composite
def graphs(draw: st.DrawFn) -> StageGraph:
    stages = draw(st.integers(1, 7))
    after = [st.sets(st.integers(i + 1, stages - 1)) for i in range(stages - 1)]
    return StageGraph((*(tuple(sorted(draw(its))) for its in after), ()))


@given(slo_ns=st.integers(1, 10**11), services_ns=services)
def test_a_line_shares_the_slo_in_proportion(slo_ns: int, services_ns: list[int]) -> None:
    targets = split_slo(slo_ns, services_ns)
    assert slo_ns - len(targets) < sum(targets) <= slo_ns
    for service, target in zip(services_ns, targets, strict=True):
        assert 0 <= slo_ns * service - target * sum(services_ns) < sum(services_ns)


@given(graph=graphs(), slo_ns=st.integers(1, 10**9), data=st.data())
def test_no_way_through_a_graph_has_more_than_the_slo(
    graph: StageGraph, slo_ns: int, data: st.DataObject
) -> None:
    its = st.lists(st.integers(1, 10**6), min_size=graph.stages, max_size=graph.stages)
    services_ns = data.draw(its)
    targets = split_slo(slo_ns, services_ns, graph)
    ways = _ways(graph)
    assert max(sum(targets[i] for i in way) for way in ways) <= slo_ns
    assert graph.longest_path(services_ns) == max(sum(services_ns[i] for i in w) for w in ways)


@given(graph=graphs())
def test_neighbours_are_mutual(graph: StageGraph) -> None:
    for i, j in itertools.product(range(graph.stages), repeat=2):
        assert (j in graph.neighbours(i)) == (i in graph.neighbours(j))
        assert (j in graph.neighbours(i)) == (j in graph.followers[i] or i in graph.followers[j])


def test_a_line_has_two_ends() -> None:
    assert [line(4).neighbours(i) for i in range(4)] == [(1,), (0, 2), (1, 3), (2,)]
    assert line(1).neighbours(0) == ()


@pytest.mark.parametrize(
    "followers", [((0,),), ((2, 1), (), ()), ((1,), (0,)), ((1, 1), ()), ((5,),)]
)
def test_cycles_and_unknown_stages_are_refused(followers: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="stage"):
        StageGraph(followers)


@pytest.mark.parametrize(("slo_ns", "services_ns"), [(0, [1]), (5, [1, 0])])
def test_what_is_not_positive_is_refused(slo_ns: int, services_ns: list[int]) -> None:
    with pytest.raises(ValueError, match="not positive"):
        split_slo(slo_ns, services_ns)


@given(target_ns=st.integers(1, 10**10), service_ns=st.integers(1, 10**10))
def test_requests_may_always_wait_a_little(target_ns: int, service_ns: int) -> None:
    allowed = wait_allowed_ns(target_ns, service_ns)
    assert allowed > 0
    if target_ns >= 1.2 * service_ns:
        assert allowed == target_ns - service_ns


def test_a_key_stage_leaves_when_it_has_been_below_both_for_the_timeout() -> None:
    keys = KeyStages(scale_down_timeout_ns=3)

    def step(now_ns: int, queues: list[int], over: list[bool]) -> dict[int, str]:
        loads = [StageLoad(i, 1, 1.0, 1000, waiting) for i, waiting in enumerate(queues)]
        keys.step(now_ns, loads, over)
        return {stage: key.reason for stage, key in keys.listed.items()}

    assert step(0, [0, 0, 0], [False] * 3) == {}
    assert step(1, [4, 4, 0], [False, False, True]) == {0: "longest_queue", 2: "over_target"}
    assert step(2, [0, 1, 0], [False] * 3) == {
        0: "longest_queue",
        1: "longest_queue",
        2: "over_target",
    }
    assert step(4, [0, 0, 0], [False] * 3) == {1: "longest_queue"}
    assert step(5, [0, 0], [False] * 2) == {}
    assert step(6, [0, 0, 9], [False] * 3) == {2: "longest_queue"}
    assert step(7, [0, 0], [False] * 2) == {}


# -- helpers --------------------------------------------------------------------------------------


def _ways(graph: StageGraph) -> list[list[int]]:
    """All ways from any stage to an end."""

    def from_here(stage: int) -> list[list[int]]:
        rest = [way for after in graph.followers[stage] for way in from_here(after)]
        return [[stage, *way] for way in rest or [[]]]

    return [way for stage in range(graph.stages) for way in from_here(stage)]
