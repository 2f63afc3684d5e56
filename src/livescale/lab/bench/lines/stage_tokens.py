"""Are tokens right that a model in stages gives while instances are added to every stage?

A small pool that computes, its tokens held to stock `transformers`.
"""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path

from livescale.engine.files.make import make_model
from livescale.lab.bench.base.made_models import pool_config
from livescale.lab.bench.base.pool_play import Acts, asking_for, play_pool
from livescale.lab.bench.base.token_checks import wrong_greedy_tokens
from livescale.lab.bench.lines.stage_play import stages_serve
from livescale.load.traces import TraceRow
from livescale.runtime.supervisor.supervisor import Pool

_MODEL, _PRESET = "tokens", "tiny"
TOKEN_STAGES_MAX, REPLICAS = 4, 2
"""Decoder layers of the model; instances of each stage in the end."""
_REQUESTS, _OUTPUT_TOKENS, _GAP_NS = 24, 16, 100_000_000
_PROMPT_TOKENS_MIN, _PROMPT_TOKENS_MAX = 20, 200
_SEED = 0


def stage_tokens(scratch: Path, stages: int) -> tuple[int, int]:
    """Wrong and missing tokens of a model in so many stages, and how many came: each stage has one
    instance, and gets another one while requests are computed. Raises BenchError."""
    directory = scratch / _MODEL
    make_model(directory, _PRESET)
    limits = {"stages": stages, "min_replicas": 1, "max_replicas": 1}
    settings = {
        "port": 0,
        "workers": stages * REPLICAS,
        "device": "cpu",
        "arena_bytes": "8MiB",
        "kv_bytes": "16MiB",
    }
    models = [{"path": str(directory), "name": _MODEL, **limits}]
    pool = Pool(pool_config(scratch, models, settings))
    rng = random.Random(_SEED)
    rows = [
        TraceRow(
            number * _GAP_NS, rng.randint(_PROMPT_TOKENS_MIN, _PROMPT_TOKENS_MAX), _OUTPUT_TOKENS
        )
        for number in range(_REQUESTS)
    ]
    begin, end = (stages_serve(_MODEL, [count] * stages) for count in (1, REPLICAS))
    more = asking_for(_MODEL, REPLICAS, rows[-1].arrival_ns // 4)
    played = asyncio.run(play_pool(pool, _MODEL, rows, Acts(begin, more, end)))
    return played.wrong_tokens(partial(wrong_greedy_tokens, directory)), played.tokens
