"""What a line measures, and what its stages get: oracles beside the windows, bounds, and growth
that would only move the queue."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from livescale.control.scaling.stage_lines import StageLine
from livescale.control.stages.corrector import Corrector, CorrectorSettings
from livescale.control.stages.formulas.stage_load import StageLoad
from livescale.control.stages.formulas.targets import split_slo
from livescale.control.stages.limits import within
from livescale.control.stages.line_scaling import LineScaling
from livescale.control.stages.line_window import LineSeen, LineWindow, StageSeen
from livescale.control.stages.shared_queue import without_moving
from livescale.messages.events import StageCounts
from livescale.values.scaling_policies import LinePolicy, StagesByQueue, StagesByRate

MS = 1_000_000
S = 1000 * MS

limits_of = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted).map(tuple), min_size=1, max_size=9
)


@given(limits=limits_of, data=st.data())
def test_counts_stay_within_limits_and_total(
    limits: list[tuple[int, int]], data: st.DataObject
) -> None:
    counts = [data.draw(st.integers(0, 9)) for _ in limits]
    total = data.draw(st.integers(0, 40))
    found = within(counts, limits, total)
    assert all(least <= n <= most for n, (least, most) in zip(found, limits, strict=True))
    assert sum(found) <= max(total, sum(least for least, _ in limits))
    free = [min(max(n, least), most) for n, (least, most) in zip(counts, limits, strict=True)]
    assert sum(found) == sum(free) or sum(found) >= total


@given(
    rates=st.lists(st.integers(0, 120), min_size=1, max_size=12),
    services_ms=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    total=st.integers(8, 30),
    is_uniform=st.booleans(),
    smooths=st.booleans(),
)
def test_whatever_comes_the_total_holds_and_overloaded_stages_are_told(
    rates: list[int], services_ms: list[int], total: int, is_uniform: bool, smooths: bool
) -> None:
    policy = StagesByQueue(is_uniform=is_uniform, smooths=smooths)
    scaling, counts = LineScaling(policy), [1] * len(services_ms)
    limits = [(1, total)] * len(counts)
    for period, rate in enumerate(rates):
        loads = [
            StageLoad(number, n, float(rate), ms * MS)
            for number, (n, ms) in enumerate(zip(counts, services_ms, strict=True))
        ]
        decided = scaling.step(period * S, loads, limits, total)
        assert sum(its.to_replicas for its in decided) <= total
        assert all(its.reason and its.values for its in decided)
        if is_uniform:
            assert len({its.to_replicas for its in decided}) == 1
        counts = [its.to_replicas for its in decided]


def test_stages_as_narrow_wait_for_one_another() -> None:
    """An even line has time for one queue: eight shares of it. A stage that is narrower has its
    own share."""
    even = [StageLoad(n, 1, 45.0, 20 * MS) for n in range(8)]
    slow = [*even[:3], StageLoad(3, 1, 28.0, 30 * MS), *even[4:]]
    for loads, grown in ((even, []), (slow, [3])):
        targets = split_slo(4 * sum(load.service_ns for load in loads), [20 * MS] * 8)
        decided = Corrector(CorrectorSettings()).step(0, loads, targets, 99)
        kept = without_moving(decided, loads, targets, S)
        assert [its.stage for its in kept if its.to_replicas > 1] == grown
        assert any(its.reason == "queue_elsewhere" for its in kept)


def test_where_not_all_that_are_as_narrow_can_grow_none_does() -> None:
    loads = [StageLoad(n, 1, 90.0, 20 * MS, waiting=100) for n in range(4)]
    targets = split_slo(S, [20 * MS] * 4)
    for total, reasons in ((8, {"overloaded"}), (6, {"no_room", "no_room_for_all"})):
        decided = Corrector(CorrectorSettings()).step(0, loads, targets, total)
        kept = without_moving(decided, loads, targets, S)
        assert {its.reason for its in kept} == reasons
        assert {its.to_replicas for its in kept} == ({2} if total == 8 else {1})


# -- windows --------------------------------------------------------------------------------------


@given(
    tokens=st.integers(1, 50),
    per_s=st.integers(1, 40),
    services_ms=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    queued=st.tuples(st.integers(0, 2000), st.integers(0, 2000)),
)
def test_a_window_gives_back_what_came(
    tokens: int, per_s: int, services_ms: list[int], queued: tuple[int, int]
) -> None:
    """Evenly spaced Runs of as many tokens, each stage as long for each: rate, service times and
    CVs of 0; what waits more than before came, too."""
    window = LineWindow()
    assert window.end(0, _line(services_ms, 0, tokens, per_s, queued[0])) is None
    loads = window.end(10 * S, _line(services_ms, 10 * per_s, tokens, per_s, queued[1]))
    assert loads is not None
    arrived = max(10 * per_s + (queued[1] - queued[0]) / tokens, 0)
    for load, ms in zip(loads, services_ms, strict=True):
        assert load.service_ns == ms * MS
        assert load.arrivals_per_s == pytest.approx(arrived / 10)
        if 10 * per_s >= 8:
            assert load.service_cv == pytest.approx(0, abs=0.01)
            assert load.arrival_cv == pytest.approx(0, abs=0.2)
    slowest = max(services_ms)
    assert all(load.waiting == 0 for load in loads if load.service_ns < 0.85 * slowest * MS)


def test_what_waits_anywhere_waits_for_the_narrowest_stage() -> None:
    """A queue of 50 Runs throughout, less those that are being computed."""
    window = LineWindow()
    window.begin(0, _line([10, 30, 10], 0, 100, 20, 5000))
    loads = window.end(10 * S, _line([10, 30, 10], 200, 100, 20, 5000))
    assert loads is not None
    in_service = 20 * (0.010 + 0.030 + 0.010)
    assert [load.waiting for load in loads] == [0, round(50 - in_service), 0]


def test_a_stage_that_has_not_run_yet_is_not_judged() -> None:
    window = LineWindow()
    window.begin(0, LineSeen(0, (StageSeen(1, 1, {}),)))
    assert window.end(S, LineSeen(900, (StageSeen(1, 1, {}),))) is None


def test_counts_of_an_instance_that_is_new_are_old() -> None:
    """As after a restart of the controller: its sums tell nothing of the window."""
    window = LineWindow()
    window.begin(0, _line([10], 0, 100, 20, 0))
    first = _line([10], 100, 100, 20, 0)
    (stage,) = first.stages
    joined = {**stage.counts, 9: StageCounts(came=10**6, done=10**6, busy_ns=10**6 * S)}
    loads = window.end(5 * S, LineSeen(0, (StageSeen(2, 2, joined),)))
    assert loads is not None
    assert loads[0].arrivals_per_s == pytest.approx(20)


def test_runs_without_prompts_are_no_overload() -> None:
    """A report that was late has two windows' work of a stage that is busy all the time."""
    window, decoding = LineWindow(), StageCounts(came=200, done=200, busy_ns=2 * S)
    window.begin(0, LineSeen(0, (StageSeen(1, 1, {1: StageCounts()}),)))
    loads = window.end(S, LineSeen(0, (StageSeen(1, 1, {1: decoding}),)))
    assert loads is not None
    assert loads[0].arrivals_per_s == pytest.approx(95)
    assert loads[0].least_stable == 1


