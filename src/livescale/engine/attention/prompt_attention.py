"""Attention of prompts: many rows of one request, tile by tile.

A block of rows attends to its context piece by piece. What a piece gives is a softmax of its own;
the logarithms of the sums of exponentials say in which shares two of them are joined (running
softmax: Milakov and Gimelshein 2018, §3; Dao et al. 2022, arXiv 2205.14135, §3.1). So memory
follows the size of a tile, not the length of a prompt, and what no row of a block sees is not
computed. No single rows, no weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch.nn.functional import scaled_dot_product_attention

from livescale.batching.runs.run import Segment
from livescale.engine.attention.kv_cache import KVCache

TILE_TOKENS = {"cpu": 1024, "cuda": 4096}
"""Rows of a block and positions of a piece, at most. Smaller pieces are joined more often; larger
ones need larger copies."""

MASKED_SCORES, MASKED_TOKENS = 1 << 16, 4096
"""Rows times positions, and positions, up to which rows and their context are one tile, under a
mask of that size: what joining two tiles costs is more than what the mask hides."""

SCORES_AT_ONCE = {"cpu": 1 << 18, "cuda": 64 << 20}
"""Scores that are held at a time where a tile is computed from its parts. On a CPU they had better
stay in its caches; on a GPU few large steps are fast."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The first `rows` rows of a block and the positions `[start, stop)`, each of which is seen by
    one of them at least, as each row sees one at least.

    Row i sees the first i + 1 if the tile `is_causal`; the others than those that `mask`
    (rows, stop - start), which is added to scores, hides with minus infinity; or all.
    """

    rows: int
    start: int
    stop: int
    is_causal: bool = False
    mask: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows `[start, stop)` of a segment. The first tile has all of them."""

    start: int
    stop: int
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A segment of rows `[start, stop)` of the Run, which have the positions from `first` on.

    `places` are those of the positions `[seen_from, first + rows)` in the cache. `whole`: all that
    the rows see as one tile, if that needs no large mask.
    """

    start: int
    stop: int
    first: int
    seen_from: int
    places: torch.Tensor
    blocks: tuple[RowBlock, ...]
    whole: Tile | None


def prompt_part(row: int, segment: Segment, cache: KVCache, window: int | None) -> PromptPart:
    """The segment, whose first row is `row` of the Run, in layers whose rows see the last `window`
    positions (None: all)."""
    first, stop = segment.first_position, segment.context_tokens
    seen_from = _seen_from(first, window)
    blocks = row_blocks(first, segment.token_count, window, cache.device)
    whole = None
    if first == 0 and (window is None or stop <= window):
        whole = Tile(stop, 0, stop, is_causal=True)
    elif len(blocks) == len(blocks[0].tiles) == 1:
        whole = blocks[0].tiles[0]
    return PromptPart(
        start=row,
        stop=row + segment.token_count,
        first=first,
        seen_from=seen_from,
        places=cache.places(segment.block_table, seen_from, stop),
        blocks=blocks,
        whole=whole,
    )


def row_blocks(
    first: int, rows: int, window: int | None, device: torch.device
) -> tuple[RowBlock, ...]:
    """`rows` rows with the positions from `first` on, and what they see, in tiles."""
    masks = _Masks(window, device)
    seen_from, end = _seen_from(first, window), first + rows
    context = end - seen_from
    if seen_from < first and context <= MASKED_TOKENS and rows * context <= MASKED_SCORES:
        return (RowBlock(0, rows, (masks.tile(first, rows, seen_from, end),)),)
    size = TILE_TOKENS[device.type]
    # A block no longer than the window: its rows see all of the block before them.
    step = size if window is None else min(size, window)
    blocks = []
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        tiles = tuple(_tiles(first + start, first + stop, window, size, masks))
        blocks.append(RowBlock(start, stop, tiles))
    return tuple(blocks)


def attend_prompt(
    part: PromptPart,
    queries: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor],
    cached: tuple[torch.Tensor, torch.Tensor],
    scaling: float,
    softcap: float | None,
    out: torch.Tensor,
) -> None:
    """Fill `out` (n, heads, D) for `queries` (heads, n, D), the part's n rows.

    `own` are their keys and values (KV heads, n, D), `cached` those of the layer in the cache
    (KV heads, places, D). `softcap` bounds the scores (Gemma 2).
    """
    heads, _, head_dim = queries.shape
    kv_heads = own[0].shape[0]
    product_dtype = _product_dtype(queries.dtype, queries.device)
    whole, is_converted = part.whole, product_dtype is not queries.dtype
    # torch's kernels work in tiles themselves; a copy in another type is to be of one tile at most.
    if softcap is None and whole is not None and (len(part.blocks) == 1 or not is_converted):
        context = _context(part, whole, own, cached, product_dtype)
        out.copy_(_by_library(queries.to(product_dtype), *context, whole, scaling))
        return
    is_fused = softcap is None and queries.device.type == "cpu"

    def attend(rows: torch.Tensor, tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = _context(part, tile, own, cached, product_dtype)
        if is_fused:
            return _fused(rows, keys, values, tile, scaling)
        return _from_parts(rows, keys, values, tile, scaling, softcap)

    for block in part.blocks:
        rows = queries[:, block.start : block.stop].to(product_dtype)
        rows = rows.view(kv_heads, heads // kv_heads, -1, head_dim)
        first, *further = block.tiles
        attended, logs = attend(rows, first)
        if further:
            attended = attended.float()
        for tile in further:
            seeing = slice(0, tile.rows)
            more = attend(rows[:, :, seeing], tile)
            _join(attended[:, :, seeing], logs[:, :, seeing], *more)
        out[block.start : block.stop] = attended.reshape(heads, -1, head_dim).transpose(0, 1)


# -- helpers, in the order used -----------------------------------------------------------------


def _seen_from(position: int, window: int | None) -> int:
    """The first position that the row of this position sees."""
    return 0 if window is None else max(position - window + 1, 0)


class _Masks:
    """Tiles with masks. Equal masks are one tensor."""

    def __init__(self, window: int | None, device: torch.device) -> None:
        self._window = window
        self._device = device
        #: by rows, positions, and how far these begin before the first row
        self._masks: dict[tuple[int, int, int], torch.Tensor] = {}

    def tile(self, first: int, rows: int, start: int, stop: int) -> Tile:
        """The rows with the positions from `first` on, and the positions `[start, stop)`."""
        key = (rows, stop - start, first - start)
        if key not in self._masks:
            self._masks[key] = self._mask(*key)
        return Tile(rows, start, stop, mask=self._masks[key])

    def _mask(self, rows: int, columns: int, ahead: int) -> torch.Tensor:
        own = torch.arange(ahead, ahead + rows, device=self._device).unsqueeze(1)
        seen = torch.arange(columns, device=self._device)
        is_hidden = seen > own
        if self._window is not None:
            is_hidden |= seen <= own - self._window
        mask = torch.zeros(rows, columns, device=self._device)
        return mask.masked_fill_(is_hidden, float("-inf"))


def _tiles(first: int, stop: int, window: int | None, size: int, masks: _Masks) -> Iterator[Tile]:
    """Those of the block of rows at the positions `[first, stop)`: the rows themselves, then what
    all of them see, then the window's edge."""
    rows = stop - first
    yield Tile(rows, first, stop, is_causal=True)
    all_see_from = min(_seen_from(stop - 1, window), first)
    for start in range(all_see_from, first, size):
        yield Tile(rows, start, min(start + size, first))
    edge = _seen_from(first, window)
    if edge < all_see_from:
        # The last row begins behind the edge: it sees nothing of the tile, and is none of its rows.
        yield masks.tile(first, rows - 1, edge, all_see_from)


