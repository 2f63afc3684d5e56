"""Pools that serve a model in stages: what their tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
from completions import Answer, prompt
from pool_thread import LocalPool
from team_pools import words

from livescale.messages.commands import ChangeDuty
from livescale.values.routes import Pipeline
from slowness import patient

TOKENS, STREAMS = 24, 10


def stage_pool(
    model: Path, scratch: Path, stages: int, replicas: int, workers: int, **flags: object
) -> LocalPool:
    # One stage alone has to be told by its layers: four decoder layers, embedding and head.
    cut = f"stages: {stages}" if stages > 1 else "stage_spans: '0-6'"
    limits = f"    {cut}\n    min_replicas: {replicas}\n    max_replicas: {replicas}\n"
    settings = {"lost_after_ms": 30_000, "request_attempts_max": 4}
    return LocalPool(model, scratch, limits, workers=workers, **(settings | flags))


async def burst(pool: LocalPool, during: Callable[[], None] = lambda: None) -> list[Answer]:
    """Streams of different lengths; `during` is called when tokens have come."""
    answers = [Answer(prompt(n, 40 + 17 * n)) for n in range(STREAMS)]
    async with httpx.AsyncClient(
        timeout=patient(60), limits=httpx.Limits(max_connections=None)
    ) as client:
        streams = [asyncio.create_task(a.read(pool.url, client, TOKENS)) for a in answers]
        while not any(answer.token_ids for answer in answers):
            await asyncio.sleep(0.005)
        await asyncio.to_thread(during)
        await asyncio.gather(*streams)
    return answers


async def arrive(pool: LocalPool, requests: int, prompt_tokens: int, per_s: float) -> list[Answer]:
    """One-pass requests, evenly spaced, whatever is answered by then."""
    answers = [Answer(prompt(n, prompt_tokens)) for n in range(requests)]
    async with httpx.AsyncClient(
        timeout=patient(60), limits=httpx.Limits(max_connections=None)
    ) as client:
        streams = []
        for answer in answers:
            streams.append(asyncio.create_task(answer.read(pool.url, client, 1)))
            await asyncio.sleep(1 / per_s)
        await asyncio.gather(*streams)
    return answers


def counted(pool: LocalPool, family: str, stage: str) -> float:
    """What the page of metrics has for the stage."""
    start = f'livescale_{family}_total{{model="{stage}"}} '
    page = httpx.get(f"{pool.url}/metrics").text.splitlines()
    return next(float(line.removeprefix(start)) for line in page if line.startswith(start))


def set_replicas(pool: LocalPool, count: int) -> None:
    limits = {"min_replicas": count, "max_replicas": count}
    changed = httpx.patch(f"{pool.url}/admin/models/tiny", json=limits)
    assert changed.status_code == 200, changed.text


def by_stage(pool: LocalPool) -> list[int]:
    """Instances of each stage that serve."""
    [model] = httpx.get(f"{pool.url}/admin/models").json()["data"]
    return [counts.get("serving", 0) for counts in model["instances_by_stage"]]


def pipelines(pool: LocalPool) -> list[Pipeline]:
    return [p for word in words(pool, ChangeDuty) for p in word.duty.pipelines]
