"""Plans: which devices, which strategy, what it costs, and how far from the best there is."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from clusters import (
    RATE,
    H,
    W,
    best_possible_ns,
    bytes_over,
    check_reaches_all,
    copies,
    device,
    nic,
    rails,
    request,
    singles,
    two_leaves,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from effort import examples
from livescale.clusters.topology import Device, Direction, Host, Leaf, LinkKind, LinkUse, Topology
from livescale.control.multicast.bound import lower_bound
from livescale.control.multicast.cost import CostModel, shape_of
from livescale.control.multicast.fabric import Fabric
from livescale.control.multicast.placing import kinds_of_spare
from livescale.control.multicast.planner import STRATEGIES, PlanError, make_plan
from livescale.control.multicast.ranges import covers, intersect
from livescale.control.multicast.request import PlanRequest, Source
from livescale.messages.scale_plan import ScalePlan
from livescale.values.chunks import ChunkGrid, ChunkRange, Feed
from livescale.values.types import FromStorage, FromWorker

IN, OUT = Direction.IN, Direction.OUT
ONE_COPY_NS = 320 * (1 << 20) * 80


def bound_ns(asked: PlanRequest, plan: ScalePlan, topology: Topology) -> int:
    targets = plan.instances
    sources = [s.workers * (asked.tp_size // len(s.workers)) for s in asked.sources]
    found = lower_bound(sources, targets, sum(asked.layer_bytes), Fabric.of(asked, topology))
    assert found is not None
    return found.ns


# -- choice of devices ----------------------------------------------------------------------------


def test_devices_near_a_source_are_taken_first() -> None:
    """Same scale-up group, then same leaf, then bandwidth, then id."""
    topology = Topology(
        {
            W[0]: device("a", "leaf0", group="nv"),
            W[1]: device("b", "leaf1", 9 * RATE),
            W[2]: device("c", "leaf0", RATE),
            W[3]: device("d", "leaf0", 2 * RATE),
            W[4]: device("a", "leaf7", RATE, group="nv"),
            W[5]: device("e", "leaf0", RATE),
        },
        leaves={name: Leaf(name, RATE, RATE) for name in ("leaf0", "leaf1", "leaf7")},
        group_bytes_per_s=100 * RATE,
    )
    for count, expected in ((1, [4]), (2, [4, 3]), (3, [4, 3, 2]), (4, [4, 3, 2, 5])):
        asked = request(copies(W[0]), spare=W[1:6], instances=count)
        plan = make_plan(asked, topology, "chain")
        assert plan.instances == tuple((W[i],) for i in expected)


def test_ranks_of_an_instance_share_a_group() -> None:
    topology = rails(3, 3)
    spare = [W[2], *W[3:9]]
    asked = request([Source((W[0], W[1]))], spare=spare, instances=3, tp_size=2)
    plan = make_plan(asked, topology)
    assert plan.instances == ((W[3], W[4]), (W[6], W[7]), (W[2], W[5]))


def test_fewer_devices_than_wanted_are_all_taken_and_none_is_an_error() -> None:
    asked = request(copies(W[0]), spare=W[1:3], instances=5)
    assert make_plan(asked, singles(3)).receivers == 2
    with pytest.raises(PlanError, match="no 2 spare workers"):
        make_plan(request([Source((W[0], W[1]))], spare=[W[2]], instances=1, tp_size=2), singles(3))


def test_what_cannot_be_planned_is_named() -> None:
    with pytest.raises(PlanError, match=r"w9\.0 is not in the topology"):
        make_plan(request(copies(W[9]), [W[1]]), singles(2))
    with pytest.raises(PlanError, match="'snail'"):
        make_plan(request(copies(W[0]), [W[1]]), singles(2), "snail")
    with pytest.raises(PlanError, match="not 2 ranks"):
        make_plan(request(copies(W[0]), [(W[1], W[2])], tp_size=2), singles(3))
    with pytest.raises(PlanError, match="no bytes"):
        make_plan(request(copies(W[0]), [W[1]], layers=(0, 0)), singles(2))
    with pytest.raises(PlanError, match="storage cannot be read"):
        make_plan(request([], [W[1]], has_storage=False), singles(2))


# -- strategies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(data=st.data())
@settings(max_examples=examples(25))
def test_every_strategy_brings_everything_to_all(strategy: str, data: st.DataObject) -> None:
    topology = rails(3, 4, spine=data.draw(st.sampled_from([None, RATE])))
    workers = data.draw(st.permutations(W[:12]))
    sources = data.draw(st.integers(1, 4))
    targets = data.draw(st.integers(1, 8))
    layers = tuple(data.draw(st.lists(st.integers(0, 9000), min_size=1, max_size=6).filter(any)))
    held = [*copies(*workers[:sources]), *copies(H[0])]
    chosen = sorted(workers[sources : sources + targets])
    asked = request(held, chosen, layers=layers, chunk_bytes=1000)
    plan = make_plan(asked, topology, strategy)
    check_reaches_all(plan, asked)
    assert strategy in ("auto", plan.strategy)
    assert make_plan(asked, topology, strategy) == plan
    received = sum(
        use.bytes
        for use in plan.links
        if use.link.direction is IN and use.link.kind is not LinkKind.SPINE
    )
    if plan.strategy != "storage":
        assert received == sum(layers) * len(chosen)


@pytest.mark.parametrize("groups", [2, 5])
def test_shards_divide_the_time_by_the_width_of_groups(groups: int) -> None:
    """BlitzScale Figure 14: with four devices a node, each sends a quarter over its own NIC."""
    topology = rails(groups, 4)
    asked = request(copies(*W[:4]), W[4 : 4 * groups])
    plan = make_plan(asked, topology, "sharded")
    assert plan.predicted_ns == pytest.approx(ONE_COPY_NS / 4, rel=0.05)
    assert bytes_over(plan, LinkKind.NIC, "w4.0", IN) == 80 << 20
    assert make_plan(asked, topology).predicted_ns == pytest.approx(ONE_COPY_NS / 4, rel=0.05)


@pytest.mark.long
@given(senders=st.integers(1, 8), width=st.integers(1, 8), more=st.integers(0, 8))
def test_groups_of_different_sizes_use_as_many_links_as_the_smaller_has(
    senders: int, width: int, more: int
) -> None:
    topology = rails(3, 8)
    targets = [*W[8 : 8 + width], *W[16 : 16 + more]]
    asked = request(copies(*W[:senders]), targets, layers=(1 << 20,) * 840)
    plan = make_plan(asked, topology, "sharded")
    check_reaches_all(plan, asked)
    narrowest = min(senders, max(width, more), *([min(width, more)] if more else []))
    alone_ns = 840 * (1 << 20) * 80
    assert plan.predicted_ns is not None
    assert plan.predicted_ns <= alone_ns / narrowest * 1.06


def test_ranks_are_sharded_among_equal_ranks() -> None:
    """Two instances of two ranks per host: each rank's bytes go over two NICs."""
    topology = rails(2, 4)
    sources = [Source((W[0], W[1])), Source((W[2], W[3]))]
    asked = request(sources, [(W[4], W[5]), (W[6], W[7])], tp_size=2)
    plan = make_plan(asked, topology, "sharded")
    assert plan.predicted_ns == pytest.approx(ONE_COPY_NS / 2, rel=0.05)
    senders = [{str(feed.upstream) for feed in load.feeds} for load in plan.loads]
    assert senders == [{"w0.0", "w6.0"}, {"w1.0", "w7.0"}, {"w2.0", "w4.0"}, {"w3.0", "w5.0"}]


