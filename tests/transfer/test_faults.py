"""What goes wrong on a chain, and that only what must fail fails."""

from __future__ import annotations

import contextlib
import random
import socket

import pytest
from transfer_world import WAIT_S, Recorder, World, total_bytes, write_model

from livescale.transfer.arena import Arena
from livescale.transfer.data_plane import DataPlane, TransferError
from livescale.transfer.frames import (
    CHUNK_BYTES_MAX,
    HEADER_BYTES,
    Frame,
    FrameKind,
    decode_header,
)
from livescale.transfer.orders import ReceiveOrder, SendOrder
from livescale.types import WorkerRef

MIB = 1 << 20
KIB = 1 << 10
SLOW = 4_000_000
"""Bytes per second at which a test can step in before a model of 1 MiB has passed."""


def test_a_corrupt_byte_fails_every_target_and_names_the_layer() -> None:
    with World(4, 4 * MIB, chunk_bytes=16 * KIB) as world:
        manifest = write_model(world.arenas[0], [50_000] * 5)
        world.arenas[0].view(manifest.layers[3].offset_bytes + 4_321, 1)[0] ^= 1
        world.link_chain(0, 1, 2, 3)
        _, *targets = world.chain(1, manifest, 0, 1, 2, 3)
        for target in targets:
            target.check_failed("plan 1", "layer 3", "checksum")
            assert ("layer_arrived", 3) not in target.news
        for target in targets[:-1]:
            assert "checksum" in target.wait("forward_ended")[2]
        assert ("layer_arrived", 2) in targets[0].news
        # The connections have survived.
        whole = write_model(world.arenas[0], [50_000] * 5)
        for target in world.chain(2, whole, 0, 1, 2, 3)[1:]:
            target.check_completed(whole)


def test_a_sender_that_dies_fails_the_chain_behind_it() -> None:
    with World(3, 4 * MIB, chunk_bytes=16 * KIB, uplink_bytes_per_s=SLOW) as world:
        manifest = write_model(world.arenas[0], [512 * KIB, 512 * KIB])
        world.link_chain(0, 1, 2)
        sender, first, second = world.chain(1, manifest, 0, 1, 2)
        behind = write_model(Arena(4 * MIB), [1000], seed=9, base_bytes=2 * MIB)
        waiting = world.receive(2, behind, 1, upstream=0, forward_to=None)
        world.wait_chunks(2, 3)
        world.planes[0].close()
        assert "w0.0 closed" in sender.wait("ended")[2]
        first.check_failed("plan 1", "w0.0", "layer", "connection was lost")
        second.check_failed("plan 1", "w1.0 gave up")
        waiting.check_failed("plan 2", "w0.0", "connection was lost")
        assert world.planes[1].upstreams() == ()
        assert world.planes[1].connected() == (WorkerRef(2),)


def test_a_target_whose_downstream_dies_still_completes() -> None:
    with World(3, 4 * MIB, chunk_bytes=16 * KIB, uplink_bytes_per_s=SLOW) as world:
        manifest = write_model(world.arenas[0], [512 * KIB, 512 * KIB])
        world.link_chain(0, 1, 2)
        sender, first, second = world.chain(1, manifest, 0, 1, 2)
        world.wait_chunks(2, 3)
        world.planes[2].close()
        second.check_failed("plan 1", "w2.0 closed")
        _, sent_bytes, error = first.wait("forward_ended")
        assert sent_bytes < total_bytes(manifest)
        assert all(word in error for word in ("plan 1", "w2.0", "layer", "lost")), error
        assert world.planes[1].connected() == ()
        first.check_completed(manifest)
        assert world.holds(1, manifest)
        assert sender.wait("ended")[2] is None


def test_an_order_to_forward_without_a_connection_still_receives() -> None:
    with World(3, 4 * MIB) as world:
        manifest = write_model(world.arenas[0], [1000])
        world.link(0, 1)
        target = world.receive(1, manifest, 1, upstream=0, forward_to=2)
        assert "no connection to w2.0" in target.wait("forward_ended")[2]
        world.send(1, manifest, 0, 1)
        target.check_completed(manifest)
        assert "no connection to w2.0" in world.send(2, manifest, 0, 2).wait("ended")[2]


