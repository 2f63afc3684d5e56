"""A pool of real processes whose instances help from their first layers on, through HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from completions import Answer, check, prompt
from pool_thread import LocalPool, wait_until

from livescale.engine.oracle import GreedyOracle
from livescale.messages.commands import Dispatch, StartHolding
from livescale.messages.events import BatchTaken, HoldingCompleted, LiveStarted, RequestEnded
from livescale.telemetry.record.record import StepLine, read_record
from livescale.telemetry.replay import replay
from livescale.values.types import HoldingId, InstanceId, Outcome, RequestId
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")
# About 3.4 MB at this rate: a load takes a second.
LINK_BYTES_PER_S = 3_500_000
STREAMS, TOKENS, TRIES = 40, 24, 5


@pytest.fixture(scope="module")
def pool(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    with LocalPool(
        tiny_model,
        tmp_path_factory.mktemp("pool"),
        "    prefill_tokens_per_s: 2000\n",
        hosts=3,
        host_memory_bytes=0,
        uplink_bytes_per_s=LINK_BYTES_PER_S,
        downlink_bytes_per_s=LINK_BYTES_PER_S,
        prefill_queue_upper_ms=100,
        prefill_queue_lower_ms=50,
        run_tokens_max=64,
        sequences_max=8,
        live_order="zigzag",
        live_over_ms=0,
        spares_ahead="none",
        live_pairs="always",
    ) as local:
        yield local


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> GreedyOracle:
    return GreedyOracle(tiny_model)


async def burst(pool: LocalPool, number: int = 0, kills: bool = False) -> list[Answer]:
    """Each number has prompts of its own: none is found in an instance's prefix index."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=patient(60), limits=limits) as client:
        answers = [Answer(prompt(number * STREAMS + n, 120 + 3 * n)) for n in range(STREAMS)]
        streams = [asyncio.create_task(a.read(pool.url, client, TOKENS)) for a in answers]
        if kills:
            while not any(answer.token_ids for answer in answers[STREAMS // 4 :]):
                await asyncio.sleep(0.01)
            os.kill(pool.pool.pids()["controller"], signal.SIGKILL)
        return await asyncio.gather(*streams)


def words(pool: LocalPool, kind: type) -> list:
    lines = [line for line in read_record(pool.record) if isinstance(line, StepLine)]
    return [w for line in lines for w in (*line.events, *line.commands) if isinstance(w, kind)]


def ends(pool: LocalPool) -> tuple[list[RequestId], int]:
    """Requests that finished, and how many attempts were returned: an instance whose source becomes
    another one's gives back what it has not begun. (A gateway that lost its controller on a busy
    machine tells of ends as well: those are no worker's.)"""
    reports = [event for event in words(pool, RequestEnded) if event.worker is not None]
    returned = [event.request for event in reports if event.outcome is Outcome.RETURNED]
    finished = [event.request for event in reports if event.outcome is Outcome.FINISHED]
    assert len(finished) + len(returned) == len(reports)
    return finished, len(returned)


def live_instances(pool: LocalPool) -> dict[HoldingId, InstanceId]:
    """Instances that were to work while they load, by what their worker held."""
    loads = [order for order in words(pool, StartHolding) if order.duty is not None]
    return {load.holding: load.duty.instance for load in loads if load.duty.live_order is not None}


def test_a_burst_is_shared_with_instances_that_are_still_loading(
    pool: LocalPool, oracle: GreedyOracle
) -> None:
    """Over some bursts: where requests come one by one, as on busy cores, no load is in time."""
    before, _ = ends(pool)
    for number in range(TRIES):
        check(oracle, asyncio.run(burst(pool, number)), TOKENS)
        wait_until(lambda: pool.gauge("instances") == 1, "the pool shrinks to one instance")
        live = live_instances(pool)
        started = {event.holding for event in words(pool, LiveStarted)}
        assert started == set(live)
        taken = words(pool, BatchTaken)
        assert {batch.target for batch in taken} <= set(live.values())
        # Changing hands is no new attempt, and every request finished once.
        finished, returned = ends(pool)
        assert len(finished) == len(set(finished)) == len(before) + STREAMS * (number + 1)
        assert len(words(pool, Dispatch)) == len(finished) + returned
        if taken:
            break
    else:
        raise AssertionError("no batch changed hands")
    whole = {event.holding for event in words(pool, HoldingCompleted)}
    assert {holding for holding in whole if not holding.member.is_agent} == started


def test_a_controller_that_dies_in_the_midst_of_it_loses_nothing(
    pool: LocalPool, oracle: GreedyOracle
) -> None:
    check(oracle, asyncio.run(burst(pool, TRIES, kills=True)), TOKENS)
    wait_until(lambda: pool.gauge("num_requests_running") == 0, "nothing is left")
    wait_until(lambda: pool.gauge("instances") == 1, "the pool shrinks to one instance")


def test_the_record_replays(pool: LocalPool) -> None:
    assert replay(read_record(pool.record)).lives == 2
