"""Stages that scale by their own queues, in worlds where one of them is slow."""

from __future__ import annotations

import functools

import pytest
from msgspec.structs import replace
from stage_worlds import BEGIN_NS, SERVICE_NS, TOKENS, StageRun, burst, play, stage_world
from worlds import MS, Row

from livescale.config.variation import variation_weights
from livescale.sim.base.config import FaultConfig, ModelChange
from livescale.sim.checkers.invariants import InvariantBroken
from livescale.sim.world.simulate import simulate
from livescale.values.bindings import LateBinding
from livescale.values.scaling_policies import (
    DAY_NS,
    Bounds,
    Period,
    ScalingPolicy,
    SloAim,
    StagesByQueue,
    TargetOngoing,
)

SLO_NS = 4 * 17 * SERVICE_NS // 2
"""Four times what a request takes that never waits: seven even stages, and one of 1.5."""
BURST = ((0.3, 4), (0.75, 12), (0.3, 6))
QUEUE = StagesByQueue(slo_ns=SLO_NS)


@functools.cache
def played(policy: StagesByQueue) -> StageRun:
    return play(stage_world(policy, workers=20), burst(BURST), SLO_NS)


@pytest.mark.parametrize(
    "policy",
    [QUEUE, replace(QUEUE, smooths=False), replace(QUEUE, weights=variation_weights())],
    ids=["analytic", "not-smoothed", "learned"],
)
def test_under_a_burst_only_the_slow_stage_and_its_follower_grow(policy: StagesByQueue) -> None:
    run = played(policy)
    assert run.good == run.requests
    assert "m/3" in run.grown
    assert run.grown.keys() <= {"m/3", "m/4"}


def test_goodput_per_device_is_a_fifth_above_whole_pipelines() -> None:
    """Ideal are 41 %, where numbers of replicas are large."""
    own, whole = played(QUEUE), played(replace(QUEUE, is_uniform=True))
    assert len(whole.grown) == 8
    assert whole.good == whole.requests
    assert own.good_per_device_s >= 1.2 * whole.good_per_device_s


def test_whole_pipelines_have_as_many_of_each() -> None:
    run = played(replace(QUEUE, is_uniform=True))
    assert {*run.grown.values()} == {2}
    by_time: dict[int, list[int]] = {}
    for at_ns, one in run.scaled:
        by_time.setdefault(at_ns, []).append(one.to_instances)
    assert all(len(counts) == 8 and len({*counts}) == 1 for counts in by_time.values())


def test_every_change_has_its_reason_and_figures() -> None:
    """Also those after which there are fewer."""
    changes = [one for _, one in played(QUEUE).scaled if one.reason != "below_min"]
    assert [(one.from_instances, one.to_instances) for one in changes] == [(1, 2), (2, 1)]
    grown, shrunk = changes
    assert grown.reason in ("overloaded", "over_target")
    assert shrunk.reason in ("surplus", "even_arrivals")
    for one in changes:
        named = {"arrivals_per_1000_s", "served_per_1000_s", "waiting", "target_ns", "wanted"}
        assert named <= one.values.keys()
        assert one.values["to_replicas"] == one.to_instances


@pytest.mark.parametrize("is_uniform", [False, True])
def test_all_stages_together_stay_within_the_total(is_uniform: bool) -> None:
    """Much more comes than that serves; the simulator checks the sum at every step."""
    policy = StagesByQueue(replicas_total=9, is_uniform=is_uniform)
    run = play(stage_world(policy, workers=20), burst(((0.5, 3), (1.6, 6))), SLO_NS)
    assert run.grown == ({} if is_uniform else {"m/3": 2})


def test_a_total_that_becomes_smaller_holds_from_then_on() -> None:
    policy = StagesByQueue(slo_ns=SLO_NS)
    config = stage_world(policy, workers=20, stages=4, slow="m/1")
    changes = tuple(
        ModelChange(7_000 * MS, changed=replace(model, scaling=replace(policy, replicas_total=5)))
        for model in config.controller.models
    )
    run = play(replace(config, changes=changes), burst(((1.8, 10),)), SLO_NS)
    counts = {model.spec.name: 0 for model in config.controller.models}
    for _, one in run.scaled:
        counts[one.model] = one.to_instances
    assert sum(counts.values()) <= 5


