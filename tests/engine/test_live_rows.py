"""Hidden rows and KV leave an instance inside the model, and another one goes on with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from engine_instance import BLOCK_TOKENS, FamilyModel, load, request
from hypothesis import given
from hypothesis import strategies as st

from effort import mostly_long
from livescale.batching.runs.run import Run, Segment
from livescale.engine.attention import prompt_attention
from livescale.engine.executor import TorchExecutor
from livescale.engine.files.make import FAMILY_NAMES
from livescale.values.types import LayerSpan, SamplingParams

LAYERS = 6  # of the made models
HIDDEN = 128  # of the model "tiny"

Models = Callable[[str], FamilyModel]


def prompt_run(span: LayerSpan, prompts: list[tuple[int, ...]], first_block: int) -> Run:
    """Whole prompts over a span, in blocks from `first_block` on."""
    segments = []
    for prompt in prompts:
        stop = first_block + -(-(len(prompt) + 8) // BLOCK_TOKENS)
        segments.append(
            Segment(
                *(f"p{first_block}", 0, 0, prompt, tuple(range(first_block, stop))),
                samples=span.stop == LAYERS,
                sampling=SamplingParams(8),
                prompt_ids=prompt,
            )
        )
        first_block = stop
    return Run(1, span, tuple(segments))


@pytest.mark.parametrize(
    "name",
    mostly_long([name + way for name in FAMILY_NAMES for way in ("", " other")], FAMILY_NAMES),
)
def test_a_batch_goes_on_elsewhere_from_every_layer(family_model: Models, name: str) -> None:
    """What the head says, and what decodes say then, is the same wherever the batch was cut."""
    model = family_model(name)
    target, source = model.executor, load(model.directory, None, 1 << 20)[0]
    prompts = [tuple(request(f"cut{n}", n, 1, 512).prompt_ids) for n in (30, 1, 47)]
    whole = go_on(target, prompt_run(LayerSpan(0, LAYERS), prompts, 0), None)
    for cut in range(1, LAYERS):
        target._pool.fill_(0xFF)  # every fp32 in it is NaN: what is not moved is missed
        source._pool.fill_(0xFF)
        here = prompt_run(LayerSpan(0, cut), prompts, 3)
        there = prompt_run(LayerSpan(cut, LAYERS), prompts, 90)
        hidden = target.run(here).hidden
        assert hidden is not None
        rows = source.import_rows(target.export_rows(hidden), here.token_count)
        first = source.run(there, rows).token_ids
        for layer in range(cut - 1):
            for mine, yours in zip(here.segments, there.segments, strict=True):
                content = target.export_kv(layer, mine.block_table, mine.token_count)
                assert content.nbytes == source.kv_layer_bytes(mine.token_count)
                source.import_kv(layer, yours.block_table, yours.token_count, content)
        assert go_on(source, there, first) == whole, f"cut before layer {cut}"


def go_on(executor: TorchExecutor, run: Run, tokens: list[int] | None) -> list[list[int]]:
    """The first tokens of a batch of prompts and three further ones of each; `tokens` are the first
    ones, of prompts whose KV is complete."""
    said = [tokens or executor.run(run).token_ids]
    for step in range(3):
        segments = [
            next_token(segment, step, [tokens[index] for tokens in said])
            for index, segment in enumerate(run.segments)
        ]
        said.append(executor.run(Run(2, LayerSpan(0, LAYERS), tuple(segments))).token_ids)
    return said


def next_token(segment: Segment, step: int, generated: list[int]) -> Segment:
    return Segment(
        *(segment.request, 0, segment.token_count + step, (generated[-1],), segment.block_table),
        samples=True,
        sampling=segment.sampling,
        prompt_ids=segment.prompt_ids,
        generated_ids=tuple(generated),
    )


@pytest.mark.parametrize("name", ["tiny", "bf16"])
@given(tokens=st.integers(1, 9), seed=st.integers(0, 1000))
def test_rows_arrive_bit_for_bit(models: Path, name: str, tokens: int, seed: int) -> None:
    executor = ready(models, name)
    bits = torch.randint(
        0,
        256,
        (tokens, 2 * HIDDEN * executor.dtype.itemsize),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )
    # Every second value of something wider: not contiguous, and any bits, NaN included.
    rows = bits.view(executor.dtype)[:, ::2]
    content = executor.export_rows(rows)
    assert content.nbytes == rows.numel() * executor.dtype.itemsize
    assert content.tobytes() == rows.contiguous().view(torch.uint8).numpy().tobytes()
    arrived = executor.import_rows(memoryview(content.tobytes()), tokens)
    assert arrived.shape == (tokens, HIDDEN)
    assert arrived.dtype == executor.dtype
    assert torch.equal(arrived.view(torch.uint8), rows.contiguous().view(torch.uint8))
    rows.fill_(0)
    assert content.tobytes() == arrived.view(torch.uint8).numpy().tobytes(), "it is a copy"


def test_a_bf16_batch_gives_the_same_bits_here_and_elsewhere(models: Path) -> None:
    target, source = ready(models, "bf16"), load(models / "bf16")[0]
    prompt = tuple(request("bits", 37, 1).prompt_ids)
    rows = target.run(prompt_run(LayerSpan(0, 3), [prompt], 0)).hidden
    assert isinstance(rows, torch.Tensor)
    assert rows.dtype == torch.bfloat16
    moved = source.import_rows(target.export_rows(rows), len(prompt))
    rest = prompt_run(LayerSpan(3, 5), [prompt], 7)
    here, there = target.run(rest, rows).hidden, source.run(rest, moved).hidden
    assert isinstance(here, torch.Tensor)
    assert isinstance(there, torch.Tensor)
    assert torch.equal(here.view(torch.int16), there.view(torch.int16))


def test_rows_of_another_size_are_refused(models: Path) -> None:
    executor = ready(models, "bf16")
    row_bytes = 2 * HIDDEN
    with pytest.raises(ValueError, match=f"{3 * row_bytes} bytes of rows, 2 tokens have"):
        executor.import_rows(memoryview(bytes(3 * row_bytes)), 2)
    with pytest.raises(ValueError, match="0 bytes of rows, 0 tokens"):
        executor.import_rows(memoryview(b""), 0)


@pytest.mark.parametrize("name", ["gemma2", "bf16"])
def test_rows_that_take_turns_attend_to_the_same(
    family_model: Models, models: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Where attention is computed from its parts, a long prompt's rows are not all computed at
    once."""
    is_made = name == "bf16"
    executor = load(models / name if is_made else family_model(name).directory)[0]
    run = prompt_run(LayerSpan(0, 5), [tuple(request("turns", 90, 1, 512).prompt_ids)], 0)
    together = executor.run(run).hidden
    assert isinstance(together, torch.Tensor)
    for scores in (1, 5_000):
        monkeypatch.setitem(prompt_attention.SCORES_AT_ONCE, "cpu", scores)
        in_turns = executor.run(run).hidden
        assert isinstance(in_turns, torch.Tensor)
        distance = (in_turns - together).float().abs().max() / together.float().std()
        assert float(distance) < (0.05 if is_made else 1e-5)


@cache
def ready(models: Path, name: str) -> TorchExecutor:
    return load(models / name)[0]
