"""Members of a real pool are recorded while processes die: every record replays."""

from __future__ import annotations

import asyncio
import os
import subprocess
from functools import partial
from pathlib import Path

import httpx
import pytest
from completions import Answer, prompt
from pool_thread import LocalPool, wait_until

from livescale.common.interpreter import module_words
from livescale.common.settings import ConfigError
from livescale.config.reading import load_config
from livescale.member.inputs import (
    ControllerMet,
    ExecutorReady,
    LayerCame,
    Ordered,
    PeerSent,
    RunEnded,
    Submitted,
)
from livescale.messages.events import BatchTaken
from livescale.runtime.supervisor.supervisor import Pool
from livescale.telemetry.member_record import MemberStepLine, read_member_record
from livescale.telemetry.record.record import StepLine, read_record
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")
VICTIMS = ("worker 0", "controller", "worker 1", "agent 0", "worker 2", "worker 3", "agent 0")
#: dies in the bursts that follow when no batch has changed hands
LATER_VICTIMS = ("worker 1", "worker 2", "worker 1", "worker 2", "worker 1")
#: four workers and one agent
MEMBERS = 5
STREAMS = 16
TOKENS = 40
LINK_BYTES_PER_S = 3_000_000


@pytest.mark.long
def test_records_of_a_pool_whose_processes_die_replay(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "members"
    with LocalPool(
        tiny_model,
        tmp_path,
        "    prefill_tokens_per_s: 1000\n",
        device="timed",
        timed_run_us=3000,
        timed_token_us=500,
        workers=4,
        uplink_bytes_per_s=LINK_BYTES_PER_S,
        downlink_bytes_per_s=LINK_BYTES_PER_S,
        sequences_max=8,
        dispatched_ahead_max=2,
        prefill_queue_upper_ms=100,
        prefill_queue_lower_ms=50,
        request_attempts_max=len(VICTIMS + LATER_VICTIMS) + 1,
        live_order="zigzag",
        live_over_ms=0,
        spares_ahead="none",
        live_pairs="always",
        record_members=str(folder),
    ) as pool:
        records = MEMBERS
        for number, victim in enumerate(VICTIMS + LATER_VICTIMS):
            if number >= len(VICTIMS) and has_shared(pool):
                break
            answers = asyncio.run(burst_with_death(pool, number, victim))
            assert [answer.error for answer in answers] == [None] * STREAMS, victim
            assert [len(answer.token_ids) for answer in answers] == [TOKENS] * STREAMS, victim
            records += victim != "controller"
            wait_until(partial(has_records, folder, records), f"{victim} lives again")
            wait_until(lambda: pool.gauge("workers") == 4, "all workers are back")
            wait_until(lambda: pool.gauge("agents") == 1, "the agent is back")
    (start,) = folder.iterdir()
    files = sorted(start.iterdir())
    assert {"w0.0.jsonl", "w0.1.jsonl", "w3.1.jsonl", "h0.0.jsonl", "h0.2.jsonl"} <= {
        file.name for file in files
    }
    assert len(files) == records >= 10
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    kinds = {
        type(news)
        for file in files
        for line in read_member_record(file)
        if isinstance(line, MemberStepLine)
        for news in line.inputs
    }
    assert {Ordered, ControllerMet, LayerCame, ExecutorReady, Submitted, RunEnded} <= kinds
    assert PeerSent in kinds
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            module_words("livescale.main", "replay", *map(str, files)),
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(": the same ") == len(files)


def has_shared(pool: LocalPool) -> bool:
    """A batch has changed hands between workers."""
    steps = (line for line in read_record(pool.record) if isinstance(line, StepLine))
    return any(isinstance(event, BatchTaken) for line in steps for event in line.events)


def has_records(folder: Path, count: int) -> bool:
    """So many members have lived."""
    return len(list(folder.glob("*/*"))) == count


async def burst_with_death(pool: LocalPool, number: int, victim: str) -> list[Answer]:
    """Streams that begin at once; when tokens have come of a part of them, a process dies."""
    answers = [Answer(prompt(STREAMS * number + n, 120)) for n in range(STREAMS)]
    is_time = asyncio.Event()

    async def read(answer: Answer, client: httpx.AsyncClient) -> None:
        async for _ in answer.stream(pool.url, client, TOKENS):
            if sum(bool(answer.token_ids) for answer in answers) > number + 2:
                is_time.set()

    async with httpx.AsyncClient(
        timeout=patient(120), limits=httpx.Limits(max_connections=None)
    ) as client:
        streams = asyncio.gather(*(read(answer, client) for answer in answers))
        await is_time.wait()
        pool.kill(victim)
        await streams
    return answers


def test_a_directory_that_cannot_be_made_is_an_error_before_the_start(
    tiny_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    settings = {"port": 0, "device": "timed", "record_members": str(file)}
    with pytest.raises(ConfigError, match=f"record_members {file}/.*: Not a directory"):
        Pool(load_config(None, [str(tiny_model)], {}, settings))
