"""A worker's instance: given a model by multicast, serving, released; no file read on a target."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from thread_workers import ThreadWorker, all_from, grid_of, introduce_all

from livescale.engine.base.run_result import RunResult
from livescale.engine.executor import TorchExecutor
from livescale.engine.files.model_files import read_manifest
from livescale.engine.oracle import GreedyOracle
from livescale.messages.attempts import (
    AttemptFailed,
    AttemptReturned,
)
from livescale.messages.events import (
    CapacityMeasured,
    FeedFailed,
    FirstByteArrived,
    HoldingCompleted,
    HoldingDropped,
    HoldingFailed,
    LayerArrived,
    RequestEnded,
)
from livescale.runtime.wire.protocol import Submit, Tokens
from livescale.values.chunks import ChunkRange, Feed
from livescale.values.types import FromWorker, HoldingId, Manifest, Outcome, SamplingParams

ARENA_BYTES = 8 << 20


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test may take away."""
    return Path(shutil.copytree(tiny_model, tmp_path / "tiny"))


@pytest.fixture
def workers(machine: None, request: pytest.FixtureRequest) -> Iterator[list[ThreadWorker]]:
    count, options = request.param
    made = [ThreadWorker(number, ARENA_BYTES, **options) for number in range(count)]
    introduce_all(made)
    yield made
    for worker in made:
        worker.close()


def load_source(source: ThreadWorker, manifest: Manifest, directory: Path) -> None:
    source.load(1, manifest, all_from(manifest, None), directory=str(directory))
    words = source.heard(lambda word: isinstance(word, (HoldingCompleted, HoldingFailed)))
    assert isinstance(words[0], FirstByteArrived)
    assert isinstance(words[-1], HoldingCompleted), words[-1]
    assert any(isinstance(word, CapacityMeasured) for word in words)


def multicast(workers: list[ThreadWorker], manifest: Manifest, plan: int = 7) -> None:
    """Every worker gets the model from the one before it; returns when everybody has it."""
    for place, worker in enumerate(workers[1:], 1):
        worker.load(10 + place, manifest, all_from(manifest, workers[place - 1].ref), plan=plan)
    for worker in workers[1:]:
        check_loaded(worker, manifest)


def check_loaded(worker: ThreadWorker, manifest: Manifest) -> list[object]:
    """The load completes: each layer is told once, and the watermark is that of what was told."""
    words = worker.heard(lambda word: isinstance(word, (HoldingCompleted, HoldingFailed)))
    assert isinstance(words[-1], HoldingCompleted), words[-1]
    told = [word for word in words if isinstance(word, LayerArrived)]
    count = len(manifest.layers)
    assert sorted(word.layer for word in told) == list(range(count))
    known: set[int] = set()
    for word in told:
        known.add(word.layer)
        assert word.watermark == next(k for k in range(count + 1) if k not in known)
    return words


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
    target.release(7)
    target.heard(lambda word: isinstance(word, HoldingDropped))
    target.submit(Submit("late", 1, 11, (1, 2), (), SamplingParams(1)))
    words = target.heard(lambda word: isinstance(word, RequestEnded))
    # It may be on its way while the instance goes: somebody else runs it.
    assert words[-1].outcome is Outcome.RETURNED
    assert AttemptReturned("late", 1) in words
    assert target.report is None
    multicast(workers, manifest, plan=8)
    assert target.report is not None
    assert target.report.is_whole


