"""`bench variation`: the simulated lines, the training, and the figures of the shipped weights."""

from __future__ import annotations

import heapq
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.config.variation import variation_weights
from livescale.control.stages.formulas.attention import learned_cvs
from livescale.control.stages.formulas.variation import StageTraits, arrivals, flows_in, line
from livescale.lab.bench.lines.variation_lines import (
    BETWEEN,
    BEYOND,
    TRAINED,
    SimulatedLine,
    departures_of,
    gamma_times,
    lognormal_times,
    simulated_cvs,
    simulated_joins,
    simulated_lines,
)
from livescale.lab.bench.lines.variation_training import (
    Samples,
    as_weights,
    first_weights,
    loss_and_slopes,
    samples_of,
    trained,
)
from livescale.main import main
from livescale.values.scaling_policies import VariationWeights

QUICK = ["--lines", 12, "--requests", 20_000]


def told(_line: str) -> None: ...


def few_lines(seed: int = 5) -> list[SimulatedLine]:
    lines = simulated_lines(TRAINED, 6, 2000, seed, told)
    return [*lines, *simulated_joins(TRAINED._replace(stages=(5,)), 3, 2000, seed, told)]


@pytest.fixture
def samples() -> Samples:
    return samples_of(few_lines())


# -- simulated lines ------------------------------------------------------------------------------