def _line(services_ms: list[int], runs: int, tokens: int, per_s: int, queued: int) -> LineSeen:
    gap_ns = S // per_s
    return LineSeen(
        queued,
        tuple(
            StageSeen(
                1,
                1,
                {
                    number: StageCounts(
                        came=runs,
                        done=runs,
                        gaps_ns=runs * gap_ns,
                        gaps_squared_ns_s=runs * gap_ns * gap_ns // S,
                        busy_ns=runs * ms * MS,
                        busy_squared_ns_s=runs * (ms * MS) ** 2 // S,
                        prompt_tokens=runs * tokens,
                        prompt_ns=runs * ms * MS,
                    )
                },
            )
            for number, ms in enumerate(services_ms)
        ),
    )


@pytest.mark.parametrize(("requests", "wanted"), [(5, [3, 2]), (0, [0, 0])])
def test_before_anything_is_decided_a_line_needs_nothing_for_no_requests(
    requests: int, wanted: list[int]
) -> None:
    """After a restart of the controller a line may have more than its least, and nobody asks."""
    line = StageLine("m", StagesByQueue(slo_ns=S))
    line.requests = requests
    seen = LineSeen(0, (StageSeen(3, 3, {}), StageSeen(2, 2, {})))
    line.look(0, seen, [(1, 8), (1, 8)], 8)
    assert [line.suggestion(number).at_most for number in range(2)] == wanted


@given(
    policy=st.sampled_from(
        (StagesByQueue(slo_ns=S), StagesByRate(), StagesByRate(ahead_ns=10 * S, is_uniform=True))
    ),
    planned_per_1000_s=st.sampled_from((0, 30_000, 200_000)),
    is_uniform=st.booleans(),
    services_ms=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    total=st.integers(4, 40),
)
def test_a_line_without_requests_rests(
    policy: LinePolicy,
    planned_per_1000_s: int,
    is_uniform: bool,
    services_ms: list[int],
    total: int,
) -> None:
    """With what its plan keeps ready, too: else the controller would be woken for ever."""
    if isinstance(policy, StagesByRate) and policy.ahead_ns is None:
        policy = replace(policy, planned_per_1000_s=planned_per_1000_s, is_uniform=is_uniform)
    line, limits = StageLine("m", policy), [(1, total)] * len(services_ms)
    counts, seen = [1] * len(services_ms), _line(services_ms, 0, 0, 10, 0)
    for period in range(200):
        line.requests = 3 if period < 2 else 0
        now_ns = period * policy.period_ns
        done = _line(services_ms, min(10 * period, 20), 100, 10, 0)
        stages = zip(done.stages, counts, strict=True)
        seen = LineSeen(0, tuple(replace(its, replicas=n, serving=n) for its, n in stages))
        line.look(now_ns, seen, limits, total)
        if period > 2 and line.due_ns is None:
            break
        counts = [max(line.suggestion(n).at_most, 1) for n in range(len(counts))]
    assert line.due_ns is None
    assert [max(line.suggestion(n).at_most, 1) for n in range(len(counts))] == counts
