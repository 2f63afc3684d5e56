"""A pool of real processes that serves a model in stages: tokens are right while instances of a
stage come, go and die."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest
import torch
from completions import check, prompt
from pool_thread import LocalPool, wait_until
from stage_pools import (
    TOKENS,
    burst,
    by_stage,
    check_bytes,
    counted,
    drained_in_use,
    pipelines,
    set_replicas,
    stage_pool,
)
from transformers import AutoModelForCausalLM

from effort import mostly_long
from livescale.engine.oracle import GreedyOracle
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")
LONG_TOKENS = 150
"""Of requests that go on while an instance drains."""


@pytest.mark.long
@pytest.mark.parametrize(("few", "many"), [(1, 2), (2, 3)])
def test_instances_of_a_stage_come_and_go_and_requests_go_on(
    tiny_model: Path, tmp_path: Path, few: int, many: int
) -> None:
    oracle = GreedyOracle(tiny_model)
    with stage_pool(tiny_model, tmp_path, 2, few, 2 * many, scale_down_timeout_ms=100) as pool:
        check(oracle, asyncio.run(burst(pool, lambda: set_replicas(pool, many))), TOKENS)
        # Requests may be over before an instance of each stage drains: then once more.
        while drained_in_use(pool) != {"tiny/0", "tiny/1"}:
            set_replicas(pool, many)
            wait_until(lambda: by_stage(pool) == [many] * 2, "each stage has another instance")
            answers = asyncio.run(burst(pool, lambda: set_replicas(pool, few), LONG_TOKENS))
            check(oracle, answers, LONG_TOKENS)
            wait_until(lambda: by_stage(pool) == [few] * 2, "they are gone")
        check(oracle, asyncio.run(burst(pool)), TOKENS)
        assert check_bytes(pool, tiny_model, 2) > 0, "stages came from other members"


@pytest.mark.parametrize(
    ("stage", "stages", "replicas"),
    mostly_long([(0, 2, 2), (1, 2, 2), (0, 3, 3), (1, 3, 3), (2, 3, 3)], short=[(2, 3, 3)]),
)
def test_what_goes_through_an_instance_that_dies_is_computed_again(
    tiny_model: Path, tmp_path: Path, stage: int, stages: int, replicas: int
) -> None:
    def kill() -> None:
        member = pipelines(pool)[-1].stages[stage][-1].partner.worker
        os.kill(pool.pool.pids()[f"worker {member.worker}"], signal.SIGKILL)

    all_serve = [replicas] * stages
    with stage_pool(tiny_model, tmp_path, stages, replicas, stages * replicas) as pool:
        wait_until(lambda: by_stage(pool) == all_serve, "all serve")
        wait_until(lambda: bool(pipelines(pool)), "the record has the pipelines")
        check(GreedyOracle(tiny_model), asyncio.run(burst(pool, kill)), TOKENS)
        wait_until(lambda: by_stage(pool) == all_serve, "the worker is back")
        check(GreedyOracle(tiny_model), asyncio.run(burst(pool)), TOKENS)


@pytest.mark.long
def test_the_next_controller_goes_on_with_the_pipelines(tiny_model: Path, tmp_path: Path) -> None:
    def kill() -> None:
        os.kill(pool.pool.pids()["controller"], signal.SIGKILL)

    with stage_pool(tiny_model, tmp_path, 2, 1, 2) as pool:
        check(GreedyOracle(tiny_model), asyncio.run(burst(pool, kill)), TOKENS)
        check(GreedyOracle(tiny_model), asyncio.run(burst(pool)), TOKENS)


@pytest.mark.long
def test_runs_of_several_leaders_are_carried_out_as_one(tiny_model: Path, tmp_path: Path) -> None:
    """The first stage grows with its requests, the second has one instance, to which all lead."""
    limits = "    stages: 2\n    min_replicas: 1\n    max_replicas: 3\n"
    settings = {"target_ongoing_requests": 2, "scale_down_timeout_ms": 60_000}
    with LocalPool(tiny_model, tmp_path, limits, workers=4, **settings) as pool:
        oracle = GreedyOracle(tiny_model)
        check(oracle, asyncio.run(burst(pool)), TOKENS)
        wait_until(lambda: by_stage(pool) == [3, 1], "the first stage has grown")
        for _ in range(2):
            check(oracle, asyncio.run(burst(pool)), TOKENS)
        wait_until(lambda: counted(pool, "stage_runs_merged", "tiny/1") > 0, "Runs were merged")
        assert counted(pool, "stage_runs_merged", "tiny/0") == 0, (
            "a leader's own are chosen by itself"
        )


@pytest.mark.long
def test_log_probabilities_come_from_the_last_stage(tiny_model: Path, tmp_path: Path) -> None:
    """They are those of stock transformers."""
    ids = prompt(3, 90)
    body = {"model": "tiny", "prompt": ids, "max_tokens": 8, "temperature": 0, "logprobs": 2}
    body |= {"ignore_eos": True, "return_token_ids": True}
    with stage_pool(tiny_model, tmp_path, 2, 1, 2, run_tokens_max=64, sequences_max=16) as pool:
        answer = httpx.post(f"{pool.url}/v1/completions", json=body, timeout=patient(60))
        assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    tokens = choice["token_ids"]
    with torch.inference_mode():
        logits = model(torch.tensor([[*ids, *tokens]])).logits[0, len(ids) - 1 : -1]
    expected = torch.log_softmax(logits, dim=-1)[range(len(tokens)), tokens]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected.tolist(), abs=1e-3)
