"""Embeddings against transformers: the mean of its last hidden states, however a prompt is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_instance import BLOCK_TOKENS, FamilyModel, judge, load, request
from hypothesis import given
from hypothesis import strategies as st

from livescale.batching.runs.batcher import Batcher, BatcherConfig
from livescale.batching.runs.run import Run, SequenceSpec
from livescale.engine.base.run_result import InstanceExecutor
from livescale.engine.embeddings import Embeddings, Summed
from livescale.engine.executor import TorchExecutor
from livescale.engine.files.make import FAMILY_NAMES
from livescale.engine.files.model_files import read_manifest
from livescale.engine.oracle import GreedyOracle
from livescale.engine.timed import TimedExecutor
from livescale.latency.work import LinearLatency
from livescale.values.types import FinishReason, LayerSpan, SamplingParams
from mean_rows import assert_close, mean_rows

EMBEDS = SamplingParams(1, embeds=True)


def embedding(name: str, prompt_tokens: int, vocabulary: int = 1024) -> SequenceSpec:
    return replace(request(name, prompt_tokens, 1, vocabulary), sampling=EMBEDS)


class Served:
    """An instance whose Runs go through its layers in `cuts`."""

    def __init__(
        self,
        executor: InstanceExecutor,
        layers: int,
        kv_blocks: int | None = None,
        cuts: Sequence[int] = (),
        **limits: int,
    ) -> None:
        limits = {"run_tokens_max": 16, "sequences_max": 8} | limits
        config = BatcherConfig(kv_blocks or executor.kv_blocks, BLOCK_TOKENS, **limits)
        self.batcher = Batcher(config, LayerSpan(0, layers))
        self.executor = executor
        self.edges = [0, *cuts, layers]
        self.embeddings = Embeddings()
        self.vectors: dict[str, np.ndarray] = {}
        self.outputs: dict[str, list[int]] = {}

    def step(self) -> None:
        run = self.batcher.next()
        assert run is not None
        hidden = None
        for start, stop in zip(self.edges, self.edges[1:], strict=False):
            result = self.executor.run(Run(run.id, LayerSpan(start, stop), run.segments), hidden)
            hidden = result.hidden
        complete = self.embeddings.take(map(Summed.of, run.segments), result.row_sums)
        for news in self.batcher.done(run, [[token_id] for token_id in result.token_ids]):
            self.outputs.setdefault(news.request, []).extend(news.token_ids)
            vector = complete.get((news.request, news.attempt))
            if vector is not None:
                assert news.finish_reason is FinishReason.LENGTH
                self.vectors[news.request] = np.frombuffer(vector, "<f4")
        self.batcher.validate()
        self.embeddings.keep(self.batcher.requests())

    def serve(self, specs: Iterable[SequenceSpec]) -> dict[str, np.ndarray]:
        for spec in specs:
            self.batcher.add(spec)
        while self.batcher.has_work:
            self.step()
        assert self.embeddings.is_empty
        return self.vectors


def reference(directory: Path, specs: Sequence[SequenceSpec]) -> dict[str, np.ndarray]:
    means = mean_rows(directory, [spec.prompt_ids for spec in specs])
    return {spec.request: mean for spec, mean in zip(specs, means, strict=True)}


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_each_family_gives_the_mean_of_its_last_rows(
    family: str, family_model: Callable[[str], FamilyModel]
) -> None:
    """Prompts of one token, of one Run, and longer than a Run and than a made model's window."""
    model = family_model(family)
    specs = [embedding(f"{family} {n}", n, vocabulary=512) for n in (1, 2, 7, 45, 90)]
    assert_close(Served(model.executor, 6).serve(specs), reference(model.directory, specs))


