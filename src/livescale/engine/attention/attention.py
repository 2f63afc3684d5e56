"""Paged attention: where a Run's rows read and write in the KV cache, and who attends to what.

Everything that does not depend on the layer is computed once per Run (once per window size, if
layers have windows). No modules, no weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
import torch

from livescale.batching.runs.run import Run, Segment
from livescale.engine.attention.decode_kernel import attend_rows
from livescale.engine.attention.kv_cache import KVCache, as_array
from livescale.engine.attention.prompt_attention import PromptPart, attend_prompt, prompt_part

GROUP_CONTEXT_RATIO = 2
"""Decodes of one padded batch have contexts that differ by at most this factor."""

PADDED_CONTEXT_TOKENS = 64
"""Gathered 16-bit contexts are padded to multiples: oneDNN compiles a kernel for each size."""

GROUP_CONTEXT_TOKENS = 128
"""Decodes below this context share a batch whatever the factor: padding is cheaper than calls."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Single-row segments computed in one padded batch of B with contexts of up to C tokens.

    `rows` (B) in the Run, or None when these are all of its rows; `places` (B * C) in the cache;
    `mask` (B, 1, C), or None when all contexts have C tokens.
    """

    rows: torch.Tensor | None
    places: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class SingleRows:
    """Single-row segments as the compiled kernel takes them: B rows of the Run, each with its block
    table (padded, (B, blocks)) and the positions `[start, stop)` that it sees. All int64."""

    rows: np.ndarray
    tables: np.ndarray
    starts: np.ndarray
    stops: np.ndarray


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Who attends to what, in layers of one window size. Single rows are in `singles` where the
    cache can be read by the kernel, else in `decodes`."""

    singles: SingleRows | None
    decodes: tuple[DecodeGroup, ...]
    prompts: tuple[PromptPart, ...]


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """A Run as the layers need it. `positions` (1, T), `write_places` (T), T rows in all."""

    cache: KVCache
    positions: torch.Tensor
    write_places: torch.Tensor
    #: (first row, segment)
    segments: tuple[tuple[int, Segment], ...]
    _plans: dict[int | None, AttentionPlan] = field(default_factory=dict)

    def plan(self, window: int | None) -> AttentionPlan:
        """The plan of layers whose rows see the last `window` positions (None: all)."""
        if window not in self._plans:
            self._plans[window] = _plan(self.segments, self.cache, window)
        return self._plans[window]


