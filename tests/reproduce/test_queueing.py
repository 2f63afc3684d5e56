"""Small queueing worlds against formulas and simpler programs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.control.stages.formulas.queueing import mmc_wait
from livescale.lab.reproduce.quart.quart import (
    cv_of_gaps,
    gamma_gaps,
    lru_stays,
    tandem_departures,
    waits_in_mmc,
)

seeds = st.integers(0, 1 << 32)


def test_a_simulated_queue_waits_as_the_formula_says() -> None:
    rng = np.random.default_rng(5)
    simulated = waits_in_mmc(rng, 2.1, 1.0, 3, 300_000)
    assert simulated == pytest.approx(mmc_wait(2.1, 1.0, 3), rel=0.05)


@given(seed=seeds, stages=st.integers(1, 4), count=st.integers(2, 60))
def test_a_tandem_line_keeps_order_and_takes_its_time(seed: int, stages: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(gamma_gaps(rng, 1.0, 1.0, count))
    leaving = tandem_departures(rng, arrivals, stages, 0.8, 0.5)
    assert len(leaving) == stages
    for before, after in itertools.pairwise([arrivals, *leaving]):
        assert (after >= before).all()
        assert (np.diff(after) >= 0).all()


def test_without_a_queue_nothing_changes() -> None:
    rng = np.random.default_rng(0)
    arrivals = np.arange(1.0, 100.0)
    (leaving,) = tandem_departures(rng, arrivals, 1, 1e-6, 0.3)
    assert cv_of_gaps(leaving) == pytest.approx(0, abs=1e-5)


@given(cv=st.floats(0.1, 4), seed=seeds)
def test_gamma_gaps_have_their_mean_and_variation(cv: float, seed: int) -> None:
    gaps = gamma_gaps(np.random.default_rng(seed), cv, 3.0, 20_000)
    assert gaps.mean() == pytest.approx(3.0, rel=0.05 + 0.05 * cv)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.15 + 0.05 * cv)


@given(seed=seeds, models=st.integers(1, 8), slots=st.integers(1, 8), count=st.integers(1, 200))
def test_stays_are_those_of_a_list_that_is_searched(
    seed: int, models: int, slots: int, count: int
) -> None:
    stays = lru_stays(np.random.default_rng(seed), models, slots, 0.5, count)
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / (models * 0.5), count))
    recent: list[int] = []
    since: dict[int, float] = {}
    expected = []
    for time, model in zip(times.tolist(), rng.integers(models, size=count).tolist(), strict=True):
        if model in recent:
            recent.remove(model)
        else:
            since[model] = time
        recent.append(model)
        if len(recent) > slots:
            expected.append(time - since.pop(recent.pop(0)))
    assert stays.tolist() == expected