@pytest.mark.parametrize("aborter", [0, 1, 2])
def test_after_an_abort_the_connections_carry_the_next_plan(aborter: int) -> None:
    with World(4, 4 * MIB, chunk_bytes=16 * KIB, uplink_bytes_per_s=SLOW) as world:
        manifest = write_model(world.arenas[0], [512 * KIB, 512 * KIB])
        world.link_chain(0, 1, 2, 3)
        recorders = world.chain(1, manifest, 0, 1, 2, 3)
        world.wait_chunks(3, 2)
        world.planes[aborter].abort(1)
        if aborter == 0:
            assert recorders[0].wait("ended")[2] == "aborted"
        else:
            assert recorders[aborter].news[-1][-1] == "aborted"
            assert recorders[aborter].verdict() == ("failed", "aborted")
            assert recorders[aborter].wait("forward_ended")[2] == "aborted"
        for node in range(aborter + 1, 4):
            recorders[node].check_failed("plan 1", f"w{node - 1}.0 gave up", "aborted")
        for node in range(1, aborter):
            recorders[node].check_completed(manifest)
        other = write_model(world.arenas[0], [64 * KIB, 64 * KIB], seed=2)
        for node, recorder in enumerate(world.chain(2, other, 0, 1, 2, 3)[1:], start=1):
            recorder.check_completed(other)
            assert world.holds(node, other)


def test_after_abort_returns_nothing_is_written_for_the_plan() -> None:
    with World(2, 4 * MIB, chunk_bytes=256 * KIB, uplink_bytes_per_s=SLOW) as world:
        manifest = write_model(world.arenas[0], [MIB])
        world.link(0, 1)
        sender, target = world.chain(1, manifest, 0, 1)
        world.wait_chunks(1, 1)
        world.planes[1].abort(1)
        assert target.verdict() == ("failed", "aborted")
        everything = world.arenas[1].view(0, 4 * MIB)
        everything[:] = b"\xaa" * (4 * MIB)
        assert sender.wait("ended") == ("ended", MIB, None)
        # The next plan on the connection is through: so is all of the first.
        other = write_model(world.arenas[0], [1000], seed=2, base_bytes=2 * MIB)
        world.chain(2, other, 0, 1)[1].check_completed(other)
        assert everything[: 2 * MIB] == b"\xaa" * (2 * MIB)


def test_a_plan_that_is_aborted_before_it_begins_is_thrown_away() -> None:
    with World(3, 4 * MIB, order_wait_s=WAIT_S) as world:
        manifest = write_model(world.arenas[0], [1000])
        world.link_chain(0, 1, 2)
        first = world.receive(1, manifest, 1, upstream=0, forward_to=2)
        world.planes[1].abort(1)
        assert first.verdict() == ("failed", "aborted")
        # The order comes after the word that its plan is aborted, or before it.
        second = world.receive(1, manifest, 2, upstream=1, forward_to=None)
        second.check_failed("plan 1", "w1.0 gave up")
        assert world.send(1, manifest, 0, 1).wait("ended")[2] is None
        for target in world.chain(2, manifest, 0, 1, 2)[1:]:
            target.check_completed(manifest)
        world.planes[1].abort(99)


def test_a_queued_send_can_be_aborted() -> None:
    with World(2, 4 * MIB, chunk_bytes=16 * KIB, uplink_bytes_per_s=SLOW) as world:
        one = write_model(world.arenas[0], [512 * KIB])
        two = write_model(world.arenas[0], [512 * KIB], seed=2, base_bytes=2 * MIB)
        world.link(0, 1)
        _, first = world.chain(1, one, 0, 1)
        sender, second = world.chain(2, two, 0, 1)
        world.planes[0].abort(2)
        assert sender.wait("ended") == ("ended", 0, "aborted")
        first.check_completed(one)
        second.check_failed("plan 2", "w0.0 gave up", "aborted")


def test_another_model_than_ordered_fails_its_plan_only() -> None:
    with World(2, 4 * MIB, chunk_bytes=16 * KIB) as world:
        sent = write_model(world.arenas[0], [50_000, 50_000])
        ordered = write_model(Arena(4 * MIB), [50_000, 60_000])
        shorter = write_model(Arena(4 * MIB), [50_000, 40_000])
        longer = write_model(Arena(4 * MIB), [50_000, 50_000, 10])
        world.link(0, 1)
        # Layer 0 has other bytes in one of them and agrees in the others (same seed).
        for plan, other in enumerate((ordered, shorter, longer), start=1):
            target = world.receive(plan, other, 1, upstream=0, forward_to=None)
            world.send(plan, sent, 0, 1)
            target.check_failed(f"plan {plan}", "w0.0", "layer")
        world.chain(9, sent, 0, 1)[1].check_completed(sent)


def _open_as(world: World, node: int, ref: WorkerRef) -> socket.socket:
    """A raw connection that has introduced itself to the worker as `ref`."""
    raw = socket.create_connection(world.planes[node].address, WAIT_S)
    raw.sendall(Frame(FrameKind.HELLO, ref).encode())
    assert decode_header(raw.recv(HEADER_BYTES, socket.MSG_WAITALL)).sender == world.refs[node]
    return raw


