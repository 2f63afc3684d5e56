"""Attention of single rows over the KV blocks where they lie: a CPU kernel, compiled by Numba.

torch has no operation that reads a paged cache on a CPU: gathering the blocks and multiplying the
copy costs two to three times what reading them costs. Arithmetic is in fp32 whatever the cache
holds. For models whose layers are transformers' modules; the kernels of whole layers have their own
(`kernels/attention.py`). No torch, no plans.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from livescale.engine.kernels.compiled import as_float, compiled, exp


@compiled(nogil=True)
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
                    query[g, d] = as_float(queries[row, head * shared + g, d]) * scaling
                    summed[g, d] = 0.0
            for i in range(seen):
                p = start + i
                place = tables[b, p // block_tokens] * block_tokens + p % block_tokens
                for d in range(head_dim):
                    line[d] = as_float(keys[head, place, d])
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
                    line[d] = as_float(values[head, place, d])
                for g in range(shared):
                    weight = weights[g, i]
                    for d in range(head_dim):
                        summed[g, d] += weight * line[d]
            for g in range(shared):
                for d in range(head_dim):
                    out[row, head * shared + g, d] = summed[g, d]


@compiled()
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
        scores[i] = exp(scores[i] - highest)
    for i in range(len(scores)):
        total += scores[i]
    share = np.float32(1.0) / total
    for i in range(len(scores)):
        scores[i] *= share
