"""Serving traffic and parameters are two classes on the same links: against an oracle of single
chunks and messages, and in figures, beside equal shares."""

from __future__ import annotations

import dataclasses
import random

import msgspec
import pytest
from chunk_oracle import ChunkOracle, slowest_chunk_ns
from chunk_worlds import ChunkWorld, Load, Play, Sending, draw_chunk_world, draw_sendings
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from livescale.clusters.topology import Device, Topology
from livescale.common.settings import ConfigError
from livescale.latency.shapes import LLAMA_3_8B
from livescale.sim.base.config import EQUAL, LINK_SHARINGS, SERVING_FIRST, SimConfig
from livescale.values.chunks import ChunkGrid, ChunkRange, Feed
from livescale.values.types import FromWorker, WorkerRef

W = [WorkerRef(number) for number in range(6)]
RATE = 1_000_000_000
MB = 1_000_000
MS = 1_000_000


def draw_world(seed: int) -> ChunkWorld:
    """Feeds that are asked for in order, and messages beside them."""
    rng = random.Random(seed)
    world = draw_chunk_world(rng)
    world.sendings = draw_sendings(rng, list(world.topology.devices))
    return world


def played(world: ChunkWorld, link_sharing: str) -> Play:
    play = Play(world, link_sharing=link_sharing)
    play.run()
    return play


# -- the oracle -----------------------------------------------------------------------------------


@settings(max_examples=examples(150))
@given(seed=st.integers(0, 9999))
def test_chunks_and_messages_of_both_classes_arrive_as_the_oracle_moves_them(seed: int) -> None:
    """Messages to the nanosecond, but for rounding: chunks are not in their way. Layers within as
    many chunks as without messages (a flow and single chunks may differ by one at each hop), in
    time that is weighed with what messages leave: a chunk that misses a gap waits for the next."""
    world = draw_world(seed)
    play, oracle = played(world, SERVING_FIRST), ChunkOracle(world)
    assert sorted(play.sent) == sorted(oracle.sent)
    for number, expected_ns in oracle.sent.items():
        assert abs(play.sent[number] - expected_ns) <= 2 * len(world.sendings)
    tolerance_ns = (2 + 2 * len(world.loads)) * slowest_chunk_ns(world)
    for receiver, layers in oracle.arrivals.items():
        came = play.hearers[receiver].layers
        assert sorted(came) == sorted(layers)
        for layer, expected_ns in layers.items():
            late_ns = oracle.shared_ns(came[layer] - play.start_ns, expected_ns)
            assert late_ns <= tolerance_ns


@settings(max_examples=examples(100))
@given(seed=st.integers(0, 9999))
def test_as_one_class_they_arrive_as_the_oracle_moves_them(seed: int) -> None:
    """Now chunks are in the way of messages, too: both within two chunks for each load and each
    pair that talks, and two more."""
    world = draw_world(seed)
    play, oracle = played(world, EQUAL), ChunkOracle(world, is_equal=True)
    pairs = {(sending.sender, sending.receiver): None for sending in world.sendings}
    tolerance_ns = (2 + 2 * (len(world.loads) + len(pairs))) * slowest_chunk_ns(world)
    assert sorted(play.sent) == sorted(oracle.sent)
    for number, expected_ns in oracle.sent.items():
        assert abs(play.sent[number] - expected_ns) <= tolerance_ns
    for receiver, layers in oracle.arrivals.items():
        came = play.hearers[receiver].layers
        assert sorted(came) == sorted(layers)
        for layer, expected_ns in layers.items():
            assert abs(came[layer] - play.start_ns - expected_ns) <= tolerance_ns


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 9999))
def test_without_serving_traffic_both_ways_to_share_are_the_same(seed: int) -> None:
    world = draw_chunk_world(random.Random(seed), is_striped=seed % 2 == 0)
    plays = [played(world, link_sharing) for link_sharing in LINK_SHARINGS]
    first, second = ([play.hearers[load.receiver].layers for load in world.loads] for play in plays)
    assert first == second


# -- figures --------------------------------------------------------------------------------------