def test_a_line_without_requests_comes_to_rest_and_goes_with_its_last_one() -> None:
    """Stages that may have no replica have none in the end, and come back for a request."""
    config = stage_world(QUEUE, workers=10, stages=4, slow="m/1")
    models = tuple(
        replace(model, instances_min=0, idle_ns=1_000 * MS) for model in config.controller.models
    )
    config = replace(config, controller=replace(config.controller, models=models))
    rows = [Row(at_s * 1000 * MS, 256, 1) for at_s in (3, 4, 30)]
    run = play(config, rows, 60_000 * MS)
    assert run.good == 3
    ups = [one.model for _, one in run.scaled if one.to_instances == 1 and not one.from_instances]
    downs = [one.model for _, one in run.scaled if not one.to_instances]
    assert sorted(ups) == sorted(downs) == sorted(2 * [model.spec.name for model in models])


@pytest.mark.parametrize(
    "policy", [QUEUE, Bounds(), SloAim(), TargetOngoing()], ids=lambda policy: type(policy).__name__
)
def test_a_schedule_that_lets_all_instances_go_brings_all_stages_back(
    policy: ScalingPolicy,
) -> None:
    """Later stages have no load of their own while the requests wait at the first one."""
    config = stage_world(QUEUE, workers=6, stages=3, slow="m/1")
    nightly = (Period(0, DAY_NS, 0, 4),)
    models = tuple(
        replace(model, scaling=policy, schedule=nightly, idle_ns=1_000 * MS)
        for model in config.controller.models
    )
    config = replace(config, controller=replace(config.controller, models=models))
    rows = [Row(at_s * 1000 * MS, TOKENS, 1) for at_s in (5, 30)]
    run = play(config, rows, 60_000 * MS)
    assert run.good == run.requests == len(rows)
    gone = [one.model for _, one in run.scaled if not one.to_instances]
    assert sorted(gone) == sorted(2 * [model.spec.name for model in models])


def test_a_model_that_is_withdrawn_in_a_burst_ends_what_it_has_and_may_come_again() -> None:
    """What came before is answered by all stages; the next life of the model begins anew."""
    config = stage_world(QUEUE, workers=8, stages=3, slow="m/1")
    models = config.controller.models
    gone = [ModelChange(5_000 * MS, removed=model.spec.name) for model in models]
    back = [ModelChange(30_000 * MS, added=model) for model in models]
    rows = [*burst(((1.2, 2),)), *(Row(at_s * 1000 * MS, TOKENS, 1) for at_s in (32, 33))]
    run = play(replace(config, changes=(*gone, *back)), rows, 60_000 * MS)
    assert run.good == run.requests == len(rows)
    assert [one.reason for at_ns, one in run.scaled if at_ns >= 30_000 * MS] == ["below_min"] * 3


@pytest.mark.parametrize("seed", range(4))
def test_lost_workers_and_controllers_change_nothing_for_requests(seed: int) -> None:
    config = stage_world(StagesByQueue(replicas_total=8), workers=10, stages=4, slow="m/1")
    faults = FaultConfig(worker_losses=2, controller_restarts=1, until_ns=8_000 * MS)
    run = play(replace(config, faults=faults), burst(((0.9, 6),)), SLO_NS, seed)
    assert run.requests == len(burst(((0.9, 6),)))


@pytest.mark.parametrize("seed", range(8))
def test_lines_between_the_only_instances_that_break_keep_no_request_for_ever(seed: int) -> None:
    """No other way is there: the same two workers try again."""
    config = stage_world(StagesByQueue(replicas_total=3), workers=3, stages=3, factor=1.0)
    late = {"late_permille": 100, "late_ns_max": 500 * MS}
    faults = FaultConfig(line_loss_permille=30, until_ns=8_000 * MS, **late)
    rows = burst(((0.3, 8),))
    assert play(replace(config, faults=faults), rows, SLO_NS, seed).requests == len(rows)


def test_the_checker_sees_a_sum_beyond_the_total() -> None:
    """The first stage's policy is the line's; what others allow is checked, too."""
    config = stage_world(StagesByQueue(replicas_total=9), workers=20)
    first, *others = config.controller.models
    told = (replace(first, scaling=StagesByQueue(replicas_total=16)), *others)
    broken = replace(config, controller=replace(config.controller, models=told))
    with pytest.raises(InvariantBroken, match="no more replicas"):
        play(broken, burst(((1.6, 3),)), SLO_NS)


@pytest.mark.parametrize("runs_ahead", [2, 16])
def test_a_line_is_kept_full_however_little_an_instance_gets_ahead(runs_ahead: int) -> None:
    """What is sent to a leader is for all members: all stages work at once."""
    config = stage_world(QUEUE, workers=8, factor=1.0)
    binding = LateBinding(ahead_tokens_max=runs_ahead * TOKENS)
    config = replace(config, controller=replace(config.controller, binding=binding))
    last = simulate({"m": [Row(BEGIN_NS, TOKENS, 1)] * 100}, config, 0).requests[-1]
    assert last.finished_ns - BEGIN_NS <= 1.05 * (100 + 7) * SERVICE_NS
