"""Stages by the rate of requests, for comparison: what InferLine and Cocktail do (QUART §8.1).

InferLine's planner provides each stage for the envelope of a load, and its tuner reacts where more
comes (Crankshaw et al., SoCC 2020, §5): here the envelope is that of what came lately, or of what
was planned before. Cocktail scales whole pipelines for the load that it predicts, and for what it
did not predict (Gunasekaran et al., NSDI 2022, §4): here the forecast is Holt's, a level and a
trend. What either does besides (batch sizes, ensembles, bidding) is not here.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from livescale.control.stages.core_budget import CoresSeen
from livescale.control.stages.corrector import StageDecision
from livescale.control.stages.formulas.stage_load import StageLoad
from livescale.control.stages.key_stages import KeyStage
from livescale.control.stages.limits import even, within
from livescale.values.scaling_policies import StagesByRate
from livescale.values.types import Value
from livescale.values.units import NS_PER_S

_LEVEL_PERMILLE, _TREND_PERMILLE = 500, 300
"""How much of a period's rate goes into level and trend of a forecast."""


class _Need(Value, frozen=True):
    """Replicas that a stage should have, and why."""

    replicas: int
    reason: str
    values: dict[str, int]


@dataclass(slots=True)
class _Forecast:
    """Holt's double exponential smoothing of one rate."""

    level: float = 0.0
    trend: float = 0.0
    is_begun: bool = False

    def after(self, rate: float) -> None:
        """A period had this rate."""
        if not self.is_begun:
            self.level, self.is_begun = rate, True
            return
        before = self.level
        weight, slope = _LEVEL_PERMILLE / 1000, _TREND_PERMILLE / 1000
        self.level = weight * rate + (1 - weight) * (before + self.trend)
        self.trend = slope * (self.level - before) + (1 - slope) * self.trend

    def ahead(self, periods: float) -> float:
        """The rate in so many periods."""
        return max(self.level + periods * self.trend, 0.0)


@dataclass(slots=True)
class _StageState:
    forecast: _Forecast = field(default_factory=_Forecast)
    #: when periods ended, and their rates
    rates: deque[tuple[int, float]] = field(default_factory=deque)
    changed_ns: int | None = None


class RateScaling:
    """Of one line of stages."""

    def __init__(self, policy: StagesByRate) -> None:
        self._policy = policy
        self._states: dict[int, _StageState] = {}
        #: replicas that a stage keeps while no request comes, by number (not there: one)
        self.idle_counts: Mapping[int, int] = {}

    def step(
        self,
        now_ns: int,
        loads: Sequence[StageLoad],
        limits: Sequence[tuple[int, int]],
        total: int,
        cores: CoresSeen | None = None,
    ) -> list[StageDecision]:
        """As `LineScaling.step`. `cores` are left alone."""
        needs = [self._need(now_ns, load) for load in loads]
        idle = [self._replicas(self._planned_per_s, load) for load in loads]
        self.idle_counts = dict(enumerate(even(idle, total) if self._policy.is_uniform else idle))
        pairs = zip(loads, needs, strict=True)
        counts = [self._held(now_ns, load, need.replicas) for load, need in pairs]
        if self._policy.is_uniform:
            counts = even(counts, total)
        counts = within(counts, limits, total)
        found = []
        for load, need, count in zip(loads, needs, counts, strict=True):
            if count != load.replicas:
                self._states[load.stage].changed_ns = now_ns
            found.append(_decision(load, need, count, total))
        return found

    @property
    def key_stages(self) -> Mapping[int, KeyStage]:
        """None: a rate says nothing of queues."""
        return {}

    @property
    def _planned_per_s(self) -> float:
        """What stages are provided for whatever comes. A forecast knows no plan."""
        return 0.0 if self._policy.ahead_ns is not None else self._policy.planned_per_1000_s / 1000

    def _need(self, now_ns: int, load: StageLoad) -> _Need:
        state = self._states.setdefault(load.stage, _StageState())
        state.rates.append((now_ns, load.arrivals_per_s))
        state.forecast.after(load.arrivals_per_s)
        while state.rates[0][0] <= now_ns - self._policy.envelope_ns:
            state.rates.popleft()
        if self._policy.ahead_ns is None:
            return self._of_envelope(now_ns, state, load)
        return self._of_forecast(state, load, self._policy.ahead_ns)

    def _of_envelope(self, now_ns: int, state: _StageState, load: StageLoad) -> _Need:
        envelope = max(_parts(now_ns, state.rates, self._policy.part_ns))
        usual, now = max(self._planned_per_s, envelope), load.arrivals_per_s
        values = {"envelope_per_1000_s": round(1000 * usual)}
        return _Need(
            self._replicas(max(usual, now), load),
            "above_plan" if now > usual else "planned",
            values,
        )

    def _of_forecast(self, state: _StageState, load: StageLoad, ahead_ns: int) -> _Need:
        forecast = state.forecast.ahead(ahead_ns / self._policy.period_ns)
        backlog = load.waiting * NS_PER_S / ahead_ns
        now = load.arrivals_per_s + backlog
        values = {
            "forecast_per_1000_s": round(1000 * forecast),
            "backlog_per_1000_s": round(1000 * backlog),
        }
        return _Need(
            self._replicas(max(forecast, now), load),
            "forecast" if forecast >= now else "above_forecast",
            values,
        )

    def _replicas(self, rate_per_s: float, load: StageLoad) -> int:
        """So many are busy for that part of the time."""
        permille = 1000 * rate_per_s / load.served_per_s
        return max(math.ceil(permille / self._policy.busy_permille), 1)

    def _held(self, now_ns: int, load: StageLoad, count: int) -> int:
        """Replicas stay for a time after a change."""
        changed_ns = self._states[load.stage].changed_ns
        since_ns = None if changed_ns is None else now_ns - changed_ns
        waits = since_ns is not None and since_ns < self._policy.scale_down_timeout_ns
        return max(count, load.replicas) if waits else count


# -- helpers --------------------------------------------------------------------------------------


def _parts(now_ns: int, rates: Sequence[tuple[int, float]], part_ns: int) -> list[float]:
    """The mean rate of each part of the time, the latest first."""
    by_part = itertools.groupby(reversed(rates), key=lambda its: (now_ns - its[0]) // part_ns)
    groups = [[rate for _, rate in its] for _, its in by_part]
    return [sum(group) / len(group) for group in groups]


def _decision(load: StageLoad, need: _Need, count: int, total: int) -> StageDecision:
    reason = need.reason
    if count < need.replicas:
        reason = "limits"
    elif count < load.replicas:
        reason = "surplus"
    elif count > need.replicas:
        reason = "whole_pipelines" if count > load.replicas else "surplus_waits"
    values = {
        **need.values,
        "arrivals_per_1000_s": round(1000 * load.arrivals_per_s),
        "served_per_1000_s": round(1000 * load.served_per_s),
        "waiting": load.waiting,
        "wanted": need.replicas,
        "replicas_total": total,
    }
    return StageDecision(load.stage, load.replicas, count, reason, None, values)
