"""A worker that keeps first layers of a model that it gave up, and gets only the others again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_worker_thread import ARENA_BYTES, ask, check_loaded, load_source
from thread_workers import ThreadWorker, all_from, introduce_all

from livescale.engine.files.model_files import read_manifest
from livescale.engine.oracle import GreedyOracle
from livescale.messages.events import (
    FirstByteArrived,
    HoldingCompleted,
    HoldingDropped,
    LayerArrived,
)
from livescale.values.types import Manifest

pytestmark = pytest.mark.usefixtures("machine")

PROMPT = tuple(range(5, 40))


@pytest.fixture
def pair() -> Iterator[tuple[ThreadWorker, ThreadWorker]]:
    """A source, and a target that keeps layers in the second half of its arena."""
    made = [
        ThreadWorker(0, ARENA_BYTES),
        ThreadWorker(1, ARENA_BYTES, resident_bytes=ARENA_BYTES // 2),
    ]
    introduce_all(made)
    yield made[0], made[1]
    for worker in made:
        worker.close()


def load_and_release(
    target: ThreadWorker, manifest: Manifest, source: ThreadWorker, instance: int
) -> tuple[list[object], list[int], int]:
    """What was said of the load, tokens from it, and the bytes that it got."""
    before = target.data_plane.usage().parameter_received_bytes
    target.load(instance, manifest, all_from(manifest, source.ref), plan=instance)
    words = check_loaded(target, manifest)
    received_bytes = target.data_plane.usage().parameter_received_bytes - before
    assert isinstance(words[-1], HoldingCompleted)
    assert words[-1].received_bytes == received_bytes
    tokens = ask(target, f"r{instance}", instance, PROMPT, 4)
    target.release(instance)
    target.heard(lambda word: isinstance(word, HoldingDropped))
    return words, tokens, received_bytes


def test_first_layers_stay_and_are_not_sent_again(
    pair: tuple[ThreadWorker, ThreadWorker], tiny_model: Path
) -> None:
    source, target = pair
    manifest = read_manifest(tiny_model, "tiny")
    load_source(source, manifest, tiny_model)
    _, first, received_bytes = load_and_release(target, manifest, source, 10)
    assert received_bytes == manifest.size_bytes
    # Whatever lies at the start of the arena meanwhile is overwritten.
    target.arena.view(0, manifest.size_bytes)[:] = bytes(manifest.size_bytes)
    words, second, received_bytes = load_and_release(target, manifest, source, 11)
    decoder_layers = len(manifest.layers) - 2
    kept = 1 + -(-decoder_layers // 2)
    assert received_bytes == sum(e.size_bytes for e in manifest.layers[kept:])
    assert isinstance(words[0], FirstByteArrived)
    told = [word.layer for word in words if isinstance(word, LayerArrived)]
    assert told[:kept] == list(range(kept))
    assert first == second
    assert GreedyOracle(tiny_model).check(PROMPT, second).is_right


def test_bytes_that_changed_are_sent_again(
    pair: tuple[ThreadWorker, ThreadWorker], tiny_model: Path
) -> None:
    source, target = pair
    manifest = read_manifest(tiny_model, "tiny")
    load_source(source, manifest, tiny_model)
    _, first, _ = load_and_release(target, manifest, source, 10)
    half = ARENA_BYTES // 2
    target.arena.view(half, half)[: manifest.layers[0].size_bytes // 2] = bytes(
        manifest.layers[0].size_bytes // 2
    )
    _, second, received_bytes = load_and_release(target, manifest, source, 11)
    kept = 1 + -(-(len(manifest.layers) - 2) // 2)
    sent = [0, *range(kept, len(manifest.layers))]
    assert received_bytes == sum(manifest.layers[layer].size_bytes for layer in sent)
    assert first == second