@pytest.mark.parametrize("workers", [(2, {})], indirect=True)
def test_a_load_that_cannot_be_read_leaves_the_worker_empty_and_usable(
    workers: list[ThreadWorker], model: Path
) -> None:
    manifest = read_manifest(model, "tiny")
    victim = sorted(model.glob("*.safetensors"))[0]
    kept = victim.read_bytes()
    victim.write_bytes(kept[: len(kept) // 2])
    workers[0].load(1, manifest, all_from(manifest, None), directory=str(model), plan=2)
    words = workers[0].heard(lambda word: isinstance(word, (HoldingCompleted, HoldingFailed)))
    assert isinstance(words[-1], HoldingFailed)
    assert victim.name in words[-1].reason
    assert workers[0].report is None
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
    workers[0].load(1, manifest, all_from(manifest, None), directory=str(model))
    words = workers[0].heard(lambda word: isinstance(word, (HoldingCompleted, HoldingFailed)))
    assert isinstance(words[-1], HoldingFailed)
    assert "another checksum" in words[-1].reason


@pytest.mark.parametrize("workers", [(3, {"uplink_bytes_per_s": 2_000_000})], indirect=True)
def test_when_a_source_dies_a_load_keeps_what_it_has_and_goes_on_elsewhere(
    workers: list[ThreadWorker], model: Path
) -> None:
    manifest = read_manifest(model, "tiny")
    source, other, target = workers
    load_source(source, manifest, model)
    load_source(other, manifest, model)
    target.load(11, manifest, all_from(manifest, source.ref), plan=7)
    before = target.heard(lambda word: isinstance(word, LayerArrived))
    source.data_plane.close()
    before += target.heard(lambda word: isinstance(word, (FeedFailed, HoldingCompleted)))
    failed = before[-1]
    assert isinstance(failed, FeedFailed), "it was complete before the source died"
    assert (failed.holding, failed.upstream) == (HoldingId(7, target.ref), source.ref)
    target.amend(7, all_from(manifest, other.ref))
    after = target.heard(lambda word: isinstance(word, (HoldingCompleted, HoldingFailed)))
    assert isinstance(after[-1], HoldingCompleted)
    told = [word.layer for word in (*before, *after) if isinstance(word, LayerArrived)]
    assert sorted(told) == list(range(len(manifest.layers)))
    size = manifest.size_bytes
    assert bytes(target.arena.view(0, size)) == bytes(other.arena.view(0, size))
    assert target.report is not None
    assert target.report.is_whole


@pytest.mark.parametrize("workers", [(2, {"uplink_bytes_per_s": 2_000_000})], indirect=True)
def test_the_rest_of_a_load_may_come_from_storage(workers: list[ThreadWorker], model: Path) -> None:
    manifest = read_manifest(model, "tiny")
    source, target = workers
    load_source(source, manifest, model)
    target.load(11, manifest, all_from(manifest, source.ref), directory=str(model), plan=7)
    words = target.heard(lambda word: isinstance(word, LayerArrived))
    target.amend(7, all_from(manifest, None))
    words += target.heard(lambda word: isinstance(word, (HoldingCompleted, HoldingFailed)))
    assert isinstance(words[-1], HoldingCompleted), words[-1]
    told = [word.layer for word in words if isinstance(word, LayerArrived)]
    assert sorted(told) == list(range(len(manifest.layers)))
    size = manifest.size_bytes
    assert bytes(target.arena.view(0, size)) == bytes(source.arena.view(0, size))


@pytest.mark.parametrize("workers", [(4, {})], indirect=True)
def test_stripes_from_two_holders_make_a_model(workers: list[ThreadWorker], model: Path) -> None:
    manifest = read_manifest(model, "tiny")
    for source in workers[:2]:
        load_source(source, manifest, model)
    chunks = grid_of(manifest).chunks
    feeds = tuple(
        Feed(FromWorker(source.ref), (ChunkRange(k, chunks, 2),))
        for k, source in enumerate(workers[:2])
    )
    workers[2].load(12, manifest, feeds, plan=7)
    workers[3].load(13, manifest, all_from(manifest, workers[2].ref), plan=7)
    for worker in workers[2:]:
        check_loaded(worker, manifest)
    prompt = tuple(range(5, 40))
    answers = [ask(worker, f"r{n}", 10 + n, prompt, 6) for n, worker in enumerate(workers[2:], 2)]
    assert answers[0] == answers[1] == ask(workers[0], "r0", 1, prompt, 6)


@pytest.mark.parametrize("workers", [(2, {"uplink_bytes_per_s": 500_000})], indirect=True)
def test_a_load_that_is_released_half_way_leaves_the_worker_empty(
    workers: list[ThreadWorker], model: Path
) -> None:
    manifest = read_manifest(model, "tiny")
    load_source(workers[0], manifest, model)
    target = workers[1]
    target.load(11, manifest, all_from(manifest, workers[0].ref), plan=7)
    target.heard(lambda word: isinstance(word, FirstByteArrived))
    target.release(7)
    words = target.heard(lambda word: isinstance(word, HoldingDropped))
    assert [type(word) for word in words if isinstance(word, (HoldingFailed, HoldingDropped))] == [
        HoldingFailed,
        HoldingDropped,
    ]
    assert target.report is None
    load_source(target, manifest, model)


@pytest.mark.parametrize("workers", [(1, {})], indirect=True)
def test_requests_that_cannot_be_computed_end_alone(
    workers: list[ThreadWorker], model: Path
) -> None:
    """Others get their tokens, from the same worker and at the first attempt."""
    [worker], manifest = workers, read_manifest(model, "tiny")
    load_source(worker, manifest, model)
    prompts = {f"r{n}": tuple(range(5 + 9 * n, 25 + 18 * n)) for n in range(4)}
    # Ids that the model has not: in one piece, and at the end of a prompt of several Runs.
    poison = {"p0": (3, 5000), "p1": (*range(150), 1 << 40)}
    for name, ids in (poison | prompts).items():
        worker.submit(Submit(name, 1, 1, ids, (), SamplingParams(6)))
    ended, tokens, failed = {}, {name: [] for name in prompts}, {}
    while len(ended) < len(prompts) + len(poison):
        word = worker.heard(lambda word: isinstance(word, (RequestEnded, Tokens, AttemptFailed)))[
            -1
        ]
        if isinstance(word, RequestEnded):
            assert word.attempt == 1
            ended[word.request] = word.outcome
        elif isinstance(word, AttemptFailed):
            assert word.request not in failed
            failed[word.request] = word.reason
        else:
            for token in word.tokens:
                tokens[token.request].append(token.token_id)
    assert ended == dict.fromkeys(prompts, Outcome.FINISHED) | dict.fromkeys(poison, Outcome.FAILED)
    assert failed.keys() == poison.keys()
    assert "5000" in failed["p0"]
    checks = GreedyOracle(model).check_many([(prompts[name], tokens[name]) for name in prompts])
    assert all(check.is_right and check.tokens == 6 for check in checks)
    assert worker.is_running


class NoOperation(TorchExecutor):
    """Computes nothing: as with a library that lacks an operation of the model."""

    def run(self, *_: object, **__: object) -> RunResult:
        raise RuntimeError("no such operation")


def load_fails(worker: ThreadWorker) -> HoldingFailed:
    words = worker.heard(lambda word: isinstance(word, (HoldingCompleted, HoldingFailed)))
    assert isinstance(words[-1], HoldingFailed), words[-1]
    return words[-1]


@pytest.mark.parametrize("workers", [(1, {})], indirect=True)
def test_a_model_whose_files_do_not_fit_is_a_failed_load_and_the_next_one_is_served(
    workers: list[ThreadWorker], model: Path, tiny_model: Path
) -> None:
    [worker] = workers
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 4}))
    manifest = read_manifest(model, "misfit")
    worker.load(1, manifest, all_from(manifest, None), directory=str(model))
    assert "k_proj" in load_fails(worker).reason
    good = read_manifest(tiny_model, "tiny")
    worker.load(2, good, all_from(good, None), directory=str(tiny_model), plan=2)
    check_loaded(worker, good)
    assert len(ask(worker, "r", 2, (5, 6, 7), 4)) == 4


