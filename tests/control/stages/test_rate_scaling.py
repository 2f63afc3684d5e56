"""Stages by the rate of requests: bounds, the envelope and the forecast beside oracles."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from livescale.control.stages.corrector import StageDecision
from livescale.control.stages.formulas.stage_load import StageLoad
from livescale.control.stages.line_scaling import LineScaling
from livescale.control.stages.line_strategies import line_strategy
from livescale.control.stages.rate_scaling import RateScaling
from livescale.values.scaling_policies import StagesByQueue, StagesByRate

MS = 1_000_000
S = 1000 * MS
ENVELOPE = StagesByRate()
FORECAST = StagesByRate(ahead_ns=10 * S, is_uniform=True)
ROOM = 1000


class Line:
    """Stages whose replicas are what was decided last."""

    def __init__(self, policy: StagesByRate, services_ms: Sequence[int], total: int = ROOM) -> None:
        self._scaling = RateScaling(policy)
        self._services_ms = services_ms
        self._total = total
        self._period = 0
        self.counts = [1] * len(services_ms)

    def step(self, rate: float, waiting: int = 0) -> list[StageDecision]:
        """A period with that rate is over."""
        self._period += 1
        loads = [
            StageLoad(number, n, rate, ms * MS, waiting)
            for number, (n, ms) in enumerate(zip(self.counts, self._services_ms, strict=True))
        ]
        limits = [(1, self._total)] * len(loads)
        decided = self._scaling.step(self._period * S, loads, limits, self._total)
        self.counts = [its.to_replicas for its in decided]
        return decided


def needed(rate: float, service_ms: int, busy: float = 0.8) -> int:
    return max(math.ceil(rate * service_ms / 1000 / busy - 1e-9), 1)


@given(
    rates=st.lists(st.integers(0, 200), min_size=1, max_size=20),
    services_ms=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    total=st.integers(8, 40),
    policy=st.sampled_from((ENVELOPE, FORECAST)),
    is_uniform=st.booleans(),
    waiting=st.integers(0, 50),
)
def test_whatever_comes_the_total_holds_and_every_change_has_a_reason(
    rates: list[int],
    services_ms: list[int],
    total: int,
    policy: StagesByRate,
    is_uniform: bool,
    waiting: int,
) -> None:
    line = Line(replace(policy, is_uniform=is_uniform), services_ms, total)
    for rate in rates:
        decided = line.step(float(rate), waiting)
        assert sum(line.counts) <= total
        assert min(line.counts) >= 1
        assert len({*line.counts}) == 1 or not is_uniform
        for its in decided:
            assert its.reason
            assert {"arrivals_per_1000_s", "served_per_1000_s", "waiting", "wanted"} <= {
                *its.values
            }


@given(rate=st.integers(0, 300), services_ms=st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_a_constant_rate_gets_what_it_needs_and_keeps_it(rate: int, services_ms: list[int]) -> None:
    """Of the envelope at once; a forecast without a trend is the rate."""
    wanted = [needed(rate, ms) for ms in services_ms]
    for policy, expected in ((ENVELOPE, wanted), (FORECAST, [max(wanted)] * len(wanted))):
        line = Line(policy, services_ms)
        for _ in range(40):
            line.step(float(rate))
            assert line.counts == expected


@given(low=st.integers(0, 40), high=st.integers(60, 200))
def test_above_the_plan_it_grows_at_once_and_stays_for_the_envelope(low: int, high: int) -> None:
    line = Line(ENVELOPE, [20])
    for _ in range(8):
        line.step(float(low))
    (grown,) = line.step(float(high))
    assert grown.reason == "above_plan"
    assert line.counts == [needed(high, 20)]
    for _ in range(14):
        line.step(float(low))
        assert line.counts == [needed(high, 20)]
    for _ in range(30):
        line.step(float(low))
    assert line.counts == [needed(low, 20)]


def test_the_envelope_is_one_of_means_so_that_one_full_period_is_not_kept_for_long() -> None:
    line = Line(replace(ENVELOPE, scale_down_timeout_ns=0), [20])
    for _ in range(10):
        line.step(0.0)
    line.step(100.0)
    assert line.counts == [3]
    for _ in range(5):
        line.step(0.0)
    assert line.counts == [1]


def test_what_was_planned_is_there_from_the_first_period_on() -> None:
    line = Line(replace(ENVELOPE, planned_per_1000_s=100_000), [20, 40])
    line.step(1.0)
    assert line.counts == [needed(100, 20), needed(100, 40)]


def test_a_forecast_is_ahead_of_a_rate_that_rises_and_never_below_it() -> None:
    line = Line(FORECAST, [20])
    for second in range(1, 20):
        line.step(10.0 * second)
        assert line.counts[0] >= needed(10.0 * second, 20)
    assert line.counts[0] > needed(10.0 * 22, 20)


def test_a_queue_counts_for_a_forecast_and_not_for_an_envelope() -> None:
    forecast, envelope = Line(FORECAST, [20]), Line(ENVELOPE, [20])
    forecast.step(10.0, waiting=1000)
    envelope.step(10.0, waiting=1000)
    assert forecast.counts == [needed(10 + 1000 / 10, 20)]
    assert envelope.counts == [1]


def test_a_configuration_value_names_its_strategy() -> None:
    assert isinstance(line_strategy(StagesByQueue()), LineScaling)
    assert isinstance(line_strategy(StagesByRate()), RateScaling)


@pytest.mark.parametrize(
    "wrong",
    [
        {"period_ns": 0},
        {"part_ns": 31 * S},
        {"replicas_total": 0},
        {"busy_permille": 1001},
        {"planned_per_1000_s": -1},
        {"ahead_ns": 0},
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"periods|replicas|per mille|ahead"):
        StagesByRate(**wrong)
