"""Transfer graphs of real data planes: what arrives, from whom, in which order and how early."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transfer_world import Recorder, World, grid, total_bytes, write_model

from effort import examples
from livescale.transfer.formats.orders import TransferError
from livescale.values.chunks import ChunkRange, ranges_of
from livescale.values.types import Manifest, WorkerRef

pytestmark = pytest.mark.usefixtures("machine")

MIB = 1 << 20
KIB = 1 << 10
CHUNK = 64 * KIB


@pytest.mark.parametrize("targets", [1, 2, 3])
def test_a_chain_delivers_identical_bytes(targets: int) -> None:
    with World(targets + 1, 4 * MIB) as world:
        manifest = write_model(world.arenas[0], [100_000, 1_000_000, 1_000_000, 65_536, 7])
        world.planes[0].offer(manifest)
        for node, recorder in enumerate(
            world.chain(1, manifest, CHUNK, *range(targets + 1)), start=1
        ):
            recorder.check_completed(manifest)
            assert world.holds(node, manifest)
            used = world.planes[node].usage()
            assert used.parameter_received_bytes == total_bytes(manifest)
            assert used.discarded_bytes == 0


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.too_slow])
@given(
    layer_bytes=st.lists(st.integers(0, 5000), min_size=1, max_size=6),
    first=st.integers(101, 2900),
    second=st.integers(101, 2900),
    base_bytes=st.integers(0, 3000),
    window=st.sampled_from([None, 1, 5]),
)
def test_any_layer_and_chunk_sizes_arrive(
    layer_bytes: list[int], first: int, second: int, base_bytes: int, window: int | None
) -> None:
    # The second hop cuts other chunks than the first, and the model lies elsewhere in each memory.
    with World(3, 64 * KIB) as world:
        manifest = write_model(world.arenas[0], layer_bytes)
        world.planes[0].offer(manifest)
        recorders = []
        for node, chunk_bytes in ((1, first), (2, second)):
            chunks = grid(manifest, chunk_bytes).all()
            feeds = [world.feed(node - 1, manifest, chunk_bytes, window=window)] if chunks else []
            recorders.append(
                world.receive(
                    1, manifest, node, feeds, chunk_bytes, offset_bytes=(node - 1) * base_bytes
                )
            )
        for node, recorder in enumerate(recorders, start=1):
            recorder.check_completed(manifest)
            assert world.holds(node, manifest, (node - 1) * base_bytes)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[int], int, list[list[list[int]]], list[int]]:
    """(layer sizes, chunk bytes, for each receiver the chunks from each earlier node, deaths).

    Node 0 holds the model; node k gets every chunk from one of the nodes before it.
    """
    layer_bytes = draw(st.lists(st.integers(1, 6000), min_size=1, max_size=5))
    chunk_bytes = draw(st.integers(200, 1500))
    chunks = sum(-(-size // chunk_bytes) for size in layer_bytes)
    nodes = draw(st.integers(3, 5))
    feeds = []
    for node in range(1, nodes):
        owners = draw(st.lists(st.integers(0, node - 1), min_size=chunks, max_size=chunks))
        order = draw(st.permutations(range(chunks)))
        feeds.append([[c for c in order if owners[c] == source] for source in range(node)])
    deaths = draw(st.lists(st.integers(1, nodes - 1), max_size=nodes - 2, unique=True))
    return layer_bytes, chunk_bytes, feeds, deaths


@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.too_slow])
@given(graph=graphs(), windows=st.lists(st.sampled_from([None, 1, 3]), min_size=5, max_size=5))
def test_survivors_of_any_graph_hold_identical_bytes(
    graph: tuple[list[int], int, list[list[list[int]]], list[int]], windows: list[int | None]
) -> None:
    layer_bytes, chunk_bytes, plan, deaths = graph
    with World(len(plan) + 1, 64 * KIB, uplink_bytes_per_s=400_000) as world:
        manifest = write_model(world.arenas[0], layer_bytes)
        recorders = [
            Amending(world, manifest, chunk_bytes, node) for node in range(1, len(plan) + 1)
        ]
        for node, parts in enumerate(plan, start=1):
            feeds = [
                world.feed(source, manifest, chunk_bytes, *ranges_of(part), window=windows[source])
                for source, part in enumerate(parts)
                if part
            ]
            world.receive(1, manifest, node, feeds, chunk_bytes, recorders[node - 1])
        world.planes[0].offer(manifest)
        for node in deaths:
            world.planes[node].close()
        for node, recorder in enumerate(recorders, start=1):
            if node not in deaths:
                assert recorder.verdict()[0] == "completed", recorder.news
                recorder.check_completed(manifest, recorder.verdict()[1])
                assert world.holds(node, manifest)


class Amending(Recorder):
    """When a feed fails, everything is to come from node 0, which lives."""

    def __init__(self, world: World, manifest: Manifest, chunk_bytes: int, node: int) -> None:
        super().__init__()
        self._amend = (
            world.planes[node],
            (world.feed(0, manifest, chunk_bytes),),
        )

    def feed_failed(self, upstream: WorkerRef, reason: str) -> None:
        super().feed_failed(upstream, reason)
        plane, feeds = self._amend
        plane.amend(1, feeds)


def test_a_target_forwards_while_it_receives() -> None:
    rate = 20_000_000
    with World(4, 4 * MIB, uplink_bytes_per_s=rate, downlink_bytes_per_s=rate) as world:
        manifest = write_model(world.arenas[0], [MIB, MIB])
        world.planes[0].offer(manifest)
        for recorder in world.chain(1, manifest, CHUNK, 0, 1, 2, 3):
            recorder.check_completed(manifest)
        assert all(len(world.chunks[node]) == 32 for node in (1, 2, 3))
        for node in (1, 2):
            assert world.chunks[node + 1][0][3] < world.chunks[node][-1][3]
            # Not only the first: the next worker trails by a few chunks all the way.
            assert world.chunks[node + 1][15][3] < world.chunks[node][31][3]


def test_two_halves_from_two_holders_come_at_once() -> None:
    rate = 20_000_000
    with World(3, 4 * MIB, uplink_bytes_per_s=rate) as world:
        manifest = write_model(world.arenas[0], [MIB, MIB])
        write_model(world.arenas[1], [MIB, MIB])
        for node in (0, 1):
            world.planes[node].offer(manifest)
        feeds = [world.feed(k, manifest, CHUNK, ChunkRange(k, 32, 2)) for k in (0, 1)]
        recorder = world.receive(1, manifest, 2, feeds, CHUNK)
        recorder.check_completed(manifest)
        assert world.holds(2, manifest)
        order = [chunk for _, chunk, _, _ in world.chunks[2]]
        for k in (0, 1):
            assert [chunk for chunk in order if chunk % 2 == k] == list(range(k, 32, 2))
            world.check_sent(k, MIB)
        # Neither waited for the other: both had begun before either was half through.
        assert {chunk % 2 for chunk in order[:16]} == {0, 1}


def test_shards_exchanged_between_receivers() -> None:
    """Sharded transfer: each takes its stripe from the source, and the others' from them."""
    rate = 30_000_000
    with World(4, 4 * MIB, uplink_bytes_per_s=rate) as world:
        manifest = write_model(world.arenas[0], [MIB, MIB])
        world.planes[0].offer(manifest)
        recorders = []
        for node in (1, 2, 3):
            feeds = [
                world.feed(0 if k == node else k, manifest, CHUNK, ChunkRange(k - 1, 32, 3))
                for k in (1, 2, 3)
            ]
            recorders.append(world.receive(1, manifest, node, feeds, CHUNK))
        for node, recorder in enumerate(recorders, start=1):
            recorder.check_completed(manifest)
            assert world.holds(node, manifest)
        world.check_sent(0, total_bytes(manifest))