def _is_closed(raw: socket.socket) -> bool:
    raw.settimeout(WAIT_S)
    try:
        return raw.recv(1) == b""
    except ConnectionError:
        return True


def test_garbage_to_the_listening_port_harms_nobody() -> None:
    rng = random.Random(5)
    with World(2, 4 * MIB, chunk_bytes=16 * KIB) as world:
        manifest = write_model(world.arenas[0], [200_000])
        silent = socket.create_connection(world.planes[1].address, WAIT_S)
        for size in (1, HEADER_BYTES, 1000, 100_000):
            with socket.create_connection(world.planes[1].address, WAIT_S) as raw:
                raw.sendall(rng.randbytes(size))
                # The worker may have hung up already.
                with contextlib.suppress(OSError):
                    raw.shutdown(socket.SHUT_WR)
                assert _is_closed(raw)
        hasty = Frame(FrameKind.BEGIN, WorkerRef(0), 1).encode()
        with socket.create_connection(world.planes[1].address, WAIT_S) as raw:
            raw.sendall(hasty)
            assert _is_closed(raw)
        world.link(0, 1)
        world.chain(1, manifest, 0, 1)[1].check_completed(manifest)
        silent.close()


@pytest.mark.parametrize(
    "frames",
    [
        [b"\xff" * HEADER_BYTES],
        [Frame(FrameKind.HELLO, WorkerRef(7)).encode()],
        [Frame(FrameKind.BEGIN, WorkerRef(8), 5).encode()],
        [Frame(FrameKind.CHUNK, WorkerRef(7), 5, 0, 0, 10).encode()],
        [Frame(FrameKind.END, WorkerRef(7), 5).encode()],
        [Frame(FrameKind.BEGIN, WorkerRef(7), plan).encode() for plan in (5, 6)],
        [
            Frame(FrameKind.BEGIN, WorkerRef(7), 5).encode(),
            Frame(FrameKind.CHUNK, WorkerRef(7), 5, 0, 0, CHUNK_BYTES_MAX + 1).encode(),
        ],
        [
            Frame(FrameKind.BEGIN, WorkerRef(7), 5).encode(),
            Frame(FrameKind.CHUNK, WorkerRef(7), 5, 0, 0, 2**32 - 1).encode(),
        ],
    ],
)
def test_a_peer_that_breaks_the_protocol_loses_its_connection_only(frames: list[bytes]) -> None:
    with World(2, 4 * MIB, chunk_bytes=16 * KIB) as world:
        manifest = write_model(world.arenas[0], [200_000])
        behind = write_model(Arena(4 * MIB), [1000], base_bytes=2 * MIB)
        world.link(0, 1)
        raw = _open_as(world, 1, WorkerRef(7))
        victim = Recorder()
        world.planes[1].receive(ReceiveOrder(5, behind, WorkerRef(7)), victim)
        raw.sendall(b"".join(frames))
        assert _is_closed(raw)
        raw.close()
        victim.check_failed("plan 5", "w7.0", "protocol")
        assert world.planes[1].upstreams() == (WorkerRef(0),)
        world.chain(1, manifest, 0, 1)[1].check_completed(manifest)


@pytest.mark.parametrize(
    "chunk",
    [
        Frame(FrameKind.CHUNK, WorkerRef(7), 5, 0, 1, 10),
        Frame(FrameKind.CHUNK, WorkerRef(7), 5, 1, 0, 10),
        Frame(FrameKind.CHUNK, WorkerRef(7), 5, 0, 0, 1001),
        Frame(FrameKind.CHUNK, WorkerRef(7), 5, 0, 2**64 - 1, 10),
        Frame(FrameKind.CHUNK, WorkerRef(7), 5, 2**32 - 1, 0, 10),
    ],
)
def test_a_chunk_out_of_place_is_not_written(chunk: Frame) -> None:
    with World(1, 4 * KIB) as world:
        manifest = write_model(Arena(4 * KIB), [1000, 1000])
        raw = _open_as(world, 0, WorkerRef(7))
        target = Recorder()
        world.planes[0].receive(ReceiveOrder(5, manifest, WorkerRef(7)), target)
        raw.sendall(Frame(FrameKind.BEGIN, WorkerRef(7), 5).encode())
        raw.sendall(chunk.encode() + b"\xff" * chunk.payload_bytes)
        target.check_failed("plan 5", "w7.0", f"layer {chunk.layer}")
        # The payload was taken from the connection: the next frame is understood.
        again = Recorder()
        world.planes[0].receive(ReceiveOrder(6, manifest, WorkerRef(7)), again)
        raw.sendall(Frame(FrameKind.END, WorkerRef(7), 5).encode())
        raw.sendall(Frame(FrameKind.BEGIN, WorkerRef(7), 6).encode())
        raw.sendall(Frame(FrameKind.END, WorkerRef(7), 6).encode())
        again.check_failed("plan 6", "ended early")
        assert bytes(world.arenas[0].view(0, 4 * KIB)) == bytes(4 * KIB)
        raw.close()


