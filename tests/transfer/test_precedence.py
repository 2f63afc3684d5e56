"""Parcels of one sender and parameters of another that meet at a receiver, and that none of what
waits for the other waits for ever."""

from __future__ import annotations

import random
import socket
import threading
from collections import defaultdict
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_world import WAIT_S, World, grid, open_as, read_frame, write_model

from effort import examples
from livescale.transfer.formats.frames import Frame, FrameKind, WantedChunks, copy_id
from livescale.values.types import Manifest, WorkerRef

pytestmark = pytest.mark.usefixtures("machine")

KIB = 1 << 10
MIB = 1 << 20
RATE = 20_000_000
RATES = {"uplink_bytes_per_s": RATE, "downlink_bytes_per_s": RATE}
CHUNK = 64 * KIB
ME = WorkerRef(7)
FOR_EVER_US = 2**32 - 1


def sent_beside_parcels(parcels: int, parcel_bytes: int) -> int:
    """Bytes of parameters that one worker sends to a receiver from the first of so many parcels,
    which another worker sends there, to the last."""
    sent: list[int] = []
    is_over = threading.Event()

    def on_parcel(peer: WorkerRef, body: bytes) -> None:
        sent.append(world.planes[0].usage().parameter_sent_bytes)
        if len(sent) == parcels:
            is_over.set()

    with World(3, 16 * MIB, on_parcel=on_parcel, **RATES) as world:
        manifest = write_model(world.arenas[0], [16 * MIB])
        world.planes[0].offer(manifest)
        world.chain(1, manifest, CHUNK, 0, 1)
        world.wait_chunks(1, 4)
        for _ in range(parcels):
            world.planes[2].post(world.refs[1], bytes(parcel_bytes))
        assert is_over.wait(WAIT_S)
        world.planes[1].abort(1)
    return sent[-1] - sent[0]


def test_a_sender_of_parameters_makes_way_for_parcels_of_another_one() -> None:
    """They took as long as alone at the receiver's token bucket, but not on a link: the parameters'
    sender filled it, and the receiver's buffers. (Where the machine keeps threads waiting, the line
    is not kept: the best of three.)"""
    parcels, parcel_bytes = 8, 280 * KIB
    found = []
    for _ in range(3):
        found.append(sent_beside_parcels(parcels, parcel_bytes) / ((parcels - 1) * parcel_bytes))
        if found[-1] < 1 / 3:
            return
    pytest.fail(f"beside parcels so much of their size was sent in parameters: {found}")


MOVES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 400 * KIB)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=examples(24), deadline=None)
@given(
    moves=MOVES,
    chain=st.permutations(range(4)),
    sizes=st.lists(st.integers(1, 200 * KIB), max_size=3),
)
def test_everything_comes_between_all_pairs(
    moves: list[tuple[int, int, int]], chain: list[int], sizes: list[int]
) -> None:
    """A relay is held back by the one behind it and holds back the one before it, while each sends
    parcels to others."""
    came: defaultdict[int, list[tuple[WorkerRef, bytes]]] = defaultdict(list)
    has_come = threading.Condition()
    parcels = [(source, to, size) for source, to, size in moves if source != to]

    def at(node: int) -> Callable[[WorkerRef, bytes], None]:
        def on_parcel(peer: WorkerRef, body: bytes) -> None:
            with has_come:
                came[node].append((peer, body))
                has_come.notify_all()

        return on_parcel

    rng = random.Random(0)
    bodies = [(source, to, rng.randbytes(size)) for source, to, size in parcels]
    with World(4, MIB, on_parcel=[at(node) for node in range(4)], **RATES) as world:
        manifest = write_model(world.arenas[chain[0]], [*sizes, 300 * KIB])
        world.planes[chain[0]].offer(manifest)
        recorders = world.chain(1, manifest, 16 * KIB, *chain)
        for source, to, body in bodies:
            world.planes[source].post(world.refs[to], body, WAIT_S)
        for node, recorder in zip(chain[1:], recorders, strict=True):
            recorder.check_completed(manifest)
            assert world.holds(node, manifest)
        with has_come:
            assert has_come.wait_for(
                lambda: sum(map(len, came.values())) == len(bodies), timeout=WAIT_S
            )
        for node in range(4):
            for peer in world.refs:
                expected = [b for source, to, b in bodies if (source, to) == (peer.worker, node)]
                assert [body for sender, body in came[node] if sender == peer] == expected


def begin_parcel(world: World, node: int, size_bytes: int, came_bytes: int) -> socket.socket:
    """A raw connection on which so much of a parcel has come, and no more comes."""
    raw = open_as(world, node, ME)
    raw.sendall(Frame(FrameKind.PARCEL, ME, payload_bytes=size_bytes).encode() + bytes(came_bytes))
    return raw


