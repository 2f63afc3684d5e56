"""What happens between products: norms and the activation of the MLP.

Both write operands (`products.py`). Each piece is a chunk of lanes or a tile of features.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from livescale.engine.kernels.compiled import (
    as_bf16,
    as_float,
    as_pair,
    compiled,
    silu,
    vector,
)
from livescale.engine.kernels.job import CHUNK, FEW, GROUP, width_of
from livescale.engine.kernels.products import BF16, FP32, PAIRS
from livescale.engine.kernels.team import meet, take


@compiled()
def chunks_of(lanes: Any) -> Any:
    """Pieces of a norm."""
    return (lanes + CHUNK - 1) // CHUNK


@compiled()
def norm(job: Any, like: Any, me: Any, weight: Any, rows: Any, lanes: Any, phase: Any) -> Any:
    """All lanes are normalized: `own_operand` is full then. Returns the next phase's number."""
    operand = own_operand(job, me, lanes)
    if lanes <= CHUNK:
        normalize(job, like, me, rows, job[0].hidden, weight, operand, lanes, 0)
        return phase
    while True:
        chunk = take(job, phase)
        if chunk >= chunks_of(lanes):
            break
        normalize(job, like, me, rows, job[0].hidden, weight, operand, lanes, chunk)
    return meet(job, phase)


@compiled()
def own_operand(job: Any, me: Any, lanes: Any) -> Any:
    """What `normalize` writes. Of one chunk each thread has a copy of its own: to compute that is
    quicker than to meet."""
    is_shared = lanes > CHUNK
    return job[0].operand + (0 if is_shared else me * CHUNK * job[0].hidden * 4)


@compiled()
def normalize(
    job: Any,
    like: Any,
    me: Any,
    rows: Any,
    features: Any,
    weight: Any,
    operand: Any,
    lanes: Any,
    chunk: Any,
) -> None:
    """The operand's lanes of the chunk are x / rms(x) * weight, x the lanes of `rows` (features,
    lanes), fp32 (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, Eq. 4)."""
    group = chunk * CHUNK // GROUP
    width = width_of(lanes, group)
    before = group * GROUP
    first = chunk * CHUNK - before
    x = rows + (before * features + first) * 4
    base = operand + (before * features * job[0].operand_bytes) + first * 4
    scratch = job[0].tiles + me * job[0].tiles_bytes
    if width == 1:
        _normalize_one(job, like, x, features, weight, base)
    elif width < CHUNK:
        _normalize_lanes(job, like, x, features, width, weight, base, scratch, FEW)
    else:
        _normalize_lanes(job, like, x, features, width, weight, base, scratch, CHUNK)


@compiled(inline="always")
def _normalize_lanes(
    job: Any,
    like: Any,
    rows: Any,
    features: Any,
    width: Any,
    weight: Any,
    base: Any,
    scratch: Any,
    count: Any,
) -> None:
    """`count` lanes from `rows` on, a constant: loops over them are a vector or two."""
    w = vector(weight, like, features)
    factors, others = vector(scratch, FP32, count), vector(scratch + 4 * CHUNK, FP32, count)
    for lane in range(count):
        factors[lane] = np.float32(0)
        others[lane] = np.float32(0)
    for k in range(0, features, 2):
        even = vector(rows + k * width * 4, FP32, count)
        odd = vector(rows + (k + 1) * width * 4, FP32, count)
        for lane in range(count):
            factors[lane] += even[lane] * even[lane]
        for lane in range(count):
            others[lane] += odd[lane] * odd[lane]
    for lane in range(count):
        mean = (factors[lane] + others[lane]) / np.float32(features)
        factors[lane] = np.float32(1) / np.sqrt(mean + job[0].epsilon)
    for k in range(0, features, 2):
        even = vector(rows + k * width * 4, FP32, count)
        odd = vector(rows + (k + 1) * width * 4, FP32, count)
        scale, other = as_float(w[k]), as_float(w[k + 1])
        if job[0].is_paired:
            pairs = vector(base + k // 2 * width * 4, PAIRS, count)
            for lane in range(count):
                factor = factors[lane]
                pairs[lane] = as_pair(even[lane] * factor * scale, odd[lane] * factor * other)
        else:
            out = vector(base + k * width * 4, FP32, count)
            more = vector(base + (k + 1) * width * 4, FP32, count)
            for lane in range(count):
                out[lane] = even[lane] * factors[lane] * scale
            for lane in range(count):
                more[lane] = odd[lane] * factors[lane] * other


@compiled()
def _normalize_one(job: Any, like: Any, rows: Any, features: Any, weight: Any, base: Any) -> None:
    """A single lane: features are what lies side by side."""
    lane, w = vector(rows, FP32, features), vector(weight, like, features)
    total = np.float32(0)
    for k in range(features):
        total += lane[k] * lane[k]
    factor = np.float32(1) / np.sqrt(total / np.float32(features) + job[0].epsilon)
    if job[0].is_paired:
        narrow = vector(base, BF16, features)
        for k in range(features):
            narrow[k] = as_bf16(lane[k] * factor * as_float(w[k]))
    else:
        plain = vector(base, FP32, features)
        for k in range(features):
            plain[k] = lane[k] * factor * as_float(w[k])


@compiled()
def activate(
    job: Any, gate: Any, up: Any, tile_rows: Any, first: Any, count: Any, lanes: Any, operand: Any
) -> None:
    """Features `[first, first + count)` of the operand (intermediate, lanes) are silu(gate) * up,
    both (tile_rows, lanes), fp32. `gate` is lost."""
    features = job[0].intermediate
    for group in range((lanes + GROUP - 1) // GROUP):
        width = width_of(lanes, group)
        before = group * GROUP
        g = gate + before * tile_rows * 4
        u = vector(up + before * tile_rows * 4, FP32, count * width)
        base = operand + (before * features + first * width) * job[0].operand_bytes
        x = vector(g, FP32, count * width)
        for i in range(count * width):
            x[i] = silu(x[i]) * u[i]
        if job[0].is_paired:
            pair_rows(g, count, width, base)
        else:
            vector(base, FP32, count * width)[:] = x


@compiled()
def pair_rows(rows: Any, count: Any, width: Any, operand: Any) -> None:
    """fp32 (count, width) becomes a paired operand; the count is even."""
    if width == 1:
        plain, narrow = vector(rows, FP32, count), vector(operand, BF16, count)
        for k in range(count):
            narrow[k] = as_bf16(plain[k])
        return
    for k in range(count // 2):
        even = vector(rows + 2 * k * width * 4, FP32, width)
        odd = vector(rows + (2 * k + 1) * width * 4, FP32, width)
        pairs = vector(operand + k * width * 4, PAIRS, width)
        for lane in range(width):
            pairs[lane] = as_pair(even[lane], odd[lane])