def _by_library(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tile: Tile, scaling: float
) -> torch.Tensor:
    """(n, heads, D), by the kernel that torch chooses."""
    attended = scaled_dot_product_attention(
        queries.unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=None if tile.mask is None else tile.mask.to(queries.dtype),
        is_causal=tile.is_causal,
        scale=scaling,
        enable_gqa=keys.shape[0] < queries.shape[0],
    )
    return attended[0].transpose(0, 1)


def _product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What a tile's products are computed in. CPUs without products in bf16 emulate them; products
    in fp16 are no faster than in fp32 where a CPU has them."""
    if device.type != "cpu" or (dtype is torch.bfloat16 and _has_bf16_products()):
        return dtype
    return torch.float32


@cache
def _has_bf16_products() -> bool:
    has_onednn: bool = torch._C._has_mkldnn
    return has_onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _context(
    part: PromptPart,
    tile: Tile,
    own: tuple[torch.Tensor, torch.Tensor],
    cached: tuple[torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tile's keys and values, (KV heads, stop - start, D) each."""
    keys, values = own
    if tile.start >= part.first:
        rows = slice(tile.start - part.first, tile.stop - part.first)
        return keys[:, rows].to(dtype), values[:, rows].to(dtype)
    # The rows of this Run are in the cache, too.
    places = part.places[tile.start - part.seen_from : tile.stop - part.seen_from]
    keys, values = (cache.index_select(1, places) for cache in cached)
    return keys.to(dtype), values.to(dtype)