def page(run: Run, cache: KVCache) -> PagedBatch:
    """The Run's rows with their places in the cache."""
    positions: list[int] = []
    write_places: list[int] = []
    segments: list[tuple[int, Segment]] = []
    for segment in run.segments:
        segments.append((len(positions), segment))
        span = range(segment.first_position, segment.context_tokens)
        positions.extend(span)
        table, size = segment.block_table, cache.block_tokens
        write_places.extend(table[i // size] * size + i % size for i in span)
    return PagedBatch(
        cache=cache,
        positions=torch.tensor([positions], device=cache.device),
        write_places=torch.tensor(write_places, device=cache.device),
        segments=tuple(segments),
    )


def attend(
    paged: PagedBatch,
    layer: int,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Write the rows' keys and values, then attend.

    `queries` (heads, T, D), `keys` and `values` (KV heads, T, D) are of the decoder layer that
    counts `layer` from 0; the result is (T, heads, D). Query head h uses KV head
    h // (heads / KV heads). A row sees the last `window` positions, its own included; `softcap`
    bounds the scores (Gemma 2).
    """
    cached_keys, cached_values = paged.cache.keys[layer], paged.cache.values[layer]
    cached_keys.index_copy_(1, paged.write_places, keys)
    cached_values.index_copy_(1, paged.write_places, values)
    heads, rows, head_dim = queries.shape
    plan = paged.plan(window)
    if plan.singles is not None:
        out = _attend_singles(paged.cache, layer, queries, plan.singles, scaling, softcap)
    else:
        out = torch.empty(rows, heads, head_dim, dtype=queries.dtype, device=queries.device)
    for group in plan.decodes:
        attended = _attend_decodes(
            queries if group.rows is None else queries.index_select(1, group.rows),
            cached_keys.index_select(1, group.places),
            cached_values.index_select(1, group.places),
            group.mask,
            scaling,
            softcap,
        )
        if group.rows is None:
            return attended
        out.index_copy_(0, group.rows, attended)
    for part in plan.prompts:
        own = slice(part.start, part.stop)
        attend_prompt(
            part,
            queries[:, own],
            (keys[:, own], values[:, own]),
            (cached_keys, cached_values),
            scaling,
            softcap,
            out=out[own],
        )
    return out


# -- helpers, in the order used -----------------------------------------------------------------


def _plan(
    segments: Sequence[tuple[int, Segment]], cache: KVCache, window: int | None
) -> AttentionPlan:
    decodes = [(row, segment) for row, segment in segments if segment.token_count == 1]
    prompts = tuple(
        prompt_part(row, segment, cache, window)
        for row, segment in segments
        if segment.token_count > 1
    )
    if not decodes:
        return AttentionPlan(None, (), prompts)
    if cache.is_read_in_place:
        return AttentionPlan(_single_rows(decodes, window), (), prompts)
    groups = tuple(
        _decode_group(group, cache, window, is_all=len(group) == len(segments))
        for group in _similar(decodes)
    )
    return AttentionPlan(None, groups, prompts)


def _single_rows(decodes: Sequence[tuple[int, Segment]], window: int | None) -> SingleRows:
    stops = np.array([segment.context_tokens for _, segment in decodes])
    blocks = max(len(segment.block_table) for _, segment in decodes)
    tables = np.zeros((len(decodes), blocks), np.int64)
    for table, (_, segment) in zip(tables, decodes, strict=True):
        table[: len(segment.block_table)] = segment.block_table
    return SingleRows(
        rows=np.array([row for row, _ in decodes]),
        tables=tables,
        starts=np.zeros_like(stops) if window is None else np.maximum(stops - window, 0),
        stops=stops,
    )


def _similar(decodes: list[tuple[int, Segment]]) -> Iterator[list[tuple[int, Segment]]]:
    """Cut (row, segment) pairs into groups of similar context, each in the order of its rows."""
    group: list[tuple[int, Segment]] = []
    limit_tokens = 0
    for row, segment in sorted(decodes, key=lambda pair: (pair[1].context_tokens, pair[0])):
        if group and segment.context_tokens > limit_tokens:
            yield sorted(group, key=itemgetter(0))
            group = []
        if not group:
            limit_tokens = max(GROUP_CONTEXT_TOKENS, GROUP_CONTEXT_RATIO * segment.context_tokens)
        group.append((row, segment))
    if group:
        yield sorted(group, key=itemgetter(0))


def _decode_group(
    group: Sequence[tuple[int, Segment]], cache: KVCache, window: int | None, is_all: bool
) -> DecodeGroup:
    device, block_tokens = cache.device, cache.block_tokens
    contexts = [segment.context_tokens for _, segment in group]
    starts = [0 if window is None else max(context - window, 0) for context in contexts]
    seen_max = max(context - start for context, start in zip(contexts, starts, strict=True))
    if cache.keys.dtype is not torch.float32:
        seen_max += -seen_max % PADDED_CONTEXT_TOKENS
    blocks = -(-max(contexts) // block_tokens)
    tables = torch.tensor(
        [(list(s.block_table[:blocks]) + [0] * blocks)[:blocks] for _, s in group], device=device
    )
    stops = torch.tensor(contexts, device=device).unsqueeze(1)
    positions = torch.tensor(starts, device=device).unsqueeze(1) + torch.arange(
        seen_max, device=device
    )
    # Padding reads the row's own position, which is written: the pool's other bytes may be no
    # numbers, and zero times NaN is NaN.
    padded = torch.minimum(positions, stops - 1)
    places = tables.gather(1, padded // block_tokens) * block_tokens + padded % block_tokens
    is_seen = positions < stops
    rows = None if is_all else torch.tensor([row for row, _ in group], device=device)
    mask = None if bool(is_seen.all()) else _additive(is_seen, cache).unsqueeze(1)
    return DecodeGroup(rows, places.flatten(), mask)


def _additive(is_seen: torch.Tensor, cache: KVCache) -> torch.Tensor:
    """A mask to add to scores: 0 where `is_seen`, minus infinity elsewhere."""
    mask = torch.zeros(is_seen.shape, dtype=cache.keys.dtype, device=cache.device)
    return mask.masked_fill_(~is_seen, float("-inf"))


def _attend_singles(
    cache: KVCache,
    layer: int,
    queries: torch.Tensor,
    singles: SingleRows,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """The result (T, heads, D) for `queries` (heads, T, D); other rows than the single ones hold
    anything."""
    ordered = queries.transpose(0, 1).contiguous()
    out = torch.empty(ordered.shape, dtype=torch.float32)
    attend_rows(
        as_array(ordered),
        *cache.arrays(layer),
        singles.rows,
        singles.tables,
        singles.starts,
        singles.stops,
        cache.block_tokens,
        np.float32(scaling),
        np.float32(softcap or 0.0),
        out.numpy(),
    )
    return out.to(queries.dtype)


def _attend_decodes(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """`queries` (heads, B, D); `keys`, `values` (KV heads, B * C, D); the result (B, heads, D).

    The query heads that share a KV head are laid out as its query rows: nothing is repeated.
    """
    heads, batch, head_dim = queries.shape
    kv_heads = keys.shape[0]
    shared = heads // kv_heads
    grouped = queries.view(kv_heads, shared, batch, head_dim).transpose(1, 2)
    scores = _scores(
        grouped.reshape(kv_heads * batch, shared, head_dim),
        keys.view(kv_heads * batch, -1, head_dim),
        scaling,
        softcap,
    )
    if mask is not None:
        scores.view(kv_heads, batch, shared, -1).add_(mask)
    attended = torch.bmm(_probabilities(scores), values.view(kv_heads * batch, -1, head_dim))
    return attended.view(kv_heads, batch, shared, head_dim).transpose(0, 1).flatten(1, 2)


def _scores(
    queries: torch.Tensor, keys: torch.Tensor, scaling: float, softcap: float | None
) -> torch.Tensor:
    """(batch, n, D) and (batch, C, D) to (batch, n, C)."""
    scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(scaling)
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


def _probabilities(scores: torch.Tensor) -> torch.Tensor:
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
