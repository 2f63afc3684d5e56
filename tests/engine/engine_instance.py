"""An instance in one thread, as the tests drive it: Batcher and executors, no transport."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from livescale.batching.runs.batcher import Batcher, BatcherConfig
from livescale.batching.runs.run import EmittedTokens, Run, SequenceSpec
from livescale.engine.executor import TorchExecutor
from livescale.engine.files.model_files import read_layers, read_manifest
from livescale.engine.oracle import GreedyCheck, GreedyOracle
from livescale.engine.products.linear_choice import WeightsLayout
from livescale.values.types import LayerSpan, Manifest, SamplingParams

BLOCK_TOKENS = 4
KV_BYTES = 2 << 20  # 1024 positions of the tiny models


@dataclass(frozen=True)
class FamilyModel:
    """A made model of a family, with a complete executor and its judge."""

    directory: Path
    executor: TorchExecutor
    oracle: GreedyOracle


def load(
    directory: Path,
    layers: Collection[int] | None = None,
    kv_bytes: int = KV_BYTES,
    weights_layout: WeightsLayout = "auto",
) -> tuple[TorchExecutor, Manifest, bytearray]:
    """An executor with `layers` (all by default) materialized, its manifest and its arena."""
    manifest = read_manifest(directory, directory.name)
    arena = bytearray(manifest.size_bytes)
    executor = TorchExecutor(
        kv_bytes,
        BLOCK_TOKENS,
        weights_layout=weights_layout,
    )
    executor.assign(manifest, memoryview(arena))
    for layer in read_layers(directory, manifest, memoryview(arena)):
        if layers is None or layer in layers:
            executor.materialize(layer)
    return executor, manifest, arena


def request(
    name: str, prompt_tokens: int, output_tokens_max: int, vocabulary: int = 1024, attempt: int = 0
) -> SequenceSpec:
    """A request whose prompt is drawn from its name."""
    draw = random.Random(name)
    prompt_ids = tuple(draw.randrange(vocabulary) for _ in range(prompt_tokens))
    return SequenceSpec(name, attempt, prompt_ids, SamplingParams(output_tokens_max))


@dataclass
class Instance:
    """The three verbs in a loop. `stages` are executors with their spans, in order.

    `kv_blocks` are all that the smallest executor has, unless a test wants fewer; with few of them
    and 0 `growth_tokens`, requests are preempted.
    """

    stages: list[tuple[TorchExecutor, LayerSpan]]
    run_tokens_max: int = 64
    sequences_max: int = 8
    kv_blocks: int | None = None
    growth_tokens: int = 64
    outputs: dict[str, list[int]] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)

    def __post_init__(self) -> None:
        blocks = self.kv_blocks or min(executor.kv_blocks for executor, _ in self.stages)
        config = BatcherConfig(
            blocks,
            BLOCK_TOKENS,
            self.run_tokens_max,
            self.sequences_max,
            growth_tokens=self.growth_tokens,
        )
        self.batcher = Batcher(config, LayerSpan(0, self.stages[-1][1].stop))

    def add(self, specs: Iterable[SequenceSpec]) -> None:
        for spec in specs:
            self.batcher.add(spec)
            self.outputs[spec.request] = list(spec.generated_ids)

    def step(self, during: Callable[[], None] = lambda: None) -> list[EmittedTokens]:
        """One Run; `during` happens between its execution and its commit."""
        run = self.batcher.next()
        assert run is not None
        self.runs.append(run)
        hidden = None
        for executor, span in self.stages:
            result = executor.run(Run(run.id, span, run.segments), hidden)
            hidden = result.hidden
        during()
        emissions = self.batcher.done(run, [[token_id] for token_id in result.token_ids])
        for emission in emissions:
            assert emission.index == len(self.outputs[emission.request])
            self.outputs[emission.request].extend(emission.token_ids)
        self.batcher.validate()
        return emissions

    def finish(self) -> dict[str, list[int]]:
        """Run until nothing is left; the outputs by request."""
        while self.batcher.has_work:
            self.step()
        assert self.batcher.pool.used == 0
        return self.outputs


def judge(
    oracle: GreedyOracle, specs: Iterable[SequenceSpec], outputs: dict[str, list[int]]
) -> list[GreedyCheck]:
    """All outputs are greedy and of full length, or this raises."""
    specs = list(specs)
    checks = oracle.check_many([(spec.prompt_ids, outputs[spec.request]) for spec in specs])
    for spec, check in zip(specs, checks, strict=True):
        assert check.is_right, f"{spec.request}: tokens {check.wrong} of {outputs[spec.request]}"
        assert check.tokens == spec.sampling.output_tokens_max, spec.request
    return checks
