"""RMS norms of rows in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from livescale.engine.kernels.compiled import address_of, as_bf16, as_float, compiled, vector
from livescale.engine.kernels.products import BF16, FP32


def row_norms(
    rows: Any, weight: Any, out: Any, count: Any, features: Any, item_bytes: Any, epsilon: Any
) -> None:
    """`out` is x / rms(x) * weight of `rows` (count, features), fp32 or bf16 (Zhang and Sennrich,
    "Root Mean Square Layer Normalization", 2019, Eq. 4). `weight` (features) is fp32."""
    w = vector(weight, FP32, features)
    for row in range(count):
        place = row * features * item_bytes
        if item_bytes == 2:
            _norm_narrow(rows + place, w, out + place, features, epsilon)
        else:
            _norm_plain(rows + place, w, out + place, features, epsilon)


def row_norms_address() -> int:
    """Of `row_norms` as a C function; compiled on the first call."""
    return address_of(row_norms, types.void(*[types.int64] * 6, types.float32))


# -- helpers, in the order used -----------------------------------------------------------------


@compiled()
def _factor(x: Any, features: Any, epsilon: Any) -> Any:
    total = np.float32(0)
    for k in range(features):
        value = as_float(x[k])
        total += value * value
    return np.float32(1) / np.sqrt(total / np.float32(features) + epsilon)


@compiled()
def _norm_narrow(row: Any, weight: Any, place: Any, features: Any, epsilon: Any) -> None:
    x, out = vector(row, BF16, features), vector(place, BF16, features)
    factor = _factor(x, features, epsilon)
    for k in range(features):
        out[k] = as_bf16(as_float(x[k]) * factor * weight[k])


@compiled()
def _norm_plain(row: Any, weight: Any, place: Any, features: Any, epsilon: Any) -> None:
    x, out = vector(row, FP32, features), vector(place, FP32, features)
    factor = _factor(x, features, epsilon)
    for k in range(features):
        out[k] = x[k] * factor * weight[k]
