"""A pool with copies in host memory: models at zero, published, withdrawn; agents that die."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pool_thread import LocalPool, wait_until

from livescale.engine.files.make import make_model
from livescale.messages.commands import ModelGone, StartHolding
from livescale.messages.events import AgentJoined
from livescale.telemetry.record.record import StepLine, read_record
from livescale.telemetry.replay import replay
from livescale.values.chunks import senders
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")
AT_ZERO = "    min_replicas: 0\n    idle_s: 1\n    prefill_tokens_per_s: 500\n"


@pytest.fixture(scope="module")
def pool(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    with LocalPool(
        tiny_model,
        tmp_path_factory.mktemp("pool"),
        AT_ZERO,
        device="timed",
        workers=2,
        timed_run_us=500,
        host_memory_bytes="16MiB",
        spares_ahead="none",
    ) as local:
        yield local


def steps(pool: LocalPool) -> list[StepLine]:
    return [line for line in read_record(pool.record) if isinstance(line, StepLine)]


def commands(pool: LocalPool, kind: type) -> list:
    return [c for line in steps(pool) for c in line.commands if isinstance(c, kind)]


def loads(pool: LocalPool) -> list[StartHolding]:
    """Orders to workers."""
    return [order for order in commands(pool, StartHolding) if order.duty is not None]


def copies(pool: LocalPool) -> list[StartHolding]:
    """Orders to agents."""
    return [order for order in commands(pool, StartHolding) if order.duty is None]


def complete(pool: LocalPool, model: str = "tiny") -> httpx.Response:
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
    return httpx.post(f"{pool.url}/v1/completions", json=body, timeout=patient(60))


def withdraw(pool: LocalPool, model: str) -> None:
    headers = {"Content-Type": "application/json"}
    gone = httpx.delete(f"{pool.url}/admin/models/{model}", headers=headers, timeout=patient(60))
    assert gone.status_code < 300, gone.text


def test_a_model_at_zero_is_ready_starts_from_host_memory_and_goes_back_to_zero(
    pool: LocalPool,
) -> None:
    assert pool.gauge("instances") == 0
    assert pool.gauge("host_copies") == 1
    assert complete(pool).status_code == 200
    wait_until(lambda: loads(pool) != [], "the load is on record")
    [load] = loads(pool)
    assert [upstream.worker.is_agent for upstream in senders(load.feeds)] == [True]
    wait_until(lambda: pool.gauge("instances") == 0, "it is at zero again")
    assert pool.gauge("host_copies") == 1


def test_a_dead_agent_comes_back_and_its_copies_are_restored(pool: LocalPool) -> None:
    lives = len([e for line in steps(pool) for e in line.events if isinstance(e, AgentJoined)])
    made = len(copies(pool))
    os.kill(pool.pool.pids()["agent 0"], signal.SIGKILL)
    wait_until(lambda: len(copies(pool)) > made, "a new copy is ordered")
    wait_until(lambda: pool.gauge("host_copies") == 1, "the copy is restored")
    joined = [e for line in steps(pool) for e in line.events if isinstance(e, AgentJoined)]
    assert len(joined) > lives
    assert complete(pool).status_code == 200


def test_a_restarted_controller_finds_the_copies_where_they_are(pool: LocalPool) -> None:
    wait_until(lambda: pool.gauge("instances") == 0, "it is at zero")
    made = len(copies(pool))
    old = pool.pool.pids()["controller"]
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: pool.pool.pids().get("controller", old) != old, "a new controller")
    assert complete(pool).status_code == 200
    assert len(copies(pool)) == made


def test_models_are_published_and_withdrawn_while_the_pool_runs(
    pool: LocalPool, tmp_path: Path
) -> None:
    directory = tmp_path / "second"
    make_model(directory, "tiny", seed=9)
    published = httpx.post(
        f"{pool.url}/admin/models",
        json={"path": str(directory), "min_replicas": 0, "idle_s": 1},
        timeout=patient(60),
    )
    assert published.status_code < 300, published.text
    wait_until(lambda: pool.gauge("host_copies") == 2, "it has a copy")
    assert complete(pool, "second").status_code == 200
    # A controller's next life knows it, too.
    old = pool.pool.pids()["controller"]
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: pool.pool.pids().get("controller", old) != old, "a new controller")
    assert complete(pool, "second").status_code == 200
    withdraw(pool, "second")
    assert complete(pool, "second").status_code == 404
    wait_until(lambda: commands(pool, ModelGone) == [ModelGone("second")], "nothing is left of it")
    wait_until(lambda: pool.gauge("host_copies") == 1, "its copy is gone")
    assert complete(pool).status_code == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"path": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"path": "TINY", "name": "tiny"}, "tiny"),
        ({"path": "TINY", "name": "b", "min_replicas": 9}, "min_replicas"),
        ({"path": "TINY", "name": "b", "schedule": "at noon"}, "at noon"),
        ({"path": "TINY", "name": "b", "colour": "red"}, "colour"),
    ],
)
def test_what_cannot_be_published_is_refused_with_a_reason(
    pool: LocalPool, tiny_model: Path, body: dict[str, object], words: str
) -> None:
    body = {key: str(tiny_model) if value == "TINY" else value for key, value in body.items()}
    answer = httpx.post(f"{pool.url}/admin/models", json=body, timeout=patient(60))
    assert 400 <= answer.status_code < 500, answer.text
    assert words in answer.json()["error"]["message"]
    assert complete(pool).status_code == 200


def test_a_model_that_finds_no_room_in_host_memory_is_refused(
    pool: LocalPool, tiny_model: Path, tmp_path: Path
) -> None:
    statuses = []
    for number in range(5):
        body = {"path": str(tiny_model), "name": f"more{number}", "min_replicas": 0}
        answer = httpx.post(f"{pool.url}/admin/models", json=body, timeout=patient(60))
        statuses.append(answer.status_code)
        if answer.status_code >= 400:
            assert "host_memory_bytes" in answer.json()["error"]["message"]
            break
    assert statuses[-1] == 400
    for number in range(len(statuses) - 1):
        withdraw(pool, f"more{number}")
    wait_until(lambda: pool.gauge("host_copies") == 1, "their copies are gone")


def test_the_record_of_all_that_replays(pool: LocalPool) -> None:
    assert replay(read_record(pool.record)).lives == 3
