"""A pool of timed workers whose stages scale by themselves."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from pool_thread import LocalPool, wait_until
from stage_pools import arrive, counted
from team_pools import words

from livescale.main import main
from livescale.messages.commands import ScaleDecided
from livescale.messages.events import InstanceReported

pytestmark = pytest.mark.usefixtures("machine")
PROMPT, REQUESTS, PER_S = 64, 300, 60
#: the middle one takes twice as long as each of the others
SPANS = "0-2 2-4 4-6"
STAGES = ("tiny/0", "tiny/1", "tiny/2")


@pytest.mark.long
@pytest.mark.parametrize("policy", ["stages", "pipelines"])
def test_the_slow_stage_grows_and_goes_back(
    tiny_model: Path, tmp_path: Path, policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = f"    stage_spans: '{SPANS}'\n    max_stage_replicas: 6\n"
    with LocalPool(
        tiny_model,
        tmp_path,
        limits,
        device="timed",
        workers=6,
        # per token, all four decoder layers: 14 ms for a prompt in one of them
        timed_run_us=0,
        timed_token_us=900,
        run_tokens_max=PROMPT,
        scaling_policy=policy,
        stage_period_ms=1000,
        scale_down_timeout_ms=2000,
    ) as pool:
        answers = asyncio.run(arrive(pool, REQUESTS, PROMPT, PER_S))
        assert [answer.error for answer in answers] == [None] * REQUESTS
        assert [len(answer.token_ids) for answer in answers] == [1] * REQUESTS
        for stage in STAGES:
            # What an instance did since its last report is not known when it goes.
            wait_until(
                lambda name=stage: counted(pool, "stage_runs", name) >= 0.8 * REQUESTS,
                "nearly all is counted",
            )
        busy = [counted(pool, "stage_busy_seconds", name) for name in STAGES]
        assert busy[1] > 1.5 * max(busy[0], busy[2])
        wait_until(lambda: _last(pool) == dict.fromkeys(STAGES, 1), "all are back")
        assert counted(pool, "stage_arrivals", STAGES[1]) >= 0.8 * REQUESTS
        assert main(["top", "--url", pool.url, "--windows", "1", "--every", "0.5"]) == 0
    # What the last decision was, and why, stands with each stage.
    shown = capsys.readouterr().out.splitlines()
    rows = {row.split()[0]: row for row in shown if row.startswith("tiny/")}
    assert rows.keys() == {*STAGES}
    assert " -> 1: " in rows["tiny/1"]
    grown = [w for w in words(pool, ScaleDecided) if w.to_instances > w.from_instances > 0]
    assert "tiny/1" in {w.model for w in grown}
    if policy == "pipelines":
        assert len({w.model for w in grown}) == 3
    assert {w.reason for w in grown} <= {"overloaded", "over_target", "whole_pipelines"}
    # Reports are no flood: of a later stage a few per second, not one per Run.
    stages = [w.stage for w in words(pool, InstanceReported) if w.stage is not None]
    assert max(stage.came for stage in stages) > REQUESTS // 3
    by_instance = Counter(w.instance for w in words(pool, InstanceReported) if not w.started)
    assert min(by_instance.values()) <= 60


def _last(pool: LocalPool) -> dict[str, int]:
    """By stage, how many it was to have last."""
    return {w.model: w.to_instances for w in words(pool, ScaleDecided)}