def test_unicast_and_trees_take_what_they_send() -> None:
    topology = singles(8)
    asked = request(copies(W[0]), W[1:7])
    assert make_plan(asked, topology, "unicast").predicted_ns == 6 * ONE_COPY_NS
    tree = make_plan(asked, topology, "tree")
    assert tree.predicted_ns == pytest.approx(2 * ONE_COPY_NS, rel=0.02)
    assert [str(load.feeds[0].upstream) for load in tree.loads] == [
        *("w0.0", "w0.0", "w1.0", "w1.0", "w2.0", "w2.0")
    ]


def test_copies_that_send_themselves_share_the_targets() -> None:
    """Two copies and six targets: three times one copy; who is in a copy's fast network reads that
    copy, also where other hosts read from it."""
    plan = make_plan(request(copies(W[0], W[1]), W[2:8]), singles(8), "direct")
    assert plan.predicted_ns == 3 * ONE_COPY_NS
    assert [str(load.feeds[0].upstream) for load in plan.loads] == ["w0.0", "w1.0"] * 3
    together = make_plan(request(copies(W[0], W[4]), W[5:8]), rails(2, 4), "direct")
    assert {str(load.feeds[0].upstream) for load in together.loads} == {"w4.0"}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("is_cache_local", [False, True])
def test_storage_is_read_by_those_alone_that_have_the_files(
    strategy: str, is_cache_local: bool
) -> None:
    known = rails(2, 2)
    targets = W[1:4]
    for holder, *reads in itertools.product((None, H[0], W[0]), *[(False, True)] * len(targets)):
        readers = [worker for worker, is_reader in zip(targets, reads, strict=True) if is_reader]
        devices = {
            worker: msgspec.structs.replace(device, reads_files=worker in readers)
            for worker, device in known.devices.items()
        }
        topology = Topology(devices, known.agents, known.leaves)
        asked = request(copies(holder) if holder else [], targets, layers=(2000,), chunk_bytes=1000)
        asked = msgspec.structs.replace(asked, is_cache_local=is_cache_local)
        try:
            plan = make_plan(asked, topology, strategy)
        except PlanError:
            assert readers != targets
            continue
        fed = [p.receiver for p in plan.loads for f in p.feeds if f.upstream == FromStorage()]
        assert set(fed) <= set(readers)


