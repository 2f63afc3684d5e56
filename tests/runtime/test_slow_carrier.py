"""Loads over a slow carrier inside one host: slow, as was planned, and nobody is blamed for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from completions import Answer, prompt
from pool_thread import LocalPool, wait_until

from livescale.engine.files.make import make_model
from livescale.messages.commands import AmendHolding, PlanMade, StartHolding
from livescale.messages.events import HoldingCompleted
from livescale.messages.scale_plan import ScalePlan
from livescale.telemetry.record.record import StepLine, read_record
from livescale.values.types import HoldingId
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")
STREAMS = 30
TOKENS = 20
RATE = 5_000_000


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So large that its load takes longer than any load is late by."""
    directory = tmp_path_factory.mktemp("large") / "large"
    make_model(directory, "small", 0)
    return directory


@pytest.mark.long
def test_a_slow_carrier_inside_a_host_is_planned_as_such(large_model: Path, tmp_path: Path) -> None:
    with LocalPool(
        large_model,
        tmp_path,
        "    prefill_tokens_per_s: 500\n",
        device="timed",
        workers=3,
        carrier="tcp",
        uplink_bytes_per_s=RATE,
        downlink_bytes_per_s=RATE,
        arena_bytes="64MiB",
        timed_run_us=2000,
        sequences_max=8,
        prefill_queue_upper_ms=100,
        prefill_queue_lower_ms=50,
        queue_timeout_s="none",
        scale_down_timeout_ms=60_000,
    ) as pool:
        answers = asyncio.run(load(pool))
        assert [answer.error for answer in answers] == [None] * STREAMS
        wait_until(lambda: len(timed_loads(pool)) == 3, "it grew, and that is recorded")
        orders = [c for line in steps(pool) for c in line.commands if isinstance(c, AmendHolding)]
        assert not orders, "no load changed its sender"
        for predicted_ns, took_ns in timed_loads(pool):
            assert predicted_ns / 2 <= took_ns <= patient(predicted_ns * 2), (predicted_ns, took_ns)


def steps(pool: LocalPool) -> list[StepLine]:
    return [line for line in read_record(pool.record) if isinstance(line, StepLine)]


def timed_loads(pool: LocalPool) -> list[tuple[int, int]]:
    """Of every complete load: how long the plan said, and how long it took."""
    plans: dict[int, ScalePlan] = {}
    begun: dict[HoldingId, tuple[int, int]] = {}
    found = []
    for line in steps(pool):
        for event in line.events:
            if isinstance(event, HoldingCompleted) and not event.holding.member.is_agent:
                predicted_ns, since_ns = begun[event.holding]
                found.append((predicted_ns, line.now_ns - since_ns))
        for command in line.commands:
            if isinstance(command, PlanMade):
                plans[command.plan.plan] = command.plan
            elif isinstance(command, StartHolding) and command.duty is not None:
                held = command.holding
                predicted_ns = plans[held.plan].load_of(held.member).completed_ns
                assert predicted_ns is not None, "rates are known"
                begun[held] = (predicted_ns, line.now_ns)
    return found


async def load(pool: LocalPool) -> list[Answer]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=patient(240), limits=limits) as client:
        answers = [Answer(prompt(number % 10, 60)) for number in range(STREAMS)]
        await asyncio.gather(*(answer.read(pool.url, client, TOKENS) for answer in answers))
    return answers