def world_of(
    *loads: tuple[tuple[int, ...], int],
    size_bytes: int = 100 * MB,
    sendings: list[Sending] | None = None,
    rates: dict[int, int] | None = None,
) -> ChunkWorld:
    """Each load brings a worker a model from all of its sources, as many bytes from each. NICs
    carry a byte per nanosecond, unless `rates` says otherwise."""
    rates = rates or {}
    devices = {
        worker: Device(
            *("d", f"h{number}", "leaf", 1 << 40, 1),
            *(rates.get(number, RATE), rates.get(number, RATE)),
        )
        for number, worker in enumerate(W)
    }
    grid = ChunkGrid((size_bytes,), size_bytes // 100)
    drawn = []
    for sources, receiver in loads:
        part = grid.chunks // len(sources)
        feeds = tuple(
            Feed(FromWorker(W[source]), (ChunkRange(part * number, part * (number + 1)),))
            for number, source in enumerate(sources)
        )
        drawn.append(Load(W[receiver], feeds, 0))
    sources = list(dict.fromkeys(W[source] for sources, _ in loads for source in sources))
    return ChunkWorld(Topology(devices), grid, sources, drawn, sendings or [])


def load_ns(play: Play, receiver: int) -> int:
    completed_ns = play.hearers[W[receiver]].completed_ns
    assert completed_ns is not None
    return completed_ns - play.start_ns


@pytest.mark.parametrize("link_sharing", LINK_SHARINGS)
def test_two_senders_of_100_mb_into_one_link_of_1_gb_per_s_take_200_ms(link_sharing: str) -> None:
    """Each class alone; as two classes the serving traffic has the link for itself first."""
    kv = [Sending(W[sender], W[2], 100 * MB, 0) for sender in (0, 1)]
    assert played(world_of(sendings=kv), link_sharing).sent == {0: 200 * MS, 1: 200 * MS}
    parameters = world_of(((0, 1), 2), size_bytes=200 * MB)
    assert load_ns(played(parameters, link_sharing), 2) == 200 * MS
    both = played(world_of(((0,), 2), sendings=kv[1:]), link_sharing)
    assert load_ns(both, 2) == 200 * MS
    assert both.sent == {0: (100 if link_sharing == SERVING_FIRST else 200) * MS}


def test_parameters_beside_kv_that_fills_a_third_of_a_link_take_half_as_long_again() -> None:
    """The KV of a receiver with a third of the source's rate; it takes as long as alone."""
    rates = {0: 900 * MB, 1: 900 * MB, 2: 300 * MB}
    kv = [Sending(W[0], W[2], 60 * MB, 0)]
    world = world_of(((0,), 1), size_bytes=90 * MB, rates=rates, sendings=kv)
    kv_alone = played(dataclasses.replace(world, loads=[]), SERVING_FIRST).sent
    alone = played(dataclasses.replace(world, sendings=[]), SERVING_FIRST)
    play = played(world, SERVING_FIRST)
    assert (load_ns(alone, 1), load_ns(play, 1)) == (100 * MS, 150 * MS)
    assert play.sent == kv_alone == {0: 200 * MS}


@pytest.mark.parametrize(("link_sharing", "ratio"), [(SERVING_FIRST, 1), (EQUAL, 2)])
@pytest.mark.parametrize("receiver", [1, 2])
def test_kv_in_bursts_takes_as_long_as_alone_or_with_equal_shares_twice_as_long(
    link_sharing: str, ratio: int, receiver: int
) -> None:
    """A millisecond of KV every three is a third of the source's uplink, to the worker that loads
    or to another one. Either way to share costs the parameters the same; with equal shares KV has
    half of the link for as long as they come, so that no more than its own time is left of the
    three milliseconds."""
    kv = [Sending(W[0], W[receiver], MB, 3 * number * MS) for number in range(20)]
    alone = played(world_of(sendings=kv), link_sharing)
    assert times_ns(alone, kv) == [MS] * 20
    play = played(world_of(((0,), 1), size_bytes=40 * MB, sendings=kv), link_sharing)
    assert times_ns(play, kv) == [ratio * MS] * 20
    assert load_ns(play, 1) == 60 * MS


def times_ns(play: Play, sendings: list[Sending]) -> list[int]:
    """How long each took."""
    return [play.sent[number] - sending.start_ns for number, sending in enumerate(sendings)]


@pytest.mark.parametrize("loads", [1, 2, 3])
def test_with_equal_shares_kv_waits_for_every_load_that_reads_its_sender(loads: int) -> None:
    kv = [Sending(W[0], W[5], 10 * MB, 0)]
    world = world_of(*(((0,), 1 + number) for number in range(loads)), sendings=kv)
    assert played(world, SERVING_FIRST).sent == {0: 10 * MS}
    # A third of the rate is no whole number of bytes per second: times are rounded up.
    assert played(world, EQUAL).sent[0] == pytest.approx((1 + loads) * 10 * MS, abs=1)


# -- the setting ----------------------------------------------------------------------------------


def test_an_unknown_way_to_share_links_is_refused_by_name() -> None:
    config = SimConfig.default(LLAMA_3_8B)
    assert config.link_sharing == SERVING_FIRST
    with pytest.raises(ConfigError, match="unknown link_sharing 'fair'"):
        msgspec.structs.replace(config, link_sharing="fair")


def test_one_class_leaves_no_share_of_an_uplink_to_the_other() -> None:
    config = SimConfig.default(LLAMA_3_8B)
    controller = msgspec.structs.replace(config.controller, parameter_share_percent=80)
    with pytest.raises(ConfigError, match="parameter_share_percent"):
        msgspec.structs.replace(config, controller=controller, link_sharing=EQUAL)
