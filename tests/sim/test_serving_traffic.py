"""Rows and KV cross the links of parameters, before them: against an oracle, and under faults."""

from __future__ import annotations

import itertools
import random

import pytest
from chunk_oracle import ChunkOracle
from chunk_worlds import (
    ChunkWorld,
    Load,
    Play,
    Sending,
    draw_chunk_world,
    draw_sendings,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from effort import examples
from livescale.clusters.topology import Device, Topology
from livescale.sim.base.clock import STEP_PRIORITY
from livescale.values.chunks import ChunkGrid, Feed
from livescale.values.types import FromWorker, WorkerRef

W = [WorkerRef(number) for number in range(6)]
RATE = 1_000_000_000
MB = 1_000_000
MS = 1_000_000
GRID = ChunkGrid((1000, 500, 1500), 100)


def topology(count: int = 6) -> Topology:
    """Devices with NICs of a byte per nanosecond."""
    return Topology(
        {
            worker: Device("d", f"h{worker.worker}", "leaf", 1 << 40, 1, RATE, RATE)
            for worker in W[:count]
        }
    )


def played(sendings: list[Sending], *loads: tuple[int, int], percent: int = 100) -> Play:
    """3000 bytes of parameters go from one worker to another at the beginning."""
    feeds = [Load(W[b], (Feed(FromWorker(W[a]), GRID.all()),), 0) for a, b in loads]
    receivers = [b for _, b in loads]
    sources = list(dict.fromkeys(W[a] for a, _ in loads if a not in receivers))
    play = Play(ChunkWorld(topology(), GRID, sources, feeds, sendings), parameter_percent=percent)
    play.run()
    return play


def load_ns(play: Play, receiver: int) -> int:
    completed_ns = play.hearers[W[receiver]].completed_ns
    assert completed_ns is not None
    return completed_ns - play.start_ns


# -- properties -----------------------------------------------------------------------------------


def draw_world(seed: int) -> ChunkWorld:
    rng = random.Random(seed)
    world = draw_chunk_world(rng, is_striped=rng.random() < 0.5)
    world.sendings = draw_sendings(rng, list(world.topology.devices))
    return world


@settings(max_examples=examples(150))
@given(seed=st.integers(0, 9999))
def test_serving_traffic_takes_what_its_fair_share_takes_whatever_loads(seed: int) -> None:
    """Rates are whole bytes per second, and times whole nanoseconds: both round."""
    world = draw_world(seed)
    play = Play(world)
    play.run()
    world.loads = []
    expected = ChunkOracle(world).sent
    assert sorted(play.sent) == sorted(expected)
    for number, expected_ns in expected.items():
        assert abs(play.sent[number] - expected_ns) <= 2 * len(world.sendings)


@settings(max_examples=examples(80))
@given(seed=st.integers(0, 9999))
def test_what_one_worker_sends_another_stays_in_order(seed: int) -> None:
    world = draw_world(seed)
    play = Play(world)
    play.run()
    pairs: dict[tuple[WorkerRef, WorkerRef], list[int]] = {}
    for number in play.sent:
        sending = world.sendings[number]
        pairs.setdefault((sending.sender, sending.receiver), []).append(number)
    assert all(numbers == sorted(numbers) for numbers in pairs.values())


@settings(max_examples=examples(80))
@given(seed=st.integers(0, 9999))
def test_loads_wait_for_serving_traffic_no_longer_than_it_lasts(seed: int) -> None:
    """But for some chunks that move later than they would have: at most the last receiver's load
    is later by what everything takes that was sent, one after the other."""
    world = draw_world(seed)
    rates = [rate for rate in rates_of(world.topology) if rate]
    sent_bytes = sum(sending.size_bytes for sending in world.sendings)
    behind = Play(world)
    behind.run()
    world.sendings = []
    alone = Play(world)
    alone.run()
    slack_bytes = sent_bytes + (2 + 2 * len(world.loads)) * GRID.chunk_bytes
    assert last_ns(behind) <= last_ns(alone) + slack_bytes * RATE // min(rates)


def rates_of(used: Topology) -> list[int | None]:
    owners = [*used.devices.values(), *used.agents.values(), *used.leaves.values()]
    rates = [rate for o in owners for rate in (o.uplink_bytes_per_s, o.downlink_bytes_per_s)]
    return [*rates, *(h.storage_bytes_per_s for h in used.agents.values()), used.group_bytes_per_s]


def last_ns(play: Play) -> int:
    ends = [play.hearers[load.receiver].completed_ns for load in play.world.loads]
    assert None not in ends
    return max(end or 0 for end in ends) - play.start_ns


@settings(max_examples=examples(80))
@given(seed=st.integers(0, 9999))
@example(seed=1244)
def test_under_faults_no_link_carries_too_much_and_what_is_not_lost_arrives(seed: int) -> None:
    world = draw_world(seed)
    rng = random.Random(seed)
    play = Play(world)
    transfers, clock = play.transfers, play.clock
    workers = list(world.topology.devices)
    gone = rng.choice(workers)

    def slow(member: WorkerRef, permille: int, lasts_ns: int) -> None:
        transfers.slowdowns.slow_nic(member, permille, clock.now_ns + lasts_ns)

    for _ in range(rng.randrange(5)):
        fault = (rng.choice(workers), rng.choice((0, 0, 1, 500)), rng.randrange(9000))
        clock.at(play.start_ns + rng.randrange(9000), lambda fault=fault: slow(*fault))
        # After all that happens at that instant: rates follow a slower link at its end.
        check_ns = play.start_ns + rng.randrange(9000)
        clock.at(check_ns, transfers.moves.check_links, STEP_PRIORITY)
    gone_ns = play.start_ns + rng.randrange(20_000)
    clock.at(gone_ns, lambda: transfers.moves.serving.gone(gone))
    play.run()
    for number, sending in enumerate(world.sendings):
        may_be_lost = gone in (sending.sender, sending.receiver) and (
            play.start_ns + sending.start_ns <= gone_ns
        )
        assert number in play.sent or may_be_lost
    assert all(transfers.moves.serving.free_ns(worker) < clock.now_ns + 1 for worker in workers)


# -- examples -------------------------------------------------------------------------------------


def test_two_who_send_to_one_get_half_of_its_downlink_each() -> None:
    play = played([Sending(W[0], W[2], 100 * MB, 0), Sending(W[1], W[2], 100 * MB, 0)])
    assert list(play.sent.values()) == [200 * MS, 200 * MS]


def test_one_who_sends_to_two_gives_each_half_of_its_uplink_and_then_one_all_of_it() -> None:
    play = played([Sending(W[0], W[1], 100 * MB, 0), Sending(W[0], W[2], 50 * MB, 0)])
    assert play.sent == {1: 100 * MS, 0: 150 * MS}


def test_messages_without_bytes_wait_only_for_what_went_to_the_same_worker_before() -> None:
    sendings = [
        Sending(W[0], W[1], 1000, 0),
        Sending(W[0], W[1], 0, 10),
        Sending(W[0], W[2], 0, 10),
        Sending(W[1], W[0], 0, 10),
    ]
    assert played(sendings).sent == {2: 10, 3: 10, 0: 1000, 1: 1000}


def test_rows_go_before_parameters_which_get_what_is_left() -> None:
    """Also those that only pass the loads on: the second of the chain waits with the first."""
    play = played([Sending(W[3], W[1], 600, 1000)], (0, 1), (1, 2))
    assert play.sent == {0: 1600}
    assert load_ns(play, 1) == 3000 + 600
    assert load_ns(play, 2) == 3100 + 600


def test_parameters_use_what_rows_cannot() -> None:
    """Two get rows from one sender, at half of its uplink each; who loads keeps the other half."""
    sendings = [Sending(W[0], W[1], 1000, 0), Sending(W[0], W[2], 1000, 0)]
    play = played(sendings, (3, 1))
    assert play.sent == {0: 2000, 1: 2000}
    assert load_ns(play, 1) == 2000 + 2000


def test_directions_do_not_disturb_each_other() -> None:
    play = played([Sending(W[1], W[0], 5000, 0)], (0, 1))
    assert load_ns(play, 1) == 3000


@pytest.mark.parametrize("size_bytes", [0, 1500])
def test_parameters_take_their_share_of_an_uplink_and_rows_may_take_all(size_bytes: int) -> None:
    play = played([Sending(W[0], W[2], size_bytes, 0)], (0, 1), percent=50)
    assert play.sent == {0: size_bytes}
    assert load_ns(play, 1) == 6000 + size_bytes


@pytest.mark.parametrize(("permille", "took_ns"), [(0, 4000), (500, 3000)])
def test_a_cut_nic_holds_rows_up_and_a_slow_one_slows_them(permille: int, took_ns: int) -> None:
    play = Play(ChunkWorld(topology(), GRID, [], [], [Sending(W[0], W[1], 2000, 0)]))
    slow = play.transfers.slowdowns.slow_nic
    play.clock.at(1000, lambda: slow(W[1], permille, 3000))
    play.run()
    assert play.sent == {0: took_ns}


def test_what_is_under_way_from_or_to_the_dead_is_lost_and_its_links_are_free() -> None:
    sendings = [Sending(a, b, 1000, 0) for a, b in itertools.permutations(W[:3], 2)]
    play = Play(ChunkWorld(topology(), GRID, [], [], sendings))
    play.clock.at(1000, lambda: play.transfers.moves.serving.gone(W[1]))
    play.run()
    assert [(sendings[n].sender, sendings[n].receiver) for n in play.sent] == [
        (W[0], W[2]),
        (W[2], W[0]),
    ]
    assert set(play.sent.values()) == {1500}
