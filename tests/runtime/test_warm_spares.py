"""Released workers keep their parameters: used again without a byte, and a source meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from completions import Answer, check, prompt
from pool_thread import LocalPool, wait_until
from test_worker_thread import ARENA_BYTES, ask, check_loaded, load_source
from thread_workers import ThreadWorker, all_from, introduce_all

from livescale.common.regions import aligned
from livescale.engine.files.model_files import read_manifest
from livescale.engine.oracle import GreedyOracle
from livescale.messages.commands import ReleaseHolding, StartHolding
from livescale.messages.events import HoldingCompleted, HoldingDropped, HoldingFailed
from livescale.telemetry.history.reading import History, read_history
from livescale.telemetry.record.record import StepLine, read_record
from livescale.telemetry.replay import replay
from slowness import patient

PROMPT = tuple(range(5, 40))


@pytest.fixture
def workers(machine: None) -> Iterator[list[ThreadWorker]]:
    made = [ThreadWorker(number, ARENA_BYTES) for number in range(3)]
    introduce_all(made)
    yield made
    for worker in made:
        worker.close()


def received_bytes(worker: ThreadWorker) -> int:
    return worker.data_plane.usage().parameter_received_bytes


def test_a_spare_is_read_and_wakes_without_a_byte(
    workers: list[ThreadWorker], tiny_model: Path
) -> None:
    source, keeper, reader = workers
    manifest = read_manifest(tiny_model, "tiny")
    load_source(source, manifest, tiny_model)
    keeper.load(10, manifest, all_from(manifest, source.ref), plan=10)
    check_loaded(keeper, manifest)
    first = ask(keeper, "r1", 10, PROMPT, 4)
    keeper.keep(plan=10)
    # A reader gets all of it, while the spare serves nothing.
    reader.load(11, manifest, all_from(manifest, keeper.ref), plan=11)
    check_loaded(reader, manifest)
    assert keeper.report is not None
    assert keeper.report.is_spare
    before = received_bytes(keeper)
    keeper.wake(12, manifest, spare=10, plan=12)
    completed = keeper.heard(lambda word: isinstance(word, HoldingCompleted))[-1]
    assert isinstance(completed, HoldingCompleted)
    assert (completed.holding.plan, completed.received_bytes) == (12, 0)
    assert received_bytes(keeper) == before
    assert ask(keeper, "r2", 12, PROMPT, 4) == ask(reader, "r3", 11, PROMPT, 4) == first
    assert GreedyOracle(tiny_model).check(PROMPT, first).is_right


def test_two_models_take_turns_on_one_worker(workers: list[ThreadWorker], tiny_model: Path) -> None:
    """The second lies behind the first; one that is dropped leaves the other alone."""
    source, keeper, _ = workers
    first, second = (read_manifest(tiny_model, name) for name in ("tiny", "other"))
    load_source(source, first, tiny_model)
    load_source(keeper, first, tiny_model)
    answer = ask(keeper, "r1", 1, PROMPT, 4)
    keeper.keep(plan=1)
    behind = aligned(first.size_bytes)
    files = str(tiny_model)
    keeper.load(20, second, all_from(second, None), files, plan=20, offset_bytes=behind)
    check_loaded(keeper, second)
    assert ask(keeper, "r2", 20, PROMPT, 4) == answer
    assert len(keeper.host.member.reports) == 2
    keeper.keep(plan=20)
    before = received_bytes(keeper)
    keeper.wake(12, first, spare=1, plan=12)
    keeper.heard(lambda word: isinstance(word, HoldingCompleted))
    assert ask(keeper, "r3", 12, PROMPT, 4) == answer
    keeper.release(plan=20)
    keeper.heard(lambda word: isinstance(word, HoldingDropped))
    assert ask(keeper, "r4", 12, PROMPT, 4) == answer
    assert received_bytes(keeper) == before


def test_what_would_lie_on_a_spare_is_refused(
    workers: list[ThreadWorker], tiny_model: Path
) -> None:
    source, keeper, _ = workers
    manifest, other = (read_manifest(tiny_model, name) for name in ("tiny", "other"))
    load_source(source, manifest, tiny_model)
    load_source(keeper, manifest, tiny_model)
    answer = ask(keeper, "r1", 1, PROMPT, 4)
    keeper.keep(plan=1)
    keeper.load(20, other, all_from(other, source.ref), plan=20, offset_bytes=0)
    failed = keeper.heard(lambda word: isinstance(word, HoldingFailed))[-1]
    assert isinstance(failed, HoldingFailed)
    assert "do not fit" in failed.reason
    keeper.wake(12, manifest, spare=1, plan=12)
    keeper.heard(lambda word: isinstance(word, HoldingCompleted))
    assert ask(keeper, "r2", 12, PROMPT, 4) == answer


def test_other_bytes_than_those_that_are_wanted_do_not_wake(
    workers: list[ThreadWorker], tiny_model: Path, tmp_path: Path
) -> None:
    keeper = workers[0]
    manifest = read_manifest(tiny_model, "tiny")
    load_source(keeper, manifest, tiny_model)
    keeper.keep(plan=1)
    layers = list(manifest.layers)
    layers[0] = msgspec.structs.replace(layers[0], checksum="0" * 16)
    other = msgspec.structs.replace(manifest, layers=tuple(layers))
    keeper.wake(12, other, spare=1, plan=12)
    failed = keeper.heard(lambda word: isinstance(word, HoldingFailed))[-1]
    assert isinstance(failed, HoldingFailed)
    assert "has other bytes" in failed.reason
    assert keeper.report is None


# -- a whole pool ---------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_from_two_to_one_and_back_moves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    settings = "    min_replicas: 2\n    max_replicas: 2\n"
    with (
        LocalPool(tiny_model, tmp_path, settings, workers=2) as pool,
        httpx.Client(base_url=pool.url, timeout=patient(120), trust_env=False) as client,
    ):
        # What still loads would be dropped.
        wait_until(lambda: completed(pool) == 2, "both serve")
        for count in (1, 2):
            limits = {"min_replicas": count, "max_replicas": count}
            changed = client.patch("/admin/models/tiny", json=limits)
            assert changed.status_code < 300, changed.text
            wait_until(lambda count=count: pool.gauge("instances") == count, f"it has {count}")
            # What still drains would be resumed.
            wait_until(lambda: of_record(pool, ReleaseHolding) == 1, "one is released")
            check(GreedyOracle(tiny_model), asyncio.run(burst(pool)), 8)
    history = read_history(read_record(pool.record))
    assert [i.is_woken for i in history.instances] == [False, False, True]
    assert [i.received_bytes for i in history.instances][2] == 0
    assert of_record(pool, ReleaseHolding) == 1
    (order,) = [o for o in orders(pool) if o.spare is not None]
    assert order.feeds == ()
    check_spares(history)
    assert replay(read_record(pool.record)).lives == 1


async def burst(pool: LocalPool) -> list[Answer]:
    async with httpx.AsyncClient(timeout=patient(120)) as client:
        answers = [Answer(prompt(number, 30)) for number in range(6)]
        await asyncio.gather(*(answer.read(pool.url, client, 8) for answer in answers))
    return answers


def commands(pool: LocalPool) -> list[object]:
    steps = [line for line in read_record(pool.record) if isinstance(line, StepLine)]
    return [command for line in steps for command in line.commands]


def orders(pool: LocalPool) -> list[StartHolding]:
    return [command for command in commands(pool) if isinstance(command, StartHolding)]


def of_record(pool: LocalPool, kind: type) -> int:
    return sum(isinstance(command, kind) for command in commands(pool))


def completed(pool: LocalPool) -> int:
    steps = [line for line in read_record(pool.record) if isinstance(line, StepLine)]
    events = [event for line in steps for event in line.events]
    return sum(isinstance(e, HoldingCompleted) and not e.holding.member.is_agent for e in events)


def check_spares(history: History) -> None:
    """The device that was released kept its bytes until it was used again."""
    (spare,) = history.spares
    (released, woken) = [i for i in history.instances if i.holdings[0].member == spare.member]
    assert (spare.begun_ns, spare.ended_ns) == (released.ended_ns, woken.holdings[0].begun_ns)
