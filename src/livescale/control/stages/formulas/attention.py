"""A learned predictor of burstiness: one layer of graph attention (QUART §5.2, Eqs 4 to 6).

For stage i the neighbours j are the stages before it and stage i itself. Eq. 4 as printed adds
theta CV_i to all exponents of one softmax, where it cancels: here it is theta CV_j. What f of
Eq. 6 says is the logarithm of CV_i over the analytic prediction, so weights of zero are the latter.
Weights come as a value; `livescale bench variation --train` makes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from livescale.control.stages.formulas.variation import (
    Flow,
    StageTraits,
    flows_in,
    load,
    queued_variance,
)
from livescale.values.scaling_policies import VariationWeights

#: what x of a stage is made of, in this order
FEATURES = (
    "1",
    "ln CV of its arrivals, as the analytic formula predicts it",
    "its load",
    "-ln(1 - load), the load at most 0.99",
    "ln of its replicas",
    "CV of its service times",
    "standard deviation of service times in mean gaps, its tanh",
    "squared CV behind it if never idle",
    "ln CV of the graph's arrivals",
    "part of their variance that no stage before it smoothed",
    "stages before it on the longest way, over 8",
)
_CV_LEAST = 0.02
_LOAD_MOST = 0.99
_SLOPE = 0.2


def learned_cvs(
    stages: Sequence[StageTraits], source: Flow, weights: VariationWeights
) -> list[float]:
    """CV of the gaps between arrivals at each stage; stages as for `flows_in`.

    A stage that the graph's arrivals come to has their CV, unchanged. Raises ValueError as
    `flows_in` does.
    """
    flows = flows_in(stages, source)
    cvs = [flow.cv for flow in flows]
    projected = [_times(weights.projection, row) for row in features(stages, flows)]
    found = []
    for number, around in enumerate(neighbours(stages)):
        heeds = attention_of(weights, projected, number, around, cvs)
        correction = _correction(weights, _mixed(projected, around, heeds))
        found.append(cvs[number] * (math.exp(correction) if stages[number].after else 1.0))
    return found


def features(stages: Sequence[StageTraits], flows: Sequence[Flow]) -> list[tuple[float, ...]]:
    """x of each stage; `flows` are what comes to each of them."""
    depths: list[int] = []
    rows: list[tuple[float, ...]] = []
    for stage, flow in zip(stages, flows, strict=True):
        depths.append(max((depths[before] + 1 for before, _ in stage.after), default=0))
        busy = load(flow, stage)
        rows.append(
            (
                1.0,
                math.log(max(flow.cv, _CV_LEAST)),
                busy,
                -math.log(1 - min(busy, _LOAD_MOST)),
                math.log(stage.replicas),
                stage.service_cv,
                math.tanh(stage.service_cv * stage.replicas * busy),
                queued_variance(stage),
                math.log(max(flow.burst_cv, _CV_LEAST)),
                flow.kept,
                depths[-1] / 8,
            )
        )
    return rows


def neighbours(stages: Sequence[StageTraits]) -> list[tuple[int, ...]]:
    """N(i) of each stage: all stages before it on any way, and itself, by number."""
    found: list[tuple[int, ...]] = []
    for number, stage in enumerate(stages):
        before = {index for fed_by, _ in stage.after for index in found[fed_by]}
        found.append((*sorted(before), number))
    return found


def attention_of(
    weights: VariationWeights,
    projected: Sequence[Sequence[float]],
    number: int,
    around: Sequence[int],
    cvs: Sequence[float],
) -> list[float]:
    """Eq. 4, with the neighbour's CV: how much stage `number` heeds each stage of `around`.

    `projected` are W x of all stages, `cvs` is what theta is multiplied with, stage by stage.
    """
    width = len(weights.projection)
    own = _dot(weights.attention[:width], projected[number])
    exponents = []
    for other in around:
        raw = own + _dot(weights.attention[width:], projected[other])
        exponents.append((raw if raw > 0 else _SLOPE * raw) + weights.theta * cvs[other])
    most = max(exponents)
    powers = [math.exp(exponent - most) for exponent in exponents]
    total = math.fsum(powers)
    return [power / total for power in powers]


# -- helpers --------------------------------------------------------------------------------------


def _mixed(
    projected: Sequence[Sequence[float]], around: Sequence[int], heeds: Sequence[float]
) -> list[float]:
    """Eq. 5."""
    columns = zip(*(projected[other] for other in around), strict=True)
    return [_dot(heeds, column) for column in columns]


def _correction(weights: VariationWeights, mixed: Sequence[float]) -> float:
    """Eq. 6: ln of the CV over the analytic one."""
    rows = zip(_times(weights.layer, mixed), weights.layer_bias, strict=True)
    hidden = [math.tanh(value + bias) for value, bias in rows]
    return _dot(weights.output, hidden) + weights.output_bias


def _times(matrix: Sequence[Sequence[float]], column: Sequence[float]) -> list[float]:
    return [_dot(row, column) for row in matrix]


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))
