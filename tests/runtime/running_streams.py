"""Streams that are under way when something happens to the pool, and their right tokens."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import httpx
from completions import Answer, prompt
from pool_thread import LocalPool

from livescale.batching.runs.run import Run, Segment
from livescale.engine.timed import TimedExecutor
from livescale.latency.work import LinearLatency
from livescale.messages.events import RequestEnded
from livescale.telemetry.record.record import StepLine, read_record
from livescale.values.types import LayerSpan, Outcome, SamplingParams
from slowness import patient

STREAMS = 24
PROMPTS = [prompt(number, 20) for number in range(STREAMS)]
TOKENS = 200
ANSWER_S = 100.0
_KV_BYTES, _BLOCK_TOKENS = 64 << 20, 16
RightTokens = dict[tuple[int, ...], list[int]]


async def streams_while(
    pool: LocalPool,
    happens: Callable[[], Awaitable[object]],
    urls: Sequence[str] = (),
    verify: ssl.SSLContext | bool = True,
) -> list[Answer]:
    """Streams of which all have begun when it happens, read to their end. They are dealt to the
    gateways at `urls`, or go to the pool's own; `verify` is httpx's."""
    urls = urls or (pool.url,)
    begun = asyncio.Semaphore(0)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=patient(ANSWER_S), limits=limits, verify=verify) as client:
        answers = [Answer(prompt_ids) for prompt_ids in PROMPTS]

        async def read(answer: Answer, url: str) -> None:
            try:
                async for count in answer.stream(url, client, TOKENS):
                    if count == 1:
                        begun.release()
            except httpx.TransportError as error:
                answer.error = f"the gateway is gone: {error!r}"
            finally:
                # One that ended without a token is told by the checks; this does not wait for it.
                if not answer.token_ids:
                    begun.release()

        tasks = [
            asyncio.create_task(read(answer, urls[number % len(urls)]))
            for number, answer in enumerate(answers)
        ]
        for _ in answers:
            await begun.acquire()
        await happens()
        await asyncio.gather(*tasks)
    return answers


def right_tokens_of(pool: LocalPool) -> RightTokens:
    """A timed worker's tokens depend on the prompt and the position alone: what one executor makes
    up that is never disturbed, and does not wait."""
    manifest = pool.pool.models[0].manifest
    executor = TimedExecutor(_KV_BYTES, _BLOCK_TOKENS, LinearLatency(0, 0))
    executor.assign(manifest, memoryview(bytearray(manifest.size_bytes)))
    for entry in manifest.layers:
        executor.materialize(entry.layer)
    return {
        tuple(prompt_ids): [_token(executor, manifest.span, prompt_ids, n) for n in range(TOKENS)]
        for prompt_ids in PROMPTS
    }


def _token(executor: TimedExecutor, span: LayerSpan, prompt_ids: list[int], count: int) -> int:
    """The one behind the prompt and `count` generated ones, whose ids do not matter."""
    segment = Segment(
        request="alone",
        attempt=1,
        first_position=len(prompt_ids) + count - 1,
        token_ids=(0,),
        block_table=(),
        samples=True,
        sampling=SamplingParams(TOKENS),
        prompt_ids=tuple(prompt_ids),
        generated_ids=(0,) * count,
    )
    return executor.run(Run(0, span, (segment,))).token_ids[0]


async def nothing() -> None:
    """What happens to a pool that is not disturbed."""


def check_undisturbed(pool: LocalPool, right: RightTokens) -> None:
    """The pool serves all streams."""
    check(asyncio.run(streams_while(pool, nothing)), right)


def are_given_up(record: Path, answers: Sequence[Answer]) -> bool:
    """Whether workers have said of each of these that it is over, before all its tokens were made
    where it had not ended by itself already."""
    ended: dict[str, set[Outcome]] = {answer.request: set() for answer in answers}
    for line in read_record(record):
        for event in line.events if isinstance(line, StepLine) else ():
            if isinstance(event, RequestEnded) and event.worker and event.request in ended:
                ended[event.request].add(event.outcome)
    return all(ended.values()) and any(Outcome.RETURNED in ways for ways in ended.values())


def check(answers: list[Answer], right: RightTokens) -> None:
    assert [answer.error for answer in answers] == [None] * len(answers)
    assert [len(answer.token_ids) for answer in answers] == [TOKENS] * len(answers)
    assert {tuple(a.prompt_ids): a.token_ids for a in answers} == right
