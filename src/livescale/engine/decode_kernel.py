"""Attention of single rows over the KV blocks where they lie: a CPU kernel, compiled by Numba.

torch has no operation that reads a paged cache on a CPU: gathering the blocks and multiplying the
copy costs two to three times what reading them costs. Arithmetic is in fp32 whatever the cache
holds. Numba keeps the compiled kernel beside this file (or in the user's cache directory), so
only the first process of a machine waits for the compiler. No torch, no plans.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

FAST = {"reassoc", "contract", "nsz"}
"""Sums may be taken in any order, which vectors need; infinities and NaN keep their meaning."""


def _compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: compile on the first call, or take what an earlier process has compiled."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(cache=True, fastmath=FAST, **options)(function)
        except RuntimeError:
            # Neither this directory nor the user's cache can be written: each process compiles.
            return njit(fastmath=FAST, **options)(function)

    return decorate


def _bitcast(_context: Any, _bits: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


_float_of_bits: Any = intrinsic(_bitcast)


def _widen(_context: Any, value: Any) -> Any:
    """fp32 is itself; bf16, which comes as int16, is the upper half of an fp32."""

    def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if value == types.float32:
            return args[0]
        word = ir.IntType(32)
        bits = builder.shl(builder.zext(args[0], word), ir.Constant(word, 16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(value), generate


_as_float: Any = intrinsic(_widen)


@_compiled(inline="always")
def _exp(x: Any) -> Any:
    """e to the power of x <= 0, within 2e-7: a polynomial, so that a loop of it is vectors."""
    scaled = max(x * np.float32(1.44269504), np.float32(-126.0))
    whole = np.floor(scaled)
    f = (scaled - whole) * np.float32(0.69314718)
    power = np.float32(1.0 / 720) * f + np.float32(1.0 / 120)
    power = power * f + np.float32(1.0 / 24)
    power = power * f + np.float32(1.0 / 6)
    power = power * f + np.float32(0.5)
    power = power * f + np.float32(1.0)
    power = power * f + np.float32(1.0)
    return power * _float_of_bits(np.uint32(np.int32(whole) + 127) << np.uint32(23))


@_compiled(nogil=True)
def attend_rows(
    queries: Any,
    keys: Any,
    values: Any,
    rows: Any,
    tables: Any,
    starts: Any,
    stops: Any,
    block_tokens: Any,
    scaling: Any,
    softcap: Any,
    out: Any,
) -> None:
    """Fill `out[row]` for each `row` of `rows` (B).

    `queries` (T, heads, D), `keys` and `values` (KV heads, places, D) are float32, or int16 with
    bf16's bits; `out` (T, heads, D) is float32. Row b sees the positions `[starts[b], stops[b])`,
    of which position p lies in block `tables[b, p // block_tokens]`. `softcap` 0 is none.
    """
    kv_heads, head_dim = keys.shape[0], keys.shape[2]
    shared = queries.shape[1] // kv_heads
    most = 0
    for b in range(len(rows)):
        most = max(most, stops[b] - starts[b])
    query = np.empty((shared, head_dim), np.float32)
    summed = np.empty((shared, head_dim), np.float32)
    line = np.empty(head_dim, np.float32)
    weights = np.empty((shared, most), np.float32)
    for b in range(len(rows)):
        row, start, seen = rows[b], starts[b], stops[b] - starts[b]
        for head in range(kv_heads):
            for g in range(shared):
                for d in range(head_dim):
                    query[g, d] = _as_float(queries[row, head * shared + g, d]) * scaling
                    summed[g, d] = 0.0
            for i in range(seen):
                p = start + i
                place = tables[b, p // block_tokens] * block_tokens + p % block_tokens
                for d in range(head_dim):
                    line[d] = _as_float(keys[head, place, d])
                for g in range(shared):
                    score = np.float32(0.0)
                    for d in range(head_dim):
                        score += query[g, d] * line[d]
                    weights[g, i] = score
            for g in range(shared):
                _normalize(weights[g, :seen], softcap)
            for i in range(seen):
                p = start + i
                place = tables[b, p // block_tokens] * block_tokens + p % block_tokens
                for d in range(head_dim):
                    line[d] = _as_float(values[head, place, d])
                for g in range(shared):
                    weight = weights[g, i]
                    for d in range(head_dim):
                        summed[g, d] += weight * line[d]
            for g in range(shared):
                for d in range(head_dim):
                    out[row, head * shared + g, d] = summed[g, d]


@_compiled()
def _normalize(scores: Any, softcap: Any) -> None:
    """Softmax in place."""
    if softcap > 0:
        for i in range(len(scores)):
            scores[i] = np.tanh(scores[i] / softcap) * softcap
    highest = scores[0]
    for i in range(len(scores)):
        highest = max(highest, scores[i])
    total = np.float32(0.0)
    for i in range(len(scores)):
        scores[i] = _exp(scores[i] - highest)
    for i in range(len(scores)):
        total += scores[i]
    share = np.float32(1.0) / total
    for i in range(len(scores)):
        scores[i] *= share