@pytest.mark.parametrize("workers", [(1, {})], indirect=True)
@pytest.mark.parametrize("is_measured", [True, False])
def test_a_model_that_computes_nothing_is_a_failed_load(
    workers: list[ThreadWorker], model: Path, is_measured: bool
) -> None:
    """When it is measured; or in its first Run, whose requests run elsewhere."""
    [source], manifest = workers, read_manifest(model, "tiny")
    load_source(source, manifest, model)
    target = ThreadWorker(7, ARENA_BYTES, executor=NoOperation(1 << 22, 16))
    try:
        introduce_all([source, target])
        if is_measured:
            target.load(9, manifest, all_from(manifest, None), directory=str(model))
            assert load_fails(target).reason == "RuntimeError: no such operation"
        else:
            target.load(9, manifest, all_from(manifest, source.ref))
            check_loaded(target, manifest)
            for name in ("a", "b"):
                target.submit(Submit(name, 1, 9, (5, 6, 7), (), SamplingParams(4)))
            words = target.heard(lambda word: isinstance(word, HoldingFailed))
            assert words[-1].reason == "RuntimeError: no such operation"
            ended = [word for word in words if isinstance(word, RequestEnded)]
            assert {word.request for word in ended} >= {"a"}
            assert {word.outcome for word in ended} == {Outcome.RETURNED}
        assert target.is_running
    finally:
        target.close()
