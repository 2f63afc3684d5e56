"""Chains: who follows whom, the law of their length, and what several sources are for."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from clusters import (
    RATE,
    H,
    W,
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
from hypothesis import given
from hypothesis import strategies as st

from livescale.clusters.topology import Direction, LinkKind, Topology
from livescale.control.multicast.planner import free_uplinks, make_plan
from livescale.control.multicast.request import Source

IN, OUT = Direction.IN, Direction.OUT


@given(n=st.integers(1, 15), chunks=st.integers(1, 1000), chunk_bytes=st.integers(1, 1 << 20))
def test_the_law_of_chains(n: int, chunks: int, chunk_bytes: int) -> None:
    """BlitzScale §5.1: (chunks + n - 1) / chunks of one copy's time, exactly."""
    asked = request(
        copies(W[0]), W[1 : n + 1], layers=(chunks * chunk_bytes,), chunk_bytes=chunk_bytes
    )
    plan = make_plan(asked, singles(16), "chain")
    one_copy_ns = Fraction(chunks * chunk_bytes * 10**9, RATE)
    assert plan.predicted_ns == one_copy_ns * (chunks + n - 1) / chunks


def test_a_chains_time_does_not_depend_on_its_length() -> None:
    """BlitzScale Figure 13 (a): at 320 chunks seven receivers take 2 % more than one."""
    times = [
        make_plan(request(copies(W[0]), W[1 : n + 1]), singles(8)).predicted_ns for n in range(1, 8)
    ]
    assert times[0] == 320 * (1 << 20) * 80
    assert all(time is not None and time <= times[0] * 1.05 for time in times)


@given(
    racks=st.lists(st.sampled_from("abc"), min_size=2, max_size=9),
    rates=st.lists(st.integers(3 * RATE // 4 + 1, RATE), min_size=9, max_size=9),
)
def test_a_chain_goes_through_racks_one_by_one(racks: list[str], rates: list[int]) -> None:
    """Rates between racks are not known, and those of NICs differ a little, as measured ones do."""
    devices = {
        W[n]: device(f"h{n}", rack, rate)
        for n, (rack, rate) in enumerate(zip(racks, rates, strict=False))
    }
    plan = make_plan(request(copies(W[0]), W[1 : len(racks)]), Topology(devices), "chain")
    (route,) = plan.routes()
    names = [devices[W[int(name[1:-2])]].leaf for name in route.split(" -> ")]
    crossings = sum(here != there for here, there in itertools.pairwise(names))
    assert crossings == len(set(racks)) - 1


@given(
    members=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 100)), min_size=2, max_size=9)
)
def test_staying_in_a_rack_costs_a_quarter_of_the_pace_at_most(
    members: list[tuple[str, int]],
) -> None:
    devices = {W[n]: device(f"h{n}", rack, rate) for n, (rack, rate) in enumerate(members)}
    plan = make_plan(request(copies(W[0]), W[1 : len(members)]), Topology(devices), "chain")
    (route,) = plan.routes()
    order = [members[int(name[1:-2])][1] for name in route.split(" -> ")[1:]]
    fastest_first = sorted(order, reverse=True)
    for place in range(len(order)):
        assert 4 * min(order[: place + 1]) >= 3 * fastest_first[place]


def test_the_faster_target_comes_first() -> None:
    """BlitzScale Figure 13 (b): the downtime of the target whose link is twice as fast halves."""
    topology = Topology({W[0]: device(rate=2 * RATE), W[1]: device(), W[2]: device(rate=2 * RATE)})
    plan = make_plan(request(copies(W[0]), W[1:3]), topology, "chain")
    assert plan.routes() == ("w0.0 -> w2.0 -> w1.0",)
    first, last = plan.load_of(W[2]).completed_ns, plan.load_of(W[1]).completed_ns
    one_copy_ns = 320 * (1 << 20) * 80
    assert first is not None
    assert first * 2 == one_copy_ns
    assert last == one_copy_ns + (1 << 20) * 40  # behind it by one chunk of the faster hop


