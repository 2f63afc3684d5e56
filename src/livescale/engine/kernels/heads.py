"""Queries and keys are turned by their positions; keys and values go to the KV cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from livescale.engine.kernels.compiled import as_bf16, as_float, compiled, matrix, vector
from livescale.engine.kernels.job import GROUP, lane_of, width_of
from livescale.engine.kernels.products import BF16, FP32, INT64


@compiled()
def turn_angles(job: Any, lanes: Any, group: Any) -> None:
    """The group's cosines and sines (head size / 2, lanes) from the tables by position."""
    half = job[0].head_dim // 2
    width = width_of(lanes, group)
    before = group * GROUP
    count = min(width, job[0].rows - before)
    positions = vector(job[0].positions, INT64, job[0].rows)
    cosines = matrix(job[0].cosines + before * half * 4, FP32, half, width)
    sines = matrix(job[0].sines + before * half * 4, FP32, half, width)
    for lane in range(count):
        place = positions[before + lane] * half * 4
        cosine = vector(job[0].cosine_table + place, FP32, half)
        sine = vector(job[0].sine_table + place, FP32, half)
        for d in range(half):
            cosines[d, lane] = cosine[d]
            sines[d, lane] = sine[d]


@compiled()
def turn_and_keep(job: Any, layer: Any, like: Any, lanes: Any, group: Any, kv_head: Any) -> None:
    """The queries that share a KV head, and its keys, in the lanes of one group: each head
    normalized where the model has a norm of heads (Qwen3), then turned (Su et al., "RoFormer",
    2021, Eq. 34, the halves of a head as its pairs). Keys and values are in the cache then."""
    heads, kv_heads, head_dim = job[0].heads, job[0].kv_heads, job[0].head_dim
    shared = heads // kv_heads
    width = width_of(lanes, group)
    features = (heads + 2 * kv_heads) * head_dim
    base = job[0].projected + group * GROUP * features * 4
    for g in range(shared):
        _turn(job, layer.q_norm, like, base, kv_head * shared + g, width, group)
    _turn(job, layer.k_norm, like, base, heads + kv_head, width, group)
    keys = base + (heads + kv_head) * head_dim * width * 4
    values = base + (heads + kv_heads + kv_head) * head_dim * width * 4
    _keep(job, like, layer.keys, keys, width, group, kv_head)
    _keep(job, like, layer.values, values, width, group, kv_head)


@compiled()
def turn_row(job: Any, norm: Any, like: Any, position: Any, x: Any) -> None:
    """Heads `x` (head size, heads) of the row at that position, as `turn_and_keep` turns them."""
    head_dim, width = x.shape
    half = head_dim // 2
    if norm != 0:
        _normalize_head(x, vector(norm, like, head_dim), job[0].epsilon)
    cosines = vector(job[0].cosine_table + position * half * 4, FP32, half)
    sines = vector(job[0].sine_table + position * half * 4, FP32, half)
    for d in range(half):
        for head in range(width):
            a, b = x[d, head], x[d + half, head]
            x[d, head] = a * cosines[d] - b * sines[d]
            x[d + half, head] = b * cosines[d] + a * sines[d]


@compiled()
def keep_row(
    job: Any, layer: Any, like: Any, lanes: Any, row: Any, kv_head: Any, scratch: Any
) -> None:
    """The row's key, turned, and its value are in the cache then. `scratch` has room for a head in
    fp32."""
    heads, kv_heads, head_dim = job[0].heads, job[0].kv_heads, job[0].head_dim
    features = (heads + 2 * kv_heads) * head_dim
    first, pitch = lane_of(job[0].projected, features, row, lanes)
    position = vector(job[0].positions, INT64, job[0].rows)[row]
    place = vector(job[0].kept, INT64, job[0].rows)[row] + kv_head * job[0].places
    place *= head_dim * job[0].item_bytes
    x = matrix(scratch, FP32, head_dim, 1)
    for number in range(2):
        head = heads + kv_head + number * kv_heads
        given = matrix(first + 4 * head * head_dim * pitch, FP32, head_dim, pitch)
        for d in range(head_dim):
            x[d, 0] = given[d, 0]
        if number == 0:
            turn_row(job, layer.k_norm, like, position, x)
            _keep_lane(job, layer.keys + place, x, 0)
        else:
            _keep_lane(job, layer.values + place, x, 0)


# -- helpers, in the order used -----------------------------------------------------------------


@compiled()
def _turn(job: Any, norm: Any, like: Any, base: Any, head: Any, width: Any, group: Any) -> None:
    head_dim = job[0].head_dim
    half = head_dim // 2
    x = matrix(base + head * head_dim * width * 4, FP32, head_dim, width)
    if norm != 0:
        _normalize_head(x, vector(norm, like, head_dim), job[0].epsilon)
    cosines = matrix(job[0].cosines + group * GROUP * half * 4, FP32, half, width)
    sines = matrix(job[0].sines + group * GROUP * half * 4, FP32, half, width)
    for d in range(half):
        for lane in range(width):
            a, b = x[d, lane], x[d + half, lane]
            x[d, lane] = a * cosines[d, lane] - b * sines[d, lane]
            x[d + half, lane] = b * cosines[d, lane] + a * sines[d, lane]


@compiled()
def _normalize_head(x: Any, weight: Any, epsilon: Any) -> None:
    head_dim, width = x.shape
    for lane in range(width):
        total = np.float32(0)
        for d in range(head_dim):
            total += x[d, lane] * x[d, lane]
        factor = np.float32(1) / np.sqrt(total / np.float32(head_dim) + epsilon)
        for d in range(head_dim):
            x[d, lane] *= factor * as_float(weight[d])


@compiled()
def _keep(job: Any, like: Any, cache: Any, rows: Any, width: Any, group: Any, kv_head: Any) -> None:
    head_dim = job[0].head_dim
    count = min(width, job[0].rows - group * GROUP)
    kept = vector(job[0].kept, INT64, job[0].rows)
    x = matrix(rows, FP32, head_dim, width)
    plane = cache + kv_head * job[0].places * head_dim * job[0].item_bytes
    for lane in range(count):
        place = plane + kept[group * GROUP + lane] * head_dim * job[0].item_bytes
        _keep_lane(job, place, x, lane)


@compiled()
def _keep_lane(job: Any, place: Any, x: Any, lane: Any) -> None:
    head_dim = job[0].head_dim
    if job[0].item_bytes == 2:
        narrow = vector(place, BF16, head_dim)
        for d in range(head_dim):
            narrow[d] = as_bf16(x[d, lane])
    else:
        plain = vector(place, FP32, head_dim)
        for d in range(head_dim):
            plain[d] = x[d, lane]
