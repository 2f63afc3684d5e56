"""Workers are forks of one process that has imported what they need."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from boot_messages import lonely_agent
from completions import Answer, check, prompt
from pool_thread import LocalPool, wait_until

from livescale.config.pool import PoolConfig
from livescale.config.reading import load_config
from livescale.engine.oracle import GreedyOracle
from livescale.runtime.children.forking import ForkServer, ForkServerError
from livescale.runtime.children.pool_process import STATUS_BYTES_MAX, Child, child_environment
from slowness import patient

pytestmark = [
    pytest.mark.usefixtures("machine"),
    pytest.mark.skipif(sys.platform != "linux", reason="other systems start workers without forks"),
]


@pytest.fixture(scope="module")
def pool(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    scratch = tmp_path_factory.mktemp("pool")
    with LocalPool(tiny_model, scratch, workers=2) as local:
        yield local


def fork_server(pool: LocalPool) -> psutil.Process:
    """The parent of all workers."""
    pids = pool.pool.pids()
    (parent,) = {psutil.Process(pids[f"worker {number}"]).ppid() for number in range(2)}
    return psutil.Process(parent)


def test_workers_are_forks_of_one_process_and_a_dead_one_is_replaced_by_another(
    pool: LocalPool,
) -> None:
    server = fork_server(pool)
    assert server.ppid() == os.getpid()
    first = pool.pool.pids()["worker 0"]
    pool.kill("worker 0")
    wait_until(lambda: pool.pool.pids().get("worker 0", first) != first, "the next life begins")
    wait_until(lambda: pool.gauge("workers") == 2, "it works")
    assert fork_server(pool) == server


def test_the_end_of_a_worker_is_seen_while_the_fork_server_is_stopped(pool: LocalPool) -> None:
    server = fork_server(pool)
    server.suspend()
    pool.kill("worker 1")
    wait_until(lambda: "worker 1" not in pool.pool.pids(), "its end is seen")
    server.resume()
    wait_until(lambda: "worker 1" in pool.pool.pids(), "the next life begins")
    wait_until(lambda: pool.gauge("workers") == 2, "it works")


def test_a_stream_survives_the_end_of_the_fork_server(pool: LocalPool, tiny_model: Path) -> None:
    server = fork_server(pool)

    async def stream() -> Answer:
        async with httpx.AsyncClient(timeout=patient(120)) as client:
            answer = Answer(prompt(3, 30))
            async for count in answer.stream(pool.url, client, 300):
                if count == 20:
                    os.kill(server.pid, signal.SIGKILL)
            return answer

    check(GreedyOracle(tiny_model), [asyncio.run(stream())], 300)
    wait_until(lambda: pool.gauge("workers") == 2, "both workers are replaced", 120)
    assert fork_server(pool) != server


def test_a_server_that_does_not_answer_is_an_error_and_ends_when_it_is_told(
    tiny_model: Path,
) -> None:
    config = load_config(None, [str(tiny_model)], {}, {})

    async def start() -> None:
        environment, silent = child_environment(config), ("sh", "-c", "exec sleep 600")
        server = ForkServer(
            silent, environment, config.log_level, STATUS_BYTES_MAX, first_answer_s=0.2
        )
        with pytest.raises(ForkServerError, match="does not answer"):
            await server.start("agent")
        server.end()
        await asyncio.wait_for(server.wait(), patient(60))

    asyncio.run(start())


async def lives_once(child: Child, config: PoolConfig) -> None:
    """It starts, becomes ready and ends when it is told to."""
    await child.start(config)
    watching = asyncio.create_task(child.watch())
    await asyncio.wait_for(child.is_ready.wait(), patient(60))
    child.signal(signal.SIGTERM)
    await watching


def test_a_fork_that_the_system_refuses_is_an_error_and_costs_no_other_process(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server has no room for the descriptors of an order, for one of them, or for the fork's
    own, and then has it again."""
    config = load_config(None, [str(tiny_model)], {}, {})
    boot = lonely_agent(tmp_path)

    async def start() -> None:
        server = ForkServer((), child_environment(config), config.log_level, STATUS_BYTES_MAX)
        first = await server.start("agent")
        serving = psutil.Process(psutil.Process(first.pid).ppid())
        used, open_before = serving.num_fds(), psutil.Process().num_fds()
        limits = serving.rlimit(psutil.RLIMIT_NOFILE)
        for room in range(3):
            serving.rlimit(psutil.RLIMIT_NOFILE, (used + room, limits[1]))
            with pytest.raises(ForkServerError, match=r"cannot fork: .*Too many open files"):
                await server.start("agent")
            assert serving.num_fds() == used
            assert psutil.Process().num_fds() == open_before
            assert [child.pid for child in serving.children()] == [first.pid]
        await lives_once(Child("agent 0", "agent", lambda _: boot, forks=server), config)
        serving.rlimit(psutil.RLIMIT_NOFILE, limits)
        second = await server.start("agent")
        assert first.returncode is None
        for fork in (first, second):
            fork.send_signal(signal.SIGKILL)
            assert await fork.wait() == -signal.SIGKILL
        server.end()
        await server.wait()

    asyncio.run(start())
    assert "agent 0 is started without a fork: it cannot fork" in caplog.text


def test_a_server_that_cannot_start_is_an_error_and_processes_start_without_it(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(None, [str(tiny_model)], {}, {})
    boot = lonely_agent(tmp_path)

    async def start() -> None:
        environment = child_environment(config)
        server = ForkServer(("false",), environment, config.log_level, STATUS_BYTES_MAX)
        with pytest.raises(ForkServerError, match="ended"):
            await server.start("agent")
        await lives_once(Child("agent 0", "agent", lambda _: boot, forks=server), config)
        await server.wait()

    asyncio.run(start())
    assert "agent 0 is started without a fork" in caplog.text
