"""The arithmetic of attention: many rows of one prompt, and what it has in common with decodes.

No cache, no segments: queries, keys and values are already where they are computed.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

SCORES_AT_ONCE = {"cpu": 2 << 20, "cuda": 64 << 20}
"""Scores that are held at a time where attention is computed from its parts: the rows of a long
prompt take turns, because its scores grow with the square of its tokens. On a CPU they had better
stay in its caches; on a GPU few large steps are fast."""


def attend_prompt(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    is_causal: bool,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """`queries` (heads, n, D); `keys`, `values` (KV heads, C, D); the result (n, heads, D)."""
    heads, rows, head_dim = queries.shape
    kv_heads = keys.shape[0]
    # In 16 bits torch's fused attention is 2 to 8 times slower on CPUs than its parts.
    is_fused = queries.dtype is torch.float32 or queries.device.type != "cpu"
    if softcap is None and is_fused:
        fused = scaled_dot_product_attention(
            queries.unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=None if is_causal else mask,
            is_causal=is_causal,
            scale=scaling,
            enable_gqa=kv_heads < heads,
        )
        return fused[0].transpose(0, 1)
    out = torch.empty(rows, heads, head_dim, dtype=queries.dtype, device=queries.device)
    context = keys.shape[1]
    step = _rows_at_once(heads * context, queries.device)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        seen = context - rows + stop  # what comes later is masked
        grouped = queries[:, start:stop].reshape(kv_heads, -1, head_dim)
        scores = scores_of(grouped, keys[:, :seen], scaling, softcap)
        scores.view(heads, stop - start, seen).add_(mask[start:stop, :seen])
        attended = torch.bmm(probabilities(scores), values[:, :seen])
        out[start:stop] = attended.view(heads, stop - start, head_dim).transpose(0, 1)
    return out


def _rows_at_once(row_scores: int, device: torch.device) -> int:
    """How many rows of so many scores are computed together: a power of two, because oneDNN
    compiles a kernel for each size."""
    fitting = max(SCORES_AT_ONCE[device.type] // row_scores, 1)
    return 1 << (fitting.bit_length() - 1)


def scores_of(
    queries: torch.Tensor, keys: torch.Tensor, scaling: float, softcap: float | None
) -> torch.Tensor:
    """(batch, n, D) and (batch, C, D) to (batch, n, C)."""
    scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(scaling)
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


def probabilities(scores: torch.Tensor) -> torch.Tensor:
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
