"""Training of the learned predictor of burstiness: numpy alone, the same weights for a seed.

Adam on the mean of sqrt(d^2 + e^2), where d is ln of predicted over simulated CV: nearly the mean
relative error, smooth near zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from livescale.control.stages.formulas.attention import FEATURES, features, neighbours
from livescale.control.stages.formulas.variation import arrivals, flows_in
from livescale.lab.bench.lines.variation_lines import SimulatedLine
from livescale.values.scaling_policies import VariationWeights

Numbers = NDArray[np.float64]
Weights = dict[str, Numbers]

_HIDDEN, _WIDE = 12, 16
_BATCH = 512
_RATE, _DECAY = 4e-3, 1e-5
_SMOOTH = 0.02
_SLOPE = 0.2
_DIGITS = 6
_ABSENT = -1e9


@dataclass(frozen=True, slots=True)
class Samples:
    """Stages with others before them, and their neighbours: S samples of N neighbours at most.

    `own` S x F features, `others` S x N x F, `cvs` S x N, `is_there` S x N, `wanted` S: ln of the
    simulated CV over the analytic one.
    """

    own: Numbers
    others: Numbers
    cvs: Numbers
    is_there: NDArray[np.bool_]
    wanted: Numbers

    def some(self, chosen: NDArray[np.int64]) -> Samples:
        return Samples(*(getattr(self, name)[chosen] for name in self.__slots__))


def samples_of(lines: Sequence[SimulatedLine]) -> Samples:
    """All stages but the first of each line."""
    most = max(len(one.stages) for one in lines)
    own, others, cvs, there, wanted = [], [], [], [], []
    for one in lines:
        flows = flows_in(one.stages, arrivals(1.0, one.cvs[0]))
        rows = features(one.stages, flows)
        for number, around in enumerate(neighbours(one.stages)):
            if number == 0:
                continue
            padding = most - len(around)
            own.append(rows[number])
            others.append([rows[j] for j in around] + [(0.0,) * len(FEATURES)] * padding)
            cvs.append([flows[j].cv for j in around] + [0.0] * padding)
            there.append([True] * len(around) + [False] * padding)
            wanted.append(np.log(one.cvs[number] / flows[number].cv))
    return Samples(*(np.array(values) for values in (own, others, cvs, there, wanted)))


def trained(
    lines: Sequence[SimulatedLine], steps: int, seed: int, say: Callable[[str], None]
) -> Weights:
    """Weights for these lines after so many steps of Adam. Tells every tenth."""
    samples = samples_of(lines)
    rng = np.random.default_rng(seed)
    weights = first_weights(rng)
    means = {name: np.zeros_like(value) for name, value in weights.items()}
    squares = {name: np.zeros_like(value) for name, value in weights.items()}
    for step in range(1, steps + 1):
        batch = samples.some(rng.integers(len(samples.wanted), size=_BATCH))
        _, slopes = loss_and_slopes(weights, batch)
        rate = _RATE * 0.5 * (1 + np.cos(np.pi * step / steps))
        for name, slope in slopes.items():
            slope = slope + _DECAY * weights[name]
            means[name] = 0.9 * means[name] + 0.1 * slope
            squares[name] = 0.999 * squares[name] + 0.001 * slope**2
            size = np.sqrt(squares[name] / (1 - 0.999**step)) + 1e-8
            weights[name] = weights[name] - rate * means[name] / (1 - 0.9**step) / size
        if step % max(1, steps // 10) == 0:
            say(f"step {step} of {steps}: loss {loss_and_slopes(weights, samples)[0]:.4f}")
    return weights


def first_weights(rng: np.random.Generator) -> Weights:
    """Small ones, drawn; what they correct is near nothing."""
    shapes = {
        "projection": (_HIDDEN, len(FEATURES)),
        "attention": (2 * _HIDDEN,),
        "theta": (),
        "layer": (_WIDE, _HIDDEN),
        "layer_bias": (_WIDE,),
        "output": (_WIDE,),
        "output_bias": (),
    }
    return {
        name: np.asarray(rng.normal(0.0, 0.3, shape) if shape else 0.0)
        for name, shape in shapes.items()
    }


def loss_and_slopes(weights: Weights, samples: Samples) -> tuple[float, Weights]:
    """The loss over all samples, and its gradient by each weight."""
    w = weights
    own, others = samples.own @ w["projection"].T, samples.others @ w["projection"].T
    of_own, of_others = w["attention"][:_HIDDEN], w["attention"][_HIDDEN:]
    raw = (own @ of_own)[:, None] + others @ of_others
    exponents = np.where(raw > 0, raw, _SLOPE * raw) + w["theta"] * samples.cvs
    exponents = np.where(samples.is_there, exponents, _ABSENT)
    powers = np.exp(exponents - exponents.max(axis=1, keepdims=True))
    heeds = powers / powers.sum(axis=1, keepdims=True)
    mixed = np.einsum("sn,snh->sh", heeds, others)
    hidden = np.tanh(mixed @ w["layer"].T + w["layer_bias"])
    off = hidden @ w["output"] + w["output_bias"] - samples.wanted
    size = np.sqrt(off**2 + _SMOOTH**2)

    d_off = off / size / len(off)
    d_hidden = d_off[:, None] * w["output"] * (1 - hidden**2)
    d_mixed = d_hidden @ w["layer"]
    d_heeds = np.einsum("sh,snh->sn", d_mixed, others)
    d_exponents = heeds * (d_heeds - (heeds * d_heeds).sum(axis=1, keepdims=True))
    d_raw = d_exponents * np.where(raw > 0, 1.0, _SLOPE)
    d_own = d_raw.sum(axis=1)[:, None] * of_own
    d_others = heeds[:, :, None] * d_mixed[:, None, :] + d_raw[:, :, None] * of_others
    slopes = {
        "projection": d_own.T @ samples.own + np.einsum("snh,snf->hf", d_others, samples.others),
        "attention": np.concatenate(
            [own.T @ d_raw.sum(axis=1), np.einsum("sn,snh->h", d_raw, others)]
        ),
        "theta": np.asarray((d_exponents * samples.cvs).sum()),
        "layer": d_hidden.T @ mixed,
        "layer_bias": d_hidden.sum(axis=0),
        "output": hidden.T @ d_off,
        "output_bias": np.asarray(d_off.sum()),
    }
    return float(size.mean()), slopes


def as_weights(weights: Weights) -> VariationWeights:
    """The weights as they are written down, rounded."""

    def plain(value: Numbers) -> object:
        if value.ndim == 0:
            return float(f"{float(value):.{_DIGITS}g}")
        return tuple(plain(part) for part in value)

    return VariationWeights(**{name: plain(value) for name, value in weights.items()})  # type: ignore[arg-type]
