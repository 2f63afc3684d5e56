"""Attention over the KV cache where it lies: pieces of decodes and of prompts.

A decode reads a stretch of its context, so that one long context is shared by all threads; of
several stretches the thread that ends last adds up (Dao et al., "Flash-Decoding", 2023). A prompt
takes some rows and all heads that share a KV head together, and goes through its context in blocks
with a running softmax (Dao et al., "FlashAttention", 2022, Algorithm 1; `prompt_blocks.py`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from livescale.engine.kernels.compiled import (
    as_bf16,
    as_float,
    as_pair,
    call_tile_product,
    compiled,
    exp,
    fetch_add,
    matrix,
    pair_of,
    vector,
)
from livescale.engine.kernels.heads import keep_row, turn_row
from livescale.engine.kernels.job import CHUNK, CONTEXT, GROUP, STRETCH, lane_of
from livescale.engine.kernels.norms import pair_rows
from livescale.engine.kernels.products import BF16, FP32, INT64, PAIRS


@compiled()
def store_head(job: Any, lane: Any, lanes: Any, head: Any, values: Any, share: Any) -> None:
    """A head's values (head size), times their `share`, in a lane of the operand that the output
    projection takes."""
    head_dim = job[0].head_dim
    features = job[0].heads * head_dim
    place, pitch = lane_of(job[0].attended, features, lane, lanes)
    if job[0].is_paired:
        # Half as wide as fp32, and the features of a pair lie side by side.
        group = lane // GROUP * GROUP
        place = job[0].attended + 2 * group * features + 4 * (lane - group)
        pairs = matrix(place + 4 * (head * head_dim // 2) * pitch, PAIRS, head_dim // 2, pitch)
        for d in range(head_dim // 2):
            pairs[d, 0] = as_pair(values[2 * d] * share, values[2 * d + 1] * share)
    else:
        plain = matrix(place + 4 * head * head_dim * pitch, FP32, head_dim, pitch)
        for d in range(head_dim):
            plain[d, 0] = values[d] * share


@compiled()
def attend_stretch(
    job: Any, layer: Any, like: Any, me: Any, lanes: Any, unit: Any, number: Any, kv_head: Any
) -> None:
    """One stretch of a decode's context. `unit` is the row's, `number` that of its first stretch.
    Where all rows are decodes, no other one sees a row's key: queries and keys are turned here."""
    row, stretch, stretches = unit[0], unit[3], unit[4]
    head_dim, shared = job[0].head_dim, job[0].heads // job[0].kv_heads
    columns = (shared + CHUNK - 1) // CHUNK * CHUNK
    seen = vector(job[0].positions, INT64, job[0].rows)[row] + 1
    start = max(0, seen - layer.window) if layer.window else np.int64(0)
    start, stop = max(start, stretch * STRETCH), min(seen, (stretch + 1) * STRETCH)
    count = max(0, stop - start)
    scratch = job[0].attention + me * job[0].attention_bytes
    queries = matrix(scratch, FP32, head_dim, columns)
    kept = scratch + 4 * head_dim * columns
    scores = matrix(kept + 4 * STRETCH * head_dim, FP32, STRETCH, columns)
    weights = kept + 4 * STRETCH * (head_dim + columns)
    summed = matrix(weights + 4 * STRETCH * shared, FP32, shared, head_dim)
    highest = vector(weights + 4 * shared * (STRETCH + head_dim), FP32, columns)
    totals = vector(weights + 4 * shared * (STRETCH + head_dim) + 4 * columns, FP32, columns)
    if job[0].rows == job[0].segment_count and stretch == stretches - 1:
        keep_row(job, layer, like, lanes, row, kv_head, kept)
    _gather_query(job, layer, like, lanes, row, kv_head, queries)
    table = vector(unit[2], INT64, seen // job[0].block_tokens + 1)
    plane = kv_head * job[0].places * head_dim * job[0].item_bytes
    for first in range(0, count, CONTEXT):
        taken = min(CONTEXT, count - first)
        padded = (taken + CHUNK - 1) // CHUNK * CHUNK
        copy_kept(job, like, layer.keys + plane, table, start + first, taken, padded, kept)
        into = scores.ctypes.data + 4 * first * columns
        block_product(job, padded, columns, head_dim, kept, scratch, into, 0)
    _weigh(scores, count, highest, totals)
    padded = (count + 2 * CHUNK - 1) // (2 * CHUNK) * 2 * CHUNK
    _turn_weights(job, scores, count, padded, shared, weights)
    copy_values(job, like, layer.values + plane, table, start, count, padded, kept)
    if count > 0:
        block_product(job, shared, head_dim, padded, weights, kept, summed.ctypes.data, 0)
    else:
        summed[:] = np.float32(0)
    if stretches == 1:
        for g in range(shared):
            share = np.float32(1) / totals[g]
            store_head(job, row, lanes, kv_head * shared + g, summed[g], share)
    else:
        _hand_in(job, lanes, unit, number, kv_head, summed, highest, totals)


@compiled()
def copy_kept(
    job: Any, like: Any, plane: Any, table: Any, start: Any, count: Any, padded: Any, into: Any
) -> None:
    """Keys or values (padded, head size) of `count` positions, the others 0, in the type that
    operands have."""
    head_dim, size = job[0].head_dim, job[0].block_tokens
    step = head_dim * job[0].operand_bytes
    for i in range(count):
        p = start + i
        place = table[p // size] * size + p % size
        source = vector(plane + place * head_dim * job[0].item_bytes, like, head_dim)
        if job[0].is_paired:
            narrow = vector(into + i * step, like, head_dim)
            for d in range(head_dim):
                narrow[d] = source[d]
        else:
            wide = vector(into + i * step, FP32, head_dim)
            for d in range(head_dim):
                wide[d] = as_float(source[d])
    rest = vector(into + count * step, BF16, (padded - count) * step // 2)
    for i in range(len(rest)):
        rest[i] = 0


@compiled()
def copy_values(
    job: Any, like: Any, plane: Any, table: Any, start: Any, count: Any, padded: Any, into: Any
) -> None:
    """Values of `count` positions as an operand (padded, head size), the others 0."""
    if not job[0].is_paired:
        copy_kept(job, like, plane, table, start, count, padded, into)
        return
    head_dim, size = job[0].head_dim, job[0].block_tokens
    for i in range(0, padded, 2):
        pairs = vector(into + 2 * i * head_dim, PAIRS, head_dim)
        if i >= count:
            for d in range(head_dim):
                pairs[d] = 0
            continue
        p = start + i
        place = table[p // size] * size + p % size
        even = vector(plane + place * head_dim * job[0].item_bytes, BF16, head_dim)
        p = start + min(i + 1, count - 1)
        place = table[p // size] * size + p % size
        odd = vector(plane + place * head_dim * job[0].item_bytes, BF16, head_dim)
        # The weight of a position that is there twice is 0.
        for d in range(head_dim):
            pairs[d] = pair_of(even[d], odd[d])


@compiled()
def block_product(
    job: Any, m: Any, n: Any, k: Any, left: Any, right: Any, into: Any, is_added: Any
) -> None:
    """`into` (m, n), fp32, is `left` (m, k) times the operand `right` (k, n), or grows by that."""
    product = job[0].bf16_product if job[0].is_paired else job[0].fp32_product
    if product != 0:
        call_tile_product(product, m, n, k, k, n, n, is_added, left, right, into, job[0].is_paired)
        return
    a, b, out = matrix(left, FP32, m, k), matrix(right, FP32, k, n), matrix(into, FP32, m, n)
    for i in range(m):
        if not is_added:
            for j in range(n):
                out[i, j] = np.float32(0)
        for x in range(k):
            factor = a[i, x]
            for j in range(n):
                out[i, j] += factor * b[x, j]


# -- helpers, in the order used -----------------------------------------------------------------


@compiled()
def _gather_query(
    job: Any, layer: Any, like: Any, lanes: Any, row: Any, kv_head: Any, queries: Any
) -> None:
    """A row's heads that share a KV head as an operand (head size, columns), scaled."""
    head_dim, columns = queries.shape
    shared = job[0].heads // job[0].kv_heads
    features = (job[0].heads + 2 * job[0].kv_heads) * head_dim
    source, pitch = lane_of(job[0].projected, features, row, lanes)
    for d in range(head_dim):
        for g in range(columns):
            queries[d, g] = np.float32(0)
    for g in range(shared):
        place = source + 4 * (kv_head * shared + g) * head_dim * pitch
        head = matrix(place, FP32, head_dim, pitch)
        for d in range(head_dim):
            queries[d, g] = head[d, 0]
    if job[0].rows == job[0].segment_count:
        position = vector(job[0].positions, INT64, job[0].rows)[row]
        turn_row(job, layer.q_norm, like, position, queries)
    for d in range(head_dim):
        for g in range(columns):
            queries[d, g] *= job[0].scaling
    if job[0].is_paired:
        pair_rows(queries.ctypes.data, head_dim, columns, queries.ctypes.data)


@compiled()
def _weigh(scores: Any, count: Any, highest: Any, totals: Any) -> None:
    """Scores (positions, columns) become weights, e to their power below their column's highest,
    whose sum `totals` gets. Without positions: minus infinity and 0."""
    columns = len(highest)
    for g in range(columns):
        highest[g] = np.float32(-np.inf)
        totals[g] = np.float32(0)
    for i in range(count):
        row = vector(scores.ctypes.data + 4 * i * columns, FP32, columns)
        for g in range(columns):
            highest[g] = max(highest[g], row[g])
    for i in range(count):
        row = vector(scores.ctypes.data + 4 * i * columns, FP32, columns)
        for g in range(columns):
            row[g] = exp(row[g] - highest[g])
        for g in range(columns):
            totals[g] += row[g]


@compiled()
def _turn_weights(
    job: Any, scores: Any, count: Any, padded: Any, shared: Any, weights: Any
) -> None:
    """Weights (positions, columns) as the left side of a product, (heads, padded)."""
    narrow, plain = matrix(weights, BF16, shared, padded), matrix(weights, FP32, shared, padded)
    for g in range(shared):
        if job[0].is_paired:
            for i in range(count):
                narrow[g, i] = as_bf16(scores[i, g])
            for i in range(count, padded):
                narrow[g, i] = 0
        else:
            for i in range(count):
                plain[g, i] = scores[i, g]
            for i in range(count, padded):
                plain[g, i] = np.float32(0)


@compiled()
def _hand_in(
    job: Any,
    lanes: Any,
    unit: Any,
    number: Any,
    kv_head: Any,
    summed: Any,
    highest: Any,
    totals: Any,
) -> None:
    """What came of one stretch; the last one of a row and KV head adds all up."""
    shared, head_dim = summed.shape
    stretches, kv_heads = unit[4], job[0].kv_heads
    pitch = shared * (head_dim + 2)
    parts = matrix(
        job[0].partials + 4 * (number * kv_heads + kv_head * stretches) * pitch,
        FP32,
        stretches,
        pitch,
    )
    part = parts[unit[3]]
    for g in range(shared):
        part[g * (head_dim + 2)] = highest[g]
        part[g * (head_dim + 2) + 1] = totals[g]
        for d in range(head_dim):
            part[g * (head_dim + 2) + 2 + d] = summed[g, d]
    if fetch_add(job[0].ready + 8 * (number * kv_heads + kv_head), 1) % stretches < stretches - 1:
        return
    for g in range(shared):
        top = np.float32(-np.inf)
        for s in range(stretches):
            top = max(top, parts[s, g * (head_dim + 2)])
        total = np.float32(0)
        for s in range(stretches):
            share = exp(parts[s, g * (head_dim + 2)] - top)
            total += parts[s, g * (head_dim + 2) + 1] * share
        for d in range(head_dim):
            summed[g, d] = np.float32(0)
        for s in range(stretches):
            share = exp(parts[s, g * (head_dim + 2)] - top)
            for d in range(head_dim):
                summed[g, d] += parts[s, g * (head_dim + 2) + 2 + d] * share
        store_head(job, unit[0], lanes, kv_head * shared + g, summed[g], np.float32(1) / total)
