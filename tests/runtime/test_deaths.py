"""Processes die at random moments under load: every stream still ends, with the right tokens."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import httpx
import pytest
from completions import Answer, check, prompt
from pool_thread import LocalPool, wait_until

from livescale.engine.oracle import GreedyOracle
from livescale.telemetry.record.record import read_record
from livescale.telemetry.replay import replay
from slowness import patient

pytestmark = [pytest.mark.usefixtures("machine"), pytest.mark.long]
LINK_BYTES_PER_S = 10_000_000
STREAMS = 60
DEATHS = 5
TOKENS = 120
SEEDS = range(int(os.environ.get("DEATH_ROUNDS", "1")))


@pytest.mark.parametrize("seed", SEEDS)
def test_streams_survive_any_deaths(tiny_model: Path, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with LocalPool(
        tiny_model,
        tmp_path,
        "    prefill_tokens_per_s: 2000\n",
        uplink_bytes_per_s=LINK_BYTES_PER_S,
        downlink_bytes_per_s=LINK_BYTES_PER_S,
        request_attempts_max=DEATHS + 1,
    ) as pool:
        answers = asyncio.run(_load_with_deaths(pool, rng))
        check(GreedyOracle(tiny_model), answers, TOKENS)
        wait_until(lambda: pool.gauge("workers") == 3, "all workers are back")
        wait_until(lambda: pool.gauge("instances") == 1, "the pool shrinks to one instance")
        wait_until(lambda: pool.gauge("num_requests_running") == 0, "nothing is left")
    assert replay(read_record(pool.record)).lives >= 2


async def _load_with_deaths(pool: LocalPool, rng: random.Random) -> list[Answer]:
    """Streams begin when others have got on; some of their beginnings kill a process."""
    fatal = sorted(rng.sample(range(5, STREAMS), DEATHS))
    victims = ["controller", *[f"worker {rng.randrange(3)}" for _ in fatal[1:]]]
    rng.shuffle(victims)
    next_tokens = asyncio.Condition()
    async with httpx.AsyncClient(
        timeout=patient(120), limits=httpx.Limits(max_connections=None)
    ) as client:
        answers: list[Answer] = []
        ended: list[Answer] = []

        async def read(answer: Answer) -> None:
            async for _ in answer.stream(pool.url, client, TOKENS):
                async with next_tokens:
                    next_tokens.notify_all()
            async with next_tokens:
                ended.append(answer)
                next_tokens.notify_all()

        tasks = []

        for number in range(STREAMS):
            answers.append(Answer(prompt(number, rng.randrange(10, 300))))
            tasks.append(asyncio.create_task(read(answers[-1])))
            wanted = sum(len(answer.token_ids) for answer in answers) + rng.randrange(TOKENS)
            async with next_tokens:
                while len(ended) < len(answers):
                    if sum(len(answer.token_ids) for answer in answers) >= wanted:
                        break
                    await next_tokens.wait()
            if number in fatal:
                pid = pool.pool.pids().get(victims[fatal.index(number)])
                if pid is not None:  # it may be dead already
                    os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*tasks)
    return answers
