"""Graph attention over stages: what Eq. 4 depends on, and what untrained weights give."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.config.variation import variation_weights
from livescale.control.stages.formulas.attention import (
    FEATURES,
    attention_of,
    features,
    learned_cvs,
    neighbours,
)
from livescale.control.stages.formulas.variation import StageTraits, arrivals, flows_in, line
from livescale.values.scaling_policies import VariationWeights

WEIGHTS = variation_weights()
STAGES = line([StageTraits(1 / (0.6 * m), 0.2, m) for m in (3, 1, 4, 2)])
SOURCE = arrivals(1.0, 4.0)
DIAMOND = [
    StageTraits(2.0, 0.1, 1),
    StageTraits(2.0, 0.1, 1, ((0, 0.5),)),
    StageTraits(2.0, 0.1, 2, ((0, 0.5),)),
    StageTraits(2.0, 0.1, 1, ((1, 1.0), (2, 1.0))),
]
weights_of_theta = st.floats(-2, 2)


def heeds(theta: float, cvs: Sequence[float], number: int = 3) -> list[float]:
    """Attention of a stage to those before it and itself, with theta times these CVs."""
    rows = features(STAGES, flows_in(STAGES, SOURCE))
    projected = [
        [math.fsum(a * b for a, b in zip(line, row, strict=True)) for line in WEIGHTS.projection]
        for row in rows
    ]
    weights = msgspec.structs.replace(WEIGHTS, theta=theta)
    return attention_of(weights, projected, number, neighbours(STAGES)[number], cvs)


@given(theta=weights_of_theta, own_cv=st.floats(0, 8))
def test_as_printed_theta_cancels(theta: float, own_cv: float) -> None:
    """Eq. 4 with CV_i in the exponent: neither theta nor CV_i makes a difference."""
    assert heeds(theta, [own_cv] * 4) == pytest.approx(heeds(0.0, [0.0] * 4), rel=1e-9)


def test_as_printed_theta_has_no_gradient() -> None:
    step, cvs = 1e-3, [2.5] * 4
    above, below = heeds(0.5 + step, cvs), heeds(0.5 - step, cvs)
    assert [(a - b) / (2 * step) for a, b in zip(above, below, strict=True)] == pytest.approx(
        [0.0] * 4, abs=1e-10
    )


def test_with_the_neighbours_cv_theta_counts() -> None:
    """A stage with a larger CV is heeded more the larger theta is."""
    cvs = [4.0, 1.0, 1.0, 1.0]
    first = [heeds(theta, cvs)[0] for theta in (-0.5, 0.0, 0.5)]
    assert first == sorted(first)
    assert first[2] - first[0] > 1e-6


@given(theta=weights_of_theta, cvs=st.lists(st.floats(0, 8), min_size=4, max_size=4))
def test_attention_is_shared_out(theta: float, cvs: list[float]) -> None:
    found = heeds(theta, cvs)
    assert min(found) >= 0
    assert math.fsum(found) == pytest.approx(1)


def test_weights_of_zero_are_the_formula() -> None:
    none = VariationWeights(
        projection=((0.0,) * len(FEATURES),),
        attention=(0.0, 0.0),
        theta=0.0,
        layer=((0.0,),),
        layer_bias=(0.0,),
        output=(0.0,),
        output_bias=0.0,
    )
    expected = [flow.cv for flow in flows_in(STAGES, SOURCE)]
    assert learned_cvs(STAGES, SOURCE, none) == expected


def test_the_first_stage_sees_what_comes() -> None:
    """QUART's Figure 2 has CV 0.1 enter and 0.03 at the first stage; here they are the same."""
    assert learned_cvs(STAGES, SOURCE, WEIGHTS)[0] == SOURCE.cv


def test_what_stands_behind_makes_no_difference() -> None:
    whole = learned_cvs(STAGES, SOURCE, WEIGHTS)
    assert [learned_cvs(STAGES[:n], SOURCE, WEIGHTS)[-1] for n in range(1, 5)] == whole


def test_neighbours_are_all_stages_on_the_way() -> None:
    assert neighbours(DIAMOND) == [(0,), (0, 1), (0, 2), (0, 1, 2, 3)]
    assert neighbours(STAGES)[3] == (0, 1, 2, 3)


@given(
    cv=st.floats(0, 20),
    busy=st.floats(0.01, 3),
    service_cv=st.floats(0, 3),
    replicas=st.integers(1, 64),
    count=st.integers(1, 12),
)
def test_predictions_are_positive_numbers(
    cv: float, busy: float, service_cv: float, replicas: int, count: int
) -> None:
    stages = line([StageTraits(1 / (busy * replicas), service_cv, replicas)] * count)
    for found in learned_cvs(stages, arrivals(1.0, cv), WEIGHTS):
        assert math.isfinite(found)
        assert found >= 0
