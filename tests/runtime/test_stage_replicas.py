"""Real pools of one to four stages with one to three instances of each: tokens are right, each
instance gets its stage's bytes only, and a request goes through the same instances to its end."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from pathlib import Path

import httpx
import msgspec
import pytest
from completions import check
from pool_thread import LocalPool, wait_until
from stage_pools import TOKENS, burst, by_stage, check_bytes, stage_pool
from team_pools import words

from livescale.engine.oracle import GreedyOracle
from livescale.messages.commands import StartHolding
from livescale.telemetry.member_record import (
    ExecuteBrief,
    MemberLine,
    MemberStepLine,
    read_member_record,
)
from livescale.telemetry.record.record import RequestLine, read_record
from livescale.values.types import RequestId, WorkerRef

pytestmark = pytest.mark.usefixtures("machine")
MATRIX = list(itertools.product(range(1, 5), range(1, 4)))

Crossed = dict[tuple[RequestId, int], dict[WorkerRef, list[tuple[int, int]]]]
"""By attempt of a request and by worker: positions (the first one, how many) in order."""


@pytest.mark.long
@pytest.mark.parametrize(("stages", "replicas"), MATRIX)
def test_tokens_are_right(tiny_model: Path, tmp_path: Path, stages: int, replicas: int) -> None:
    folder = tmp_path / "members"
    workers = stages * replicas
    with stage_pool(
        tiny_model, tmp_path, stages, replicas, workers, record_members=str(folder)
    ) as pool:
        wait_until(lambda: by_stage(pool) == [replicas] * stages, "all serve")
        check(GreedyOracle(tiny_model), asyncio.run(burst(pool)), TOKENS)
        names = [model["id"] for model in httpx.get(f"{pool.url}/v1/models").json()["data"]]
        assert names == ["tiny"]
        ordered = words(pool, StartHolding)
        held = {w.holding.member: w.model for w in ordered if not w.holding.member.is_agent}
        assert len(held) == workers
        check_bytes(pool, tiny_model, stages)
    check_ways(pool, crossed(folder), held, stages)


# -- helpers, in the order used -------------------------------------------------------------------


def crossed(folder: Path) -> Crossed:
    """What the members' records have."""
    found: Crossed = defaultdict(lambda: defaultdict(list))
    for file in sorted(folder.glob("*/w*.jsonl")):
        lines = list(read_member_record(file))
        first = lines[0]
        assert isinstance(first, MemberLine)
        for run in (run for line in lines for run in executed(line)):
            for request, attempt, position, count, _ in run.segments:
                found[request, attempt][first.ref].append((position, count))
    return found


def executed(line: object) -> list[ExecuteBrief]:
    if not isinstance(line, MemberStepLine):
        return []
    kinds = [(effect, msgspec.json.decode(effect)["type"]) for effect in line.effects]
    return [
        msgspec.json.decode(effect, type=ExecuteBrief)
        for effect, kind in kinds
        if kind == "Execute"
    ]


def check_ways(pool: LocalPool, ways: Crossed, held: dict[WorkerRef, str], stages: int) -> None:
    """Each request went through one instance of each stage, and each of its positions once."""
    requests = {li.request: li for li in read_record(pool.record) if isinstance(li, RequestLine)}
    names = sorted({*held.values()})
    assert len(names) == stages
    seen: dict[WorkerRef, None] = {}
    for name, line in requests.items():
        way = ways[name, line.attempts]
        assert sorted(held[worker] for worker in way) == names
        for worker, pieces in way.items():
            seen[worker] = None
            stops = [first + count for first, count in pieces]
            assert [first for first, _ in pieces] == [0, *stops[:-1]]
            assert stops[-1] == line.prompt_tokens + TOKENS - 1
    # With ten requests at once no instance has nothing to do.
    assert len(seen) == len(held)