def test_chunks_come_in_the_order_of_the_feed() -> None:
    with World(2, 4 * MIB) as world:
        manifest = write_model(world.arenas[0], [MIB])
        world.planes[0].offer(manifest)
        wanted = (ChunkRange(8, 16), ChunkRange(1, 8, 2), ChunkRange(0, 8, 2))
        world.receive(
            1, manifest, 1, [world.feed(0, manifest, CHUNK, *wanted)], CHUNK
        ).check_completed(manifest)
        assert [c for _, c, _, _ in world.chunks[1]] == [c for part in wanted for c in part]


def test_orders_may_come_before_anybody_holds_the_model() -> None:
    with World(3, 4 * MIB) as world:
        manifest = write_model(world.arenas[0], [MIB, MIB])
        second = world.receive(1, manifest, 2, [world.feed(1, manifest, CHUNK)], CHUNK)
        first = world.receive(1, manifest, 1, [world.feed(0, manifest, CHUNK)], CHUNK)
        world.planes[0].offer(manifest)
        for recorder in (first, second):
            recorder.check_completed(manifest)


def test_layers_are_given_as_storage_brings_them() -> None:
    with World(2, 4 * MIB) as world:
        manifest = write_model(world.arenas[0], [MIB, 0, MIB])
        filling = world.planes[0].fill(manifest, 100_000)
        recorder = world.receive(1, manifest, 1, [world.feed(0, manifest, CHUNK)], CHUNK)
        filling.layer_done(2)
        assert recorder.wait("layer_arrived", count=2) == ("layer_arrived", 2)
        assert recorder.wait("layer_arrived") == ("layer_arrived", 1)
        filling.layer_done(0)
        recorder.check_completed(manifest)
        world.planes[0].offer(manifest)  # Nothing happens: it is.


