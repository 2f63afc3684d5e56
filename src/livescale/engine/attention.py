"""Paged attention: the KV pool, where a Run's rows read and write in it, and the computation.

The function is registered with transformers' attention interface and gets its batch through the
layer call's keyword `paged`. Everything that does not depend on the layer is computed once per
Run. No modules, no weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from livescale.batching.run import Run, Segment

ATTENTION = "livescale_paged"
"""Name of the attention function in transformers' registry."""

GROUP_CONTEXT_RATIO = 2
"""Decodes of one padded batch have contexts that differ by at most this factor."""

GROUP_CONTEXT_TOKENS = 128
"""Decodes below this context share a batch whatever the factor: padding is cheaper than calls."""


class KVCache:
    """One model's cut of a flat pool of bytes: `blocks` blocks of `block_tokens` positions.

    `keys` and `values` are (decoder layers, token places, KV heads, head size); place
    `block * block_tokens + i` is the i-th position of a block, in every layer.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        dtype: torch.dtype,
        layers: int,
        blocks: int,
        block_tokens: int,
        kv_heads: int,
        head_dim: int,
    ) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        shape = (2, layers, blocks * block_tokens, kv_heads, head_dim)
        size_bytes = torch.Size(shape).numel() * dtype.itemsize
        assert size_bytes <= len(pool), f"{size_bytes} bytes of KV in a pool of {len(pool)}"
        self.keys, self.values = pool[:size_bytes].view(dtype).view(shape).unbind(0)

    @property
    def device(self) -> torch.device:
        return self.keys.device


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Single-row segments computed in one padded batch of B with contexts of up to C tokens.

    `rows` (B) in the Run, `places` (B * C) in the cache, `mask` (B, 1, 1, C) or None when all
    contexts have C tokens.
    """

    rows: torch.Tensor
    places: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A segment of several rows `[start, stop)`.

    If it begins its request, it attends only to itself (`places` and `mask` are None), else to
    `places` (context) of the cache under `mask` (rows, context).
    """

    start: int
    stop: int
    places: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """A Run as the layers need it. `positions` (1, T), `write_places` (T), T rows in all."""

    cache: KVCache
    positions: torch.Tensor
    write_places: torch.Tensor
    decodes: tuple[DecodeGroup, ...]
    prompts: tuple[PromptPart, ...]


def page(run: Run, cache: KVCache) -> PagedBatch:
    """The Run's rows with their places in the cache."""
    positions: list[int] = []
    write_places: list[int] = []
    decodes: list[tuple[int, Segment]] = []
    prompts: list[PromptPart] = []
    for segment in run.segments:
        row = len(positions)
        context = segment.context_tokens
        positions.extend(range(segment.first_position, context))
        write_places.extend(_places(segment, segment.first_position, cache.block_tokens))
        if segment.token_count == 1:
            decodes.append((row, segment))
        else:
            prompts.append(_prompt_part(row, segment, cache))
    return PagedBatch(
        cache=cache,
        positions=torch.tensor([positions], device=cache.device),
        write_places=torch.tensor(write_places, device=cache.device),
        decodes=tuple(_decode_group(group, cache) for group in _similar(decodes)),
        prompts=tuple(prompts),
    )


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged: PagedBatch,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Write the rows' keys and values, then attend. Called by transformers' attention modules.

    `query` is (1, heads, T, head size), `key` and `value` (1, KV heads, T, head size); the result
    is (1, T, heads, head size). Query head h uses KV head h // (heads / KV heads).
    """
    special = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
    assert all(value is None for value in special.values()), f"not a plain attention: {special}"
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    queries, keys, values = (rows[0].transpose(0, 1) for rows in (query, key, value))
    cached_keys, cached_values = paged.cache.keys[layer], paged.cache.values[layer]
    cached_keys.index_copy_(0, paged.write_places, keys)
    cached_values.index_copy_(0, paged.write_places, values)
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    for group in paged.decodes:
        attended = _attend_decodes(
            queries.index_select(0, group.rows),
            cached_keys.index_select(0, group.places),
            cached_values.index_select(0, group.places),
            group.mask,
            scaling,
        )
        out.index_copy_(0, group.rows, attended)
    for part in paged.prompts:
        rows = slice(part.start, part.stop)
        if part.places is None:
            context = keys[rows], values[rows]
        else:
            context = (
                cached_keys.index_select(0, part.places),
                cached_values.index_select(0, part.places),
            )
        out[rows] = _attend_prompt(queries[rows], *context, part.mask, scaling)
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION, paged_attention)


# -- helpers, in the order used -----------------------------------------------------------------


def _places(segment: Segment, start: int, block_tokens: int) -> list[int]:
    """Places of the segment's positions from `start` to its last one."""
    table = segment.block_table
    return [
        table[position // block_tokens] * block_tokens + position % block_tokens
        for position in range(start, segment.context_tokens)
    ]


def _prompt_part(row: int, segment: Segment, cache: KVCache) -> PromptPart:
    stop = row + segment.token_count
    if segment.first_position == 0:
        return PromptPart(row, stop, None, None)
    places = torch.tensor(_places(segment, 0, cache.block_tokens), device=cache.device)
    columns = torch.arange(segment.context_tokens, device=cache.device)
    last_seen = torch.arange(
        segment.first_position, segment.context_tokens, device=cache.device
    ).unsqueeze(1)
    return PromptPart(row, stop, places, _additive(columns <= last_seen, cache))


def _additive(is_seen: torch.Tensor, cache: KVCache) -> torch.Tensor:
    """A mask to add to scores: 0 where `is_seen`, minus infinity elsewhere."""
    mask = torch.zeros(is_seen.shape, dtype=cache.keys.dtype, device=cache.device)
    return mask.masked_fill_(~is_seen, float("-inf"))


def _similar(decodes: list[tuple[int, Segment]]) -> Iterator[list[tuple[int, Segment]]]:
    """Cut (row, segment) pairs into groups of similar context, shortest first."""
    group: list[tuple[int, Segment]] = []
    limit_tokens = 0
    for row, segment in sorted(decodes, key=lambda pair: (pair[1].context_tokens, pair[0])):
        if group and segment.context_tokens > limit_tokens:
            yield group
            group = []
        if not group:
            shortest = segment.context_tokens
            limit_tokens = max(GROUP_CONTEXT_RATIO * shortest, GROUP_CONTEXT_TOKENS)
        group.append((row, segment))
    if group:
        yield group


def _decode_group(group: Sequence[tuple[int, Segment]], cache: KVCache) -> DecodeGroup:
    device, block_tokens = cache.device, cache.block_tokens
    contexts = [segment.context_tokens for _, segment in group]
    blocks = -(-contexts[-1] // block_tokens)
    tables = [(list(s.block_table[:blocks]) + [0] * blocks)[:blocks] for _, s in group]
    columns = torch.arange(contexts[-1], device=device)
    table_columns = torch.tensor(tables, device=device)[:, columns // block_tokens]
    places = table_columns * block_tokens + columns % block_tokens
    mask = None
    if contexts[0] != contexts[-1]:
        is_seen = columns < torch.tensor(contexts, device=device).unsqueeze(1)
        # Padding reads the request's first position, which is written: the pool's other bytes may
        # be no numbers, and zero times NaN is NaN.
        places = torch.where(is_seen, places, places[:, :1])
        mask = _additive(is_seen, cache)[:, None, None, :]
    rows = torch.tensor([row for row, _ in group], device=device)
    return DecodeGroup(rows, places.flatten(), mask)


def _attend_decodes(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """`queries` (B, heads, D); `keys`, `values` (B * C, KV heads, D); the result (B, heads, D).

    The query heads that share a KV head are laid out as its query rows: nothing is repeated.
    """
    batch, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    grouped = queries.view(batch, kv_heads, heads // kv_heads, head_dim)
    shape = (batch, -1, kv_heads, head_dim)
    attended = scaled_dot_product_attention(
        grouped,
        keys.view(shape).transpose(1, 2),
        values.view(shape).transpose(1, 2),
        attn_mask=mask,
        scale=scaling,
    )
    return attended.reshape(batch, heads, head_dim)


def _attend_prompt(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """`queries` (n, heads, D); `keys`, `values` (context, KV heads, D); the result as `queries`.

    Without a mask the rows are the context, and each sees itself and those before.
    """
    shared = queries.shape[1] // keys.shape[1]
    attended = scaled_dot_product_attention(
        queries.transpose(0, 1).unsqueeze(0),
        keys.repeat_interleave(shared, dim=1).transpose(0, 1).unsqueeze(0),
        values.repeat_interleave(shared, dim=1).transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
    )
    return attended[0].transpose(0, 1)
