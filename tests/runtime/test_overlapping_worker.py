"""A worker whose engine waits for layers inside a step: its thread takes in what comes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from thread_workers import WAIT_S, ThreadWorker, all_from, grid_of, introduce_all

from livescale.batching.runs.engine_step import EngineStep, StepTokens
from livescale.batching.runs.run import Run
from livescale.engine.base.run_result import InstanceExecutor, RunResult
from livescale.engine.files.model_files import read_manifest
from livescale.messages.attempts import AttemptReturned
from livescale.messages.events import HoldingCompleted, LayerArrived
from livescale.runtime.wire.protocol import Submit, Tokens
from livescale.values.chunks import Feed, ranges_of
from livescale.values.types import (
    FinishReason,
    FromWorker,
    LayerSpan,
    Manifest,
    SamplingParams,
    WorkerRef,
)
from slowness import patient

SOURCE, NOWHERE = WorkerRef(1), WorkerRef(9)


class WaitingEngine(InstanceExecutor):
    """A step needs every layer, one after the other, and gives each request its only token."""

    def __init__(self) -> None:
        self.waits = threading.Event()

    def assign(self, manifest: Manifest, arena: memoryview) -> None:
        self._missing = set(range(len(manifest.layers)))

    def when_missing(self, await_layer: Callable[[], bool]) -> None:
        self._await_layer = await_layer

    def materialize(self, layer: int) -> None:
        self._missing.remove(layer)

    def release(self) -> None:
        self._missing = set()

    def run(self, run: Run, hidden: Any = None, layer_ran: Any = None) -> RunResult:
        assert run.asks is not None
        while self._missing:
            self.waits.set()
            if not self._await_layer():
                return RunResult(None, [], step=EngineStep(is_given_up=True))
        tokens = tuple(
            StepTokens(spec.request, spec.attempt, (7,), FinishReason.LENGTH)
            for spec in run.asks.taken
        )
        return RunResult(None, [], step=EngineStep(tokens))

    @property
    def is_engine(self) -> bool:
        return True

    @property
    def kv_blocks(self) -> int:
        return 64

    def kv_layer_bytes(self, tokens: int) -> int:
        return 0

    def prefill_tokens_per_s(self, span: LayerSpan, tokens: int) -> int:
        return 1000

    def _passes_nothing(self, *_: object) -> Any:
        raise AssertionError("nothing passes")

    export_rows = import_rows = join_rows = split_rows = _passes_nothing
    export_kv = import_kv = _passes_nothing


@pytest.fixture
def engine() -> WaitingEngine:
    return WaitingEngine()


@pytest.fixture
def worker(machine: None, engine: WaitingEngine, tiny_model: Path) -> Iterator[ThreadWorker]:
    """Beside one that has the model."""
    made = ThreadWorker(0, 8 << 20, executor=engine)
    source = ThreadWorker(SOURCE.worker, 8 << 20, executor=WaitingEngine())
    introduce_all([made, source])
    manifest = read_manifest(tiny_model, "tiny")
    source.load(4, manifest, all_from(manifest, None), directory=str(tiny_model))
    source.heard(lambda word: isinstance(word, HoldingCompleted))
    yield made
    made.close()
    source.close()


def waiting(worker: ThreadWorker, engine: WaitingEngine, directory: Path) -> Manifest:
    """The first layer is there, the others never come, and a step waits for them."""
    manifest = read_manifest(directory, "tiny")
    grid = grid_of(manifest)
    first = grid.of_layer(0)
    rest = range(first.stop, grid.chunks)
    feeds = (
        Feed(FromWorker(SOURCE), ranges_of(first)),
        Feed(FromWorker(NOWHERE), ranges_of(rest)),
    )
    worker.load(5, manifest, feeds, live_order="overlap")
    worker.heard(lambda word: isinstance(word, LayerArrived))
    worker.submit(Submit("g0-1", 1, 5, (1, 2, 3), (), SamplingParams(1)))
    assert engine.waits.wait(patient(WAIT_S))
    return manifest


def test_a_step_waits_until_other_feeds_bring_its_layers(
    worker: ThreadWorker, engine: WaitingEngine, tiny_model: Path
) -> None:
    manifest = waiting(worker, engine, tiny_model)
    worker.amend(1, all_from(manifest, SOURCE))
    words = worker.heard(lambda word: isinstance(word, Tokens))
    came = [word.layer for word in words if isinstance(word, LayerArrived)]
    assert sorted(came) == list(range(1, len(manifest.layers))), "before the first token"
    (tokens,) = [word for word in words if isinstance(word, Tokens)]
    assert [token.token_id for token in tokens.tokens] == [7]


def test_a_load_that_is_dropped_ends_the_step(
    worker: ThreadWorker, engine: WaitingEngine, tiny_model: Path
) -> None:
    waiting(worker, engine, tiny_model)
    worker.release(1)
    words = worker.heard(lambda word: isinstance(word, AttemptReturned))
    assert words[-1] == AttemptReturned("g0-1", 1)
    assert worker.is_running


def test_a_worker_that_is_told_to_end_does_not_wait_for_layers(
    worker: ThreadWorker, engine: WaitingEngine, tiny_model: Path
) -> None:
    waiting(worker, engine, tiny_model)
    worker.close()
    assert not worker.is_running
