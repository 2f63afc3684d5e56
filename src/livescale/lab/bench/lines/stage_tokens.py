"""Are tokens right that a model in stages gives while instances are added to every stage?

A small pool that computes, its tokens held to stock `transformers`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import httpx

from livescale.engine.files.make import make_model
from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.base.made_models import pool_config, vocabulary_of
from livescale.lab.bench.base.token_checks import wrong_greedy_tokens
from livescale.lab.bench.lines.stage_play import pool_client, stages_serve
from livescale.lab.client import replayer
from livescale.load.traces import TraceRow
from livescale.runtime.supervisor.supervisor import Pool

_MODEL, _PRESET = "tokens", "tiny"
TOKEN_STAGES_MAX, REPLICAS = 4, 2
"""Decoder layers of the model; instances of each stage in the end."""
_REQUESTS, _OUTPUT_TOKENS, _GAP_NS = 24, 16, 100_000_000
_PROMPT_TOKENS_MIN, _PROMPT_TOKENS_MAX = 20, 200
_DRAIN_NS = 300_000_000_000
_SEED = 0


def stage_tokens(scratch: Path, stages: int) -> tuple[int, int]:
    """Wrong and missing tokens of a model in so many stages, and how many came. Raises
    BenchError."""
    directory = scratch / _MODEL
    make_model(directory, _PRESET)
    results = asyncio.run(_play(directory, stages, _rows()))
    missing = sum(result.output_tokens - len(result.token_ids) for result in results)
    outputs = [(result.prompt_ids, result.token_ids) for result in results]
    wrong = sum(wrong_greedy_tokens(directory, outputs))
    return missing + wrong, sum(len(result.token_ids) for result in results)


# -- helpers, in the order used -------------------------------------------------------------------


def _rows() -> list[TraceRow]:
    rng = random.Random(_SEED)
    return [
        TraceRow(
            number * _GAP_NS,
            rng.randint(_PROMPT_TOKENS_MIN, _PROMPT_TOKENS_MAX),
            _OUTPUT_TOKENS,
        )
        for number in range(_REQUESTS)
    ]


async def _play(
    directory: Path, stages: int, rows: Sequence[TraceRow]
) -> list[replayer.ReplayResult]:
    """Each stage has one instance, and gets another one while requests are computed."""
    limits = {"stages": stages, "min_replicas": 1, "max_replicas": 1}
    settings = {
        "port": 0,
        "workers": stages * REPLICAS,
        "device": "cpu",
        "arena_bytes": "8MiB",
        "kv_bytes": "16MiB",
    }
    models = [{"path": str(directory), "name": _MODEL, **limits}]
    pool = Pool(pool_config(directory.parent, models, settings))
    async with pool:
        await pool.ready()
        async with pool_client(pool) as client:
            await pool.or_failure(stages_serve(client, _MODEL, [1] * stages))
            results, _ = await pool.or_failure(
                asyncio.gather(_replay(pool, rows), _add(client, stages, rows[-1].arrival_ns // 4))
            )
    return results


async def _add(client: httpx.AsyncClient, stages: int, at_ns: int) -> None:
    """An instance to each stage, as an operator does. Raises BenchError."""
    await asyncio.sleep(at_ns / 1e9)
    limits = {"min_replicas": REPLICAS, "max_replicas": REPLICAS}
    answer = await client.patch(f"/admin/models/{_MODEL}", json=limits)
    if not answer.is_success:
        raise BenchError(f"the pool refused other limits: {answer.text}")
    await stages_serve(client, _MODEL, [REPLICAS] * stages)


async def _replay(pool: Pool, rows: Sequence[TraceRow]) -> list[replayer.ReplayResult]:
    vocabulary = vocabulary_of(pool.models[0].manifest)
    return await replayer.replay(
        pool.base_url,
        _MODEL,
        rows,
        prompt_ids_for=replayer.prompts_from_seed(vocabulary, _SEED),
        drain_ns_max=_DRAIN_NS,
    )
