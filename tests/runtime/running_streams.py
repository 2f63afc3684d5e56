"""Streams that are under way when something happens to the pool, and their right tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import httpx
from completions import Answer, prompt
from pool_thread import LocalPool

STREAMS = 24
TOKENS = 200
ANSWER_S = 100.0
RightTokens = dict[tuple[int, ...], list[int]]


async def streams_while(
    pool: LocalPool, happens: Callable[[], Awaitable[object]], urls: Sequence[str] = ()
) -> list[Answer]:
    """Streams of which all have begun when it happens, read to their end. They are dealt to the
    gateways at `urls`, or go to the pool's own."""
    urls = urls or (pool.url,)
    begun = asyncio.Semaphore(0)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=ANSWER_S, limits=limits) as client:
        answers = [Answer(prompt(number, 20)) for number in range(STREAMS)]

        async def read(answer: Answer, url: str) -> None:
            try:
                async for count in answer.stream(url, client, TOKENS):
                    if count == 1:
                        begun.release()
            except httpx.TransportError as error:
                answer.error = f"the gateway is gone: {error!r}"

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
    """A timed worker's tokens depend on the prompt alone: those of a run without faults."""

    async def nothing() -> None:
        pass

    answers = asyncio.run(streams_while(pool, nothing))
    return {tuple(answer.prompt_ids): answer.token_ids for answer in answers}


def check(answers: list[Answer], right: RightTokens) -> None:
    assert [answer.error for answer in answers] == [None] * len(answers)
    assert [len(answer.token_ids) for answer in answers] == [TOKENS] * len(answers)
    assert {tuple(a.prompt_ids): a.token_ids for a in answers} == right
