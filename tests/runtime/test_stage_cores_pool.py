"""A pool of timed workers whose stages get cores instead of instances."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from pool_thread import LocalPool, wait_until
from stage_pools import arrive
from team_pools import words

from livescale.config.cores import write_cores
from livescale.messages.commands import CoresDecided, ScaleDecided, SetCores
from livescale.messages.events import CoresChanged
from livescale.values.scaling_policies import CoresModel

pytestmark = pytest.mark.usefixtures("machine")
PROMPT, REQUESTS, PER_S = 64, 180, 20
#: the second one takes three times as long as the first
SPANS = "0-2 2-6"
CORES_MAX = 20


@pytest.mark.long
def test_workers_get_cores_and_give_them_back(tiny_model: Path, tmp_path: Path) -> None:
    write_cores(tmp_path / "cores.json", CoresModel(1e6, 9e6))
    with LocalPool(
        tiny_model,
        tmp_path,
        f"    stage_spans: '{SPANS}'\n",
        device="timed",
        workers=6,
        # per token, all four decoder layers: 40 ms for a prompt in one of them
        timed_run_us=0,
        timed_token_us=2500,
        run_tokens_max=PROMPT,
        scaling_policy="stages",
        stage_period_ms=500,
        scale_down_timeout_ms=1000,
        cores_profile=str(tmp_path / "cores.json"),
        cores_max=CORES_MAX,
    ) as pool:
        answers = asyncio.run(arrive(pool, REQUESTS, PROMPT, PER_S))
        assert [answer.error for answer in answers] == [None] * REQUESTS
        assert [len(answer.token_ids) for answer in answers] == [1] * REQUESTS
        wait_until(lambda: _all_given_back(pool), "all have what they began with")
    raised = [w for w in words(pool, CoresDecided) if w.reason == "more_cores"]
    assert raised
    assert {w.model for w in raised} <= {"tiny/0", "tiny/1"}
    orders = Counter((w.worker, w.cores) for w in words(pool, SetCores))
    told = Counter((w.worker, w.cores) for w in words(pool, CoresChanged))
    assert orders == told
    assert max(w.cores for w in words(pool, SetCores)) > 1
    gone = [w for w in words(pool, ScaleDecided) if w.reason == "even_arrivals"]
    assert any(w.values["to_cores"] > w.values["cores"] for w in gone)


def _all_given_back(pool: LocalPool) -> bool:
    """Each worker that was ordered some has told of one."""
    told = {w.worker: w.cores for w in words(pool, CoresChanged)}
    ordered = {w.worker for w in words(pool, SetCores)}
    return set(told) >= ordered and set(told.values()) <= {1}
