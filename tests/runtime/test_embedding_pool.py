"""Embeddings from a pool of real processes: beside completions, and when a worker dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from completions import Answer, check, prompt
from pool_thread import LocalPool, wait_until
from stage_pools import pipelines, stage_pool

from livescale.engine.oracle import GreedyOracle
from mean_rows import assert_close, mean_rows

pytestmark = pytest.mark.usefixtures("machine")
TOKENS = 24
SIZES = {"run_tokens_max": 64, "sequences_max": 16, "lost_after_ms": 30_000}


async def embed(
    client: openai.AsyncOpenAI, prompts: Sequence[Sequence[int]]
) -> dict[int, np.ndarray]:
    """By the prompt's place."""
    answer = await client.embeddings.create(model="tiny", input=[[*ids] for ids in prompts])
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    return {entry.index: np.asarray(entry.embedding, np.float32) for entry in answer.data}


@pytest.mark.long
def test_right_beside_completions_and_when_a_worker_dies(tiny_model: Path, tmp_path: Path) -> None:
    """Prompts take several Runs; those that a dead worker had are computed anew elsewhere."""
    limits = "    min_replicas: 2\n    max_replicas: 2\n"
    with LocalPool(tiny_model, tmp_path, limits, workers=2, **SIZES) as pool:
        check_burst(tiny_model, pool, lambda: pool.kill("worker 1"))


@pytest.mark.long
@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), (4, 1)])
def test_a_model_in_stages_gives_the_same(
    tiny_model: Path, tmp_path: Path, stages: int, replicas: int
) -> None:
    with stage_pool(tiny_model, tmp_path, stages, replicas, stages * replicas, **SIZES) as pool:
        check_burst(tiny_model, pool, lambda: None)


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1])
def test_a_worker_of_a_stage_dies(tiny_model: Path, tmp_path: Path, stage: int) -> None:
    def kill() -> None:
        member = pipelines(pool)[-1].stages[stage][-1].partner.worker
        pool.kill(f"worker {member.worker}")

    with stage_pool(tiny_model, tmp_path, 2, 2, 4, **SIZES) as pool:
        wait_until(lambda: bool(pipelines(pool)), "the record has the pipelines")
        check_burst(tiny_model, pool, kill)


def check_burst(model: Path, pool: LocalPool, during: Callable[[], None]) -> None:
    """Embeddings and completions at once; `during` is called when the first tokens have come."""
    prompts = [prompt(number, 5 + 120 * number) for number in range(8)]

    async def burst() -> tuple[list[Answer], list[dict[int, np.ndarray]]]:
        options = {"timeout": 60, "limits": httpx.Limits(max_connections=None)}
        answers = [Answer(prompt(50 + n, 40 + 17 * n)) for n in range(6)]
        url = f"{pool.url}/v1"
        async with (
            httpx.AsyncClient(**options) as http,
            openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client,
        ):
            streams = [asyncio.create_task(a.read(pool.url, http, TOKENS)) for a in answers]
            batches = [asyncio.create_task(embed(client, prompts)) for _ in range(4)]
            while not any(answer.token_ids for answer in answers):
                await asyncio.sleep(0.005)
            await asyncio.to_thread(during)
            await asyncio.gather(*streams)
            return answers, list(await asyncio.gather(*batches))

    answers, found = asyncio.run(burst())
    expected = dict(enumerate(mean_rows(model, prompts)))
    for vectors in found:
        assert_close(vectors, expected)
    check(GreedyOracle(model), answers, TOKENS)
    wait_until(lambda: pool.gauge("num_requests_running") == 0, "nothing is left")
    wait_until(lambda: pool.kv_in_use() == 0, "no KV is held")
