"""A client that sends one request at a time, beside one that sends a thousand at once."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import httpx
import pytest
from pool_thread import LocalPool, wait_until

from livescale.messages.commands import Dispatch
from livescale.messages.events import RequestArrived
from livescale.telemetry.record.record import StepLine, read_record
from livescale.values.types import RequestId
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")
LIGHT, HEAVY = "127.0.0.2", "127.0.0.1"
ROUNDS, REQUESTS = 2, 3
CHOICES, STREAMS = 128, 8
LIGHT_PROMPT, HEAVY_PROMPT, HEAVY_TOKENS = 800, 4, 64


@pytest.mark.long
def test_a_light_client_hardly_notices_a_heavy_one(tiny_model: Path, tmp_path: Path) -> None:
    """It finds a place in the line, which the other fills, and its turn comes next: at most one
    request of the other is dispatched between its arrival and its dispatch."""
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
        asyncio.run(ask_beside(pool))
    clients: dict[int, set[str]] = {LIGHT_PROMPT: set(), HEAVY_PROMPT: set()}
    client_of: dict[RequestId, str] = {}
    #: by request of the light client that waits, how many of the other went first
    overtaken: dict[RequestId, int] = {}
    counts: list[int] = []
    for line in read_record(pool.record):
        if not isinstance(line, StepLine):
            continue
        for event in line.events:
            # One that is announced anew is no arrival.
            if isinstance(event, RequestArrived) and event.request not in client_of:
                clients[event.prompt_tokens].add(event.client)
                client_of[event.request] = event.client
                if event.client == LIGHT:
                    overtaken[event.request] = 0
        for command in line.commands:
            if isinstance(command, Dispatch):
                if client_of[command.request] == HEAVY:
                    overtaken = {request: count + 1 for request, count in overtaken.items()}
                else:
                    counts.append(overtaken.pop(command.request))
    assert clients == {LIGHT_PROMPT: {LIGHT}, HEAVY_PROMPT: {HEAVY}}
    assert len(counts) == ROUNDS * REQUESTS
    assert max(counts) <= 1, counts


async def ask_beside(pool: LocalPool) -> None:
    """The light client's requests, one at a time, while the heavy one fills the line."""
    numbers = itertools.count()
    async with client_at(LIGHT) as light, client_at(HEAVY) as heavy:
        for _ in range(ROUNDS):
            streams = [asyncio.ensure_future(press(pool, heavy)) for _ in range(STREAMS)]
            await asyncio.to_thread(wait_until, lambda: is_full(pool), "the line is full")
            for _ in range(REQUESTS):
                await ask(pool, light, next(numbers))
            assert not any(stream.done() for stream in streams)
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
            await asyncio.to_thread(wait_until, lambda: is_empty(pool), "nothing is left")


def client_at(address: str) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(
        local_address=address, limits=httpx.Limits(max_connections=None)
    )
    return httpx.AsyncClient(transport=transport, timeout=patient(120))


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


async def ask(pool: LocalPool, client: httpx.AsyncClient, number: int) -> None:
    """A prompt that no other one begins like."""
    body = {
        "model": "tiny",
        "prompt": [20 + number] * LIGHT_PROMPT,
        "max_tokens": 1,
        "ignore_eos": True,
    }
    response = await client.post(f"{pool.url}/v1/completions", json=body)
    assert response.status_code == 200, response.text