def test_connecting_twice_does_nothing_and_a_newer_life_replaces_an_older() -> None:
    with World(2, MIB) as world:
        manifest = write_model(world.arenas[0], [1000])
        world.link(0, 1)
        world.link(0, 1)
        assert world.planes[0].connected() == (WorkerRef(1, 0),)
        reborn_arena = Arena(MIB)
        reborn = DataPlane(WorkerRef(1, 1), reborn_arena)
        world.planes[0].connect(reborn.worker, reborn.address)
        assert world.planes[0].connected() == (WorkerRef(1, 1),)
        with pytest.raises(TransferError, match=r"w1\.0 .* followed by w1\.1"):
            world.link(0, 1)
        target, sender = Recorder(), Recorder()
        reborn.receive(ReceiveOrder(1, manifest, WorkerRef(0)), target)
        world.planes[0].send(SendOrder(1, manifest, reborn.worker), sender)
        target.check_completed(manifest)
        stale = world.send(2, manifest, 0, 1)
        assert "no connection to w1.0" in stale.wait("ended")[2]
        # The receiving side replaces an older life of the sender, too, and refuses it later.
        raw = _open_as(world, 1, WorkerRef(0, 3))
        assert world.planes[1].upstreams() == (WorkerRef(0, 3),)
        old = socket.create_connection(world.planes[1].address, WAIT_S)
        old.sendall(Frame(FrameKind.HELLO, WorkerRef(0, 2)).encode())
        assert _is_closed(old)
        raw.close()
        old.close()
        reborn.close()
        reborn_arena.close()


def test_disconnecting_fails_what_runs_and_leaves_the_rest() -> None:
    with World(3, 4 * MIB, chunk_bytes=16 * KIB, uplink_bytes_per_s=SLOW) as world:
        manifest = write_model(world.arenas[0], [MIB])
        world.link(0, 1)
        world.link(0, 2)
        sender, lost = world.chain(1, manifest, 0, 1)
        _, kept = world.chain(2, manifest, 0, 2)
        world.wait_chunks(1, 2)
        world.planes[0].disconnect(WorkerRef(1, 9))
        world.planes[0].disconnect(WorkerRef(1))
        assert "disconnected" in sender.wait("ended")[2]
        lost.check_failed("plan 1", "w0.0", "connection was lost")
        assert world.planes[0].connected() == (WorkerRef(2),)
        kept.check_completed(manifest)
        world.link(0, 1)
        world.chain(3, manifest, 0, 1)[1].check_completed(manifest)


def test_connecting_to_nobody_or_somebody_else_is_refused_by_name() -> None:
    with World(2, MIB, handshake_s=0.2) as world:
        with pytest.raises(TransferError, match=r"w5\.0 .*w1\.0 answered"):
            world.planes[0].connect(WorkerRef(5), world.planes[1].address)
        with pytest.raises(TransferError, match="same worker"):
            world.planes[0].connect(WorkerRef(0), world.planes[0].address)
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            with pytest.raises(TransferError, match=r"w5\.0"):
                world.planes[0].connect(WorkerRef(5), silent.getsockname())
            silent.listen()
            with pytest.raises(TransferError, match=r"w5\.0"):
                world.planes[0].connect(WorkerRef(5), silent.getsockname())
        assert world.planes[0].connected() == ()


def test_closing_ends_everything_that_waits() -> None:
    with World(3, 4 * MIB, uplink_bytes_per_s=1000) as world:
        manifest = write_model(world.arenas[0], [MIB])
        world.link_chain(0, 1, 2)
        world.link_chain(2, 1)
        unclaimed = world.send(3, manifest, 2, 1)
        begun = world.chain(1, manifest, 0, 1, 2)
        lonely = world.receive(2, manifest, 0, upstream=2, forward_to=None)
        for plane in world.planes:
            plane.close()
            plane.close()
        lonely.check_failed("plan 2")
        for recorder in begun[1:]:
            recorder.check_failed("plan 1")
        assert begun[0].wait("ended")[2] is not None
        assert unclaimed.wait("ended")[2] is not None
        late = world.receive(4, manifest, 1, upstream=0, forward_to=None)
        late.check_failed("plan 4", "closed")
