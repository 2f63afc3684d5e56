"""A request's KV leaves one executor for other blocks of another, and its tokens go on alike."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_instance import BLOCK_TOKENS, FamilyModel, load, request
from hypothesis import given
from hypothesis import strategies as st

from livescale.batching.runs.run import Run, Segment
from livescale.engine.attention.kv_cache import KVCache, KvSize
from livescale.engine.executor import TorchExecutor
from livescale.values.types import LayerSpan, SamplingParams

ALL = LayerSpan(0, 6)
DECODER_LAYERS = 4


def generate(
    executor: TorchExecutor,
    block_table: tuple[int, ...],
    known: list[int],
    computed: int,
    n: int,
) -> list[int]:
    """`known` and `n` more tokens; the first `computed` have their KV in the blocks."""
    known = list(known)
    for _ in range(n):
        new = tuple(known[computed:])
        segment = Segment("r", 0, computed, new, block_table, True, SamplingParams(n))
        computed = len(known)
        known += executor.run(Run(1, ALL, (segment,))).token_ids
    return known


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("first", [1, 9])
def test_generation_goes_on_elsewhere(
    family_model: Callable[[str], FamilyModel], name: str, first: int
) -> None:
    model = family_model(name)
    source, target = (load(model.directory)[0] for _ in range(2))
    prompt = list(request("move", 30, 1, 512).prompt_ids)
    here, there = tuple(range(3, 20)), tuple(reversed(range(40, 57)))
    whole = generate(source, here, prompt, 0, 25)
    known = generate(source, here, prompt, 0, first)
    target._pool.fill_(0xFF)  # every fp32 in it is NaN: what is not moved is missed
    computed = len(known) - 1
    for layer in range(DECODER_LAYERS):
        content = bytearray(source.export_kv(layer, here, computed))
        target.import_kv(layer, there, computed, memoryview(content))
    assert generate(target, there, known, computed, 25 - first) == whole


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("computed", [0, 13])
def test_kv_of_a_layer_that_is_told_is_that_of_the_whole_run(
    family_model: Callable[[str], FamilyModel], name: str, computed: int
) -> None:
    """KV leaves while later layers are computed: of a whole prompt, and of one whose beginning an
    earlier Run computed. Each decoder layer is told once, in order, and the token is the same."""
    model = family_model(name)
    source, target = (load(model.directory)[0] for _ in range(2))
    source._pool.fill_(0xFF)  # every fp32 in it is NaN: what is told too early is none of the KV
    target._pool.fill_(0xFF)
    prompt = list(request("told", 30, 1, 512).prompt_ids)
    here, there = tuple(range(3, 20)), tuple(reversed(range(40, 57)))
    if computed:
        beginning = Segment("r", 0, 0, tuple(prompt[:computed]), here, False, SamplingParams(20))
        source.run(Run(1, ALL, (beginning,)))
    rest = Segment("r", 0, computed, tuple(prompt[computed:]), here, True, SamplingParams(20))
    told: dict[int, bytearray] = {}

    def layer_ran(number: int) -> None:
        assert number not in told
        told[number] = bytearray(source.export_kv(number - 1, here, len(prompt)))
        target.import_kv(number - 1, there, len(prompt), memoryview(told[number]))

    known = prompt + source.run(Run(2, ALL, (rest,)), None, layer_ran).token_ids
    assert list(told) == [1, 2, 3, 4]
    for number, content in told.items():
        assert content == bytearray(source.export_kv(number - 1, here, len(prompt)))
    tokens = generate(target, there, known, len(prompt), 19)
    assert tokens == generate(model.executor, here, prompt, 0, 20)


@pytest.mark.parametrize("cut", range(1, 6))
def test_layers_of_a_span_are_told_but_embedding_and_head(models: Path, cut: int) -> None:
    executor, _, _ = load(models / "tiny")
    prompt = request("span", 9, 1).prompt_ids
    told: list[int] = []
    hidden = None
    for span in (LayerSpan(0, cut), LayerSpan(cut, 6)):
        segment = Segment("r", 0, 0, prompt, (1, 2, 3), span.stop == 6, SamplingParams(1))
        hidden = executor.run(Run(1, span, (segment,)), hidden, told.append).hidden
        assert told == [number for number in range(1, 5) if number < span.stop]


def cache(dtype: torch.dtype, blocks: int, block_tokens: int) -> KVCache:
    """A cache of 3 layers, 2 KV heads and head size 5, filled with random numbers."""
    pool = torch.empty(2 * 3 * blocks * block_tokens * 2 * 5 * dtype.itemsize, dtype=torch.uint8)
    made = KVCache(pool, dtype, KvSize(3, blocks, block_tokens, 2, 5))
    for table in (made.keys, made.values):
        table.copy_(torch.randn(table.shape))
    return made


@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    block_tokens=st.integers(1, 7),
    blocks=st.integers(1, 9),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_roundtrip(
    dtype: torch.dtype, block_tokens: int, blocks: int, seed: int, data: st.DataObject
) -> None:
    draw = random.Random(seed)
    source, target = cache(dtype, blocks, block_tokens), cache(dtype, blocks + 2, block_tokens)
    here = draw.sample(range(blocks), blocks)
    there = draw.sample(range(blocks + 2), blocks)
    tokens = data.draw(st.integers(1, blocks * block_tokens))
    layer = draw.randrange(3)
    before = [table.clone() for table in (target.keys, target.values)]
    buffer = source.export_layer(layer, here, tokens)
    assert buffer.is_contiguous()
    target.import_layer(layer, there, buffer)
    assert torch.equal(target.export_layer(layer, there, tokens), buffer)
    for index, (mine, yours) in enumerate(
        ((source.keys, target.keys), (source.values, target.values))
    ):
        for position in range(tokens):
            from_place = here[position // block_tokens] * block_tokens + position % block_tokens
            to_place = there[position // block_tokens] * block_tokens + position % block_tokens
            assert torch.equal(buffer[index, position], mine[layer, :, from_place])
            assert torch.equal(yours[layer, :, to_place], mine[layer, :, from_place])
            yours[layer, :, to_place] = before[index][layer, :, to_place]
        assert torch.equal(yours, before[index]), "nothing else was written"


def test_what_does_not_fit_is_refused(models: Path) -> None:
    executor, _, _ = load(models / "tiny")
    token_bytes = 2 * 2 * 32 * 4  # keys and values, KV heads, head size, fp32
    content = memoryview(bytearray(5 * token_bytes))
    executor.import_kv(0, (1, 2), 5, content)
    with pytest.raises(ValueError, match=f"2560 bytes of KV, 6 tokens have {6 * token_bytes}"):
        executor.import_kv(0, (1, 2), 6, content)
    with pytest.raises(ValueError, match=f"KV of 5 tokens in blocks that hold {BLOCK_TOKENS}"):
        executor.import_kv(0, (1,), 5, content)
    with pytest.raises(ValueError, match=r"blocks \(1, 256\) of a cache of 256"):
        executor.import_kv(0, (1, 256), 5, content)
    with pytest.raises(ValueError, match="KV of 9 tokens in blocks that hold 8"):
        executor.export_kv(0, (1, 2), 9)
    other = cache(torch.float32, 2, 4)
    for wrong in (
        torch.zeros(2, 3, 2, 6),
        torch.zeros(1, 3, 2, 5),
        torch.zeros(2, 3, 2, 5).half(),
        torch.zeros(60),
    ):
        with pytest.raises(ValueError, match=r"cache of \(2, tokens, 2, 5\) and torch\.fl"):
            other.import_layer(0, (0,), wrong)
