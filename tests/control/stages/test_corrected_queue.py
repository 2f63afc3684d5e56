"""The Corrector before a queue of requests, which arrive and are served at random."""

from __future__ import annotations

import heapq
import random

import pytest

import effort
from livescale.control.stages.corrector import Corrector, CorrectorSettings, StageDecision
from livescale.control.stages.formulas.stage_load import StageLoad
from livescale.control.stages.formulas.targets import wait_allowed_ns

S = 1_000_000_000
SERVICE_S, PERIOD_S, TARGET_S = 0.1, 5, 0.2
PERIODS = 40


@pytest.mark.parametrize("seed", effort.mostly_long(range(12), short=[0, 1]))
def test_after_twice_the_load_requests_soon_take_what_the_target_says(seed: int) -> None:
    """New replicas serve a period after they were ordered. Ten periods after the step the queue
    is gone; from then on the mean of all requests is within the target, and a few replicas more or
    less than the formula says are there."""
    queue = _Queue(seed)
    queue.play(40.0, PERIODS)
    decisions, sojourns = queue.play(80.0, PERIODS)
    late = [sojourn for period in sojourns[10:] for sojourn in period]
    assert sum(late) / len(late) < TARGET_S
    load = StageLoad(0, 1, 80.0, round(SERVICE_S * S))
    allowed_ns = wait_allowed_ns(round(TARGET_S * S), load.service_ns)
    needed = load.replicas_needed(allowed_ns, S, 99)
    assert needed == 9
    assert all(abs(its.to_replicas - needed) <= 2 for its in decisions[10:])
    assert max(its.to_replicas for its in decisions) <= 2 * needed


# -- helpers --------------------------------------------------------------------------------------


class _Queue:
    """M/M/c whose c the Corrector changes. More serve a period later, fewer at once."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        settings = CorrectorSettings(period_ns=PERIOD_S * S, scale_down_timeout_ns=3 * PERIOD_S * S)
        self._corrector = Corrector(settings)
        self._replicas, self._serving, self._period = 1, 1, 0
        self._waiting: list[float] = []
        #: of those in service: when each ends, and when it arrived
        self._busy: list[tuple[float, float]] = []

    def play(self, rate: float, periods: int) -> tuple[list[StageDecision], list[list[float]]]:
        """Decisions, and sojourns (seconds) of the requests that left, by period."""
        decisions, sojourns = [], []
        for _ in range(periods):
            ordered = self._replicas
            arrivals, mean_waiting, left = self._play_period(rate)
            load = StageLoad(
                0, ordered, arrivals / PERIOD_S, round(SERVICE_S * S), int(mean_waiting)
            )
            now_ns = self._period * PERIOD_S * S
            (its,) = self._corrector.step(now_ns, [load], [round(TARGET_S * S)], 100)
            # What was ordered a period ago is there now.
            self._serving = min(ordered, its.to_replicas)
            self._replicas = its.to_replicas
            decisions.append(its)
            sojourns.append(left)
        return decisions, sojourns

    def _play_period(self, rate: float) -> tuple[int, float, list[float]]:
        now, end = float(self._period * PERIOD_S), float((self._period + 1) * PERIOD_S)
        self._period += 1
        coming, arrivals, area, left = now + self._random.expovariate(rate), 0, 0.0, []
        while now < end:
            self._begin(now)
            following = min(coming, self._busy[0][0] if self._busy else end, end)
            area += len(self._waiting) * (following - now)
            now = following
            if now == end:
                break
            if now == coming:
                arrivals += 1
                self._waiting.append(now)
                coming = now + self._random.expovariate(rate)
            else:
                left.append(now - heapq.heappop(self._busy)[1])
        return arrivals, area / PERIOD_S, left

    def _begin(self, now: float) -> None:
        while self._waiting and len(self._busy) < self._serving:
            ends = now + self._random.expovariate(1 / SERVICE_S)
            heapq.heappush(self._busy, (ends, self._waiting.pop(0)))
