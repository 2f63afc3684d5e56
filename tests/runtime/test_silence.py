"""Processes that stop without an end: streams go on elsewhere, and the process is replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from completions import Answer, prompt
from pool_thread import LocalPool, wait_until
from running_streams import (
    ANSWER_S,
    TOKENS,
    RightTokens,
    check,
    check_undisturbed,
    right_tokens_of,
    streams_while,
)

from livescale.config.pool import PoolConfig
from livescale.messages.events import WorkerLost
from livescale.telemetry.record.record import StepLine, read_record
from slowness import patient, patient_ms

pytestmark = pytest.mark.usefixtures("machine")
#: of one run; a stream takes a few seconds, in which everything happens
RUN_US = 20_000


@pytest.fixture(scope="module")
def pool(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    with LocalPool(
        tiny_model,
        tmp_path_factory.mktemp("pool"),
        "    min_replicas: 3\n    prefill_tokens_per_s: 5000\n",
        device="timed",
        workers=3,
        timed_run_us=RUN_US,
        lost_after_ms=patient_ms(1000),
    ) as local:
        yield local


@pytest.fixture
def stopped(pool: LocalPool) -> Iterator[Callable[[str], psutil.Process]]:
    """Stops a child of the pool by name; whatever is still stopped at the end goes on. One that is
    just starting, because it had no time on a busy machine, would be given longer to answer."""
    wait_until(lambda: is_whole(pool), "the pool is whole")
    processes = []

    def stop(name: str) -> psutil.Process:
        process = psutil.Process(pool.pool.pids()[name])
        os.kill(process.pid, signal.SIGSTOP)
        processes.append(process)
        return process

    yield stop
    for process in processes:
        if process.is_running():
            process.send_signal(signal.SIGCONT)
    wait_until(lambda: is_whole(pool), "the pool is whole again")


def is_whole(pool: LocalPool) -> bool:
    try:
        is_healthy = httpx.get(f"{pool.url}/health", timeout=patient(10)).status_code == 200
        has_workers = pool.gauge("workers") == 3 and pool.gauge("instances") == 3
        return is_healthy and has_workers and pool.gauge("host_copies") == 1
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def right_tokens(pool: LocalPool) -> RightTokens:
    return right_tokens_of(pool)


def losses(pool: LocalPool) -> list[WorkerLost]:
    steps = [line for line in read_record(pool.record) if isinstance(line, StepLine)]
    return [e for line in steps for e in line.events if isinstance(e, WorkerLost)]


def test_streams_of_a_stopped_worker_go_on_elsewhere(
    pool: LocalPool,
    stopped: Callable[[str], psutil.Process],
    right_tokens: RightTokens,
) -> None:
    processes = []

    async def stop() -> None:
        processes.append(stopped("worker 0"))

    check(asyncio.run(streams_while(pool, stop)), right_tokens)
    (process,) = processes
    wait_until(lambda: not process.is_running(), "it is killed")
    wait_until(lambda: is_whole(pool), "it is replaced")


def test_requests_wait_for_the_next_life_of_a_stopped_controller(
    pool: LocalPool,
    stopped: Callable[[str], psutil.Process],
    right_tokens: RightTokens,
) -> None:
    late = []
    lives = pool.pool.pids()

    async def stop() -> None:
        process = stopped("controller")
        # New ones come while it is stopped: what answers them is its next life.
        new = Answer(prompt(0, 20))
        async with httpx.AsyncClient(timeout=patient(ANSWER_S)) as client:
            await new.read(pool.url, client, TOKENS)
        late.append(new)
        assert not process.is_running()

    check(asyncio.run(streams_while(pool, stop)), right_tokens)
    assert late[0].token_ids == right_tokens[tuple(prompt(0, 20))]
    # Nobody else was taken for lost because of it.
    assert pool.pool.pids() == lives | {"controller": pool.pool.pids()["controller"]}


def test_health_is_false_while_no_controller_answers(
    pool: LocalPool, stopped: Callable[[str], psutil.Process]
) -> None:
    """It is stopped again and again, as if it could not be replaced."""
    is_over = threading.Event()
    processes = []

    def stop_every_life() -> None:
        while not is_over.wait(0.02):
            pid = pool.pool.pids().get("controller")
            if pid is not None and pid not in [process.pid for process in processes]:
                processes.append(stopped("controller"))

    thread = threading.Thread(target=stop_every_life)
    thread.start()
    try:
        wait_until(
            lambda: httpx.get(f"{pool.url}/health", timeout=patient(10)).status_code == 503,
            "the pool is not healthy",
        )
    finally:
        is_over.set()
        thread.join()


def test_a_stopped_agent_is_replaced(
    pool: LocalPool, stopped: Callable[[str], psutil.Process]
) -> None:
    process = stopped("agent 0")
    wait_until(lambda: not process.is_running(), "it is killed")
    wait_until(lambda: pool.gauge("agents") == 1, "it is replaced")
    wait_until(lambda: pool.gauge("host_copies") == 1, "with its copy")


def test_a_stopped_gateway_is_replaced(
    pool: LocalPool, stopped: Callable[[str], psutil.Process]
) -> None:
    process = stopped("gateway")
    wait_until(lambda: not process.is_running(), "it is killed")
    # Its listening socket never closed.
    wait_until(lambda: is_whole(pool), "the next one serves")
    wait_until(lambda: pool.gauge("num_requests_running") == 0, "nothing is left")


def test_requests_that_come_before_the_next_gateway_wait_for_it(pool: LocalPool) -> None:
    """It answers none of them before it knows the pool."""
    process = psutil.Process(pool.pool.pids()["gateway"])
    process.kill()
    wait_until(lambda: not process.is_running(), "it has ended")
    body = {"model": "tiny", "prompt": prompt(1, 20), "max_tokens": 2}

    async def ask() -> list[int]:
        async with httpx.AsyncClient(timeout=patient(ANSWER_S), trust_env=False) as client:
            posts = [client.post(f"{pool.url}/v1/completions", json=body) for _ in range(8)]
            return [answer.status_code for answer in await asyncio.gather(*posts)]

    assert asyncio.run(ask()) == [200] * 8
    wait_until(lambda: is_whole(pool), "the pool is whole again")


def test_a_worker_that_goes_on_in_time_is_nobodys_loss(
    pool: LocalPool,
    stopped: Callable[[str], psutil.Process],
    right_tokens: RightTokens,
) -> None:
    processes = []

    async def stop_and_go() -> None:
        process = stopped("worker 1")
        processes.append(process)
        process.send_signal(signal.SIGCONT)

    check(asyncio.run(streams_while(pool, stop_and_go)), right_tokens)
    assert processes[0].is_running()


@pytest.mark.long
def test_nobody_is_given_up_on_a_busy_machine(tiny_model: Path, tmp_path: Path) -> None:
    """With the default patience, while others burn every core."""
    burn = [sys.executable, "-c", "while True: pass"]
    burning = [subprocess.Popen(burn) for _ in range(os.cpu_count() or 1)]
    try:
        with LocalPool(
            tiny_model,
            tmp_path,
            "    min_replicas: 3\n    prefill_tokens_per_s: 5000\n",
            device="timed",
            workers=3,
            timed_run_us=RUN_US,
            lost_after_ms=PoolConfig().lost_after_ms,
        ) as pool:
            lives = pool.pool.pids()
            for _ in range(2):
                check_undisturbed(pool, right_tokens_of(pool))
            assert pool.pool.pids() == lives
            assert not losses(pool)
    finally:
        for process in burning:
            process.kill()
            process.wait()
