"""Greedy tokens of vLLM, run by an interpreter that has it: from its own load of a directory, or
with parameters that come from an arena.

Standard input has {"directories", "prompts", "tokens", "ways"}, the last line of the output has by
directory and way the tokens, and whether nothing was copied. In place of tokens the way "refused"
gives the words of the refusal, and "moved" the tokens and how they ended, by where a request was
cut and went on in a later attempt.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from vllm import LLM
from vllm import SamplingParams as VllmParams

from livescale.batching.engine_serving import EngineServing
from livescale.batching.runs.batcher import BatcherConfig
from livescale.batching.runs.run import EmittedTokens, SequenceSpec
from livescale.engine.base.errors import ModelError
from livescale.engine.files.model_files import read_layers, read_manifest
from livescale.values.types import SamplingParams
from livescale.vllm_engine.executor import VllmExecutor
from livescale.vllm_engine.skeleton import EngineTerms

BLOCK_TOKENS, RUN_TOKENS, SEQUENCES = 32, 128, 8
KV_BYTES = 32 << 20
ARRIVALS = ("before", "during", "given up", "before")
"""Layers come before the first step, or one by one when the step needs them; or the step is given
up when half of them are there, and begun again."""


def main() -> None:
    asked = json.load(sys.stdin)
    found = {
        name: {way: of(name, way, asked) for way in asked["ways"]} for name in asked["directories"]
    }
    print(json.dumps(found))


def of(directory: str, way: str, asked: dict[str, Any]) -> tuple[Any, bool]:
    if way == "own":
        return own_load(directory, asked), False
    executor = executor_of(way)
    if way == "refused":
        manifest = read_manifest(Path(directory), "m")
        try:
            executor.assign(manifest, memoryview(bytearray(manifest.size_bytes)))
        except ModelError as error:
            return str(error), False
    if way == "moved":
        return moved(executor, Path(directory), asked), False
    begun(executor, Path(directory))
    # The engine is there already, and had other parameters.
    found = [from_arena(executor, Path(directory), asked, arrival) for arrival in ARRIVALS]
    assert all(one == found[0] for one in found), directory
    return found[0]


@cache
def executor_of(way: str) -> VllmExecutor:
    """Of more models than two the engines are closed."""
    terms = EngineTerms(KV_BYTES, BLOCK_TOKENS, RUN_TOKENS, SEQUENCES, way == "views")
    return VllmExecutor(terms, skeletons_max=2)


def own_load(directory: str, asked: dict[str, Any]) -> list[list[int]]:
    engine = LLM(
        model=directory,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        max_model_len=512,
        kv_cache_memory_bytes=KV_BYTES,
    )
    sampling = VllmParams(
        temperature=0.0, max_tokens=asked["tokens"], ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def begun(executor: VllmExecutor, directory: Path) -> None:
    """A load that is given up before the last layer is there."""
    manifest = read_manifest(directory, directory.name)
    arena = memoryview(bytearray(manifest.size_bytes))
    executor.assign(manifest, arena)
    layers = list(read_layers(directory, manifest, arena))
    for layer in layers[: len(layers) // 2]:
        executor.materialize(layer)
    executor.release()


def from_arena(
    executor: VllmExecutor, directory: Path, asked: dict[str, Any], arrival: str
) -> tuple[list[list[int]], bool]:
    manifest = read_manifest(directory, directory.name)
    arena = memoryview(bytearray(manifest.size_bytes))
    layers = list(read_layers(directory, manifest, arena))
    faults = [len(layers) // 2] if arrival == "given up" else []

    def come() -> bool:
        if len(layers) in faults:
            faults.clear()
            return False
        executor.materialize(layers.pop(0))
        return True

    executor.when_missing(come)
    executor.assign(manifest, arena)
    config = BatcherConfig(executor.kv_blocks, BLOCK_TOKENS, RUN_TOKENS, SEQUENCES)
    serving = EngineServing(1, config, manifest.span, overlaps=arrival != "before")
    if arrival == "before":
        # They may come in any order.
        layers.reverse()
        while layers:
            come()
        serving.layers_arrived(manifest.span.stop)
    else:
        come()
        serving.layers_arrived(1)
    tokens: dict[str, list[int]] = {}
    for number, ids in enumerate(asked["prompts"]):
        tokens[str(number)] = []
        serving.add(SequenceSpec(str(number), 1, tuple(ids), SamplingParams(asked["tokens"])))
    for emitted in steps(executor, serving):
        tokens[emitted.request] += emitted.token_ids
    assert not layers, "it needed all of them"
    copies_nothing = executor.copies_nothing
    executor.release()
    return list(tokens.values()), copies_nothing


def steps(executor: VllmExecutor, serving: EngineServing) -> Iterator[EmittedTokens]:
    """All that the engine emits, until it has nothing to do."""
    while (run := serving.next()) is not None:
        step = executor.run(run).step
        assert step is not None
        yield from serving.stepped(run, step, 1)


def moved(executor: VllmExecutor, directory: Path, asked: dict[str, Any]) -> list[Any]:
    """One request, whole and cut behind each of its tokens, with limits that count them all: it may
    not end before `least` tokens, and would by one of them that may end it."""
    manifest = read_manifest(directory, directory.name)
    arena = memoryview(bytearray(manifest.size_bytes))
    executor.assign(manifest, arena)
    for layer in read_layers(directory, manifest, arena):
        executor.materialize(layer)
    config = BatcherConfig(executor.kv_blocks, BLOCK_TOKENS, RUN_TOKENS, SEQUENCES)
    serving = EngineServing(1, config, manifest.span)
    serving.layers_arrived(manifest.span.stop)

    def ended(sampling: SamplingParams, known: tuple[int, ...]) -> tuple[list[int], str]:
        spec = SequenceSpec("a", 1, tuple(asked["prompts"][0]), sampling, known)
        serving.add(spec)
        found = list(steps(executor, serving))
        assert [e.index for e in found] == list(range(len(known), len(known) + len(found)))
        reason = found[-1].finish_reason
        assert reason is not None
        return [*known, *(i for e in found for i in e.token_ids)], reason.value

    free, _ = ended(SamplingParams(asked["tokens"]), ())
    least = asked["tokens"] // 2
    ways = [
        SamplingParams(asked["tokens"]),
        # A token of the first half ends nothing there.
        SamplingParams(
            asked["tokens"], output_tokens_min=least, stop_token_ids=(free[1], free[-2])
        ),
        SamplingParams(asked["tokens"], repetition_penalty=1.3),
    ]
    found = []
    for sampling in ways:
        whole = ended(sampling, ())
        cut = [ended(sampling, tuple(whole[0][:known])) for known in range(1, len(whole[0]))]
        found.append([whole, cut])
    executor.release()
    return found


if __name__ == "__main__":
    main()
