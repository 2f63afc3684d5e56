"""Chains of real data planes: what arrives, in which order, and how early."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transfer_world import Recorder, World, total_bytes, write_model

from livescale.transfer.arena import Arena
from livescale.transfer.orders import ReceiveOrder

MIB = 1 << 20
KIB = 1 << 10


@pytest.mark.parametrize("targets", [1, 2, 3])
def test_a_chain_delivers_identical_bytes(targets: int) -> None:
    with World(targets + 1, 4 * MIB, chunk_bytes=64 * KIB) as world:
        manifest = write_model(world.arenas[0], [100_000, 1_000_000, 1_000_000, 65_536, 7])
        world.link_chain(*range(targets + 1))
        sender, *receivers = world.chain(1, manifest, *range(targets + 1))
        assert sender.wait("ended") == ("ended", total_bytes(manifest), None)
        for node, recorder in enumerate(receivers, start=1):
            recorder.check_completed(manifest)
            assert world.holds(node, manifest)
        for recorder in receivers[:-1]:
            ended = recorder.wait("forward_ended")
            assert ended == ("forward_ended", total_bytes(manifest), None)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    layer_bytes=st.lists(st.integers(0, 5000), min_size=1, max_size=6),
    chunk_bytes=st.integers(101, 2900),
    seed=st.integers(0, 1000),
)
def test_any_layer_and_chunk_sizes_arrive(
    layer_bytes: list[int], chunk_bytes: int, seed: int
) -> None:
    # The second hop cuts other chunks than the first: a forwarder is free to.
    with World(3, 64 * KIB, chunk_bytes=[chunk_bytes, 3001 - chunk_bytes, 1000]) as world:
        manifest = write_model(world.arenas[0], layer_bytes, seed)
        world.link_chain(0, 1, 2)
        _, first, second = world.chain(1, manifest, 0, 1, 2)
        for node, recorder in ((1, first), (2, second)):
            recorder.check_completed(manifest)
            assert world.holds(node, manifest)
            assert sum(size for _, _, size, _ in world.chunks[node]) == total_bytes(manifest)


def test_a_target_forwards_while_it_receives() -> None:
    rate = 20_000_000
    limits = {"uplink_bytes_per_s": rate, "downlink_bytes_per_s": rate}
    with World(4, 4 * MIB, chunk_bytes=64 * KIB, **limits) as world:
        manifest = write_model(world.arenas[0], [MIB, MIB])
        world.link_chain(0, 1, 2, 3)
        for recorder in world.chain(1, manifest, 0, 1, 2, 3)[1:]:
            recorder.check_completed(manifest)
        assert all(len(world.chunks[node]) == 32 for node in (1, 2, 3))
        for node in (1, 2):
            nexts_first_ns = world.chunks[node + 1][0][3]
            assert nexts_first_ns < world.chunks[node][-1][3]
            # Not only the first: the next worker trails by a few chunks all the way.
            nexts_half_ns = world.chunks[node + 1][15][3]
            assert nexts_half_ns < world.chunks[node][31][3]


def test_the_order_may_come_after_the_bytes() -> None:
    with World(3, 4 * MIB, chunk_bytes=64 * KIB) as world:
        manifest = write_model(world.arenas[0], [MIB, MIB])
        world.link_chain(0, 1, 2)
        sent = world.send(1, manifest, 0, 1)
        first = world.receive(1, manifest, 1, upstream=0, forward_to=2)
        first.check_completed(manifest)
        second = world.receive(1, manifest, 2, upstream=1, forward_to=None)
        second.check_completed(manifest)
        assert sent.wait("ended")[2] is None


def test_a_stream_without_an_order_is_thrown_away_after_a_while() -> None:
    with World(2, 4 * MIB, order_wait_s=0.05) as world:
        manifest = write_model(world.arenas[0], [MIB])
        world.link(0, 1)
        world.send(1, manifest, 0, 1).wait("ended")
        world.chain(2, manifest, 0, 1)[1].check_completed(manifest)
        late = world.receive(1, manifest, 1, upstream=0, forward_to=None)
        late.check_failed("plan 1", "w0.0", "no order came")


def test_an_order_waits_for_the_connection_of_its_upstream() -> None:
    with World(2, 4 * MIB) as world:
        manifest = write_model(world.arenas[0], [MIB])
        target = world.receive(1, manifest, 1, upstream=0, forward_to=None)
        world.link(0, 1)
        world.send(1, manifest, 0, 1)
        target.check_completed(manifest)


def test_an_order_whose_upstream_never_connects_fails() -> None:
    with World(2, 4 * MIB, order_wait_s=0.05) as world:
        manifest = write_model(world.arenas[0], [MIB])
        target = world.receive(1, manifest, 1, upstream=0, forward_to=None)
        target.check_failed("plan 1", "w0.0 did not connect")


def test_one_holder_sends_to_several_targets_at_once() -> None:
    with World(4, 4 * MIB, chunk_bytes=64 * KIB, uplink_bytes_per_s=30_000_000) as world:
        manifest = write_model(world.arenas[0], [MIB])
        for node in (1, 2, 3):
            world.link(0, node)
        recorders = [world.chain(node, manifest, 0, node) for node in (1, 2, 3)]
        for sender, target in recorders:
            assert sender.wait("ended")[2] is None
            target.check_completed(manifest)
        firsts = [world.chunks[node][0][3] for node in (1, 2, 3)]
        lasts = [world.chunks[node][-1][3] for node in (1, 2, 3)]
        assert max(firsts) < min(lasts)


def test_two_plans_run_through_one_worker_at_once() -> None:
    rate = 20_000_000
    with World(5, 4 * MIB, chunk_bytes=32 * KIB, uplink_bytes_per_s=rate) as world:
        one = write_model(world.arenas[0], [MIB], seed=1)
        two = write_model(world.arenas[1], [MIB], seed=2, base_bytes=2 * MIB)
        world.link_chain(0, 2, 3)
        world.link_chain(1, 2, 4)
        recorders = [world.chain(1, one, 0, 2, 3), world.chain(2, two, 1, 2, 4)]
        for manifest, (_, middle, last) in zip((one, two), recorders, strict=True):
            middle.check_completed(manifest)
            last.check_completed(manifest)
            assert world.holds(2, manifest)
        offsets = [offset for _, offset, _, _ in world.chunks[2]]
        assert offsets.count(0) == 2
        # The second plan's first chunk came before the first plan's last one.
        assert offsets[1:].index(0) + 1 < offsets.index(MIB - 32 * KIB)


def test_plans_on_one_connection_follow_one_another() -> None:
    with World(2, 4 * MIB, chunk_bytes=64 * KIB) as world:
        one = write_model(world.arenas[0], [MIB], seed=1)
        two = write_model(world.arenas[0], [MIB], seed=2, base_bytes=2 * MIB)
        world.link(0, 1)
        for recorder, manifest in (
            (world.chain(1, one, 0, 1)[1], one),
            (world.chain(2, two, 0, 1)[1], two),
        ):
            recorder.check_completed(manifest)
        assert world.holds(1, one)
        assert world.holds(1, two)


def test_orders_for_the_same_plan_or_memory_are_refused() -> None:
    with World(2, 4 * MIB) as world:
        manifest = write_model(world.arenas[0], [MIB])
        world.link(0, 1)
        first = world.receive(1, manifest, 1, upstream=0, forward_to=None)
        again = world.receive(1, manifest, 1, upstream=0, forward_to=None)
        other = world.receive(2, manifest, 1, upstream=0, forward_to=None)
        again.check_failed("plan 1", "already being received")
        other.check_failed("plan 2", "plan 1 is being received into the same memory")
        world.send(1, manifest, 0, 1)
        first.check_completed(manifest)


def test_a_model_that_does_not_fit_fails_the_whole_chain() -> None:
    with World(3, MIB) as world:
        manifest = write_model(world.arenas[0], [MIB])
        large = write_model(Arena(2 * MIB), [2 * MIB])
        world.link_chain(0, 1, 2)
        second = world.receive(1, manifest, 2, upstream=1, forward_to=None)
        first = world.receive(1, large, 1, upstream=0, forward_to=2)
        first.check_failed(f"needs {2 * MIB}", f"has {MIB}")
        assert first.wait("forward_ended")[1] == 0
        second.check_failed("plan 1", "w1.0 gave up", f"needs {2 * MIB}")
        assert f"needs {2 * MIB}" in world.send(2, large, 0, 1).wait("ended")[2]


def test_incast_is_limited_by_the_receiver() -> None:
    rate = 16_000_000
    with World(
        3,
        20 * MIB,
        chunk_bytes=64 * KIB,
        uplink_bytes_per_s=[rate, rate, None],
        downlink_bytes_per_s=[None, None, rate],
    ) as world:
        one = write_model(world.arenas[0], [4 * MIB], seed=1)
        two = write_model(world.arenas[1], [4 * MIB], seed=2, base_bytes=8 * MIB)
        world.link(0, 2)
        world.link(1, 2)
        recorders = [world.chain(1, one, 0, 2)[1], world.chain(2, two, 1, 2)[1]]
        recorders[0].check_completed(one)
        recorders[1].check_completed(two)
        chunks = world.chunks[2]
        elapsed_s = (chunks[-1][3] - chunks[0][3]) / 1e9
        received = sum(size for _, _, size, _ in chunks[1:])
        assert received / elapsed_s / rate == pytest.approx(1, abs=0.1)


def test_a_listener_may_abort_the_plan_that_it_is_told_of() -> None:
    class Quitter(Recorder):
        def layer_arrived(self, layer: int) -> None:
            super().layer_arrived(layer)
            if layer == 1:
                world.planes[1].abort(1)

    with World(2, 4 * MIB) as world:
        manifest = write_model(world.arenas[0], [1000] * 4)
        world.link(0, 1)
        quitter = Quitter()
        world.planes[1].receive(ReceiveOrder(1, manifest, world.refs[0]), quitter)
        world.send(1, manifest, 0, 1).wait("ended")
        assert quitter.verdict() == ("failed", "aborted")
        world.chain(2, manifest, 0, 1)[1].check_completed(manifest)
        assert quitter.news[-1] == ("failed", "aborted")
        assert [news for news in quitter.news if news[0] == "layer_arrived"] == [
            ("layer_arrived", 0),
            ("layer_arrived", 1),
        ]


def test_a_late_target_gets_what_its_sender_is_still_receiving() -> None:
    rate = 20_000_000
    limits = {"uplink_bytes_per_s": rate, "downlink_bytes_per_s": rate}
    with World(3, 4 * MIB, chunk_bytes=64 * KIB, **limits) as world:
        manifest = write_model(world.arenas[0], [MIB, MIB])
        world.link_chain(0, 1, 2)
        first = world.chain(1, manifest, 0, 1)[1]
        first.wait("layer_arrived")
        sender, second = world.chain(2, manifest, 1, 2)
        first.check_completed(manifest)
        second.check_completed(manifest)
        assert sender.wait("ended") == ("ended", total_bytes(manifest), None)
        assert world.holds(2, manifest)
        # It did not wait for its sender to have everything.
        assert world.chunks[2][0][3] < world.chunks[1][-1][3]


def test_a_late_target_fails_with_the_chain_it_joined() -> None:
    with World(3, 4 * MIB, chunk_bytes=64 * KIB, uplink_bytes_per_s=4_000_000) as world:
        manifest = write_model(world.arenas[0], [MIB, MIB])
        world.link_chain(0, 1, 2)
        first = world.chain(1, manifest, 0, 1)[1]
        first.wait("first_byte")
        sender, second = world.chain(2, manifest, 1, 2)
        world.planes[0].close()
        first.check_failed("plan 1", "w0.0")
        second.check_failed("plan 2", "w1.0")
        assert sender.wait("ended")[2] is not None
