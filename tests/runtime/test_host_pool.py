"""A pool on several emulated hosts: everything crosses shaped links, and hosts die whole."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from completions import Answer, prompt
from pool_thread import LocalPool, wait_until

from livescale.lab.testbed.bed import Testbed
from livescale.lab.testbed.spec import NetworkSpec, TestbedError
from livescale.messages.commands import AmendHolding, StartHolding
from livescale.messages.events import HoldingDropped, HoldingFailed, WorkerJoined, WorkerLost
from livescale.telemetry.record.record import StepLine, read_record
from livescale.telemetry.replay import replay
from livescale.values.chunks import senders
from livescale.values.types import HoldingId
from slowness import patient

HOSTS = 3
TOKENS = 30


pytestmark = pytest.mark.usefixtures("machine")


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    made = Testbed(NetworkSpec(hosts=HOSTS, link_bits_per_s=100_000_000))
    try:
        made.__enter__()
    except TestbedError as error:
        pytest.skip(f"no testbed here: {error}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def pool(
    bed: Testbed, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalPool]:
    with LocalPool(
        tiny_model,
        tmp_path_factory.mktemp("pool"),
        "    prefill_tokens_per_s: 500\n",
        bed,
        device="timed",
        workers=HOSTS,
        timed_run_us=2000,
        sequences_max=8,
        prefill_queue_upper_ms=100,
        prefill_queue_lower_ms=50,
        request_attempts_max=4,
        # What is tested is how bytes move.
        warm_spares="off",
    ) as local:
        yield local


def burst(pool: LocalPool) -> None:
    async def ask() -> list[Answer]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=patient(120), limits=limits) as client:
            answers = [Answer(prompt(number % 10, 60)) for number in range(40)]
            await asyncio.gather(*(answer.read(pool.url, client, TOKENS) for answer in answers))
        return answers

    answers = asyncio.run(ask())
    assert [answer.error for answer in answers] == [None] * len(answers)
    assert [len(answer.token_ids) for answer in answers] == [TOKENS] * len(answers)
    by_prompt = {tuple(answer.prompt_ids): answer.token_ids for answer in answers}
    assert all(by_prompt[tuple(answer.prompt_ids)] == answer.token_ids for answer in answers)


def test_a_pool_on_hosts_serves_and_scales_over_their_links(pool: LocalPool) -> None:
    wait_until(lambda: pool.gauge("agents") == HOSTS, "every host has an agent")
    burst(pool)
    steps = [line for line in read_record(pool.record) if isinstance(line, StepLine)]
    joined = [e for line in steps for e in line.events if isinstance(e, WorkerJoined)]
    assert sorted(event.device.host for event in joined) == ["h0", "h1", "h2"]
    wait_until(lambda: pool.gauge("instances") == 1, "it shrinks again")


def test_a_host_that_dies_comes_back(pool: LocalPool) -> None:
    for name in ("agent 1", "worker 1"):
        os.kill(pool.pool.pids()[name], signal.SIGKILL)
    burst(pool)
    wait_until(lambda: pool.gauge("workers") == pool.gauge("agents") == HOSTS, "all are back")
    wait_until(lambda: pool.gauge("host_copies") >= 1, "the host copy is there")


def test_a_link_that_was_cut_heals_the_pool_without_it(pool: LocalPool, bed: Testbed) -> None:
    bed.cut("h0")
    try:
        burst(pool)
    finally:
        bed.restore("h0")
    burst(pool)


@pytest.mark.long
def test_a_slow_link_is_gone_around(pool: LocalPool, bed: Testbed) -> None:
    """Bytes still come over it, so nothing stalls; but a load takes many times what was planned."""
    wait_until(lambda: len(holders(pool)) == 1, "one instance is left")
    (source,) = holders(pool)
    before = len(amendments(pool))
    host = f"h{source}"
    bed.set_rate(host, 0, 1_000_000)
    try:
        burst(pool)
        wait_until(lambda: len(amendments(pool)) > before, "somebody else is asked")
    finally:
        bed.set_rate(host, 0, 100_000_000)
    asked = [u.worker.worker for order in amendments(pool)[before:] for u in senders(order.feeds)]
    assert source not in asked
    burst(pool)


def amendments(pool: LocalPool) -> list[AmendHolding]:
    steps = [line for line in read_record(pool.record) if isinstance(line, StepLine)]
    return [c for line in steps for c in line.commands if isinstance(c, AmendHolding)]


def holders(pool: LocalPool) -> list[int]:
    """Workers that were given a model and have not lost it."""
    held: dict[HoldingId, None] = {}
    for line in read_record(pool.record):
        if not isinstance(line, StepLine):
            continue
        for event in line.events:
            if isinstance(event, HoldingDropped | HoldingFailed):
                held.pop(event.holding, None)
            elif isinstance(event, WorkerLost):
                held = {one: None for one in held if one.member.worker != event.worker.worker}
        loads = [c for c in line.commands if isinstance(c, StartHolding) and c.duty is not None]
        held |= {load.holding: None for load in loads}
    return sorted(one.member.worker for one in held)


def test_the_record_of_it_replays(pool: LocalPool) -> None:
    assert replay(read_record(pool.record)).lives == 1
