"""Every family in one pool whose instances help while they load: whatever changes hands on the way,
every token that a client reads is right."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from completions import prompt
from pool_thread import LocalPool, wait_until

from livescale.engine.make import FAMILY_NAMES, Preset, make_model
from livescale.engine.oracle import GreedyOracle
from livescale.messages.commands import StartHolding
from livescale.messages.events import BatchTaken, LiveStarted, RequestEnded
from livescale.telemetry.record import StepLine, read_record
from livescale.types import Outcome

pytestmark = [pytest.mark.pool, pytest.mark.long]
SIZES = Preset(4, 64, 96, 4, 2, 1024)
# About a megabyte each: a load takes half a second.
LINK_BYTES_PER_S = 2_000_000
SETTINGS = "    prefill_tokens_per_s: 1000\n    min_replicas: 0\n"
STREAMS, TOKENS, LONG_TOKENS, READ_TOKENS = 24, 8, 90, 3


@dataclass
class FamilyStream:
    """A streamed completion, and what its client does with it."""

    body: dict[str, object]
    #: the client goes when it has read so many tokens
    leaves_after: int | None = None
    token_ids: list[int] = field(default_factory=list)

    async def read(self, url: str, client: httpx.AsyncClient) -> None:
        async with client.stream("POST", f"{url}/v1/completions", json=self.body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        self.token_ids += choice.get("token_ids") or []
                if self.leaves_after is not None and len(self.token_ids) >= self.leaves_after:
                    return


def stream_of(family: str, number: int) -> FamilyStream:
    """Every third one is sampled, every fifth one is left, every eighth one is long."""
    body = {
        "model": family,
        "prompt": prompt(number, 90 + 2 * number),
        "max_tokens": LONG_TOKENS if number % 8 == 2 else TOKENS,
        "temperature": 0.9 if number % 3 == 1 else 0,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    return FamilyStream(body, READ_TOKENS if number % 5 == 4 else None)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("live-families")
    for family in FAMILY_NAMES:
        make_model(root / family, SIZES, seed=5, family=family)
    return {family: root / family for family in FAMILY_NAMES}


@pytest.fixture(scope="module")
def pool(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    first, *others = models
    entries = "".join(f"  - path: {models[family]}\n{SETTINGS}" for family in others)
    with LocalPool(
        models[first],
        tmp_path_factory.mktemp("pool"),
        SETTINGS + entries,
        workers=2,
        hosts=2,
        uplink_bytes_per_s=LINK_BYTES_PER_S,
        downlink_bytes_per_s=LINK_BYTES_PER_S,
        prefill_queue_upper_ms=100,
        prefill_queue_lower_ms=50,
        run_tokens_max=64,
        sequences_max=8,
        dispatched_ahead_max=2,
        live_over_ms=0,
        live_pairs="always",
    ) as local:
        # Else the last copy of a model would be in the way of the next one.
        copies = len(models)
        wait_until(lambda: local.gauge("host_copies") == copies, "all are in host memory")
        yield local


async def burst(url: str, family: str) -> list[FamilyStream]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        # One instance is there before the others come.
        await FamilyStream(stream_of(family, 0).body, 1).read(url, client)
        streams = [stream_of(family, number) for number in range(STREAMS)]
        await asyncio.gather(*(stream.read(url, client) for stream in streams))
    return streams


async def alone(url: str, streams: list[FamilyStream]) -> list[list[int]]:
    """What an instance with nothing else to do answers."""
    again = [FamilyStream(stream.body) for stream in streams]
    async with httpx.AsyncClient(timeout=60) as client:
        for stream in again:
            await stream.read(url, client)
    return [stream.token_ids for stream in again]


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_burst_is_answered_right(pool: LocalPool, models: dict[str, Path], family: str) -> None:
    name = "tiny" if family == next(iter(FAMILY_NAMES)) else family
    streams = asyncio.run(burst(pool.url, name))
    whole = [stream for stream in streams if stream.leaves_after is None]
    assert [len(s.token_ids) for s in whole] == [s.body["max_tokens"] for s in whole]
    greedy = [stream for stream in streams if stream.body["temperature"] == 0]
    oracle = GreedyOracle(models[family])
    checks = oracle.check_many([(s.body["prompt"], s.token_ids) for s in greedy])
    assert [check.wrong for check in checks] == [()] * len(greedy)
    sampled = [stream for stream in streams if stream.body["temperature"]]
    for stream, token_ids in zip(sampled, asyncio.run(alone(pool.url, sampled)), strict=True):
        assert stream.token_ids == token_ids[: len(stream.token_ids)]


def test_what_changed_hands_ended_once(pool: LocalPool) -> None:
    wait_until(lambda: pool.gauge("num_requests_running") == 0, "nothing is left")
    lines = [line for line in read_record(pool.record) if isinstance(line, StepLine)]
    words = [word for line in lines for word in line.events]
    orders = [word for line in lines for word in line.commands if isinstance(word, StartHolding)]
    duties = {order.holding: order.duty for order in orders}
    live = {duties[word.holding].instance for word in words if isinstance(word, LiveStarted)}
    taken = [word for word in words if isinstance(word, BatchTaken)]
    print(f"{len(live)} instances helped, {len(taken)} batches were taken over")
    assert {batch.target for batch in taken} <= live
    ended = [word for word in words if isinstance(word, RequestEnded)]
    assert {word.outcome for word in ended} <= {
        *(Outcome.FINISHED, Outcome.CANCELLED, Outcome.RETURNED)
    }
