"""Attention of prompts against the same written densely, in fp64, and what memory it takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from effort import mostly_long
from livescale.batching.runs.run import Segment
from livescale.engine.attention import prompt_attention
from livescale.engine.attention.kv_cache import KVCache, KvSize
from livescale.engine.attention.prompt_attention import attend_prompt, prompt_part, row_blocks
from livescale.values.types import SamplingParams

CPU = torch.device("cpu")
#: of a result's distance from the oracle's, where values are of size one
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


@contextmanager
def sizes(tile_tokens: int, masked_scores: int, scores_at_once: int) -> Iterator[None]:
    """Tiles of other sizes, so that short prompts have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(prompt_attention.TILE_TOKENS, "cpu", tile_tokens)
        patch.setattr(prompt_attention, "MASKED_SCORES", masked_scores)
        patch.setitem(prompt_attention.SCORES_AT_ONCE, "cpu", scores_at_once)
        yield


def seen_by(first: int, rows: int, window: int | None) -> torch.Tensor:
    """(rows, first + rows): does the row see the position?"""
    own = torch.arange(first, first + rows).unsqueeze(1)
    positions = torch.arange(first + rows)
    is_seen = positions <= own
    return is_seen if window is None else is_seen & (positions > own - window)


@dataclass(frozen=True)
class Prompt:
    """Rows behind earlier ones, in a cache whose other bytes are no numbers."""

    segment: Segment
    cache: KVCache
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    window: int | None

    def attended(self, scaling: float, softcap: float | None) -> torch.Tensor:
        heads, rows, head_dim = self.queries.shape
        part = prompt_part(0, self.segment, self.cache, self.window)
        out = torch.full((rows, heads, head_dim), 7.0, dtype=self.queries.dtype)
        first = self.segment.first_position
        own = self.keys[:, first:], self.values[:, first:]
        cached = self.cache.keys[0], self.cache.values[0]
        attend_prompt(part, self.queries, own, cached, scaling, softcap, out)
        return out

    def wanted(self, scaling: float, softcap: float | None) -> torch.Tensor:
        shared = len(self.queries) // len(self.keys)
        keys, values = (of.double().repeat_interleave(shared, 0) for of in (self.keys, self.values))
        scores = self.queries.double() @ keys.transpose(1, 2) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        is_seen = seen_by(self.segment.first_position, self.queries.shape[1], self.window)
        scores.masked_fill_(~is_seen, float("-inf"))
        return (scores.softmax(-1) @ values).transpose(0, 1)