def test_beside_requests_that_generate(
    models: Path, executors: dict[str, TorchExecutor], oracles: dict[str, GreedyOracle]
) -> None:
    specs = [embedding(f"mean {n}", 5 + 13 * n) for n in range(6)]
    others = [request(f"text {n}", 3 + 11 * n, 12) for n in range(6)]
    served = Served(executors["tiny"], 6)
    mixed = [spec for pair in zip(specs, others, strict=True) for spec in pair]
    assert_close(served.serve(mixed), reference(models / "tiny", specs))
    judge(oracles["tiny"], others, served.outputs)


def test_prefixes_that_are_known_are_computed_anew_and_found_by_others(
    models: Path, executors: dict[str, TorchExecutor], oracles: dict[str, GreedyOracle]
) -> None:
    generating, alike = request("shared", 60, 4), replace(embedding("alike", 60), request="alike")
    alike = replace(alike, prompt_ids=generating.prompt_ids)
    again = replace(alike, request="again")
    later = replace(generating, request="later")
    served = Served(executors["tiny"], 6)
    for spec in (generating, alike, again):
        served.serve([spec])
    assert served.batcher.room.reused_tokens == 0
    expected = reference(models / "tiny", [alike])["alike"]
    assert_close(served.vectors, {"alike": expected, "again": expected})
    fresh = Served(executors["tiny"], 6)
    fresh.serve([alike])
    fresh.serve([later])
    assert fresh.batcher.room.reused_tokens == 56
    judge(oracles["tiny"], [later], fresh.outputs)


def test_a_preempted_prompt_begins_anew(models: Path, executors: dict[str, TorchExecutor]) -> None:
    """The generating requests arrived first, and take the blocks that the prompt had."""
    first = [request(f"first {n}", 8, 60) for n in range(3)]
    spec = embedding("last", 70)
    # Prompts get few tokens of each Run.
    served = Served(
        executors["tiny"], 6, kv_blocks=40, run_tokens_max=6, sequences_max=4, growth_tokens=0
    )
    vectors = served.serve([*first, spec])
    assert served.batcher.room.preemptions
    assert_close(vectors, reference(models / "tiny", [spec]))


def test_a_cancelled_prompt_leaves_nothing(executors: dict[str, TorchExecutor]) -> None:
    served = Served(executors["tiny"], 6)
    served.batcher.add(embedding("gone", 60))
    served.step()
    assert not served.embeddings.is_empty
    served.batcher.cancel("gone", 0)
    assert served.serve([embedding("other", 5)]).keys() == {"other"}


def test_the_layers_may_run_one_after_the_other(
    models: Path, executors: dict[str, TorchExecutor]
) -> None:
    """As in a live batch: only the last Run gives sums."""
    specs = [embedding(f"cut {n}", 9 + n) for n in range(3)]
    served = Served(executors["tied"], 6, cuts=(1, 3, 5))
    assert_close(served.serve(specs), reference(models / "tied", specs))


def test_sixteen_bits(models: Path) -> None:
    executor, _, _ = load(models / "bf16")
    specs = [embedding(f"bf16 {n}", 40 * n) for n in (1, 2)]
    assert_close(Served(executor, 6).serve(specs), reference(models / "bf16", specs), 0.05)


@given(
    prompts=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    run_tokens_max=st.integers(8, 40),
)
def test_a_timed_executor_gives_the_same_for_the_same_prompt(
    prompts: list[int], run_tokens_max: int, models: Path
) -> None:
    manifest = read_manifest(models / "tiny", "tiny")
    executor = TimedExecutor(1 << 20, BLOCK_TOKENS, LinearLatency(0, 0))
    executor.assign(manifest, memoryview(bytearray(manifest.size_bytes)))
    for layer in range(6):
        executor.materialize(layer)
    specs = [embedding(f"made up {n} {count}", count) for n, count in enumerate(prompts)]
    vectors = Served(executor, 6, run_tokens_max=run_tokens_max).serve(specs)
    for spec in specs:
        assert len(vectors[spec.request]) == 128
        places = np.asarray(spec.prompt_ids) % 128
        expected = np.bincount(places, minlength=128) / len(places)
        assert_close({"it": vectors[spec.request]}, {"it": expected}, 1e-6)