@pytest.mark.parametrize("hangs_up", [True, False])
@pytest.mark.parametrize("came_bytes", [0, MIB])
def test_a_parcel_that_stops_on_its_way_stops_no_load(hangs_up: bool, came_bytes: int) -> None:
    """Its sender dies, or hangs while its system goes on."""
    with World(3, 4 * MIB, **RATES) as world:
        manifest = write_model(world.arenas[0], [2 * MIB])
        world.planes[0].offer(manifest)
        recorders = world.chain(1, manifest, CHUNK, 0, 1, 2)
        world.wait_chunks(1, 2)
        raw = begin_parcel(world, 1, 16 * MIB, came_bytes)
        if hangs_up:
            raw.close()
        for node, recorder in enumerate(recorders, start=1):
            recorder.check_completed(manifest)
            assert world.holds(node, manifest)
        raw.close()


def test_parcels_without_an_end_leave_a_load_its_slices() -> None:
    with World(3, 4 * MIB, **RATES) as world:
        manifest = write_model(world.arenas[0], [512 * KIB])
        world.planes[0].offer(manifest)
        is_over = threading.Event()

        def post() -> None:
            while not is_over.is_set():
                world.planes[2].post(world.refs[1], bytes(MIB), WAIT_S)

        thread = threading.Thread(target=post)
        thread.start()
        [recorder] = world.chain(1, manifest, CHUNK, 0, 1)
        recorder.check_completed(manifest)
        is_over.set()
        assert "feed_stalled" not in [news[0] for news in recorder.news]
        thread.join(WAIT_S)


def test_a_receiver_that_is_closed_while_others_are_held_back_for_it() -> None:
    with World(3, 4 * MIB, **RATES) as world:
        manifest = write_model(world.arenas[0], [4 * MIB])
        world.planes[0].offer(manifest)
        [held] = world.chain(1, manifest, CHUNK, 0, 1)
        world.wait_chunks(1, 2)
        raw = begin_parcel(world, 1, 16 * MIB, 0)
        world.planes[1].close()
        held.check_failed("closed")
        world.chain(2, manifest, CHUNK, 0, 2)[0].check_completed(manifest)
        raw.close()


# -- a peer that holds others back ----------------------------------------------------------------


def want_all(world: World, manifest: Manifest, held_us: int) -> socket.socket:
    """A raw connection that holds the worker's chunks back, and then wants all of them."""
    raw = open_as(world, 0, ME)
    wanted = WantedChunks(copy_id(manifest), CHUNK, grid(manifest, CHUNK).all()).encode()
    raw.sendall(
        Frame(FrameKind.HOLD, ME, chunk=held_us).encode()
        + Frame(FrameKind.WANT, ME, 5, payload_bytes=len(wanted)).encode()
        + wanted
    )
    return raw


def test_a_peer_that_holds_chunks_back_for_ever_gets_them_all_the_same() -> None:
    with World(1, 4 * MIB) as world:
        manifest = write_model(world.arenas[0], [4 * CHUNK])
        world.planes[0].offer(manifest)
        raw = want_all(world, manifest, FOR_EVER_US)
        chunks = [read_frame(raw)[0].chunk for _ in range(4)]
        assert chunks == [0, 1, 2, 3]
        raw.close()


def test_words_and_parcels_go_while_chunks_are_held_back_and_these_when_they_may() -> None:
    with World(1, 4 * MIB) as world:
        manifest = write_model(world.arenas[0], [64 * CHUNK])
        world.planes[0].offer(manifest)
        raw = want_all(world, manifest, FOR_EVER_US)
        assert read_frame(raw)[0].kind is FrameKind.CHUNK
        for _ in range(10):
            world.planes[0].post(ME, b"parcel")
        kinds = [FrameKind.CHUNK]
        while kinds.count(FrameKind.PARCEL) < 10:
            kinds.append(read_frame(raw)[0].kind)
        assert kinds.count(FrameKind.CHUNK) < 64 // 2
        raw.sendall(Frame(FrameKind.HOLD, ME).encode())
        for _ in range(64 - kinds.count(FrameKind.CHUNK)):
            assert read_frame(raw)[0].kind is FrameKind.CHUNK
        raw.close()


def test_a_sender_that_is_held_back_can_be_closed_and_can_withdraw() -> None:
    with World(1, 4 * MIB) as world:
        manifest = write_model(world.arenas[0], [64 * CHUNK])
        world.planes[0].offer(manifest)
        raw = want_all(world, manifest, FOR_EVER_US)
        assert read_frame(raw)[0].kind is FrameKind.CHUNK
        world.planes[0].withdraw(manifest)
        while (frame := read_frame(raw)[0]).kind is FrameKind.CHUNK:
            pass
        assert frame.kind is FrameKind.REFUSE
        world.planes[0].close()
        raw.close()
