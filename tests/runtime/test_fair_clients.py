"""A client that sends one request at a time, beside one that sends a thousand at once."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from pathlib import Path

import httpx
import pytest
from pool_thread import LocalPool, wait_until

from livescale.messages.events import RequestArrived
from livescale.telemetry.record import StepLine, read_record

pytestmark = pytest.mark.usefixtures("machine")
LIGHT, HEAVY = "127.0.0.2", "127.0.0.1"
ROUNDS, REQUESTS = 2, 3
CHOICES, STREAMS = 128, 8
LIGHT_PROMPT, HEAVY_PROMPT, HEAVY_TOKENS = 800, 4, 64


def test_a_light_client_hardly_notices_a_heavy_one(tiny_model: Path, tmp_path: Path) -> None:
    """Its worst time to the first token is at most twice as long as without: it finds a place in
    the line, which the other fills, its turn comes next, and an instance has a place for it. A step
    of the other's requests is short beside its prompt."""
    with LocalPool(
        tiny_model,
        tmp_path,
        device="timed",
        workers=1,
        kv_bytes="64MiB",
        timed_run_us=20_000,
        timed_token_us=500,
        run_tokens_max=1024,
        queue_requests_max=512,
    ) as pool:
        alone, beside = asyncio.run(measure(pool))
    assert len(alone) == len(beside) == ROUNDS * REQUESTS
    assert max(beside) <= 2 * max(alone), (sorted(alone), sorted(beside))
    steps = [line for line in read_record(pool.record) if isinstance(line, StepLine)]
    events = [event for line in steps for event in line.events]
    arrived = [event for event in events if isinstance(event, RequestArrived)]
    clients: dict[int, set[str]] = {event.prompt_tokens: set() for event in arrived}
    for event in arrived:
        clients[event.prompt_tokens].add(event.client)
    assert clients == {LIGHT_PROMPT: {LIGHT}, HEAVY_PROMPT: {HEAVY}}


async def measure(pool: LocalPool) -> tuple[list[float], list[float]]:
    """Seconds to the first token of each of the light client's requests: those without the heavy
    one, and those beside it. In turn, so that what else the machine does is in both."""
    alone, beside = [], []
    numbers = itertools.count()
    async with client_at(LIGHT) as light, client_at(HEAVY) as heavy:
        await ttft_s(pool, light, next(numbers))
        for _ in range(ROUNDS):
            for _ in range(REQUESTS):
                alone.append(await ttft_s(pool, light, next(numbers)))
            streams = [asyncio.ensure_future(press(pool, heavy)) for _ in range(STREAMS)]
            await asyncio.to_thread(wait_until, lambda: is_full(pool), "the line is full")
            for _ in range(REQUESTS):
                beside.append(await ttft_s(pool, light, next(numbers)))
            assert not any(stream.done() for stream in streams)
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
            await asyncio.to_thread(wait_until, lambda: is_empty(pool), "nothing is left")
    return alone, beside


def client_at(address: str) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(
        local_address=address, limits=httpx.Limits(max_connections=None)
    )
    return httpx.AsyncClient(transport=transport, timeout=120)


def is_full(pool: LocalPool) -> bool:
    return pool.gauge("num_requests_waiting") > 512 - CHOICES


def is_empty(pool: LocalPool) -> bool:
    return not pool.gauge("num_requests_waiting") and not pool.gauge("num_requests_running")


async def press(pool: LocalPool, client: httpx.AsyncClient) -> None:
    """Ask for many answers, again and again."""
    body = {
        "model": "tiny",
        "prompt": [11] * HEAVY_PROMPT,
        "max_tokens": HEAVY_TOKENS,
        "ignore_eos": True,
        "n": CHOICES,
    }
    while True:
        response = await client.post(f"{pool.url}/v1/completions", json=body)
        assert response.status_code in (200, 503), response.text
        if response.status_code == 503:
            await asyncio.sleep(int(response.headers["retry-after-ms"]) / 1000)


async def ttft_s(pool: LocalPool, client: httpx.AsyncClient, number: int) -> float:
    """Of a prompt that no other one begins like."""
    body = {
        "model": "tiny",
        "prompt": [20 + number] * LIGHT_PROMPT,
        "max_tokens": 1,
        "ignore_eos": True,
        "stream": True,
    }
    began_s = time.monotonic()
    async with client.stream("POST", f"{pool.url}/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and "choices" in json.loads(line[6:]):
                return time.monotonic() - began_s
    raise AssertionError("no token came")