def test_a_filling_that_fails_refuses_who_waits() -> None:
    with World(2, 4 * MIB) as world:
        manifest = write_model(world.arenas[0], [MIB, MIB])
        filling = world.planes[0].fill(manifest, CHUNK)
        recorder = world.receive(1, manifest, 1, [world.feed(0, manifest, CHUNK)], CHUNK)
        filling.layer_done(0)
        recorder.wait("layer_arrived")
        filling.fail("the disk is gone")
        assert recorder.wait("feed_failed") == ("feed_failed", world.refs[0], "the disk is gone")


def test_several_plans_run_through_one_connection_at_once() -> None:
    with World(2, 8 * MIB, uplink_bytes_per_s=20_000_000) as world:
        models = [
            write_model(world.arenas[0], [MIB], seed=seed, base_bytes=seed * 2 * MIB)
            for seed in range(3)
        ]
        for manifest in models:
            world.planes[0].offer(manifest)
        recorders = [
            world.receive(plan, manifest, 1, [world.feed(0, manifest, CHUNK)], CHUNK)
            for plan, manifest in enumerate(models)
        ]
        for manifest, recorder in zip(models, recorders, strict=True):
            recorder.check_completed(manifest)
            assert world.holds(1, manifest)
        assert len({plan for plan, _, _, _ in world.chunks[1][-6:]}) > 1


def test_both_directions_of_a_connection_carry_chunks() -> None:
    with World(2, 4 * MIB) as world:
        one = write_model(world.arenas[0], [MIB], seed=1)
        two = write_model(world.arenas[1], [MIB], seed=2, base_bytes=2 * MIB)
        world.planes[0].offer(one)
        world.planes[1].offer(two)
        there = world.receive(1, one, 1, [world.feed(0, one, CHUNK)], CHUNK)
        back = world.receive(2, two, 0, [world.feed(1, two, CHUNK)], CHUNK)
        there.check_completed(one)
        back.check_completed(two)


def test_what_is_present_is_not_asked_for() -> None:
    with World(2, 4 * MIB) as world:
        manifest = write_model(world.arenas[0], [MIB, MIB, 0, MIB])
        world.planes[0].offer(manifest)
        entry = manifest.layers[1]
        place = (entry.offset_bytes, entry.size_bytes)
        world.arenas[1].view(*place)[:] = world.arenas[0].view(*place)
        recorder = world.receive(
            1, manifest, 1, [world.feed(0, manifest, CHUNK)], CHUNK, present_layers=(1, 2)
        )
        assert recorder.verdict() == ("completed", 2 * MIB)
        layers = [news[1] for news in recorder.news if news[0] == "layer_arrived"]
        assert sorted(layers) == [0, 3]
        assert world.holds(1, manifest)
        # With everything there nothing is asked and nobody needed.
        world.planes[1].withdraw(manifest)
        again = world.receive(2, manifest, 1, [], CHUNK, present_layers=(0, 1, 2, 3))
        assert again.news == [("completed", 0)]


def test_a_hop_through_shared_memory(tmp_path: Path) -> None:
    """Where both ends are on one host the uplink is not paid: at this one no byte would come."""
    hosts = ["one", "one", "other"]
    uplinks = [1, None, None]
    with World(
        3, 4 * MIB, shm_directory=tmp_path, host_name=hosts, uplink_bytes_per_s=uplinks
    ) as world:
        manifest = write_model(world.arenas[0], [100_000, 1_000_000, 1_000_000, 65_536, 7])
        world.planes[0].offer(manifest)
        for node, recorder in enumerate(world.chain(1, manifest, CHUNK, 0, 1, 2), start=1):
            recorder.check_completed(manifest)
            assert world.holds(node, manifest)
        assert world.planes[1].probe(world.refs[0], 4 * MIB) > 0
        world.planes[0].withdraw(manifest)
        # Not within a test's patience: the two others are on different hosts.
        with pytest.raises(TransferError, match="did not answer"):
            world.planes[2].probe(world.refs[0], MIB, timeout_s=0.1)
    assert list(tmp_path.iterdir()) == []


def test_a_probe_is_answered_and_its_bytes_are_thrown_away() -> None:
    """What it measures: `test_probe.py`."""
    with World(2, 4 * MIB, uplink_bytes_per_s=20_000_000) as world:
        assert world.planes[1].probe(world.refs[0], 4 * MIB) > 0
        assert world.planes[1].usage().discarded_bytes == 4 * MIB
