"""A linear layer in one call: rows become lanes, tiles of weights are multiplied and given as rows.

The threads are those of torch's own team. Each takes chunks of rows, then tiles of weights, until
none is left: the result does not depend on how many there are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, from_dtype, types  # type: ignore[attr-defined]

from livescale.engine.kernels.compiled import (
    SQUARE,
    address_of,
    as_bf16,
    as_float,
    call_with_address,
    compiled,
    fetch_add,
    load,
    matrix,
    turn_square,
    vector,
)
from livescale.engine.kernels.job import CHUNK, GROUP, TILE, width_of
from livescale.engine.kernels.products import BF16, FP32, PAIRS, multiply, tile_rows
from livescale.engine.kernels.team import SPINS

CALL_FIELDS = ("weights", "bias", "features", "width", "x", "added", "out", "rows", "lanes")
"""What differs between calls: addresses of weights (width, features), bias (width), `x` (rows,
features), `added` and `out` (rows, width), all of one type; `bias` and `added` 0 are none."""

COUNTER_BYTES, COUNTERS = 64, 4
"""A cache line each: threads that came, chunks taken, chunks laid out, tiles taken."""

TILE_BYTES = TILE * GROUP * 4
LINE_BYTES = SQUARE * TILE * 4
"""Of each thread's `tiles`: products of a tile with a group, and rows of it before they are
rounded."""

_TYPES = "is_paired item_bytes operand_bytes"
_FUNCTIONS = "fp32_product bf16_product release yield_core"
_MEMORY = "operand wide wide_bytes tiles tiles_bytes counters"
_TIMES = "is_timed product_ticks"
_OTHERS = " ".join((_TYPES, _FUNCTIONS, _MEMORY, _TIMES)).split()

LINEAR = np.dtype([(name, np.int64) for name in (*CALL_FIELDS, *_OTHERS)])
"""What one call knows; see `JOB`, whose names these are. `operand` is where the lanes are laid
out, or, where a row is an operand already, the row."""


def run_linear(pointer: Any) -> None:
    """One thread's part of the call."""
    job = carray(pointer, (1,))
    me = fetch_add(job[0].counters, 1)
    if job[0].item_bytes == 2:
        _run(job, BF16, me)
    else:
        _run(job, FP32, me)


def linear_address() -> int:
    """Of `run_linear` as a C function, `void run_linear(LINEAR *)`; compiled on the first call."""
    record: Any = types.CPointer(from_dtype(LINEAR))  # type: ignore[no-untyped-call]
    return address_of(run_linear, types.void(record))


# -- helpers, in the order used -----------------------------------------------------------------


@compiled()
def _run(job: Any, like: Any, me: Any) -> None:
    if job[0].operand != job[0].x:
        _lay_out(job, like)
    features, width, lanes = job[0].features, job[0].width, job[0].lanes
    tile = job[0].tiles + me * job[0].tiles_bytes
    step = _step(job)
    tiles, groups = (width + step - 1) // step, (lanes + GROUP - 1) // GROUP
    while True:
        # A group of lanes meets all weights before the next one: it stays in the cache.
        piece = fetch_add(job[0].counters + 3 * COUNTER_BYTES, 1)
        if piece >= tiles * groups:
            break
        group, first = piece // tiles, piece % tiles * step
        count, before = min(step, width - first), group * GROUP
        operand = job[0].operand + before * features * job[0].operand_bytes
        multiply(
            job, like, me, job[0].weights, features, first, count, operand,
            width_of(lanes, group), tile, count, 0, 0,
        )  # fmt: skip
        _give(job, like, tile, group, first, count)
    if job[0].release:
        call_with_address(job[0].release, 1)


