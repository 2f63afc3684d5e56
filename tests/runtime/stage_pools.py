"""Pools that serve a model in stages: what their tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
from completions import Answer, prompt
from pool_thread import LocalPool
from team_pools import words

from livescale.common.regions import ALIGNMENT_BYTES
from livescale.engine.files.model_files import model_spec, read_manifest
from livescale.messages.commands import ChangeDuty, Drain, Resume, StartHolding
from livescale.messages.events import HoldingCompleted, InstanceReported
from livescale.telemetry.record.record import StepLine, read_record
from livescale.values.chunks import senders
from livescale.values.routes import Pipeline
from livescale.values.stages import even_stages, stage_specs
from livescale.values.types import InstanceId
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


async def burst(
    pool: LocalPool, during: Callable[[], None] = lambda: None, tokens: int = TOKENS
) -> list[Answer]:
    """Streams of different lengths; `during` is called when tokens have come."""
    answers = [Answer(prompt(n, 40 + 17 * n)) for n in range(STREAMS)]
    async with httpx.AsyncClient(
        timeout=patient(60), limits=httpx.Limits(max_connections=None)
    ) as client:
        streams = [asyncio.create_task(a.read(pool.url, client, tokens)) for a in answers]
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


def check_bytes(pool: LocalPool, model: Path, stages: int) -> int:
    """What came into the workers for each load of a stage were its own bytes, as who moved them
    counted. Returns how many loads came from other members."""
    spec = model_spec(read_manifest(model, "tiny"))
    sizes = {s.name: s.size_bytes for s in stage_specs(spec, even_stages(spec, stages))}
    assert (max(sizes.values()) + ALIGNMENT_BYTES < spec.size_bytes) == (stages > 1)
    orders = {word.holding: word for word in words(pool, StartHolding)}
    loads = [(orders[done.holding], done) for done in words(pool, HoldingCompleted)]
    assert loads
    for order, done in loads:
        own_bytes = sizes[order.model] if order.spare is None else 0
        assert own_bytes <= done.received_bytes <= own_bytes + ALIGNMENT_BYTES
    return sum(bool(senders(order.feeds)) for order, _ in loads)


def drained_in_use(pool: LocalPool) -> set[str]:
    """Stages of which an instance computed for requests after it was told to drain: the first one
    reports KV in use then, a later one more and more Runs."""
    stages: dict[InstanceId, str] = {}
    #: by instance that drains: Runs that had come by its last report
    draining: dict[InstanceId, int | None] = {}
    found: set[str] = set()
    for line in read_record(pool.record):
        if not isinstance(line, StepLine):
            continue
        for event in line.events:
            if isinstance(event, InstanceReported) and event.instance in draining:
                came, before = event.stage.came if event.stage else 0, draining[event.instance]
                if event.kv_blocks_used or (before is not None and came > before):
                    found.add(stages[event.instance])
                draining[event.instance] = came
        for command in line.commands:
            if isinstance(command, StartHolding) and command.duty is not None:
                stages[command.duty.instance] = command.model
            elif isinstance(command, Drain):
                draining[command.instance] = None
            elif isinstance(command, Resume):
                draining.pop(command.instance, None)
    return found


def pipelines(pool: LocalPool) -> list[Pipeline]:
    return [p for word in words(pool, ChangeDuty) for p in word.duty.pipelines]
