"""Two workers have a model of sixteen layers, four get it: they compute for real, in teams."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from completions import Answer, check, prompt
from pool_thread import LocalPool, wait_until
from team_pools import SOURCES, ask_for, team_pool, teams, words

from livescale.engine.files.make import Preset, make_model
from livescale.engine.oracle import GreedyOracle
from livescale.messages.events import LayerArrived
from slowness import patient

pytestmark = [pytest.mark.usefixtures("machine"), pytest.mark.long]
WORKERS = 6
SHAPE = Preset(16, 64, 128, 4, 4, 1024)
# About 3.2 MB at this rate: a load takes six seconds, and teams begin after half of it.
LINK_BYTES_PER_S = 550_000
CLIENTS, TOKENS = 50, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "sixteen"
    make_model(directory, SHAPE)
    return directory


@pytest.fixture(scope="module")
def pool(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    with team_pool(
        model,
        tmp_path_factory.mktemp("pool"),
        workers=WORKERS,
        link_bytes_per_s=LINK_BYTES_PER_S,
        host_memory_bytes=0,
        multicast="binomial",
        teams="pairs",
    ) as local:
        yield local


async def burst(pool: LocalPool, number: int) -> list[Answer]:
    """Streams one after the other from each client, until all workers serve."""
    limits = httpx.Limits(max_connections=None)
    answers: list[Answer] = []
    are_loaded = asyncio.Event()

    async def ask_on(client: httpx.AsyncClient) -> None:
        while not are_loaded.is_set():
            count = len(answers)
            answers.append(Answer(prompt(10_000 * number + count, 100 + count % 50)))
            await answers[-1].read(pool.url, client, TOKENS)

    async with httpx.AsyncClient(timeout=patient(120), limits=limits) as client:
        await ask_for(pool, client, WORKERS)
        asking = asyncio.gather(*(ask_on(client) for _ in range(CLIENTS)))
        await asyncio.to_thread(wait_until, lambda: pool.serving() == WORKERS, "all serve")
        are_loaded.set()
        await asking
        await ask_for(pool, client, SOURCES)
    return answers


def test_targets_run_layers_before_they_have_the_first_one(pool: LocalPool, model: Path) -> None:
    """Each member whose part begins later has run layers of visits when layer 1 came."""
    oracle = GreedyOracle(model)
    later: dict[object, bool] = {}
    for number in range(5):
        wait_until(lambda: pool.gauge("workers") == WORKERS, "all workers are there")
        check(oracle, asyncio.run(burst(pool, number)), TOKENS)
        for team in teams(pool):
            for member in team.members[1:]:
                later.setdefault(member.partner.worker, False)
        for event in words(pool, LayerArrived):
            if event.holding.member in later and event.watermark <= 2 and event.live_layers:
                later[event.holding.member] = True
        if later and all(later.values()):
            return
        wait_until(lambda: pool.gauge("instances") == SOURCES, "the pool shrinks")
    raise AssertionError(f"members of later parts that ran layers before layer 1: {later}")