@compiled()
def _lay_out(job: Any, like: Any) -> None:
    """The rows are the operand's lanes when all threads have come here. None waits for a chunk that
    no thread has begun."""
    chunks = (job[0].lanes + CHUNK - 1) // CHUNK
    laid = job[0].counters + 2 * COUNTER_BYTES
    while True:
        chunk = fetch_add(job[0].counters + COUNTER_BYTES, 1)
        if chunk >= chunks:
            break
        if job[0].lanes == 1:
            _widen(like, job[0].x, job[0].features, job[0].operand)
        elif job[0].is_paired:
            # Pairs of features stay pairs.
            _turn(job, PAIRS, job[0].features // 2, chunk)
        else:
            _turn(job, like, job[0].features, chunk)
        fetch_add(laid, 1)
    spins = 0
    while load(laid) < chunks:
        spins += 1
        if spins > SPINS:
            call_with_address(job[0].yield_core, 0)


@compiled()
def _widen(like: Any, row: Any, features: Any, operand: Any) -> None:
    narrow, wide = vector(row, like, features), vector(operand, FP32, features)
    for k in range(features):
        wide[k] = as_float(narrow[k])


@compiled()
def _turn(job: Any, like: Any, items: Any, chunk: Any) -> None:
    """Rows of `items` become lanes of the chunk; lanes behind the last row repeat it."""
    before = chunk * CHUNK // GROUP * GROUP
    width = width_of(job[0].lanes, before // GROUP)
    first = chunk * CHUNK - before
    place = job[0].operand + before * items * 4
    size = job[0].features * job[0].item_bytes
    item_bytes = size // items
    for lane in range(first, min(first + CHUNK, width), SQUARE):
        row = min(before + lane, job[0].rows - 1)
        source, last = job[0].x + row * size, job[0].rows - 1 - row
        for start in range(0, items, SQUARE):
            target = place + (start * width + lane) * 4
            turn_square(like, source + start * item_bytes, size, last, target, width * 4)


@compiled()
def _give(job: Any, like: Any, tile: Any, group: Any, first: Any, count: Any) -> None:
    """Columns `[first, first + count)` of the group's rows are lanes of the tile, and what is
    added."""
    before, width = group * GROUP, width_of(job[0].lanes, group)
    if width == 1:
        _give_row(job, like, tile, before, first, count)
        return
    lines = tile + TILE_BYTES
    sums, rows = matrix(tile, FP32, count, width), matrix(lines, FP32, SQUARE, TILE)
    squares = count // SQUARE * SQUARE
    for lane in range(0, min(width, job[0].rows - before), SQUARE):
        for i in range(0, squares, SQUARE):
            source = tile + (i * width + lane) * 4
            turn_square(FP32, source, width * 4, SQUARE, lines + i * 4, TILE * 4)
        for other in range(min(SQUARE, job[0].rows - before - lane)):
            for i in range(squares, count):
                rows[other, i] = sums[i, lane + other]
            _give_row(job, like, lines + other * TILE * 4, before + lane + other, first, count)


@compiled()
def _give_row(job: Any, like: Any, line: Any, row: Any, first: Any, count: Any) -> None:
    """`count` sums, fp32, become a part of the row."""
    sums = vector(line, FP32, count)
    if job[0].bias:
        bias = vector(job[0].bias + first * job[0].item_bytes, like, count)
        for i in range(count):
            sums[i] += as_float(bias[i])
    by = (row * job[0].width + first) * job[0].item_bytes
    if job[0].added:
        added = vector(job[0].added + by, like, count)
        for i in range(count):
            sums[i] += as_float(added[i])
    narrow, plain = vector(job[0].out + by, BF16, count), vector(job[0].out + by, FP32, count)
    if job[0].item_bytes == 2:
        for i in range(count):
            narrow[i] = as_bf16(sums[i])
    else:
        for i in range(count):
            plain[i] = sums[i]


@compiled()
def _step(job: Any) -> Any:
    """Rows of weights that one thread takes at once."""
    rows = tile_rows(job, job[0].width, job[0].features)
    # Many lanes pay for larger tiles: the operand is read once for each.
    is_wide = job[0].item_bytes == job[0].operand_bytes
    return TILE if job[0].lanes >= GROUP // 2 and is_wide else rows