def a_prompt(
    first: int,
    rows: int,
    window: int | None,
    shape: tuple[int, int, int] = (2, 2, 8),
    dtype: torch.dtype = torch.float32,
    block_tokens: int = 16,
    size: float = 1.0,
) -> Prompt:
    """`shape` is (KV heads, query heads of each, head size)."""
    kv_heads, shared, head_dim = shape
    stop = first + rows
    blocks = -(-stop // block_tokens) + 2
    pool_bytes = 2 * kv_heads * blocks * block_tokens * head_dim * dtype.itemsize
    pool = torch.full((pool_bytes,), 0xFF, dtype=torch.uint8)
    cache = KVCache(pool, dtype, KvSize(1, blocks, block_tokens, kv_heads, head_dim))
    table = tuple(torch.randperm(blocks)[:-2].tolist())
    # Turned like rows of a layer, whose heads lie beside one another.
    queries = (torch.randn(rows, kv_heads * shared, head_dim) * size).to(dtype).transpose(0, 1)
    keys, values = torch.randn(2, kv_heads, stop, head_dim).to(dtype)
    seen_from = 0 if window is None else max(first - window + 1, 0)
    places = cache.places(table, seen_from, stop)
    cache.keys[0].index_copy_(1, places, keys[:, seen_from:])
    cache.values[0].index_copy_(1, places, values[:, seen_from:])
    segment = Segment("p", 0, first, (1,) * rows, table, samples=False, sampling=SamplingParams(1))
    return Prompt(segment, cache, queries, keys, values, window)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@given(
    first=st.one_of(st.just(0), st.integers(1, 90)),
    rows=st.integers(1, 70),
    window=st.one_of(st.none(), st.integers(1, 100)),
    softcap=st.sampled_from([None, 1.5]),
    shape=st.sampled_from([(1, 1, 8), (2, 3, 24), (4, 1, 64), (1, 5, 33)]),
    block_tokens=st.sampled_from([1, 4, 16]),
    tile_tokens=st.sampled_from([1, 7, 16, 32, 1024]),
    masked_scores=st.sampled_from([0, 200, 1 << 16]),
    scores_at_once=st.sampled_from([1, 300, 1 << 18]),
    size=st.sampled_from([0.1, 3.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_it_is_attention(
    dtype: torch.dtype,
    first: int,
    rows: int,
    window: int | None,
    softcap: float | None,
    shape: tuple[int, int, int],
    block_tokens: int,
    tile_tokens: int,
    masked_scores: int,
    scores_at_once: int,
    size: float,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    prompt = a_prompt(first, rows, window, shape, dtype, block_tokens, size)
    with sizes(tile_tokens, masked_scores, scores_at_once):
        out = prompt.attended(0.2, softcap)
    distance = (out.double() - prompt.wanted(0.2, softcap)).abs().max()
    assert float(distance) < TOLERANCES[dtype] * max(1, size / 3)


@pytest.mark.parametrize("dtype", mostly_long(TOLERANCES, [torch.bfloat16]), ids=str)
def test_tiles_of_the_size_that_serves(dtype: torch.dtype) -> None:
    """More rows, earlier positions and window than a tile has."""
    torch.manual_seed(1)
    for first, window in ((0, None), (1100, None), (1100, 1050)):
        prompt = a_prompt(first, 1090, window, dtype=dtype)
        distance = (prompt.attended(0.3, None).double() - prompt.wanted(0.3, None)).abs().max()
        assert float(distance) < TOLERANCES[dtype]


@given(
    first=st.integers(0, 60),
    rows=st.integers(1, 60),
    window=st.one_of(st.none(), st.integers(1, 70)),
    tile_tokens=st.integers(1, 40),
    masked_scores=st.sampled_from([0, 500]),
)
@example(first=0, rows=40, window=1, tile_tokens=16, masked_scores=0)
def test_tiles_have_each_seen_position_once(
    first: int, rows: int, window: int | None, tile_tokens: int, masked_scores: int
) -> None:
    with sizes(tile_tokens, masked_scores, 1):
        blocks = row_blocks(first, rows, window, CPU)
    count = torch.zeros(rows, first + rows)
    assert [row for block in blocks for row in range(block.start, block.stop)] == [*range(rows)]
    for block in blocks:
        assert block.tiles[0].rows == block.stop - block.start
        for tile in block.tiles:
            columns = tile.stop - tile.start
            visible = torch.ones(tile.rows, columns)
            if tile.is_causal:
                visible.tril_()
            if tile.mask is not None:
                visible = (tile.mask == 0).float()
            assert visible.any(1).all(), "torch's kernel errs in rows that see nothing"
            assert visible.any(0).all(), "a position that no row sees is not read"
            assert max(tile.rows, columns) <= tile_tokens or tile.mask is not None
            assert tile.mask is None or visible.numel() <= max(masked_scores, tile_tokens**2)
            count[block.start : block.start + tile.rows, tile.start : tile.stop] += visible
    assert torch.equal(count, seen_by(first, rows, window).float())


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that any step gave, and of the largest one in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.fp32_elements = 0

    def __torch_dispatch__(self, step: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = step(*args, **(kwargs or {}))
        for tensor in given if isinstance(given, tuple | list) else (given,):
            if isinstance(tensor, torch.Tensor):
                # Of one that is expanded, or a view, what it stands on.
                stored = tensor.untyped_storage().nbytes() // tensor.element_size()
                elements = min(tensor.numel(), stored)
                self.elements = max(self.elements, elements)
                if tensor.dtype is torch.float32:
                    self.fp32_elements = max(self.fp32_elements, elements)
        return given


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("softcap", mostly_long([None, 2.0], [2.0]))
@pytest.mark.parametrize("window", mostly_long([None, 50], [50]))
@pytest.mark.parametrize("first", [0, 300])
def test_memory_grows_with_the_rows_and_no_faster(
    first: int, window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    largest = []
    for rows in (256, 512):
        prompt = a_prompt(first, rows, window, (1, 2, 4), dtype)
        with sizes(32, 1024, 4096), _Largest() as given:
            prompt.attended(0.3, softcap)
        # The layer's rows of the cache are looked at, and not copied.
        cached = prompt.cache.keys[0].numel()
        largest.append(given.elements)
        assert given.elements <= max(prompt.queries.numel(), cached)
        if dtype is torch.float16:
            assert given.fp32_elements <= 4096, "what is widened, or a score, is of one tile"
        if dtype is torch.float16 and softcap is None:
            assert given.fp32_elements <= 1024, "a tile's mask is the largest"
    assert largest[1] <= 2 * largest[0]


@given(tokens=st.integers(2000, 9000), window=st.integers(1, 3000))
def test_equal_masks_are_one(tokens: int, window: int) -> None:
    """However long a prompt is: that of all blocks but the first and last ones, and theirs."""
    blocks = row_blocks(0, tokens, window, CPU)
    masks = {id(tile.mask) for block in blocks for tile in block.tiles if tile.mask is not None}
    assert len(masks) <= 4
