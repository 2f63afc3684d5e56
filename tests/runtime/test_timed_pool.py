"""A pool of timed workers: real processes, sockets and multicast, and no torch anywhere."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import psutil
import pytest
from completions import Answer, prompt
from pool_thread import LocalPool, wait_until

from livescale.messages.commands import ScaleDecided, StartHolding
from livescale.messages.events import AgentJoined, HoldingCompleted, LinkMeasured, WorkerJoined
from livescale.telemetry.record.record import StepLine, read_record
from livescale.values.chunks import senders
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")
TOKENS = 30
STREAMS = 40
TRIES = 5


@pytest.mark.parametrize("policy", ["bounds", "slo"])
def test_timed_workers_serve_scale_and_load_no_torch(
    tiny_model: Path, tmp_path: Path, policy: str
) -> None:
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
        scaling_policy=policy,
        ttft_aim_ms=200,
    ) as pool:
        # Where requests come one by one, as on busy cores, one burst may not be worth a load.
        for _ in range(TRIES):
            answers = asyncio.run(load(pool))
            assert [answer.error for answer in answers] == [None] * STREAMS
            assert [len(answer.token_ids) for answer in answers] == [TOKENS] * STREAMS
            # A token depends on prompt and position alone, on whichever instance.
            of_prompt = {tuple(answer.prompt_ids): answer.token_ids for answer in answers}
            assert all(of_prompt[tuple(a.prompt_ids)] == a.token_ids for a in answers)
            wait_until(lambda: pool.gauge("num_requests_running") == 0, "nothing is left")
            if has_grown(pool):
                break
        for name, pid in pool.pool.pids().items():
            files = {mapped.path for mapped in psutil.Process(pid).memory_maps()}
            assert not any("libtorch" in file for file in files), name
        wait_until(lambda: len(multicast_bytes(pool)) > 0, "it grew, and that is recorded")
        # Ways are tried beside all this, as soon as a member knows another.
        wait_until(lambda: bool(measured_by_workers(pool)), "a worker measured its link")
        measured = events(pool, LinkMeasured)
        for member in {event.receiver for event in measured}:
            assert sum(event.receiver == member for event in measured) <= 2
        # Parameters moved for real, all of them.
        assert set(multicast_bytes(pool)) == {pool.pool.models[0].manifest.size_bytes}


def test_a_topology_makes_hosts_of_one_machine(tiny_model: Path, tmp_path: Path) -> None:
    topology = tmp_path / "two.yaml"
    topology.write_text(
        "leaves: [{name: 'l{n}', count: 2, spine: 1Gbit}]\n"
        "hosts:\n"
        "  - {name: 'a{n}', count: 2, leaf: 'l{n}', nic: 1Gbit, devices: [{nic: 200Mbit}]}\n"
    )
    with LocalPool(
        tiny_model,
        tmp_path,
        "    min_replicas: 2\n    prefill_tokens_per_s: 500\n",
        device="timed",
        topology=str(topology),
    ) as pool:
        answers = asyncio.run(load(pool))
        assert [answer.error for answer in answers] == [None] * STREAMS
        wait_until(lambda: pool.gauge("agents") == 2, "each host has an agent")
        wait_until(lambda: len(events(pool, AgentJoined)) == 2, "that is recorded")
        wait_until(lambda: len(events(pool, WorkerJoined)) == 2, "so are their workers")
        joined = events(pool, WorkerJoined)
        assert sorted((e.device.host, e.device.uplink_bytes_per_s) for e in joined) == [
            ("a0", 25_000_000),
            ("a1", 25_000_000),
        ]
        # Rates that are told are not measured.
        assert not events(pool, LinkMeasured)


@pytest.mark.long
def test_few_prompt_tokens_and_long_answers_scale_a_pool(tiny_model: Path, tmp_path: Path) -> None:
    """Twice as many requests as all instances have places for, and hardly any prefill work."""
    requests, tokens = 64, 250
    with LocalPool(
        tiny_model,
        tmp_path,
        device="timed",
        workers=4,
        timed_run_us=5000,
        timed_token_us=10,
        sequences_max=8,
        spares_ahead="none",
    ) as pool:
        for _ in range(TRIES):
            answers = [Answer(prompt(number % 10, 4)) for number in range(requests)]
            asyncio.run(read_all(pool, answers, tokens))
            assert [answer.error for answer in answers] == [None] * requests
            assert [len(answer.token_ids) for answer in answers] == [tokens] * requests
            wait_until(lambda: pool.gauge("num_requests_running") == 0, "nothing is left")
            ups = [c for c in commands(pool, ScaleDecided) if c.to_instances > c.from_instances > 0]
            if any(up.to_instances == 4 for up in ups):
                break
        else:
            raise AssertionError(f"it was not scaled as far as it goes: {ups}")
    reasons = {up.reason for up in ups}
    assert reasons <= {"requests", "waiting_requests", "ttft_aim"}
    assert reasons & {"requests", "waiting_requests"}


def has_grown(pool: LocalPool) -> bool:
    return any(c.to_instances > c.from_instances > 0 for c in commands(pool, ScaleDecided))


def commands(pool: LocalPool, kind: type) -> list:
    steps = [line for line in read_record(pool.record) if isinstance(line, StepLine)]
    return [command for line in steps for command in line.commands if isinstance(command, kind)]


def events(pool: LocalPool, kind: type) -> list:
    steps = [line for line in read_record(pool.record) if isinstance(line, StepLine)]
    return [event for line in steps for event in line.events if isinstance(event, kind)]


def measured_by_workers(pool: LocalPool) -> set[int]:
    found = events(pool, LinkMeasured)
    return {event.receiver.worker for event in found if not event.receiver.is_agent}


def multicast_bytes(pool: LocalPool) -> list[int]:
    """What every complete load from another worker received."""
    steps = [line for line in read_record(pool.record) if isinstance(line, StepLine)]
    events = [event for line in steps for event in line.events]
    commands = [command for line in steps for command in line.commands]
    targets = {
        command.holding
        for command in commands
        if isinstance(command, StartHolding) and command.duty is not None and senders(command.feeds)
    }
    completed = [event for event in events if isinstance(event, HoldingCompleted)]
    return [event.received_bytes for event in completed if event.holding in targets]


async def load(pool: LocalPool) -> list[Answer]:
    answers = [Answer(prompt(number % 10, 60)) for number in range(STREAMS)]
    await read_all(pool, answers, TOKENS)
    return answers


async def read_all(pool: LocalPool, answers: list[Answer], tokens: int) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=patient(120), limits=limits) as client:
        await asyncio.gather(*(answer.read(pool.url, client, tokens) for answer in answers))