_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def _fused(
    rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tile: Tile, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rows` (KV heads, query heads of each, n, D), `keys` and `values` (KV heads, C, D): attention
    over the tile, shaped like `rows`, and the logarithms of its sums (KV heads, shared, n), fp32.

    By torch's kernel for CPUs, which `scaled_dot_product_attention` calls too, but keeps these
    logarithms to itself. It gives 0 for those of rows that see nothing: tiles have none.
    """
    kv_heads, shared, count, head_dim = rows.shape
    if tile.is_causal or tile.mask is not None:
        attended, logs = _KERNEL(
            rows,
            keys.unsqueeze(1).expand(-1, shared, -1, -1),
            values.unsqueeze(1).expand(-1, shared, -1, -1),
            is_causal=tile.is_causal,
            attn_mask=tile.mask,
            scale=scaling,
        )
        return attended, logs
    # All see all: query heads that share keys are more rows of one head, which reads keys once.
    attended, logs = _KERNEL(
        rows.reshape(1, kv_heads, shared * count, head_dim),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        scale=scaling,
    )
    return attended.reshape(rows.shape), logs.reshape(rows.shape[:3])


def _from_parts(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tile: Tile,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_fused` by products and a softmax, in fp32; on any device, and with soft caps."""
    kv_heads, shared, count, head_dim = rows.shape
    attended = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
    logs = torch.empty(rows.shape[:3], dtype=torch.float32, device=rows.device)
    step = _rows_at_once(kv_heads * shared * keys.shape[1], rows.device)
    for start in range(0, count, step):
        stop = min(start + step, count)
        now = slice(start, stop)
        seen = stop if tile.is_causal else keys.shape[1]
        grouped = rows[:, :, now].reshape(kv_heads, -1, head_dim)
        scores = torch.bmm(grouped, keys[:, :seen].transpose(1, 2)).float().mul_(scaling)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        by_row = scores.view(kv_heads, shared, stop - start, seen)
        if tile.is_causal:
            hidden = torch.ones(stop - start, seen, dtype=torch.bool, device=rows.device)
            by_row.masked_fill_(hidden.triu_(start + 1), float("-inf"))
        elif tile.mask is not None:
            by_row.add_(tile.mask[now])
        highest = by_row.amax(dim=-1, keepdim=True)
        sums = by_row.sub_(highest).exp_().sum(dim=-1, keepdim=True)
        summed = torch.bmm(scores.to(values.dtype), values[:, :seen])
        attended[:, :, now] = summed.view(kv_heads, shared, -1, head_dim).div(sums)
        logs[:, :, now] = highest.add_(sums.log_()).squeeze(-1)
    return attended, logs


def _rows_at_once(row_scores: int, device: torch.device) -> int:
    """How many rows of so many scores are computed together: a power of two, because oneDNN
    compiles a kernel for each size."""
    fitting = max(SCORES_AT_ONCE[device.type] // row_scores, 1)
    return 1 << (fitting.bit_length() - 1)


def _join(
    rows: torch.Tensor, logs: torch.Tensor, more: torch.Tensor, more_logs: torch.Tensor
) -> None:
    """Change `rows` (.., n, D) and `logs` (.., n) to what they are over both parts of a context."""
    share = torch.sigmoid(more_logs - logs).unsqueeze(-1)
    rows.lerp_(more.to(rows.dtype), share)
    torch.logaddexp(logs, more_logs, out=logs)
