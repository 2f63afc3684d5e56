"""A pool of timed workers: real processes, sockets and multicast, and no torch anywhere."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import psutil
import pytest
from completions import Answer, prompt
from pool_thread import LocalPool, wait_until

from livescale.messages.commands import StartLoad
from livescale.messages.events import LoadCompleted
from livescale.telemetry.record import StepLine, read_record
from livescale.types import FromWorker

pytestmark = pytest.mark.pool
TOKENS = 30
STREAMS = 40


def test_timed_workers_serve_scale_and_load_no_torch(tiny_model: Path, tmp_path: Path) -> None:
    with LocalPool(
        tiny_model,
        tmp_path,
        "    prefill_tokens_per_s: 500\n",
        device="timed",
        workers=3,
        timed_run_us=2000,
        timed_token_us=20,
        sequences_max=8,
        prefill_queue_upper_ms=100,
        prefill_queue_lower_ms=50,
    ) as pool:
        answers = asyncio.run(load(pool))
        assert [answer.error for answer in answers] == [None] * STREAMS
        assert [len(answer.token_ids) for answer in answers] == [TOKENS] * STREAMS
        # A token depends on prompt and position alone, on whichever instance.
        by_prompt = {tuple(answer.prompt_ids): answer.token_ids for answer in answers}
        assert all(by_prompt[tuple(answer.prompt_ids)] == answer.token_ids for answer in answers)
        for name, pid in pool.pool.pids().items():
            files = {mapped.path for mapped in psutil.Process(pid).memory_maps()}
            assert not any("libtorch" in file for file in files), name
        wait_until(lambda: pool.gauge("num_requests_running") == 0, "nothing is left")
        wait_until(lambda: len(multicast_bytes(pool)) > 0, "it grew, and that is recorded")
        # Parameters moved for real, all of them.
        assert set(multicast_bytes(pool)) == {pool.pool.models[0].manifest.size_bytes}


def multicast_bytes(pool: LocalPool) -> list[int]:
    """What every complete load from another worker received."""
    steps = [line for line in read_record(pool.record) if isinstance(line, StepLine)]
    events = [event for line in steps for event in line.events]
    commands = [command for line in steps for command in line.commands]
    targets = {
        command.instance
        for command in commands
        if isinstance(command, StartLoad) and isinstance(command.upstream, FromWorker)
    }
    completed = [event for event in events if isinstance(event, LoadCompleted)]
    return [event.received_bytes for event in completed if event.instance in targets]


async def load(pool: LocalPool) -> list[Answer]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        answers = [Answer(prompt(number % 10, 60)) for number in range(STREAMS)]
        await asyncio.gather(*(answer.read(pool.url, client, TOKENS) for answer in answers))
    return answers