@given(rates=st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_nobody_waits_for_a_slower_one_behind(rates: list[int]) -> None:
    """Every target gets the model as fast as its own link and the source's allow."""
    devices = {W[0]: device(rate=9 * RATE)}
    devices |= {W[i]: device(rate=rate * RATE) for i, rate in enumerate(rates, 1)}
    asked = request(copies(W[0]), W[1 : len(rates) + 1], layers=(9 << 20,) * 300)
    plan = make_plan(asked, Topology(devices), "chain")
    for i, rate in enumerate(rates, 1):
        alone_ns = 2700 * (1 << 20) * 80 // rate
        completed = plan.load_of(W[i]).completed_ns
        assert completed is not None
        assert alone_ns <= completed <= alone_ns * 1.05


def test_several_sources_share_the_targets() -> None:
    plan = make_plan(request(copies(W[5], W[0]), W[1:4]), singles(6), "chain")
    assert plan.routes() == ("w0.0 -> w2.0", "w5.0 -> w1.0 -> w3.0")


def test_more_sources_than_targets_leave_some_idle() -> None:
    plan = make_plan(request(copies(*W[:3]), [W[7]]), singles(8), "chain")
    assert plan.routes() == ("w0.0 -> w7.0",)


def test_a_slow_source_is_left_out() -> None:
    """Half the targets behind a link of a ninth of the rate would hold up everybody."""
    topology = singles(6)
    topology.devices[W[1]] = device("h1", out=RATE // 9)
    plan = make_plan(request(copies(W[0], W[1]), W[2:6]), topology, "chain")
    assert plan.routes() == ("w0.0 -> w2.0 -> w3.0 -> w4.0 -> w5.0",)


@given(sources=st.integers(1, 6), targets=st.integers(1, 12), downs=st.lists(st.integers(1, 9)))
def test_every_target_is_reached_once(sources: int, targets: int, downs: list[int]) -> None:
    nodes = W[sources : sources + targets]
    topology = singles(20)
    for worker, down in zip(nodes, downs, strict=False):
        topology.devices[worker] = device(rate=down * RATE)
    asked = request(copies(*W[:sources]), nodes, layers=(5 << 20,) * 3)
    check_reaches_all(make_plan(asked, topology, "chain"), asked)


def test_chains_join_equal_ranks() -> None:
    topology = singles(8, rate=9 * RATE)
    topology.devices[W[3]] = device()
    targets = [(W[2], W[3]), (W[4], W[5])]
    plan = make_plan(request([Source((W[0], W[1]))], targets, tp_size=2), topology, "chain")
    assert plan.routes() == (
        "w0.0 -> w4.0 -> w2.0",  # the instance with a slow rank comes last in every chain
        "w1.0 -> w5.0 -> w3.0",
    )
    assert plan.instances == ((W[2], W[3]), (W[4], W[5]))


def test_a_host_copy_sends_every_rank() -> None:
    topology = rails(2, 2)
    plan = make_plan(request([Source((H[0],))], [(W[2], W[3])], tp_size=2), topology, "chain")
    assert plan.routes() == ("h0.0 -> w2.0", "h0.0 -> w3.0")
    assert bytes_over(plan, LinkKind.NIC, "h0.0", OUT) == 2 * 320 << 20
    assert plan.predicted_ns == 2 * 320 * (1 << 20) * 80


@pytest.mark.parametrize("spine", [RATE, RATE // 2])
def test_the_spine_is_crossed_once(spine: int) -> None:
    topology = two_leaves(3, spine)
    plan = make_plan(request(copies(W[0]), W[1:6]), topology)
    assert plan.routes() == ("w0.0 -> w1.0 -> w2.0 -> w3.0 -> w4.0 -> w5.0",)
    assert bytes_over(plan, LinkKind.SPINE, "leaf0", OUT) == 320 << 20
    assert bytes_over(plan, LinkKind.SPINE, "leaf1", OUT) == 0
    assert plan.predicted_ns is not None
    assert plan.predicted_ns <= 320 * (1 << 20) * 80 * RATE // spine * 1.02


def test_targets_read_from_the_source_under_their_own_leaf() -> None:
    plan = make_plan(
        request(copies(W[0], W[3]), [W[1], W[2], W[4], W[5]]), two_leaves(3, RATE), "chain"
    )
    assert plan.routes() == ("w0.0 -> w1.0 -> w2.0", "w3.0 -> w4.0 -> w5.0")
    assert not any(use.link.kind is LinkKind.SPINE for use in plan.links)


def test_a_chain_enters_and_leaves_groups_under_one_leaf() -> None:
    """Rail-optimized: what is not under one leaf goes through the scale-up group."""
    topology = rails(3, 4, spine=RATE)
    plan = make_plan(request(copies(W[0]), W[1:12]), topology, "chain")
    assert not any(use.link.kind is LinkKind.SPINE for use in plan.links)
    crossings = [u for u in plan.links if u.link.kind is LinkKind.NIC and u.link.direction is IN]
    assert len(crossings) == 2  # each of the two other groups is entered once


def test_two_chains_leave_two_targets_free_to_serve() -> None:
    """BlitzScale Figure 12: along one chain only the tail can scale live without interference,
    along two chains both targets can."""
    one = make_plan(request(copies(W[0]), W[2:4]), singles(4), "chain")
    assert free_uplinks(one) == (W[3],)
    two = make_plan(request(copies(W[0], W[1]), W[2:4]), singles(4), "chain")
    assert free_uplinks(two) == (W[2], W[3])


def test_a_target_that_serves_while_it_loads_is_the_tail() -> None:
    plan = make_plan(request(copies(W[0]), W[1:4], busy=[nic(W[1], OUT)]), singles(4), "chain")
    assert plan.routes() == ("w0.0 -> w2.0 -> w3.0 -> w1.0",)
    assert plan.serving_bytes == 0


def test_a_source_that_serves_outward_is_not_read() -> None:
    """BlitzScale Figure 7 (d): load from the decode instance, whose NIC receives, and not from
    the prefill instance, whose NIC sends KV caches."""
    prefill, decode = W[0], W[1]
    busy = [nic(prefill, OUT), nic(decode, IN)]
    plan = make_plan(request(copies(prefill, decode), [W[2]], busy=busy), singles(3))
    assert plan.routes() == ("w1.0 -> w2.0",)
    assert plan.serving_bytes == 0


def test_bytes_that_must_meet_serving_traffic_are_counted() -> None:
    busy = [nic(W[0], OUT)]
    plan = make_plan(request(copies(W[0]), W[1:3], busy=busy, has_storage=False), singles(3))
    assert plan.serving_bytes == 320 << 20
    (met,) = (use for use in plan.links if use.serving_bytes)
    assert str(met.link) == "w0.0 nic out"


def test_a_copy_that_is_arriving_is_read_only_when_all_whole_ones_are() -> None:
    whole, tail = copies(W[0], readers=1), copies(W[1], is_loading=True)
    behind = make_plan(request([*whole, *tail], [W[2]]), singles(3))
    assert behind.routes() == ("w1.0 -> w2.0",)
    assert behind.predicted_ns == 321 * (1 << 20) * 80  # one chunk later
    idle = make_plan(request([*copies(W[0]), *tail], [W[2]]), singles(3))
    assert idle.routes() == ("w0.0 -> w2.0",)


def test_links_that_others_use_are_shared() -> None:
    one_copy_ns = 320 * (1 << 20) * 80
    read = make_plan(request(copies(W[0], readers=1), [W[1]]), singles(2))
    assert read.predicted_ns == 2 * one_copy_ns
    also_taken = [nic(W[0], OUT), nic(W[1], IN), nic(W[1], IN)]
    taken = make_plan(request(copies(W[0], readers=1), [W[1]], taken=also_taken), singles(2))
    assert taken.predicted_ns is not None
    assert taken.predicted_ns == pytest.approx(3 * one_copy_ns, rel=1e-6)  # the rate is rounded


def test_without_a_known_rate_there_is_no_prediction() -> None:
    plan = make_plan(request(copies(W[0]), W[1:3]), singles(3, rate=None))
    assert plan.strategy == "chain"
    assert plan.predicted_ns is None
    assert plan.loads[0].layer_ns == ()


def test_layers_arrive_one_after_the_other() -> None:
    asked = request(copies(W[0]), W[1:3], layers=(3 << 20, 0, 2 << 20), chunk_bytes=1 << 20)
    plan = make_plan(asked, singles(3), "chain")
    chunk_ns = (1 << 20) * 80
    assert plan.load_of(W[1]).layer_ns == (3 * chunk_ns, 0, 5 * chunk_ns)
    second = plan.load_of(W[2]).layer_ns
    assert (second[0], second[2]) == (4 * chunk_ns, 6 * chunk_ns)
