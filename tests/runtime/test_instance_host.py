"""A worker's instance: given a model by multicast, serving, released; no file read on a target."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from thread_workers import ThreadWorker, connect_all

from livescale.engine.model_files import read_manifest
from livescale.engine.oracle import GreedyOracle
from livescale.messages.commands import Release, StartSend
from livescale.messages.events import (
    CapacityMeasured,
    LayerArrived,
    LoadCompleted,
    LoadFailed,
    LoadStarted,
    Released,
    RequestEnded,
    SendEnded,
)
from livescale.runtime.wire import AttemptFailed, Order, Submit, Tokens
from livescale.types import FromStorage, FromWorker, Manifest, Outcome, SamplingParams

ARENA_BYTES = 8 << 20


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test may take away."""
    return Path(shutil.copytree(tiny_model, tmp_path / "tiny"))


@pytest.fixture
def workers(request: pytest.FixtureRequest) -> Iterator[list[ThreadWorker]]:
    count, options = request.param
    made = [ThreadWorker(number, ARENA_BYTES, **options) for number in range(count)]
    connect_all(made)
    yield made
    for worker in made:
        worker.close()


def load_source(source: ThreadWorker, manifest: Manifest, directory: Path) -> None:
    source.load(1, manifest, FromStorage(), directory=str(directory))
    words = source.heard(lambda word: isinstance(word, (LoadCompleted, LoadFailed)))
    assert isinstance(words[0], LoadStarted)
    assert isinstance(words[-1], LoadCompleted), words[-1]
    assert any(isinstance(word, CapacityMeasured) for word in words)


def multicast(workers: list[ThreadWorker], manifest: Manifest) -> None:
    """Worker 0 sends along all others; returns when everybody has everything."""
    for place, worker in enumerate(workers[1:], 1):
        following = workers[place + 1].ref if place + 1 < len(workers) else None
        upstream = FromWorker(workers[place - 1].ref)
        worker.load(10 + place, manifest, upstream, following, plan=7)
    send = StartSend(7, workers[0].ref, workers[1].ref, manifest.model)
    workers[0].host.post(partial(workers[0].host.send, Order(send)))
    for worker in workers[1:]:
        words = worker.heard(lambda word: isinstance(word, (LoadCompleted, LoadFailed)))
        assert isinstance(words[-1], LoadCompleted), words[-1]
        arrived = [word.watermark for word in words if isinstance(word, LayerArrived)]
        assert arrived == list(range(1, len(manifest.layers) + 1))
        assert isinstance(words[0], LoadStarted)
    ended = workers[0].heard(lambda word: isinstance(word, SendEnded))[-1]
    assert isinstance(ended, SendEnded)
    assert ended.error is None


def ask(
    worker: ThreadWorker, name: str, instance: int, prompt: tuple[int, ...], count: int
) -> list[int]:
    worker.submit(Submit(name, 1, instance, prompt, (), SamplingParams(count)))
    words = worker.heard(lambda word: isinstance(word, (RequestEnded, AttemptFailed)))
    assert isinstance(words[-1], RequestEnded), words[-1]
    tokens = [token for word in words if isinstance(word, Tokens) for token in word.tokens]
    assert [token.index for token in tokens] == list(range(count))
    return [token.token_id for token in tokens]


@pytest.mark.parametrize(
    "workers", [(3, {}), (4, {"uplink_bytes_per_s": 40_000_000})], indirect=True
)
def test_targets_hold_the_same_bytes_and_serve_the_same_tokens_without_any_file(
    workers: list[ThreadWorker], model: Path, tiny_model: Path
) -> None:
    manifest = read_manifest(model, "tiny")
    load_source(workers[0], manifest, model)
    shutil.rmtree(model)  # nobody can read the model any more
    multicast(workers, manifest)
    size = manifest.size_bytes
    source_bytes = bytes(workers[0].arena.view(0, size))
    for target in workers[1:]:
        assert bytes(target.arena.view(0, size)) == source_bytes
    prompt = tuple(range(5, 40))
    answers = [ask(workers[0], "r0", 1, prompt, 6)]
    answers += [ask(w, f"r{p}", 10 + p, prompt, 6) for p, w in enumerate(workers[1:], 1)]
    assert GreedyOracle(tiny_model).check(prompt, answers[0]).is_right
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("workers", [(2, {})], indirect=True)
def test_a_released_worker_takes_the_next_model(workers: list[ThreadWorker], model: Path) -> None:
    manifest = read_manifest(model, "tiny")
    load_source(workers[0], manifest, model)
    multicast(workers, manifest)
    target = workers[1]
    release = Order(Release(11, 0, target.ref))
    target.host.post(partial(target.host.release, release))
    target.heard(lambda word: isinstance(word, Released))
    target.submit(Submit("late", 1, 11, (1, 2), (), SamplingParams(1)))
    words = target.heard(lambda word: isinstance(word, RequestEnded))
    assert words[-1].outcome is Outcome.FAILED
    assert target.host.report is None
    multicast(workers, manifest)
    assert target.host.report is not None
    assert target.host.report.is_loaded


@pytest.mark.parametrize("workers", [(2, {})], indirect=True)
def test_a_load_that_cannot_be_read_leaves_the_worker_empty_and_usable(
    workers: list[ThreadWorker], model: Path
) -> None:
    manifest = read_manifest(model, "tiny")
    victim = sorted(model.glob("*.safetensors"))[0]
    kept = victim.read_bytes()
    victim.write_bytes(kept[: len(kept) // 2])
    workers[0].load(1, manifest, FromStorage(), directory=str(model))
    words = workers[0].heard(lambda word: isinstance(word, (LoadCompleted, LoadFailed)))
    assert isinstance(words[-1], LoadFailed)
    assert victim.name in words[-1].reason
    assert workers[0].host.report is None
    victim.write_bytes(kept)
    load_source(workers[0], manifest, model)


@pytest.mark.parametrize("workers", [(1, {})], indirect=True)
def test_a_file_that_changed_since_its_manifest_is_not_served(
    workers: list[ThreadWorker], model: Path
) -> None:
    manifest = read_manifest(model, "tiny")
    victim = sorted(model.glob("*.safetensors"))[-1]
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    workers[0].load(1, manifest, FromStorage(), directory=str(model))
    words = workers[0].heard(lambda word: isinstance(word, (LoadCompleted, LoadFailed)))
    assert isinstance(words[-1], LoadFailed)
    assert "another checksum" in words[-1].reason


@pytest.mark.parametrize("workers", [(2, {"uplink_bytes_per_s": 2_000_000})], indirect=True)
def test_a_source_that_dies_fails_the_load_with_a_reason(
    workers: list[ThreadWorker], model: Path
) -> None:
    manifest = read_manifest(model, "tiny")
    load_source(workers[0], manifest, model)
    workers[1].load(11, manifest, FromWorker(workers[0].ref), plan=7)
    send = StartSend(7, workers[0].ref, workers[1].ref, manifest.model)
    workers[0].host.post(partial(workers[0].host.send, Order(send)))
    workers[1].heard(lambda word: isinstance(word, LoadStarted))
    workers[0].data_plane.close()
    words = workers[1].heard(lambda word: isinstance(word, (LoadCompleted, LoadFailed)))
    assert isinstance(words[-1], LoadFailed)
    assert "w0.0" in words[-1].reason
    assert workers[1].host.report is None
