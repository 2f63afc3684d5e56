"""Attention of a prompt's rows: blocks of its context with a running softmax.

Rows and the heads that share a KV head are the columns of one product, (context, head size) times
(head size, columns), so that nothing is transposed but values (Dao et al., "FlashAttention", 2022,
Algorithm 1).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from livescale.engine.kernels.attention import block_product, copy_kept, store_head
from livescale.engine.kernels.compiled import (
    as_float,
    compiled,
    exp,
    matrix,
    vector,
)
from livescale.engine.kernels.job import CHUNK, CONTEXT, GROUP, lane_of
from livescale.engine.kernels.norms import pair_rows
from livescale.engine.kernels.products import FP32, INT64


@compiled()
def attend_prompt(
    job: Any, layer: Any, like: Any, me: Any, lanes: Any, unit: Any, kv_head: Any
) -> None:
    """Rows of one segment, `unit[1]` of them from `unit[0]` on, in the heads of one KV head."""
    row, rows = unit[0], unit[1]
    head_dim, shared = job[0].head_dim, job[0].heads // job[0].kv_heads
    columns = (shared * rows + CHUNK - 1) // CHUNK * CHUNK
    scratch = job[0].attention + me * job[0].attention_bytes
    queries = scratch
    keys = queries + 4 * GROUP * head_dim
    values = keys + 4 * CONTEXT * head_dim
    out = matrix(values + 4 * CONTEXT * head_dim, FP32, head_dim, columns)
    scores = matrix(values + 4 * (CONTEXT + GROUP) * head_dim, FP32, CONTEXT, columns)
    weights = values + 4 * (CONTEXT + GROUP) * head_dim + 4 * CONTEXT * GROUP
    highest = vector(weights + 4 * CONTEXT * GROUP, FP32, columns)
    totals = vector(weights + 4 * CONTEXT * GROUP + 4 * GROUP, FP32, columns)
    factors = vector(weights + 4 * CONTEXT * GROUP + 8 * GROUP, FP32, columns)
    _gather_queries(job, lanes, row, rows, kv_head, queries, columns)
    for column in range(columns):
        # Finite: a row may see nothing of its first block, if its window begins later.
        highest[column] = np.float32(-1e30)
        totals[column] = np.float32(0)
    for d in range(head_dim):
        for column in range(columns):
            out[d, column] = np.float32(0)
    position = vector(job[0].positions, INT64, job[0].rows)[row]
    table = vector(unit[2], INT64, (position + rows) // job[0].block_tokens + 1)
    plane = kv_head * job[0].places * head_dim * job[0].item_bytes
    first = max(0, position + 1 - layer.window) if layer.window else np.int64(0)
    first -= first % CONTEXT
    for start in range(first, position + rows, CONTEXT):
        count = min(CONTEXT, position + rows - start)
        copy_kept(job, like, layer.keys + plane, table, start, count, CONTEXT, keys)
        _gather_values(job, like, layer.values + plane, table, start, count, values)
        block_product(job, CONTEXT, columns, head_dim, keys, queries, scores.ctypes.data, 0)
        _hide(scores, start, position, rows, shared, layer.window)
        _run_softmax(job, scores, highest, totals, factors, weights)
        for d in range(head_dim):
            for column in range(columns):
                out[d, column] *= factors[column]
        block_product(job, head_dim, columns, CONTEXT, values, weights, out.ctypes.data, 1)
    for i in range(rows):
        for g in range(shared):
            column = g * rows + i
            share = np.float32(1) / totals[column]
            store_head(job, row + i, lanes, kv_head * shared + g, out[:, column], share)


@compiled()
def _gather_queries(
    job: Any, lanes: Any, row: Any, rows: Any, kv_head: Any, queries: Any, columns: Any
) -> None:
    """(head size, columns), scaled, as an operand; columns too many are zeros."""
    head_dim, shared = job[0].head_dim, job[0].heads // job[0].kv_heads
    features = (job[0].heads + 2 * job[0].kv_heads) * head_dim
    plain = matrix(queries, FP32, head_dim, columns)
    for d in range(head_dim):
        for column in range(columns):
            plain[d, column] = np.float32(0)
    for i in range(rows):
        source, pitch = lane_of(job[0].projected, features, row + i, lanes)
        for g in range(shared):
            head = matrix(
                source + 4 * (kv_head * shared + g) * head_dim * pitch, FP32, head_dim, pitch
            )
            for d in range(head_dim):
                plain[d, g * rows + i] = head[d, 0] * job[0].scaling
    if job[0].is_paired:
        pair_rows(queries, head_dim, columns, queries)


@compiled()
def _gather_values(
    job: Any, like: Any, plane: Any, table: Any, start: Any, count: Any, values: Any
) -> None:
    """(head size, CONTEXT): values turned on their side, then zeros."""
    head_dim, size = job[0].head_dim, job[0].block_tokens
    narrow, wide = matrix(values, like, head_dim, CONTEXT), matrix(values, FP32, head_dim, CONTEXT)
    for i in range(count):
        p = start + i
        place = table[p // size] * size + p % size
        source = vector(plane + place * head_dim * job[0].item_bytes, like, head_dim)
        if job[0].is_paired:
            for d in range(head_dim):
                narrow[d, i] = source[d]
        else:
            for d in range(head_dim):
                wide[d, i] = as_float(source[d])
    for d in range(head_dim):
        for i in range(count, CONTEXT):
            if job[0].is_paired:
                narrow[d, i] = like
            else:
                wide[d, i] = np.float32(0)


@compiled()
def _hide(scores: Any, start: Any, position: Any, rows: Any, shared: Any, window: Any) -> None:
    """Scores of positions that a row does not see are minus infinity."""
    last = position + rows - 1
    if start + CONTEXT - 1 <= position and (not window or start > last - window):
        return
    hidden = np.float32(-np.inf)
    for i in range(CONTEXT):
        for g in range(shared):
            for row in range(rows):
                ahead = start + i - (position + row)
                if ahead > 0 or (window and ahead <= -window):
                    scores[i, g * rows + row] = hidden


@compiled()
def _run_softmax(
    job: Any, scores: Any, highest: Any, totals: Any, factors: Any, weights: Any
) -> None:
    """The block's weights as an operand (CONTEXT, columns), and by what earlier sums shrink."""
    columns = scores.shape[1]
    for column in range(columns):
        factors[column] = highest[column]
    for i in range(CONTEXT):
        for column in range(columns):
            highest[column] = max(highest[column], scores[i, column])
    for column in range(columns):
        factors[column] = exp(factors[column] - highest[column])
        totals[column] *= factors[column]
    for i in range(CONTEXT):
        row = vector(scores.ctypes.data + 4 * i * columns, FP32, columns)
        out = vector(weights + 4 * i * columns, FP32, columns)
        for column in range(columns):
            out[column] = exp(row[column] - highest[column])
        for column in range(columns):
            totals[column] += out[column]
    if job[0].is_paired:
        pair_rows(weights, CONTEXT, columns, weights)
