"""Products of weights, as they lie in the arena, with an activation of few lanes.

Weights (out, in) are multiplied some rows at a time, the piece that threads share. Three ways, by
what the CPU and torch's build have (`tile_products.py`): bf16 times bf16 by torch's product of
small matrices; fp32 by the same, of weights that are fp32 or widened to fp32 a few rows at a time;
loops compiled here, for single lanes in fp32 and where torch's are missing.

An *operand* is an activation that is to be multiplied: fp32 (features, lanes), or, where bf16 is
multiplied itself (`is_paired`), int16 (features / 2, lanes, 2).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from livescale.engine.kernels.compiled import (
    as_float,
    call_tile_product,
    compiled,
    matrix,
    ticks,
    vector,
)
from livescale.engine.kernels.job import GROUP, TILE, WIDE_ITEMS, width_of

FP32 = np.float32(0)
BF16 = np.int16(0)
PAIRS = np.int32(0)
INT64 = np.int64(0)
"""Passed for their types: of weights and KV, of paired operands, of counts."""


@compiled()
def tile_rows(job: Any, out: Any, features: Any) -> Any:
    """Rows of weights (out, features) that one thread takes at once."""
    rows = TILE if out >= 32 * TILE else TILE // 2
    if job[0].item_bytes == 2 and job[0].is_paired == 0:
        rows = max(4, min(rows, WIDE_ITEMS // features))
    return rows


@compiled()
def tiles_of(job: Any, out: Any, features: Any) -> Any:
    """Pieces of weights (out, features)."""
    rows = tile_rows(job, out, features)
    return (out + rows - 1) // rows


@compiled()
def multiply(
    job: Any,
    like: Any,
    me: Any,
    weights: Any,
    features: Any,
    first: Any,
    count: Any,
    operand: Any,
    lanes: Any,
    into: Any,
    into_rows: Any,
    into_row: Any,
    is_added: Any,
) -> None:
    """Rows `[first, first + count)` of `weights` (out, features) times `operand` (features, lanes),
    to `into_row` and the following ones of `into` (into_rows, lanes), fp32; or added to them."""
    begun = ticks() if job[0].is_timed else 0
    rows = weights + first * features * job[0].item_bytes
    product = job[0].bf16_product if job[0].is_paired else job[0].fp32_product
    if lanes == 1 and not job[0].is_paired:
        product = 0
    if product != 0 and job[0].item_bytes != job[0].operand_bytes:
        wide = job[0].wide + me * job[0].wide_bytes
        _widen(like, rows, count * features, wide)
        rows = wide
    for group in range((lanes + GROUP - 1) // GROUP):
        width = width_of(lanes, group)
        before = group * GROUP
        entering = operand + before * features * job[0].operand_bytes
        leaving = into + (before * into_rows + into_row * width) * 4
        if product != 0:
            call_tile_product(
                product,
                count,
                width,
                features,
                features,
                width,
                width,
                is_added,
                rows,
                entering,
                leaving,
                job[0].is_paired,
            )
        elif width == 1:
            _dots(like, rows, features, count, entering, leaving, is_added)
        else:
            _sums(like, rows, features, count, width, entering, leaving, is_added)
    if me == 0 and job[0].is_timed:
        job[0].product_ticks += ticks() - begun


@compiled()
def add_bias(
    like: Any,
    bias: Any,
    first: Any,
    count: Any,
    lanes: Any,
    into: Any,
    into_rows: Any,
    into_row: Any,
) -> None:
    """Items `[first, first + count)` of `bias` are added to rows of `into`, as in `multiply`."""
    offsets = vector(bias, like, first + count)
    for group in range((lanes + GROUP - 1) // GROUP):
        width = width_of(lanes, group)
        rows = matrix(into + (group * GROUP * into_rows + into_row * width) * 4, FP32, count, width)
        for row in range(count):
            for lane in range(width):
                rows[row, lane] += as_float(offsets[first + row])


# -- helpers, in the order used -----------------------------------------------------------------


@compiled()
def _widen(like: Any, weights: Any, count: Any, wide: Any) -> None:
    narrow, out = vector(weights, like, count), vector(wide, FP32, count)
    for i in range(count):
        out[i] = as_float(narrow[i])


@compiled()
def _dots(
    like: Any, weights: Any, features: Any, count: Any, entering: Any, leaving: Any, is_added: Any
) -> None:
    """Of a single lane: four rows at a time read the lane once."""
    w = matrix(weights, like, count, features)
    x, out = vector(entering, FP32, features), vector(leaving, FP32, count)
    row = 0
    while row + 4 <= count:
        a = np.float32(0)
        b = np.float32(0)
        c = np.float32(0)
        d = np.float32(0)
        for k in range(features):
            factor = x[k]
            a += as_float(w[row, k]) * factor
            b += as_float(w[row + 1, k]) * factor
            c += as_float(w[row + 2, k]) * factor
            d += as_float(w[row + 3, k]) * factor
        if is_added:
            a += out[row]
            b += out[row + 1]
            c += out[row + 2]
            d += out[row + 3]
        out[row], out[row + 1], out[row + 2], out[row + 3] = a, b, c, d
        row += 4
    while row < count:
        total = out[row] if is_added else np.float32(0)
        for k in range(features):
            total += as_float(w[row, k]) * x[k]
        out[row] = total
        row += 1


@compiled()
def _sums(
    like: Any,
    weights: Any,
    features: Any,
    count: Any,
    width: Any,
    entering: Any,
    leaving: Any,
    is_added: Any,
) -> None:
    """Of several lanes, without torch: a row of weights scales the lanes of each feature."""
    w = matrix(weights, like, count, features)
    x, out = matrix(entering, FP32, features, width), matrix(leaving, FP32, count, width)
    for row in range(count):
        if not is_added:
            for lane in range(width):
                out[row, lane] = np.float32(0)
        for k in range(features):
            factor = as_float(w[row, k])
            for lane in range(width):
                out[row, lane] += factor * x[k, lane]