@given(
    gaps=st.lists(st.floats(0, 3), min_size=1, max_size=30),
    replicas=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_departures_are_those_of_a_heap(gaps: list[float], replicas: int, seed: int) -> None:
    times = np.cumsum(gaps)
    services = np.random.default_rng(seed).gamma(2.0, 1.0, len(gaps))
    free, expected = [0.0] * replicas, []
    for time, service in zip(times, services, strict=True):
        end = max(float(time), free[0]) + float(service)
        heapq.heapreplace(free, end)
        expected.append(end)
    assert departures_of(times, services, replicas) == pytest.approx(sorted(expected))


def test_chance_goes_through_exponential_services_and_ways_that_part() -> None:
    stages = [
        StageTraits(1 / 1.4, 1.0, 2),
        StageTraits(0.5, 1.0, 1, ((0, 0.3),)),
        StageTraits(1.0, 1.0, 1, ((0, 0.7),)),
        StageTraits(1 / 2.4, 1.0, 3, ((1, 1.0), (2, 1.0))),
    ]
    rng = np.random.default_rng(0)
    found = simulated_cvs(rng, stages, gamma_times(rng, 1.0, 100_000))
    assert found == pytest.approx([1.0] * 4, rel=0.03)


@pytest.mark.parametrize("other", [BETWEEN, BEYOND])
def test_training_sees_none_of_what_is_judged(other: Any) -> None:
    for name in ("stages", "cvs", "loads", "service_cvs"):
        assert not set(getattr(TRAINED, name)) & set(getattr(other, name)), name


@given(cv=st.floats(0.1, 1), seed=st.integers(0, 99))
def test_drawn_times_have_their_mean_and_cv(cv: float, seed: int) -> None:
    for draw in (gamma_times, lognormal_times):
        times = draw(np.random.default_rng(seed), cv, 20_000)
        assert times.mean() == pytest.approx(1, rel=0.05)
        assert times.std() == pytest.approx(cv, rel=0.15)


def test_lines_are_the_same_for_a_seed() -> None:
    assert few_lines() == few_lines()
    assert few_lines() != few_lines(6)


# -- training -------------------------------------------------------------------------------------


def test_slopes_are_differences(samples: Samples) -> None:
    weights = first_weights(np.random.default_rng(1))
    _, slopes = loss_and_slopes(weights, samples)
    for name, value in weights.items():
        for place in [(0,) * value.ndim, tuple(size - 1 for size in value.shape)]:
            losses = []
            for step in (1e-6, -1e-6):
                moved = value.copy()
                moved[place] += step
                losses.append(loss_and_slopes({**weights, name: moved}, samples)[0])
            slope = (losses[0] - losses[1]) / 2e-6
            assert slope == pytest.approx(float(slopes[name][place]), abs=1e-7, rel=1e-4), name


def test_as_printed_theta_learns_nothing(samples: Samples) -> None:
    """Eq. 4's CV_i is the same for all neighbours: no gradient. With CV_j there is one."""
    weights = first_weights(np.random.default_rng(1))
    own = np.repeat(samples.cvs[:, :1], samples.cvs.shape[1], axis=1)
    printed = Samples(samples.own, samples.others, own, samples.is_there, samples.wanted)
    assert abs(loss_and_slopes(weights, printed)[1]["theta"]) < 1e-14
    assert abs(loss_and_slopes(weights, samples)[1]["theta"]) > 1e-6


def test_training_and_inference_are_one_function() -> None:
    lines = few_lines()
    rough = first_weights(np.random.default_rng(2))
    weights = as_weights(rough)
    exact = {name: np.asarray(getattr(weights, name)) for name in rough}
    errors = [
        np.log(found / measured)
        for one in lines
        for found, measured in list(
            zip(learned_cvs(one.stages, arrivals(1.0, one.cvs[0]), weights), one.cvs, strict=True)
        )[1:]
    ]
    loss = float(np.sqrt(np.array(errors) ** 2 + 0.02**2).mean())
    assert loss == pytest.approx(loss_and_slopes(exact, samples_of(lines))[0])


def test_training_learns_and_repeats_itself() -> None:
    lines = few_lines()
    found = [as_weights(trained(lines, 60, 3, told)) for _ in range(2)]
    assert found[0] == found[1]
    losses = [
        loss_and_slopes({k: np.asarray(getattr(w, k)) for k in rough}, samples_of(lines))[0]
        for rough in [first_weights(np.random.default_rng(3))]
        for w in (as_weights(rough), found[0])
    ]
    assert losses[1] < losses[0]


# -- figures --------------------------------------------------------------------------------------


def test_shipped_weights_keep_their_promise() -> None:
    """Below 15 % on lines that training has not seen, and no worse than either formula."""
    lines = simulated_lines(BETWEEN, 80, 30_000, 77, told)
    weights, errors = variation_weights(), {"qna": [], "gaps": [], "learned": []}
    for one in lines:
        source = arrivals(1.0, one.cvs[0])
        found = {
            "qna": [flow.cv for flow in flows_in(one.stages, source, is_qna=True)],
            "gaps": [flow.cv for flow in flows_in(one.stages, source)],
            "learned": learned_cvs(one.stages, source, weights),
        }
        for name, cvs in found.items():
            measured = np.array(one.cvs[1:])
            errors[name] += list(abs(np.array(cvs[1:]) - measured) / measured)
    means = {name: float(np.mean(values)) for name, values in errors.items()}
    assert means["learned"] < means["gaps"] < means["qna"]
    assert means["learned"] < 0.15


def test_constant_equal_stages_wait_once() -> None:
    """Friedman: gaps behind the first of equal constant stages go through the others."""
    stages = line([StageTraits(1 / 2.4, 0.0, 3)] * 4)
    rng = np.random.default_rng(0)
    found = simulated_cvs(rng, stages, gamma_times(rng, 4.0, 20_000))
    assert found[2:] == pytest.approx([found[1]] * 2, rel=0.01)


def test_the_command_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    assert main(["bench", "variation", *map(str, QUICK), "--json", str(file)]) == 0
    assert "relative errors" in capsys.readouterr().out
    figures = json.loads(file.read_text())
    kinds = {(row["kind"], row["predictor"]) for row in figures["rows"] if row["group"] == "all"}
    assert len(kinds) == 12
    assert all(0 <= row["median"] <= row["p90"] for row in figures["rows"])


def test_the_command_trains(tmp_path: Path) -> None:
    file = tmp_path / "weights.json"
    words = [*QUICK, "--training-lines", 6, "--training-requests", 2000, "--training-steps", 20]
    assert main(["bench", "variation", *map(str, words), "--train", str(file)]) == 0
    made = msgspec.json.decode(file.read_bytes(), type=VariationWeights)
    assert made != variation_weights()


def test_weights_have_a_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "variation", "--train", str(tmp_path / "none" / "w.json")]) != 0
    assert "--train" in capsys.readouterr().err
