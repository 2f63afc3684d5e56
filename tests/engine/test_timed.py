"""The timed executor: tokens that a retry repeats, KV blocks as a real pool has, Runs that last."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.batching.runs.batcher import Batcher, BatcherConfig
from livescale.batching.runs.run import SequenceSpec
from livescale.engine.base.errors import ModelError
from livescale.engine.executor import TorchExecutor
from livescale.engine.files.model_files import read_manifest
from livescale.engine.timed import TimedExecutor
from livescale.latency.work import LinearLatency
from livescale.values.types import Manifest, SamplingParams

KV_BYTES, BLOCK_TOKENS = 1 << 20, 16
INSTANT = LinearLatency(0, 0)


@pytest.fixture(scope="module")
def manifest(tiny_model: Path) -> Manifest:
    return read_manifest(tiny_model, "tiny")


def ready(manifest: Manifest, latency: LinearLatency = INSTANT) -> TimedExecutor:
    executor = TimedExecutor(KV_BYTES, BLOCK_TOKENS, latency)
    executor.assign(manifest, memoryview(bytearray(manifest.size_bytes)))
    for layer in range(len(manifest.layers)):
        executor.materialize(layer)
    return executor


def answer(executor: TimedExecutor, manifest: Manifest, spec: SequenceSpec) -> list[int]:
    """All tokens of a request that runs alone, those of earlier attempts included."""
    config = BatcherConfig(executor.kv_blocks, BLOCK_TOKENS, run_tokens_max=8, sequences_max=8)
    batcher = Batcher(config, manifest.span)
    batcher.add(spec)
    tokens = list(spec.generated_ids)
    while (run := batcher.next()) is not None:
        emissions = batcher.done(run, [[token_id] for token_id in executor.run(run).token_ids])
        tokens += [token_id for emission in emissions for token_id in emission.token_ids]
    return tokens


@given(
    prompt=st.lists(st.integers(0, 1023), min_size=1, max_size=40),
    stops=st.sets(st.integers(0, 1023), max_size=30),
    count=st.integers(1, 20),
    data=st.data(),
)
def test_an_attempt_goes_on_as_the_last_one_would_have_and_never_stops_early(
    manifest: Manifest, prompt: list[int], stops: set[int], count: int, data: st.DataObject
) -> None:
    executor = ready(manifest)
    sampling = SamplingParams(count, stop_token_ids=tuple(sorted(stops)))
    whole = answer(executor, manifest, SequenceSpec("a", 0, tuple(prompt), sampling))
    assert len(whole) == count
    assert all(0 <= token_id < 1024 for token_id in whole)
    assert not stops & set(whole)
    kept = data.draw(st.integers(0, count - 1))
    again = SequenceSpec("b", 1, tuple(prompt), sampling, tuple(whole[:kept]))
    assert answer(ready(manifest), manifest, again) == whole


def test_different_prompts_get_different_tokens(manifest: Manifest) -> None:
    executor, sampling = ready(manifest), SamplingParams(16)
    answers = {
        tuple(answer(executor, manifest, SequenceSpec("a", 0, (number, 7), sampling)))
        for number in range(20)
    }
    assert len(answers) == 20


def test_its_pool_has_as_many_blocks_as_a_real_one(manifest: Manifest) -> None:
    torch_executor = TorchExecutor(KV_BYTES, BLOCK_TOKENS)
    torch_executor.assign(manifest, memoryview(bytearray(manifest.size_bytes)))
    assert ready(manifest).kv_blocks == torch_executor.kv_blocks


def test_what_does_not_fit_is_refused_with_both_sizes(manifest: Manifest) -> None:
    executor = TimedExecutor(KV_BYTES, BLOCK_TOKENS, INSTANT)
    with pytest.raises(ModelError, match=f"{manifest.size_bytes}.*100"):
        executor.assign(manifest, memoryview(bytearray(100)))
    small = TimedExecutor(1000, BLOCK_TOKENS, INSTANT)
    with pytest.raises(ModelError, match="1000"):
        small.assign(manifest, memoryview(bytearray(manifest.size_bytes)))


@pytest.mark.usefixtures("machine")
def test_runs_take_as_long_as_the_latency_model_says(manifest: Manifest) -> None:
    latency = LinearLatency(base_ns=2_000_000, per_token_ns=100_000)
    executor = ready(manifest, latency)
    # 3 tokens of prompt in one Run, then 19 Runs of one token.
    due_ns = 20 * latency.base_ns + 22 * latency.per_token_ns
    started_ns = time.monotonic_ns()
    answer(executor, manifest, SequenceSpec("a", 0, (1, 2, 3), SamplingParams(20)))
    elapsed_ns = time.monotonic_ns() - started_ns
    # What a sleep is late by is taken off the next Run, at most this much; a busy machine may
    # take longer by any amount, so only too little is an error.
    assert elapsed_ns >= due_ns - 2_000_000


def test_the_capacity_is_the_latency_models(manifest: Manifest) -> None:
    executor = ready(manifest, LinearLatency(1_000_000, 10_000))
    assert executor.prefill_tokens_per_s(manifest.span, 100) == 50_000