def test_host_memory_feeds_its_own_devices_first() -> None:
    topology = rails(2, 2)
    asked = request(copies(H[0]), [W[0], W[2]])
    plan = make_plan(asked, topology, "host")
    assert bytes_over(plan, LinkKind.HOST, "w0.0", IN) == 320 << 20
    assert bytes_over(plan, LinkKind.NIC, "h0.0", OUT) == 320 << 20
    assert plan.load_of(W[0]).completed_ns == ONE_COPY_NS // 2
    assert plan.load_of(W[2]).completed_ns == ONE_COPY_NS


def test_a_local_cache_feeds_nobody_elses_devices() -> None:
    """ServerlessLLM: what the own host's memory does not have comes from storage."""
    asked = request(copies(H[0]), [W[0], W[2]])
    asked = msgspec.structs.replace(asked, is_cache_local=True)
    plan = make_plan(asked, rails(2, 2), "host")
    assert plan.routes() == ("h0.0 -> w0.0", "storage -> w2.0")


def test_device_and_host_copies_are_used_together() -> None:
    plan = make_plan(request([*copies(H[1]), *copies(W[0])], [W[2], W[4]]), rails(3, 2), "chain")
    assert plan.routes() == ("h1.0 -> w2.0", "w0.0 -> w4.0")


def test_without_a_copy_one_reads_storage_and_the_others_follow() -> None:
    topology = rails(3, 1)
    plan = make_plan(request([], W[:3]), topology)
    assert plan.routes() == ("storage -> w0.0 -> w1.0 -> w2.0",)
    assert plan.predicted_ns == pytest.approx(10 * ONE_COPY_NS, rel=0.02)
    alone = make_plan(request([], W[:3]), topology, "storage")
    assert all(load.feeds[0].upstream == FromStorage() for load in alone.loads)


