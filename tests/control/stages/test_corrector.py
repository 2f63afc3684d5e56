"""The Corrector in closed loops, and what always holds of its decisions."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.control.stages.corrector import Corrector, CorrectorSettings, StageDecision
from livescale.control.stages.formulas.pid import Gains, Pid
from livescale.control.stages.formulas.stage_load import StageLoad
from livescale.control.stages.formulas.targets import wait_allowed_ns

S = 1_000_000_000
SERVICE_NS = S // 10
SETTINGS = CorrectorSettings(period_ns=S, scale_down_timeout_ns=3 * S)

loads_of_a_stage = st.builds(
    StageLoad,
    stage=st.just(0),
    replicas=st.integers(0, 12),
    arrivals_per_s=st.floats(0, 120),
    service_ns=st.integers(S // 100, S),
    waiting=st.integers(0, 60),
    arrival_cv=st.none() | st.floats(0, 8),
    service_cv=st.none() | st.floats(0, 2),
)


@st.composite
def stories(draw: st.DrawFn) -> list[list[StageLoad]]:
    """Loads of a few stages over a few periods, without regard to what was decided."""
    stages = draw(st.integers(1, 5))
    return [
        [msgspec.structs.replace(draw(loads_of_a_stage), stage=stage) for stage in range(stages)]
        for _ in range(draw(st.integers(1, 6)))
    ]


@given(
    story=stories(),
    target_ns=st.integers(S // 1000, 4 * S),
    total=st.integers(0, 60),
    least=st.integers(1, 3),
)
def test_limits_hold_whatever_the_load(
    story: list[list[StageLoad]], target_ns: int, total: int, least: int
) -> None:
    corrector = Corrector(CorrectorSettings(replicas_min=least))
    for period, loads in enumerate(story):
        decisions = corrector.step(period * S, loads, [target_ns] * len(loads), total)
        assert [its.stage for its in decisions] == [load.stage for load in loads]
        assert sum(its.to_replicas for its in decisions) <= total
        if total >= least * len(loads):
            assert min(its.to_replicas for its in decisions) >= least


@given(story=stories(), target_ns=st.integers(S // 1000, 4 * S), total=st.integers(0, 60))
def test_every_change_has_its_reason_and_numbers(
    story: list[list[StageLoad]], target_ns: int, total: int
) -> None:
    corrector, again = Corrector(SETTINGS), Corrector(SETTINGS)
    grows, falls = {"overloaded", "over_target", "below_min"}, {"surplus", "over_total"}
    for period, loads in enumerate(story):
        targets = [target_ns] * len(loads)
        decisions = corrector.step(period * S, loads, targets, total)
        assert decisions == again.step(period * S, loads, targets, total)
        for load, its in zip(loads, decisions, strict=True):
            assert its.from_replicas == load.replicas
            if its.to_replicas > load.replicas:
                assert its.reason in grows
            elif its.to_replicas < load.replicas:
                assert its.reason in falls
            is_unsteady = load.replicas < load.least_stable
            assert ("sojourn_ns" in its.values) is not is_unsteady
            if is_unsteady and its.to_replicas < load.least_stable:
                assert sum(d.to_replicas for d in decisions) == total
            assert its.values["arrivals_per_1000_s"] == round(1000 * load.arrivals_per_s)
            if its.values["error_permille"] > 0:
                assert its.key_reason == "over_target"


@given(
    offered=st.floats(0.3, 20),
    slack=st.floats(1.05, 4),
    cv=st.floats(0.3, 3),
    lag=st.integers(0, 2),
)
def test_after_twice_the_load_it_settles_within_ten_periods_and_stays(
    offered: float, slack: float, cv: float, lag: int
) -> None:
    """Against the model: replicas are there `lag` periods after they were ordered."""
    target_ns = int(SERVICE_NS * slack)
    rate = offered / SERVICE_NS * S
    plant = _Plant(rate=rate, arrival_cv=cv, lag=lag)
    run = _closed_loop(plant, target_ns, periods=60)
    before = run[-1].to_replicas
    assert {its.to_replicas for its in run[-10:]} == {before}
    plant.rate = 2 * rate
    run = _closed_loop(plant, target_ns, periods=50, corrector=plant.corrector)
    settled = run[10:]
    assert {(its.from_replicas, its.to_replicas) for its in settled} == {(plant.replicas,) * 2}
    assert all(its.values["sojourn_ns"] <= its.values["target_ns"] for its in settled)
    assert plant.replicas >= before


@pytest.mark.parametrize("offered", [1.5, 3.4, 7.2, 14.0])
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_backlog_from_the_step_is_gone_within_ten_periods(offered: float, lag: int) -> None:
    """The same with a fluid queue: what comes while replicas load waits, and has to be served."""
    target_ns = 2 * SERVICE_NS
    plant = _Plant(rate=offered / SERVICE_NS * S, lag=lag, has_backlog=True)
    _closed_loop(plant, target_ns, periods=40)
    plant.rate *= 2
    run = _closed_loop(plant, target_ns, periods=60, corrector=plant.corrector)
    assert all(its.values["sojourn_ns"] <= its.values["target_ns"] for its in run[10:])
    assert not any(its.to_replicas > its.from_replicas for its in run[10:])
    assert len({its.to_replicas for its in run[-10:]}) == 1
    assert plant.waiting == 0
    assert max(its.to_replicas for its in run) <= 2 * plant.replicas


def test_half_the_load_gives_replicas_back_after_the_timeout() -> None:
    plant = _Plant(rate=60.0)
    _closed_loop(plant, 2 * SERVICE_NS, periods=30)
    before = plant.replicas
    plant.rate = 20.0
    run = _closed_loop(plant, 2 * SERVICE_NS, periods=60, corrector=plant.corrector)
    assert [its.reason for its in run[:3]] == ["surplus_waits"] * 3
    assert run[3].reason == "surplus"
    assert plant.replicas < before
    needed = plant.load().replicas_needed(wait_allowed_ns(2 * SERVICE_NS, SERVICE_NS), S, 99)
    assert needed is not None
    assert needed <= plant.replicas <= needed + 1


def test_the_printed_sign_empties_the_pipeline() -> None:
    """Eqs 2 and 3 alone, without any guard: with T_target - T_i the late stage loses what it has;
    with T_i - T_target it grows until it is not late."""
    printed = _plain_pid(lambda sojourn, target: target - sojourn)
    corrected = _plain_pid(lambda sojourn, target: sojourn - target)
    assert printed.replicas == 0
    assert printed.waiting > 1000
    assert corrected.replicas >= corrected.load().least_stable
    assert corrected.waiting == 0


def test_an_overloaded_stage_grows_at_once() -> None:
    load = StageLoad(0, 1, 95.0, SERVICE_NS)
    (its,) = Corrector(SETTINGS).step(0, [load], [2 * SERVICE_NS], 48)
    assert its.reason == "overloaded"
    assert its.to_replicas >= load.least_stable == 10
    assert its.key_reason == "over_target"


def test_too_few_devices_go_to_the_stage_that_is_worst_off() -> None:
    loads = [StageLoad(0, 2, 25.0, SERVICE_NS), StageLoad(1, 2, 60.0, SERVICE_NS)]
    decisions = Corrector(SETTINGS).step(0, loads, [2 * SERVICE_NS] * 2, 6)
    assert [(its.to_replicas, its.reason) for its in decisions] == [
        (2, "no_room"),
        (4, "overloaded"),
    ]
    assert decisions[1].values["wanted"] > 4


def test_more_than_the_total_is_taken_where_it_is_felt_least() -> None:
    loads = [StageLoad(0, 6, 5.0, SERVICE_NS), StageLoad(1, 6, 50.0, SERVICE_NS)]
    decisions = Corrector(SETTINGS).step(0, loads, [2 * SERVICE_NS] * 2, 8)
    assert [(its.to_replicas, its.reason) for its in decisions] == [
        (2, "over_total"),
        (6, "within_target"),
    ]


def test_a_target_below_the_service_time_does_not_ask_for_ever_more() -> None:
    plant = _Plant(rate=25.0)
    _closed_loop(plant, SERVICE_NS // 2, periods=30)
    assert plant.replicas <= 6


def test_evenness_needs_fewer_replicas_than_bursts() -> None:
    """Allen and Cunneen beside M/M/c."""
    found = []
    for arrival_cv in (0.1, None, 4.0):
        plant = _Plant(rate=45.0, arrival_cv=arrival_cv)
        _closed_loop(plant, int(1.2 * SERVICE_NS), periods=30)
        found.append(plant.replicas)
    assert found[0] < found[1] < found[2]


@given(loads=st.lists(st.floats(0, 100), min_size=1, max_size=10))
def test_what_goes_on_does_not_depend_on_the_origin_of_time(loads: list[float]) -> None:
    runs = []
    for origin_ns in (0, 7 * S + 11):
        corrector = Corrector(SETTINGS)
        runs.append(
            [
                corrector.step(
                    origin_ns + i * S, [StageLoad(0, 3, rate, SERVICE_NS)], [2 * SERVICE_NS], 9
                )
                for i, rate in enumerate(loads)
            ]
        )
    assert runs[0] == runs[1]


def test_two_loads_of_a_stage_are_refused() -> None:
    load = StageLoad(0, 1, 1.0, SERVICE_NS)
    with pytest.raises(ValueError, match="two loads"):
        Corrector(SETTINGS).step(0, [load, load], [S, S], 9)


# -- helpers --------------------------------------------------------------------------------------


class _Plant:
    """One stage. Replicas serve `lag` periods after they were ordered and go at once.

    With a backlog, what comes faster than it is served waits (a fluid); else every period is in
    its steady state, as the formula has it.
    """

    def __init__(
        self,
        rate: float,
        *,
        arrival_cv: float | None = None,
        lag: int = 0,
        has_backlog: bool = False,
    ) -> None:
        self.rate, self.arrival_cv, self.has_backlog = rate, arrival_cv, has_backlog
        self.replicas, self.waiting = 1, 0.0
        self.corrector = Corrector(SETTINGS)
        self.now_ns = 0
        self._ordered = [1] * (lag + 1)

    def load(self) -> StageLoad:
        waiting = math.ceil(self.waiting)
        return StageLoad(0, self.replicas, self.rate, SERVICE_NS, waiting, self.arrival_cv)

    def pass_period(self, replicas: int) -> None:
        self.replicas = replicas
        self._ordered = [*self._ordered[1:], replicas]
        if self.has_backlog:
            served = min(self._ordered) * S / SERVICE_NS
            self.waiting = max(0.0, self.waiting + self.rate - served)
        self.now_ns += S


def _closed_loop(
    plant: _Plant, target_ns: int, *, periods: int, corrector: Corrector | None = None
) -> list[StageDecision]:
    corrector = corrector or plant.corrector
    run = []
    for _ in range(periods):
        (its,) = corrector.step(plant.now_ns, [plant.load()], [target_ns], 500)
        plant.pass_period(its.to_replicas)
        run.append(its)
    return run


def _plain_pid(error: Callable[[float, float], float]) -> _Plant:
    """r' = r + Δr, with errors in targets, at most four of them; the load doubles at the start."""
    plant, pid, target_ns = _Plant(rate=40.0, has_backlog=True), Pid(Gains()), 2.0 * SERVICE_NS
    plant.pass_period(3)
    for _ in range(200):
        load = plant.load()
        sojourn_ns = load.sojourn_ns(load.replicas) if load.replicas else math.inf
        terms = pid.step(max(-4.0, min(error(sojourn_ns, target_ns) / target_ns, 4.0)), 1.0)
        plant.pass_period(max(0, plant.replicas + math.trunc(terms.replicas)))
    return plant
