"""A pool of real processes whose instances serve in teams while each loads from its own host's
memory, beginning with another part of the model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from completions import check
from pool_thread import LocalPool, wait_until
from team_pools import SOURCES, team_pool, teams, words
from test_team_pool import LINK_BYTES_PER_S, TOKENS, TRIES, burst

from livescale.engine.oracle import GreedyOracle
from livescale.messages.commands import StartHolding
from livescale.messages.events import HoldingCompleted
from livescale.values.chunks import Feed
from livescale.values.types import FromWorker

pytestmark = pytest.mark.usefixtures("machine")


@pytest.mark.long
def test_hosts_load_their_own_copies_in_teams(tiny_model: Path, tmp_path: Path) -> None:
    with team_pool(
        tiny_model,
        tmp_path,
        workers=4,
        link_bytes_per_s=LINK_BYTES_PER_S,
        carrier="tcp",  # with shared memory a load would be over at once
        placement="all",
        prefill_queue_upper_ms=100,
        prefill_queue_lower_ms=50,
        multicast="host-k-way",
        teams="cover",
    ) as pool:
        wait_until(lambda: len(copies(pool)) == 4, "each host has a copy")
        # On busy cores a worker may still drop what it had: then there is no team in that burst.
        for _ in range(TRIES):
            wait_until(lambda: pool.gauge("workers") == 4, "two instances can be loaded at once")
            before = len(words(pool, StartHolding))
            check(GreedyOracle(tiny_model), asyncio.run(burst(pool)), TOKENS)
            if teams(pool):
                break
            wait_until(lambda: pool.gauge("instances") == SOURCES, "the pool shrinks again")
        assert teams(pool)
        loads = [w for w in words(pool, StartHolding)[before:] if w.duty is not None]
        firsts = [feed_of(load) for load in loads[:2]]
        for feed in firsts:
            assert isinstance(feed.upstream, FromWorker)
            assert feed.upstream.worker.is_agent
        begins = {feed.chunks[0].start for feed in firsts}
        assert len(begins) == 2
        assert 0 in begins


def copies(pool: LocalPool) -> list[HoldingCompleted]:
    return [w for w in words(pool, HoldingCompleted) if w.holding.member.is_agent]


def feed_of(load: StartHolding) -> Feed:
    (feed,) = load.feeds
    return feed
