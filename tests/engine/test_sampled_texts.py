"""A sampled text depends on its request and its seed, not on what else an instance does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from engine_instance import Instance, load, request
from msgspec.structs import replace
from sampling_reference import reference_token, segment
from transformers import AutoModelForCausalLM

from effort import mostly_long
from livescale.batching.runs.run import SequenceSpec
from livescale.engine.executor import TorchExecutor
from livescale.values.types import LayerSpan, SamplingParams

LAYERS = 6
ALL = LayerSpan(0, LAYERS)
OUTPUT_TOKENS = 16

WAYS = [
    SamplingParams(OUTPUT_TOKENS, temperature=1.0, seed=1),
    SamplingParams(OUTPUT_TOKENS, temperature=1.5, top_p=0.9, seed=2),
    SamplingParams(OUTPUT_TOKENS),
    SamplingParams(OUTPUT_TOKENS, temperature=0.8, top_k=20, top_p=0.95, min_p=0.01, seed=3),
    SamplingParams(OUTPUT_TOKENS, repetition_penalty=1.5, presence_penalty=0.5),
    SamplingParams(OUTPUT_TOKENS, temperature=1.0, frequency_penalty=1.0, seed=4, logprobs=2),
    SamplingParams(
        OUTPUT_TOKENS,
        temperature=2.0,
        seed=5,
        stop_token_ids=tuple(range(0, 1024, 2)),
        output_tokens_min=OUTPUT_TOKENS,
        logit_bias=((1, 2.0), (3, 1.5)),
    ),
]
PROMPT_TOKENS = [1, 40, 7, 13, 22, 3, 30]


def requests() -> list[SequenceSpec]:
    return [
        dataclasses.replace(request(f"s{index}", tokens, OUTPUT_TOKENS), sampling=way)
        for index, (tokens, way) in enumerate(zip(PROMPT_TOKENS, WAYS, strict=True))
    ]


@pytest.fixture(scope="module")
def alone(executors: dict[str, TorchExecutor]) -> dict[str, list[int]]:
    """The text of each request when it has an instance for itself."""
    texts = {}
    for spec in requests():
        instance = Instance([(executors["tiny"], ALL)])
        instance.add([spec])
        texts |= instance.finish()
    return texts


def test_texts_are_those_of_stock_logits(models: Path, alone: dict[str, list[int]]) -> None:
    stock = AutoModelForCausalLM.from_pretrained(models / "tiny", dtype=torch.float32)
    for spec in requests():
        text = alone[spec.request]
        assert len(text) == OUTPUT_TOKENS
        with torch.inference_mode():
            logits = stock(input_ids=torch.tensor([[*spec.prompt_ids, *text]])).logits[0]
        for index, token_id in enumerate(text):
            row = logits[len(spec.prompt_ids) - 1 + index].numpy()
            of = segment(spec.sampling, spec.prompt_ids, text[:index])
            assert token_id == reference_token(row, of), f"{spec.request}, token {index}"


def test_the_texts_are_not_greedy_and_seeds_matter(
    executors: dict[str, TorchExecutor], alone: dict[str, list[int]]
) -> None:
    instance = Instance([(executors["tiny"], ALL)])
    for index, spec in enumerate(requests()):
        greedy = SamplingParams(OUTPUT_TOKENS)
        reseeded = replace(spec.sampling, seed=spec.sampling.seed + 1)
        instance.add([dataclasses.replace(spec, request=f"g{index}", sampling=greedy)])
        instance.add([dataclasses.replace(spec, request=f"n{index}", sampling=reseeded)])
    others = instance.finish()
    for index, way in enumerate(WAYS):
        text = alone[f"s{index}"]
        assert (text == others[f"g{index}"]) == (index == 2), "only one of the ways is greedy"
        assert (text == others[f"n{index}"]) == (way.temperature == 0)


@pytest.mark.parametrize("run_tokens_max", mostly_long([8, 11, 30, 512], [11]))
@pytest.mark.parametrize("is_reversed", [False, True])
def test_mixed_and_chunked(
    executors: dict[str, TorchExecutor],
    alone: dict[str, list[int]],
    run_tokens_max: int,
    is_reversed: bool,
) -> None:
    instance = Instance([(executors["tiny"], ALL)], run_tokens_max, sequences_max=5)
    instance.add(reversed(requests()) if is_reversed else requests())
    assert instance.finish() == alone


@pytest.mark.parametrize("gap", [1, 3, 7])
def test_arriving_one_after_the_other(
    executors: dict[str, TorchExecutor], alone: dict[str, list[int]], gap: int
) -> None:
    instance = Instance([(executors["tiny"], ALL)], run_tokens_max=16)
    for spec in requests():
        instance.add([spec])
        for _ in range(gap):
            instance.step()
    assert instance.finish() == alone


def test_preempted(executors: dict[str, TorchExecutor], alone: dict[str, list[int]]) -> None:
    instance = Instance([(executors["tiny"], ALL)], 32, kv_blocks=24, growth_tokens=0)
    instance.add(requests())
    assert instance.finish() == alone
    assert instance.batcher.room.preemptions > 0


@pytest.mark.parametrize("kept", [1, 7, 15])
def test_second_attempt_goes_on_with_the_same_text(
    executors: dict[str, TorchExecutor], alone: dict[str, list[int]], kept: int
) -> None:
    instance = Instance([(executors["tiny"], ALL)], run_tokens_max=8)
    instance.add(
        dataclasses.replace(spec, attempt=1, generated_ids=tuple(alone[spec.request][:kept]))
        for spec in requests()
    )
    assert instance.finish() == alone


def test_two_spans(models: Path, alone: dict[str, list[int]]) -> None:
    first, second = LayerSpan(0, 3), LayerSpan(3, LAYERS)
    stages = [
        (load(models / "tiny", range(3))[0], first),
        (load(models / "tiny", range(3, LAYERS))[0], second),
    ]
    instance = Instance(stages, run_tokens_max=16)
    instance.add(requests())
    assert instance.finish() == alone
