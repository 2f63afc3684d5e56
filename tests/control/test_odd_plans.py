"""Multicasts of odd sizes: fewer blocks than sources, more sources than targets, sources of
different speed, one source, models of hardly any layers. Each is planned: every target gets every
chunk once, from somebody who has it."""

from __future__ import annotations

import pytest
from clusters import RATE, H, W, bytes_over, check_reaches_all, copies, device, request
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from effort import examples
from livescale.clusters.topology import Direction, Host, LinkKind, Topology
from livescale.control.multicast.binomial import BinomialPlan, groups_at_home
from livescale.control.multicast.planner import STRATEGIES, make_plan
from livescale.control.multicast.request import Source
from livescale.messages.scale_plan import ScalePlan
from livescale.values.chunks import ChunkGrid, ChunkRange, Feed
from livescale.values.types import FromStorage, FromWorker, Upstream, WorkerRef


def mixed(rates: list[int | None]) -> Topology:
    """Devices on hosts of their own, with these uplinks."""
    return Topology(
        {
            W[n]: device(f"h{n}", rate=None if r is None else RATE, out=r)
            for n, r in enumerate(rates)
        }
    )


rates = st.sampled_from([None, RATE // 10, RATE // 3, RATE, 4 * RATE])


@settings(max_examples=examples(400))
@given(
    uplinks=st.lists(rates, min_size=14, max_size=14),
    sources=st.integers(1, 7),
    targets=st.integers(1, 7),
    layers=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    chunk_bytes=st.integers(1, 12),
    strategy=st.sampled_from([s for s in STRATEGIES if s not in ("host", "storage")]),
)
def test_every_target_gets_every_chunk_once(
    uplinks: list[int | None],
    sources: int,
    targets: int,
    layers: list[int],
    chunk_bytes: int,
    strategy: str,
) -> None:
    """Blocks are as few as chunks, which are fewer than sources here as often as not."""
    asked = request(
        copies(*W[:sources]),
        W[sources : sources + targets],
        layers=tuple(layers),
        chunk_bytes=chunk_bytes,
    )
    plan = make_plan(asked, mixed(uplinks), strategy)
    check_reaches_all(plan, asked)
    assert [load.receiver for load in plan.loads] == [w for (w,) in asked.targets or ()]


@settings(max_examples=examples(300))
@given(
    sources=st.integers(1, 7),
    targets=st.integers(1, 9),
    layers=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    blocks=st.integers(1, 20),
)
def test_any_number_of_blocks_reaches_all(
    sources: int, targets: int, layers: list[int], blocks: int
) -> None:
    grid = ChunkGrid(layers, 2)
    senders, receivers = [(w,) for w in W[:sources]], [(w,) for w in W[8 : 8 + targets]]
    feeds = BinomialPlan(grid, senders, receivers, blocks).feeds()
    assert sorted(worker for worker, _ in feeds) == sorted(w for (w,) in receivers)
    for its in feeds.values():
        chunks = sorted(c for feed in its for part in feed.chunks for c in part)
        assert chunks == list(range(grid.chunks))


def test_of_more_sources_than_targets_the_fastest_are_read() -> None:
    """Two that are nearly as fast are sooner than the fastest alone; a slow one holds up all."""
    topology = mixed([RATE // 10, RATE, RATE * 99 // 100, RATE, RATE])
    asked = request(copies(*W[:3]), W[3:5])
    plan = make_plan(asked, topology, "binomial")
    check_reaches_all(plan, asked)
    read = {f.upstream for load in plan.loads for f in load.feeds}
    assert read == {FromWorker(W[1]), FromWorker(W[2])}


# -- copies in host memory, for teams -------------------------------------------------------------


def with_memory(hosts: int, link: int | None = 2 * RATE) -> Topology:
    """Hosts of one device each, with an agent and a link between both."""
    agents = {H[n]: Host(f"h{n}", "leaf", 1 << 40, RATE, RATE, link) for n in range(hosts)}
    return Topology({W[n]: device(f"h{n}") for n in range(hosts)}, agents)


def senders_of(plan: ScalePlan, worker: WorkerRef) -> set[Upstream]:
    return {feed.upstream for feed in plan.load_of(worker).feeds}


@given(sources=st.integers(1, 6), data=st.data())
def test_groups_at_home_have_their_own_and_are_as_even_as_can_be(
    sources: int, data: st.DataObject
) -> None:
    homes = data.draw(st.lists(st.none() | st.integers(0, sources - 1), max_size=12))
    groups = groups_at_home(sources, homes)
    assert sorted(sum(groups, ())) == list(range(len(homes)))
    for number, positions in enumerate(groups):
        assert {homes[position] for position in positions} <= {None, number}
    filled = [g for n, g in enumerate(groups) if any(homes[p] is None for p in g)]
    if filled:
        assert max(map(len, filled)) <= min(map(len, groups)) + 1


@settings(max_examples=examples(200))
@given(
    copies_at=st.sets(st.integers(0, 7), min_size=1),
    devices_at=st.integers(0, 2),
    targets=st.integers(1, 5),
    link=st.sampled_from([None, RATE // 10, RATE, 4 * RATE]),
    strategy=st.sampled_from(["binomial", "host-k-way", "host", "auto"]),
    in_teams=st.booleans(),
)
def test_copies_in_memory_and_on_devices_reach_all(
    copies_at: set[int],
    devices_at: int,
    targets: int,
    link: int | None,
    strategy: str,
    in_teams: bool,
) -> None:
    sources = copies(*W[:devices_at], *[H[n] for n in sorted(copies_at)])
    asked = request(sources, W[2 : 2 + targets], layers=(40,) * 9, chunk_bytes=7)
    asked = replace(asked, in_teams=in_teams)
    check_reaches_all(make_plan(asked, with_memory(8, link), strategy), asked)


def test_a_device_and_a_host_copy_are_sources_together() -> None:
    """λScale's null tier, k = 2. The copy's own host reads it without a detour."""
    asked = request((*copies(W[0]), Source((H[1],))), W[1:3])
    topology = with_memory(3)
    plan = make_plan(replace(asked, in_teams=True), topology, "binomial")
    check_reaches_all(plan, asked)
    assert senders_of(plan, W[1]) == {FromWorker(H[1])}
    assert senders_of(plan, W[2]) == {FromWorker(W[0])}
    assert not bytes_over(plan, LinkKind.NIC, str(H[1]), Direction.OUT)
    plain = make_plan(asked, topology, "binomial")
    assert senders_of(plain, W[1]) == {FromWorker(W[0])}, "without teams nothing changes"
    six = replace(request((*copies(W[0]), Source((H[1],))), W[1:7]), in_teams=True)
    wide = make_plan(six, with_memory(7), "binomial")
    check_reaches_all(wide, six)
    read = set().union(*(senders_of(wide, worker) for worker in W[1:7]))
    assert read >= {FromWorker(W[0]), FromWorker(H[1])}


def test_ranks_that_share_a_memory_read_it_though_others_should_not() -> None:
    """The ranks of an instance leave a host copy by one NIC, so that it counts as read and a
    device is the better source: not for the devices of its own host."""
    shared = Source((H[1],), is_loading=False, readers=3)
    asked = replace(request((*copies(W[0]), shared), W[1:2]), in_teams=True)
    plan = make_plan(asked, with_memory(3), "binomial")
    check_reaches_all(plan, asked)
    assert senders_of(plan, W[1]) == {FromWorker(H[1])}
    elsewhere = replace(asked, targets=((W[2],),))
    assert senders_of(make_plan(elsewhere, with_memory(3), "binomial"), W[2]) == {FromWorker(W[0])}


@pytest.mark.parametrize("strategy", ["binomial", "host-k-way"])
def test_each_host_begins_elsewhere_in_its_own_copy(strategy: str) -> None:
    """λScale's warm tier: k hosts load their own copies in k-way order, though a device serves."""
    asked = request((*copies(W[0]), *[Source((H[n],)) for n in range(1, 5)]), W[1:5])
    plan = make_plan(replace(asked, in_teams=True), with_memory(5), strategy)
    check_reaches_all(plan, asked)
    for number in range(1, 5):
        assert senders_of(plan, W[number]) == {FromWorker(H[number])}
    begins = [plan.load_of(W[n]).feeds[0].chunks[0].start for n in range(1, 5)]
    assert begins == [0, 80, 160, 240]


def test_storage_is_read_in_order_where_caches_are_local() -> None:
    asked = replace(request(copies(H[1]), W[1:3]), is_cache_local=True)
    plan = make_plan(asked, with_memory(3), "host-k-way")
    assert senders_of(plan, W[2]) == {FromStorage()}
    assert plan.load_of(W[2]).feeds == (Feed(FromStorage(), (ChunkRange(0, 320),)),)
    elsewhere = replace(asked, targets=((W[2],),), instances=1)
    assert make_plan(elsewhere, with_memory(3), "host-k-way").loads[0].feeds == (
        Feed(FromStorage(), (ChunkRange(0, 320),)),
    )
