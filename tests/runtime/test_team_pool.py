"""A pool of real processes whose instances serve in teams while they load, through HTTP."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from completions import Answer, check, prompt
from pool_thread import LocalPool, wait_until
from team_pools import ask_for, team_pool, teams, words

from effort import mostly_long
from livescale.engine.oracle import GreedyOracle
from livescale.messages.events import HoldingCompleted, InstanceReported, RequestEnded
from livescale.telemetry.record.record import read_record
from livescale.telemetry.replay import replay
from livescale.values.routes import Team
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")
# About 3.4 MB at this rate: a load takes most of a second.
LINK_BYTES_PER_S = 5_000_000
STREAMS, TOKENS = 160, 24
LOADS = InstanceReported | HoldingCompleted
BURSTS = itertools.count()
# A worker that still drops what it had takes no part in the next plan: then there is no team.
TRIES = 5


@pytest.fixture(scope="module")
def pool(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    with team_pool(
        tiny_model,
        tmp_path_factory.mktemp("pool"),
        workers=4,
        link_bytes_per_s=LINK_BYTES_PER_S,
        host_memory_bytes=0,
        prefill_queue_upper_ms=100,
        prefill_queue_lower_ms=50,
        multicast="binomial",
        teams="cover",
    ) as local:
        yield local


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> GreedyOracle:
    return GreedyOracle(tiny_model)


async def burst(pool: LocalPool, kills: str = "") -> list[Answer]:
    """Two more instances are asked for, which load by one plan if both workers are free by then,
    and prompts come. With `kills` that process dies when a team has begun, if one does."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=patient(60), limits=limits) as client:
        before = len(teams(pool))
        # Other prompts each time: none is found in an instance's prefix index.
        first = next(BURSTS) * STREAMS
        answers = [Answer(prompt(first + n, 120 + n)) for n in range(STREAMS)]
        await ask_for(pool, client, 4)
        streams = [asyncio.create_task(a.read(pool.url, client, TOKENS)) for a in answers]
        if kills:
            while len(teams(pool)) == before and not all(s.done() for s in streams):
                await asyncio.sleep(0.01)
            if len(teams(pool)) > before:
                kill(pool, kills)
        await asyncio.gather(*streams)
        await ask_for(pool, client, 2)
        return answers


def kill(pool: LocalPool, who: str) -> None:
    [*_, team] = teams(pool)
    member = team.members[0 if who == "leader" else -1].partner.worker
    name = "controller" if who == "controller" else f"worker {member.worker}"
    os.kill(pool.pool.pids()[name], signal.SIGKILL)


def test_a_burst_is_served_by_a_team_before_its_members_are_loaded(
    pool: LocalPool, oracle: GreedyOracle
) -> None:
    # On busy cores the two running instances may finish all before a team is given anything.
    for _ in range(TRIES):
        wait_until(lambda: pool.gauge("workers") == 4, "two instances can be loaded at once")
        earlier = {team.number for team in teams(pool)}
        loads, ends = len(words(pool, LOADS)), len(words(pool, RequestEnded))
        check(oracle, asyncio.run(burst(pool)), TOKENS)
        wait_until(lambda: pool.gauge("instances") == 2, "the pool shrinks to two instances")
        ended = [event.request for event in words(pool, RequestEnded)[ends:]]
        assert len(set(ended)) == STREAMS
        began = [team for team in teams(pool) if team.number not in earlier]
        if any(started_early(words(pool, LOADS)[loads:], team) for team in began):
            return
    raise AssertionError("no first token came before the leader of a team had the model")


def started_early(events: list, team: Team) -> int:
    """First tokens of the team's leader before the leader had the whole model."""
    started = 0
    for event in events:
        if isinstance(event, HoldingCompleted):
            if event.holding.member == team.leader.worker:
                return started
        elif event.instance == team.leader.instance:
            started += len(event.started)
    return started


@pytest.mark.parametrize(
    "who", mostly_long(["leader", "member", "controller"], short=["controller"])
)
def test_nothing_is_lost_when_a_process_dies_in_the_midst(
    pool: LocalPool, oracle: GreedyOracle, who: str
) -> None:
    before = len(teams(pool))
    for _ in range(TRIES):
        wait_until(lambda: pool.gauge("workers") == 4, "two instances can be loaded at once")
        check(oracle, asyncio.run(burst(pool, kills=who)), TOKENS)
        wait_until(lambda: pool.gauge("num_requests_running") == 0, "nothing is left")
        wait_until(lambda: pool.gauge("instances") == 2, "the pool shrinks to two instances")
        if len(teams(pool)) > before:
            return
    raise AssertionError("no team has begun")


def test_the_record_replays(pool: LocalPool) -> None:
    assert replay(read_record(pool.record)).lives == 2
