"""QUART's pools: what they are made of, and that every system answers what comes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from livescale.lab.reproduce.base.claim import Conditions
from livescale.lab.reproduce.base.half_loads import ttfts_ns
from livescale.lab.reproduce.base.models import cluster_of
from livescale.lab.reproduce.quart.quart_loads import (
    CLUSTER,
    MODELS,
    UNEVEN,
    StageSetup,
    played_fixed,
)
from livescale.latency.shapes import EXECUTED
from livescale.load.traces import TraceRow
from livescale.sim.pools.limits import PoolError
from livescale.sim.pools.runs import PoolRun, lead_ns, run_pool
from livescale.sim.pools.stage_pools import PooledStages, fixed_counts, stage_config
from livescale.sim.pools.stage_systems import (
    STAGE_SYSTEMS,
    StageSystem,
)
from livescale.values.scaling_policies import StagesByQueue, StagesByRate

S = 1_000_000_000
POOLED = PooledStages(EXECUTED["bert-21b"], UNEVEN)
ROWS = [TraceRow(number * S // 60, POOLED.request_tokens, 1) for number in range(60)]
"""More than one replica of each stage serves, for a second."""
LONGEST_REST_NS = 4_000 * S
"""From a pool's last answer on: caches keep for an hour what they have."""
SYSTEMS = [name for name, system in STAGE_SYSTEMS.items() if not system.is_fixed]
shares_of = st.lists(st.integers(1, 9), min_size=8, max_size=8).map(tuple)


def play(system: StageSystem, rows: list[TraceRow] = ROWS) -> PoolRun:
    config = stage_config(cluster_of(CLUSTER), POOLED, system)
    return run_pool(config, {POOLED.model.name: rows}, lead_ns(config), 0)


@given(name=st.sampled_from(sorted(EXECUTED)), shares=shares_of)
def test_stages_are_all_of_a_model_and_take_all_of_its_time(
    name: str, shares: tuple[int, ...]
) -> None:
    model = EXECUTED[name]
    staged = model.in_stages(shares, 1)
    assert sum(spec.size_bytes for spec in staged.specs) == model.size_bytes
    assert sum(latency.base_ns for latency in staged.latencies) == model.executed_ns
    sizes = [spec.size_bytes for spec in staged.specs]
    assert max(sizes) - min(sizes) <= 1
    for share, latency in zip(shares, staged.latencies, strict=True):
        assert abs(latency.base_ns * sum(shares) - model.executed_ns * share) <= sum(shares)


@pytest.mark.parametrize("shares", [(1,) * 7, (1,) * 9, (1, 1, 1, 0, 1, 1, 1, 1)])
def test_shares_that_are_none_of_eight_stages_are_refused(shares: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="has 8 stages"):
        EXECUTED["bert-21b"].in_stages(shares, 1)


@given(shares=shares_of, devices=st.integers(8, 60))
def test_a_fixed_pool_has_no_narrower_stage_than_need_be(
    shares: tuple[int, ...], devices: int
) -> None:
    """The narrowest stage of any other division is no wider."""
    counts = fixed_counts(shares, devices)
    assert sum(counts) == devices
    assert min(counts) >= 1
    narrowest = max(share / count for share, count in zip(shares, counts, strict=True))
    # To be wider than that, every stage needs more than its share over it.
    needed = sum(int(share / narrowest * (1 + 1e-9)) + 1 for share in shares)
    assert needed > devices


def test_a_model_that_no_device_holds_is_refused() -> None:
    cluster = cluster_of(CLUSTER)
    small = dict.fromkeys(cluster.memory_bytes, 40_000_000_000)
    cluster.memory_bytes = small
    with pytest.raises(PoolError, match="do not fit"):
        stage_config(cluster, POOLED, STAGE_SYSTEMS["infless"])
    assert stage_config(cluster, POOLED, STAGE_SYSTEMS["quart"]).workers == len(small)


