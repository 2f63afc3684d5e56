"""Cores of hosts are never given twice, and stages give back what they do not need."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.control.stages.core_budget import CoreBudget, CoresOf, CoresSeen, StageCores
from livescale.control.stages.formulas.stage_load import StageLoad
from livescale.control.stages.line_scaling import LineScaling
from livescale.control.state.known_cores import KnownCores
from livescale.messages.events import CoresChanged
from livescale.values.scaling_policies import CoresModel, StagesByQueue
from livescale.values.types import WorkerRef

MS = 1_000_000
S = 1000 * MS
HOSTS = ("a", "b", "c")
WORKER = WorkerRef(5)

instances = st.builds(
    CoresOf, st.just(1), st.integers(1, 9), st.sampled_from(HOSTS).map(lambda host: (host,))
)
stages = st.lists(
    st.builds(StageCores, st.just(1), st.lists(instances, min_size=1, max_size=4).map(tuple)),
    min_size=1,
    max_size=4,
)


@given(stages=stages, free=st.fixed_dictionaries({host: st.integers(-2, 8) for host in HOSTS}))
def test_hosts_never_give_more_than_they_have(
    stages: list[StageCores], free: dict[str, int]
) -> None:
    """Each stage in turn takes the most that it may; one more would have been too many."""
    budget, left = CoreBudget(free), dict(free)
    for stage in stages:
        keep = len(stage.instances)
        cores = budget.most(stage, keep)
        assert cores <= max(min(its.most for its in stage.instances), stage.level)
        budget.take(stage, keep, cores)
        for its in stage.instances:
            left[its.hosts[0]] -= cores - its.cores
        assert all(left[host] >= min(free[host], 0) for host in HOSTS)
        if cores < min(its.most for its in stage.instances):
            more = [sum(its.hosts == (host,) for its in stage.instances) for host in HOSTS]
            assert any(n > max(left[host], 0) for n, host in zip(more, HOSTS, strict=True) if n)


def test_a_stage_that_cores_made_faster_is_no_later_than_before() -> None:
    """Its target follows from what it takes with the cores that its workers began with, or the
    replica that cores made up for would come back at once."""
    model = CoresModel(10.0 * MS, 70.0 * MS)
    policy = StagesByQueue(slo_ns=640 * MS, cores=model, cores_max=8)
    for cores in (1, 4):
        service_ns = round(model.service_ns(cores))
        loads = [StageLoad(0, 2, 5.0, 80 * MS), StageLoad(1, 2, 20.0, service_ns)]
        one = StageCores(1, (CoresOf(1, 8, ("a",)),) * 2)
        other = StageCores(1, (CoresOf(cores, 8, ("b",)),) * 2)
        decided = LineScaling(policy).step(0, loads, [(1, 9)] * 2, 18, _seen(one, other))
        assert [its.values["target_ns"] for its in decided] == [320 * MS, 320 * MS]


def test_cores_go_when_fewer_do_for_long_enough() -> None:
    model = CoresModel(10.0 * MS, 70.0 * MS)
    policy = StagesByQueue(slo_ns=400 * MS, cores=model, cores_max=8)
    scaling, now_ns, cores, seen = LineScaling(policy), 0, 4, []
    while now_ns < 8 * S:
        stage = StageCores(1, (CoresOf(cores, 8, ("a",)),))
        load = StageLoad(0, 1, 1.0, round(model.service_ns(cores)))
        [its] = scaling.step(now_ns, [load], [(1, 9)], 9, _seen(stage))
        assert its.to_cores is not None
        assert (its.cores_reason == "fewer_do") == (its.to_cores < cores)
        cores = its.to_cores
        seen.append(cores)
        now_ns += S
    assert seen[:3] == [4, 4, 4]
    assert seen[-1] == 1


@pytest.mark.parametrize(("has_model", "to_cores"), [(True, 3), (False, None)])
def test_a_reclaim_that_would_break_its_target_adds_cores(
    has_model: bool, to_cores: int | None
) -> None:
    """Evenly spaced arrivals at a slow stage between two fast ones."""
    model = CoresModel(0.3, 0.7)
    policy = StagesByQueue(slo_ns=700 * MS, cores=model if has_model else None, cores_max=9)
    slow = StageLoad(1, 4, 45.0, 80 * MS, arrival_cv=0.1, service_cv=0.1)
    even = [StageLoad(n, 1, 45.0, 20 * MS, arrival_cv=0.1, service_cv=0.1) for n in (0, 2)]
    one = StageCores(1, (CoresOf(1, 9, ("a",)),))
    four = StageCores(1, tuple(CoresOf(1, 9, (host,)) for host in "abcd"))
    seen = CoresSeen((one, four, one), dict.fromkeys("abcd", 4)) if has_model else None
    decided = LineScaling(policy).step(0, [even[0], slow, even[1]], [(1, 9)] * 3, 18, seen)
    assert decided[1].to_cores == to_cores
    if has_model:
        assert decided[1].to_replicas < 4
        assert (decided[1].reason, decided[1].cores_reason) == ("even_arrivals", "more_cores")
        assert decided[1].values["to_cores"] > decided[1].values["cores"]
    else:
        assert decided[1].to_replicas == 4


def test_late_answers_of_an_earlier_life_answer_no_order() -> None:
    known = KnownCores()
    known.joined(WORKER, 1, 1)
    known.order(WORKER, 4)
    assert known.held(WORKER) == 4
    assert known.changed(CoresChanged(WORKER, 3, asked=3))
    assert known.is_waiting(WORKER)
    assert (known.now(WORKER), known.held(WORKER)) == (3, 4)
    assert known.changed(CoresChanged(WORKER, 2, asked=4))
    assert not known.is_waiting(WORKER)
    assert known.most(WORKER, 8) == known.held(WORKER) == 2
    known.left(WORKER)
    assert not known.changed(CoresChanged(WORKER, 2))


def _seen(*stages: StageCores) -> CoresSeen:
    return CoresSeen(stages, {"a": 6, "b": 6})