def test_storage_that_nobody_knows_is_not_taken_for_fast() -> None:
    """Else a copy in memory, whose link has a known rate, would never be read."""
    devices = {W[0]: device("a"), W[1]: device("b")}
    for rate, strategy in ((None, "chain"), (RATE // 2, "chain"), (2 * RATE, "storage")):
        agents = {
            H[0]: Host("a", "leaf", 1, device_bytes_per_s=9 * RATE),
            H[1]: Host("b", "leaf", 1, device_bytes_per_s=9 * RATE, storage_bytes_per_s=rate),
        }
        plan = make_plan(request(copies(W[0]), W[1:2]), Topology(devices, agents))
        assert plan.strategy == strategy


def test_storage_that_hosts_share_is_divided() -> None:
    topology = Topology({w: device(str(w)) for w in W[:4]}, remote_storage_bytes_per_s=RATE)
    plan = make_plan(request([], W[:4]), topology, "storage")
    assert plan.predicted_ns == 4 * ONE_COPY_NS


def test_a_copy_goes_into_host_memory_for_every_rank() -> None:
    plan = make_plan(request([Source((W[0], W[1]))], [(H[1], H[1])], tp_size=2), rails(2, 2))
    assert plan.instances == ()
    assert [str(load.feeds[0].upstream) for load in plan.loads] == ["w0.0", "w1.0"]
    assert plan.predicted_ns == 2 * ONE_COPY_NS
    beside = make_plan(request(copies(W[0]), [H[0]]), rails(2, 2))
    assert [str(use.link) for use in beside.links] == ["w0.0 host out"]


# -- published figures ----------------------------------------------------------------------------


def test_the_papers_arithmetic() -> None:
    """BlitzScale: 16 GB take 12.8 s from a 10 Gbit/s SSD (§2); 72B over four ranks in 500 ms take
    576 Gbit/s each (§3), so at that rate a plan takes half a second."""
    gbit = 125_000_000
    disk = Host("h", "leaf", 1 << 40, storage_bytes_per_s=10 * gbit)
    one = Topology({W[0]: device("h", rate=100 * gbit)}, {H[0]: disk})
    eight_b = request([], [W[0]], layers=(16 * 10**9,))
    assert make_plan(eight_b, one).predicted_ns == 12_800_000_000
    fast = Topology(
        {
            w: Device("a800", f"h{i // 4}", "leaf", 1, 1, 576 * gbit, 576 * gbit, f"g{i // 4}")
            for i, w in enumerate(W[:8])
        }
    )
    asked = request([Source(tuple(W[:4]))], [tuple(W[4:8])], tp_size=4, layers=(36 * 10**9,))
    assert make_plan(asked, fast, "chain").predicted_ns == 500_000_000


# -- quality --------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=examples(60))
def test_auto_against_every_choice_and_every_forest(data: st.DataObject) -> None:
    """Small random clusters: two leaves, slow spines, groups, links of different speed. Brute
    force tries all devices and all ways to feed each from one upstream.
    """
    count = data.draw(st.integers(3, 6), "devices")
    devices = {}
    for i in range(count):
        host = data.draw(st.integers(0, 2), f"host of {i}")
        speed = data.draw(st.sampled_from([1, 2, 4]), f"speed of {i}")
        grouped = data.draw(st.booleans(), f"{i} in a group")
        devices[W[i]] = device(
            f"h{host}", f"leaf{host % 2}", speed * RATE, f"g{host}" if grouped else ""
        )
    spine = data.draw(st.sampled_from([None, RATE // 2, 2 * RATE]), "spine")
    leaves = {f"leaf{i}": Leaf(f"leaf{i}", spine, spine) for i in (0, 1)} if spine else {}
    topology = Topology(devices, {}, leaves, group_bytes_per_s=50 * RATE)
    sources = data.draw(st.integers(1, 2), "sources")
    wanted = data.draw(st.integers(1, min(3, count - sources)), "instances")
    asked = request(
        copies(*W[:sources]), spare=W[sources:count], instances=wanted, layers=(1 << 20,) * 256
    )
    plan = make_plan(asked, topology)
    assert plan.predicted_ns is not None
    assert plan.predicted_ns <= best_possible_ns(asked, topology) * 1.02


@given(data=st.data())
@settings(max_examples=examples(60))
def test_spare_workers_of_the_same_kinds_are_as_soon_loaded(data: st.DataObject) -> None:
    """So what was predicted for one choice of them holds for another one."""
    devices = {}
    for i in range(data.draw(st.integers(4, 10), "devices")):
        host = data.draw(st.integers(0, 3), f"host of {i}")
        grouped = data.draw(st.booleans(), f"{i} in a group")
        rate = data.draw(st.sampled_from([RATE, 2 * RATE]), f"rate of {i}")
        devices[W[i]] = device(f"h{host}", f"leaf{host % 2}", rate, f"g{host}" if grouped else "")
    spine = data.draw(st.sampled_from([None, RATE // 2, 2 * RATE]), "spine")
    leaves = {f"leaf{i}": Leaf(f"leaf{i}", spine, spine) for i in (0, 1)} if spine else {}
    topology = Topology(devices, {}, leaves, group_bytes_per_s=50 * RATE)
    others = list(devices)[1:]
    uses = [LinkUse(LinkKind.NIC, str(w), way) for w in others for way in (IN, OUT)]
    busy = data.draw(st.lists(st.sampled_from(uses), max_size=2), "busy")
    chosen = st.sets(st.sampled_from(others), min_size=1)
    first, second = (
        request(copies(W[0]), spare=sorted(data.draw(chosen, "spare")), busy=busy) for _ in range(2)
    )
    assume(kinds_of_spare(first, topology) == kinds_of_spare(second, topology))
    one, other = (make_plan(asked, topology).predicted_ns for asked in (first, second))
    assert one is not None
    assert other is not None
    assert max(one, other) <= min(one, other) * 1.02


def test_large_clusters_are_near_the_lower_bound() -> None:
    layers = (4 << 20,) * 1000
    for topology, targets in ((rails(8, 8), W[1:64]), (two_leaves(32, 8 * RATE), W[1:64])):
        asked = request(copies(W[0]), targets, layers=layers)
        plan = make_plan(asked, topology)
        bound = bound_ns(asked, plan, topology)
        assert plan.predicted_ns is not None
        assert bound <= plan.predicted_ns <= bound * 1.05


@given(data=st.data())
@settings(max_examples=examples(60))
def test_no_strategy_beats_the_lower_bound(data: st.DataObject) -> None:
    spine = data.draw(st.sampled_from([None, RATE // 3, 4 * RATE]))
    shape = data.draw(st.sampled_from(["rails", "leaves"]))
    topology = rails(4, 4, spine=spine) if shape == "rails" else two_leaves(8, spine or RATE)
    workers = data.draw(st.permutations(W[:16]))
    sources = data.draw(st.integers(1, 3))
    targets = workers[sources : sources + data.draw(st.integers(1, 12))]
    asked = request(copies(*workers[:sources]), targets, layers=(1 << 20,) * 64)
    for strategy in ("chain", "sharded", "binomial", "tree", "unicast", "direct"):
        plan = make_plan(asked, topology, strategy)
        assert plan.predicted_ns is not None
        assert plan.predicted_ns >= bound_ns(asked, plan, topology) * 0.999, strategy


@given(data=st.data())
@settings(max_examples=examples(30))
def test_auto_is_no_worse_than_any_strategy(data: st.DataObject) -> None:
    topology = rails(3, 4, spine=data.draw(st.sampled_from([None, RATE // 2])))
    workers = data.draw(st.permutations(W[:12]))
    sources = data.draw(st.integers(1, 3))
    targets = workers[sources : sources + data.draw(st.integers(1, 9))]
    asked = request(copies(*workers[:sources]), targets)
    auto = make_plan(asked, topology).predicted_ns
    assert auto is not None
    for strategy in STRATEGIES:
        other = make_plan(asked, topology, strategy).predicted_ns
        assert other is not None
        assert auto <= other * 1.01, strategy


# -- the cost model's parts -----------------------------------------------------------------------


@given(
    layers=st.lists(st.integers(0, 50), min_size=1, max_size=8),
    chunk_bytes=st.integers(1, 12),
    data=st.data(),
)
def test_shapes_count_bytes_as_chunks_do(
    layers: list[int], chunk_bytes: int, data: st.DataObject
) -> None:
    grid = ChunkGrid(layers, chunk_bytes)
    assume(grid.chunks > 0)
    start = data.draw(st.integers(0, grid.chunks - 1))
    part = ChunkRange(
        start, data.draw(st.integers(start + 1, grid.chunks)), data.draw(st.integers(1, 5))
    )
    total, ends = shape_of(grid, (part,))
    assert total == sum(grid.place(chunk)[2] for chunk in part)
    carried = 0
    expected = [0] * len(layers)
    for chunk in part:
        carried += grid.place(chunk)[2]
        expected[grid.layer(chunk)] = carried
    assert list(ends) == expected


@given(
    a=st.tuples(st.integers(0, 30), st.integers(1, 30), st.integers(1, 9)),
    b=st.tuples(st.integers(0, 30), st.integers(1, 30), st.integers(1, 9)),
)
def test_ranges_meet_where_their_chunks_do(
    a: tuple[int, int, int], b: tuple[int, int, int]
) -> None:
    first, second = (ChunkRange(s, s + n, step) for s, n, step in (a, b))
    assert intersect(first, second) == bool(set(first) & set(second))
    if covers((first,), (second,)):
        assert set(second) <= set(first)


@given(chunks=st.integers(1, 40), rates=st.lists(st.integers(1, 5), min_size=2, max_size=6))
def test_predictions_are_those_of_chunks_moved_one_by_one(chunks: int, rates: list[int]) -> None:
    """The oracle moves every chunk over every hop: a sender sends one chunk at a time, as soon as
    it has it and its link is free."""
    topology = Topology({W[i]: device(rate=rate * 60 * 1000) for i, rate in enumerate(rates)})
    grid = ChunkGrid((60,) * chunks, 60)
    hops = list(itertools.pairwise(W[: len(rates)]))
    feeds = {(to, 0): (Feed(FromWorker(of), grid.all()),) for of, to in hops}
    prediction = CostModel(grid, Fabric(topology)).predict(feeds)
    there = [0.0] * chunks
    for of, to in hops:
        rate = min(rates[of.worker], rates[to.worker])
        free = 0.0
        for chunk in range(chunks):
            free = max(free, there[chunk]) + 1_000_000 / rate
            there[chunk] = free
        assert prediction.layer_ns[to, 0][-1] == pytest.approx(there[-1], abs=len(hops) + 1)


@given(busy=st.lists(st.tuples(st.integers(0, 5), st.sampled_from((IN, OUT))), unique=True))
def test_bytes_that_meet_serving_traffic_are_told_and_free_plans_tell_none(
    busy: list[tuple[int, Direction]],
) -> None:
    """Whether the planner was told of that traffic or not."""
    serving = [nic(W[number], direction) for number, direction in busy]
    told = make_plan(request(copies(W[0], W[1]), W[2:6], busy=serving), singles(6))
    untold = make_plan(request(copies(W[0], W[1]), W[2:6]), singles(6))
    assert (untold.serving, untold.serving_bytes, untold.avoided) == ((), 0, ())
    for plan in (told, untold.beside(tuple(serving))):
        moved = {use.link: use.bytes for use in plan.links}
        met = {use.link: use.serving_bytes for use in plan.links if use.serving_bytes}
        assert plan.serving == tuple(serving)
        assert met == {link: moved[link] for link in serving if link in moved}
        assert plan.avoided == tuple(link for link in serving if link not in moved)
        assert plan.serving_bytes == sum(met.values())
    assert told.serving_bytes <= untold.beside(tuple(serving)).serving_bytes


def test_serving_bytes_are_avoided_where_they_can_be() -> None:
    """The source that is named first sends traffic; the other one is read."""
    asked = request(copies(W[0], W[4]), [W[8]], busy=[nic(W[0], OUT)])
    plan = make_plan(asked, rails(3, 4))
    assert plan.serving_bytes == 0
    assert plan.routes() == ("w4.0 -> w8.0",)