def test_what_systems_are_told_of_a_load() -> None:
    told = STAGE_SYSTEMS["quart"].with_slo(S).scaling
    assert isinstance(told, StagesByQueue)
    assert told.slo_ns == S
    planned = STAGE_SYSTEMS["inferline"].with_slo(S).planned_for(12.5).scaling
    assert isinstance(planned, StagesByRate)
    assert planned.planned_per_1000_s == 12_500
    for name in ("cocktail", "infless", "quart"):
        system = STAGE_SYSTEMS[name]
        assert system.planned_for(12.5) == system


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_answers_what_comes_and_rests(name: str) -> None:
    """In no more devices than there are; no request takes less than it would alone. A pool that
    looked at its lines for ever would be played until it counts as stuck, a month later."""
    run = play(STAGE_SYSTEMS[name].planned_for(60))
    assert run.result.end_ns - run.ended_ns <= LONGEST_REST_NS
    assert run.failed == 0
    assert len(run.result.requests) == len(ROWS)
    assert min(ttfts_ns(run)) >= POOLED.model.executed_ns
    held: dict[str, int] = {}
    for count in run.result.instances:
        held[count.model] = count.living
        assert sum(held.values()) <= run.config.workers
    assert sum(map(run.device_ns, held)) == run.device_ns()


def load_s(run: PoolRun) -> set[float]:
    """What loads took from their decision on, in seconds of two digits."""
    return {
        round((load.loaded_ns - line.decided_ns) / S, 1)
        for line in run.result.scales
        for load in line.loads
        if line.decided_ns >= run.started_ns and load.loaded_ns is not None
    }


def test_loads_take_what_the_paper_measured() -> None:
    assert load_s(play(STAGE_SYSTEMS["quart"])) == {0.8}


@pytest.mark.long
def test_loads_from_disk_take_what_the_paper_measured() -> None:
    assert load_s(play(STAGE_SYSTEMS["inferline"])) == {5.6}
    assert load_s(play(STAGE_SYSTEMS["infless"])) == {45.0}


@pytest.mark.long
def test_a_fixed_pool_takes_the_device_time_of_the_other() -> None:
    setup = StageSetup("wideresnet")
    run = played_fixed(setup, Conditions(0))
    assert run.failed == 0
    counts = {count.model: count.living for count in run.result.instances}
    assert list(counts.values()) == fixed_counts(UNEVEN, sum(counts.values()))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("cv", [None, 4.0])
def test_loads_are_the_same_for_the_same_seed_and_of_their_rate(
    model: str, cv: float | None
) -> None:
    setup = StageSetup(model, cv)
    rows = setup.rows(3)
    assert rows == setup.rows(3)
    assert rows != setup.rows(4)
    assert rows == sorted(rows, key=lambda row: row.arrival_ns)
    per_s = len(rows) * S / (60 * S if cv is None else 30 * S)
    part = per_s / setup.pooled.capacity_per_s(48)
    assert part == pytest.approx(0.13 if cv is None else 0.1, rel=0.6)


@pytest.mark.parametrize(
    ("counts", "part"),
    [((2,) * 8, 1.0), ((2, 2, 2, 3, 2, 2, 2, 2), 5 / 6), ((3, 3, 3, 5, 3, 3, 3, 3), 8 / 9)],
)
def test_a_full_line_serves_what_each_leader_can(counts: tuple[int, ...], part: float) -> None:
    """Of a stage with more instances than there are leaders, some leaders have one more than
    others. Each serves what the narrowest of its own stages does, and never more than itself: so a
    line whose shares are uneven serves less (`part`) than all instances of its narrowest stage."""
    leaders = counts[0]
    times = [POOLED.model.executed_ns * share / sum(UNEVEN) for share in UNEVEN]
    narrowest = min(count / time for count, time in zip(counts, times, strict=True))
    by_leaders = sum(
        min((count + number) // leaders / time for count, time in zip(counts, times, strict=True))
        for number in range(leaders)
    )
    assert by_leaders / narrowest == pytest.approx(part, rel=0.01)
    system = replace(STAGE_SYSTEMS["fixed-stages"], fixed_devices=sum(counts))
    config = stage_config(cluster_of(CLUSTER), POOLED, system)
    assert [model.instances_min for model in config.controller.models] == [*counts]
    rows = [TraceRow(0, POOLED.request_tokens, 1)] * 240
    run = run_pool(config, {POOLED.model.name: rows}, lead_ns(config), 0)
    ends = sorted(request.finished_ns for request in run.result.requests)
    served_per_ns = 160 / (ends[200] - ends[40])
    assert served_per_ns == pytest.approx(by_leaders, rel=0.03)
