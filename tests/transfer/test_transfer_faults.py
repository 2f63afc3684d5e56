"""What goes wrong in a transfer, what is kept, and that only what must fail fails."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transfer_world import (
    WAIT_S,
    Recorder,
    World,
    grid,
    open_as,
    read_frame,
    total_bytes,
    write_model,
)

from effort import examples
from livescale.transfer.carriers.tcp import TcpChannel
from livescale.transfer.carriers.token_bucket import TokenBucket
from livescale.transfer.formats.frames import (
    CHUNK_BYTES_MAX,
    HEADER_BYTES,
    NONCE_BYTES,
    Frame,
    FrameKind,
    WantedChunks,
    copy_id,
    decode_header,
    decode_wanted,
)
from livescale.transfer.formats.greeting import Greeting
from livescale.transfer.formats.orders import TransferError
from livescale.transfer.memory.arena import Arena, ArenaError
from livescale.transfer.plane.data_plane import DataPlane
from livescale.values.chunks import ChunkRange, Feed
from livescale.values.types import FromStorage, FromWorker, Manifest, WorkerRef

pytestmark = pytest.mark.usefixtures("machine")

MIB = 1 << 20
KIB = 1 << 10
CHUNK = 16 * KIB
SLOW = 4_000_000
"""Bytes per second at which a test can step in before a model of 1 MiB has passed."""


# -- holders that fail ----------------------------------------------------------------------------


def test_a_holder_that_dies_is_replaced_and_nothing_comes_twice() -> None:
    with World(4, 4 * MIB, uplink_bytes_per_s=SLOW) as world:
        manifest = write_model(world.arenas[0], [512 * KIB, 512 * KIB])
        write_model(world.arenas[3], [512 * KIB, 512 * KIB])
        for node in (0, 3):
            world.planes[node].offer(manifest)
        first, second = world.chain(1, manifest, CHUNK, 0, 1, 2)
        world.wait_chunks(2, 3)
        world.planes[0].close()
        _, upstream, reason = first.wait("feed_failed")
        assert upstream == world.refs[0]
        assert "connection was lost" in reason
        world.planes[1].amend(1, (world.feed(3, manifest, CHUNK),))
        # Whoever was behind it notices nothing but the pause.
        for node, recorder in ((1, first), (2, second)):
            recorder.check_completed(manifest)
            assert world.holds(node, manifest)
            assert world.planes[node].usage().discarded_bytes == 0
        assert [news for news in second.news if news[0] == "feed_failed"] == []
        assert world.planes[3].usage().parameter_sent_bytes < total_bytes(manifest)


def test_an_amended_feed_goes_on_and_an_obsolete_one_stops() -> None:
    with World(3, 4 * MIB, uplink_bytes_per_s=SLOW) as world:
        manifest = write_model(world.arenas[0], [MIB])
        write_model(world.arenas[1], [MIB])
        for node in (0, 1):
            world.planes[node].offer(manifest)
        halves = ChunkRange(0, 32), ChunkRange(32, 64)
        recorder = world.receive(
            1,
            manifest,
            2,
            [world.feed(k, manifest, CHUNK, halves[k]) for k in (0, 1)],
            CHUNK,
        )
        world.wait_chunks(2, 4)
        # Node 0 keeps its half, and gets what node 1 has not sent.
        world.planes[2].amend(1, (world.feed(0, manifest, CHUNK, *halves),))
        recorder.check_completed(manifest)
        assert world.holds(2, manifest)
        sent = [world.planes[node].usage().parameter_sent_bytes for node in (0, 1)]
        assert sent[1] < MIB // 2 < sent[0]
        chunks = [chunk for _, chunk, _, _ in world.chunks[2]]
        assert sorted(chunks) == list(range(64))


def test_a_holder_without_the_model_refuses_after_a_while_and_may_be_asked_again() -> None:
    with World(2, 4 * MIB, order_wait_s=0.05) as world:
        manifest = write_model(Arena(4 * MIB), [MIB])
        feed = world.feed(0, manifest, CHUNK)
        recorder = world.receive(1, manifest, 1, [feed], CHUNK)
        _, upstream, reason = recorder.wait("feed_failed")
        assert upstream == world.refs[0]
        assert "does not hold the model" in reason
        write_model(world.arenas[0], [MIB])
        world.planes[0].offer(manifest)
        world.planes[1].amend(1, (feed,))
        recorder.check_completed(manifest)


def test_models_of_one_shape_are_not_mistaken_for_each_other() -> None:
    with World(2, 4 * MIB, order_wait_s=0.05) as world:
        held = write_model(world.arenas[0], [MIB], seed=1)
        wanted = write_model(Arena(4 * MIB), [MIB], seed=2)
        assert held.id == wanted.id
        world.planes[0].offer(held)
        recorder = world.receive(1, wanted, 1, [world.feed(0, wanted, CHUNK)], CHUNK)
        assert "does not hold" in recorder.wait("feed_failed")[2]


def test_a_stranger_fails_its_feed_and_an_introduction_in_time_does_not() -> None:
    manifest = write_model(Arena(4 * MIB), [MIB])
    with World(1, 4 * MIB, order_wait_s=0.05) as world:
        stranger = Feed(FromWorker(WorkerRef(9)), grid(manifest, CHUNK).all())
        recorder = world.receive(1, manifest, 0, [stranger], CHUNK)
        assert recorder.wait("feed_failed")[1] == WorkerRef(9)
    with World(1, 4 * MIB, order_wait_s=WAIT_S) as world, Arena(4 * MIB) as memory:
        write_model(memory, [MIB])
        late = DataPlane(WorkerRef(9), memory)
        late.offer(manifest)
        recorder = world.receive(1, manifest, 0, [stranger], CHUNK)
        world.planes[0].introduce(late.worker, late.address)
        recorder.check_completed(manifest)
        late.close()


def test_a_holder_that_cannot_be_reached_fails_its_feed() -> None:
    with World(1, 4 * MIB, handshake_s=0.2) as world, socket.socket() as silent:
        manifest = write_model(Arena(4 * MIB), [MIB])
        silent.bind(("127.0.0.1", 0))
        for worker, why in ((7, "refused"), (8, "in time")):
            world.planes[0].introduce(WorkerRef(worker), silent.getsockname())
            feed = Feed(FromWorker(WorkerRef(worker)), grid(manifest, CHUNK).all())
            recorder = world.receive(worker, manifest, 0, [feed], CHUNK)
            _, upstream, reason = recorder.wait("feed_failed")
            assert upstream == WorkerRef(worker)
            assert f"cannot connect to w{worker}.0" in reason
            assert why in reason
            with pytest.raises(TransferError):
                world.planes[0].post(WorkerRef(worker), b"")
            world.planes[0].abort(worker)
            silent.listen()


def test_a_holder_that_hangs_up_right_after_the_greeting_fails_its_feed_every_time() -> None:
    with World(1, 8 * KIB) as world, socket.create_server(("127.0.0.1", 0)) as holder:
        manifest = write_model(Arena(8 * KIB), [KIB])

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    raw, _ = holder.accept()
                    channel = TcpChannel(raw, memoryview(b""), TokenBucket(None), TokenBucket(None))
                    Greeting(ME, "", WAIT_S).answer(channel, lambda caller: None)
                    channel.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        world.planes[0].introduce(ME, holder.getsockname())
        feed = Feed(FromWorker(ME), (ChunkRange(0, 1),))
        for plan in range(50):
            recorder = world.receive(plan, manifest, 0, [feed], KIB)
            assert recorder.wait("feed_failed")[1] == ME
            world.planes[0].abort(plan)
        holder.shutdown(socket.SHUT_RDWR)
        thread.join(WAIT_S)


def test_a_feed_that_stalls_goes_on_by_itself_and_may_stall_again() -> None:
    """How often that is told: `test_patience.py`."""
    with World(3, 4 * MIB, stall_s=0.05) as world:
        manifest = write_model(world.arenas[0], [MIB, MIB])
        filling = world.planes[0].fill(manifest, CHUNK)
        recorder = world.receive(1, manifest, 1, [world.feed(0, manifest, CHUNK)], CHUNK)
        assert recorder.wait("feed_stalled")[1] == world.refs[0]
        filling.layer_done(0)
        recorder.wait("layer_arrived")
        recorder.wait("feed_stalled", count=2)
        filling.layer_done(1)
        recorder.check_completed(manifest)


# -- corrupt bytes --------------------------------------------------------------------------------


def test_only_who_was_corrupt_itself_is_blamed_and_the_others_wait() -> None:
    with World(4, 4 * MIB) as world:
        manifest = write_model(world.arenas[0], [50_000] * 4)
        wrong = world.arenas[0].view(manifest.layers[2].offset_bytes + 4_321, 1)
        wrong[0] ^= 1
        world.planes[0].offer(manifest)
        recorders = world.chain(1, manifest, CHUNK, 0, 1, 2, 3)
        _, upstream, reason = recorders[0].wait("feed_failed")
        assert upstream == world.refs[0]
        assert all(word in reason for word in ("layer 2", "checksum", "second time"))
        assert ("layer_arrived", 2) not in recorders[0].news
        wrong[0] ^= 1
        world.planes[1].amend(1, (world.feed(0, manifest, CHUNK),))
        for node, recorder in enumerate(recorders, start=1):
            _, received_bytes = recorder.verdict()
            recorder.check_completed(manifest, received_bytes)
            assert world.holds(node, manifest)
        assert all(n[0] != "feed_failed" for r in recorders[1:] for n in r.news)


class TamperingProxy:
    """Stands between a peer and the worker that it connects to; one byte of what the worker
    sends, at this place of the stream, is changed."""

    def __init__(self, address: tuple[str, int], place: int) -> None:
        self._place = place
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._worker = socket.create_connection(address, WAIT_S)
        self.address = self._listening.getsockname()
        self._threads = [threading.Thread(target=self._there), threading.Thread(target=self._back)]
        self._peer: socket.socket
        self._has_peer = threading.Event()
        for thread in self._threads:
            thread.start()

    def _there(self) -> None:
        self._peer, _ = self._listening.accept()
        self._has_peer.set()
        while data := self._peer.recv(65_536):
            self._worker.sendall(data)
        self._worker.shutdown(socket.SHUT_WR)

    def _back(self) -> None:
        self._has_peer.wait(WAIT_S)
        at = 0
        with contextlib.suppress(OSError):
            while data := bytearray(self._worker.recv(65_536)):
                if at <= self._place < at + len(data):
                    data[self._place - at] ^= 1
                at += len(data)
                self._peer.sendall(data)

    def close(self) -> None:
        for thread in self._threads:
            thread.join(WAIT_S)
        for sock in (self._listening, self._worker, self._peer):
            sock.close()


def test_a_layer_that_was_damaged_on_the_way_is_fetched_again() -> None:
    with World(2, 4 * MIB, are_introduced=False) as world:
        manifest = write_model(world.arenas[0], [50_000] * 4)
        world.planes[0].offer(manifest)
        proxy = TamperingProxy(world.planes[0].address, place=60_000)
        world.planes[1].introduce(world.refs[0], proxy.address)
        recorder = world.receive(1, manifest, 1, [world.feed(0, manifest, CHUNK)], CHUNK)
        recorder.check_completed(manifest, total_bytes(manifest) + 50_000)
        assert world.holds(1, manifest)
        world.planes[1].disconnect(world.refs[0])
        proxy.close()


def test_a_manifest_that_describes_other_bytes_fails_every_holder_but_not_the_order() -> None:
    with World(3, 4 * MIB, uplink_bytes_per_s=SLOW) as world:
        manifest = write_model(world.arenas[0], [0, 512 * KIB])
        layers = (manifest.layers[0], write_model(world.arenas[1], [0, 512 * KIB], 1).layers[1])
        other = Manifest("other", "{}", "float32", layers)
        for node in (0, 1):
            world.arenas[node].view(0, 512 * KIB)[:] = bytes(512 * KIB)
            world.planes[node].offer(other)
        feeds = [world.feed(k, other, CHUNK, ChunkRange(k, 32, 2)) for k in (0, 1)]
        recorder = world.receive(1, other, 2, feeds, CHUNK)
        recorder.wait("feed_failed", count=2)
        assert sorted(n[1] for n in recorder.news if n[0] == "feed_failed") == world.refs[:2]
        world.planes[2].abort(1)
        recorder.check_failed("aborted")


def test_a_holder_answers_any_number_of_plans_one_after_the_other() -> None:
    with World(2, MIB) as world:
        manifest = write_model(world.arenas[0], [1000, 2000])
        world.planes[0].offer(manifest)
        for plan in range(100):
            recorder = world.receive(plan, manifest, 1, [world.feed(0, manifest, 500)], 500)
            assert recorder.verdict()[0] == "completed"
            world.planes[1].withdraw(manifest)


# -- abort, withdraw, close -----------------------------------------------------------------------


@pytest.mark.parametrize("aborter", [1, 2])
def test_after_an_abort_the_connections_carry_the_next_plan(aborter: int) -> None:
    with World(4, 4 * MIB, uplink_bytes_per_s=SLOW) as world:
        manifest = write_model(world.arenas[0], [512 * KIB, 512 * KIB])
        world.planes[0].offer(manifest)
        recorders = world.chain(1, manifest, CHUNK, 0, 1, 2, 3)
        world.wait_chunks(3, 2)
        world.planes[aborter].abort(1)
        assert recorders[aborter - 1].news[-1] == ("failed", "aborted")
        _, upstream, reason = recorders[aborter].wait("feed_failed")
        assert upstream == world.refs[aborter]
        assert "gave it up: aborted" in reason
        for node in range(aborter + 1, 4):
            world.planes[node].abort(1)
        for node in range(1, aborter):
            recorders[node - 1].check_completed(manifest)
        other = write_model(world.arenas[0], [64 * KIB, 64 * KIB], seed=2, base_bytes=2 * MIB)
        world.planes[0].offer(other)
        for node, recorder in enumerate(world.chain(2, other, CHUNK, 0, 1, 2, 3), start=1):
            recorder.check_completed(other)
            assert world.holds(node, other)


def test_after_abort_returns_nothing_is_written_for_the_plan() -> None:
    with World(2, 4 * MIB, uplink_bytes_per_s=SLOW) as world:
        manifest = write_model(world.arenas[0], [MIB])
        world.planes[0].offer(manifest)
        [target] = world.chain(1, manifest, 256 * KIB, 0, 1)
        world.wait_chunks(1, 1)
        world.planes[1].abort(1)
        assert target.verdict() == ("failed", "aborted")
        everything = world.arenas[1].view(0, 4 * MIB)
        everything[:] = b"\xaa" * (4 * MIB)
        # The next plan on the connection is through: so is what came of the first.
        other = write_model(world.arenas[0], [1000], seed=2, base_bytes=2 * MIB)
        world.planes[0].offer(other)
        world.chain(2, other, CHUNK, 0, 1)[0].check_completed(other)
        assert everything[: 2 * MIB] == b"\xaa" * (2 * MIB)
        # The holder was told to stop.
        assert world.planes[0].usage().parameter_sent_bytes < total_bytes(manifest)


def test_a_plan_that_is_carried_out_again_is_not_disturbed_by_the_last_time() -> None:
    with World(2, 4 * MIB, uplink_bytes_per_s=SLOW) as world:
        manifest = write_model(world.arenas[0], [512 * KIB])
        world.planes[0].offer(manifest)
        feed = world.feed(0, manifest, CHUNK)
        for time in (1, 2, 3):
            recorder = world.receive(7, manifest, 1, [feed], CHUNK)
            if time < 3:
                recorder.wait("first_byte")
                world.planes[1].abort(7)
        recorder.check_completed(manifest)
        assert world.holds(1, manifest)


@pytest.mark.parametrize("name", ["first_byte", "layer_arrived"])
def test_a_listener_may_abort(name: str) -> None:
    with World(2, 4 * MIB) as world:
        manifest = write_model(world.arenas[0], [MIB, MIB])
        world.planes[0].offer(manifest)
        recorder = Recorder()
        recorder.on_news = lambda *news: news[0] == name and world.planes[1].abort(1)
        world.receive(1, manifest, 1, [world.feed(0, manifest, CHUNK)], CHUNK, recorder)
        assert recorder.verdict() == ("failed", "aborted")
        assert recorder.news[-2][0] == name


def test_an_abort_that_meets_the_end_of_a_load_returns_and_peers_read_on() -> None:
    """The plan is completed between the look at it and its end; a peer reads slowly from it."""
    with World(2, 20 * MIB, withdraw_wait_s=0.05) as world:
        manifest = write_model(world.arenas[0], [16 * MIB, MIB])
        world.planes[0].offer(manifest)
        recorder, started = Recorder(), threading.Event()
        aborting = threading.Thread(target=world.planes[1].abort, args=(1,), daemon=True)
        raw = open_as(world, 1, WorkerRef(7))

        def meet(name: str, *_: object) -> None:
            if name != "layer_arrived" or len(recorder.news) < 1 + len(manifest.layers):
                return
            want_first_chunk(raw, manifest)
            aborting.start()
            while not is_inside(aborting, "fail"):
                aborting.join(0.001)
            started.set()

        recorder.on_news = meet
        feed = world.feed(0, manifest, CHUNK_BYTES_MAX)
        world.receive(1, manifest, 1, [feed], CHUNK_BYTES_MAX, recorder)
        recorder.check_completed(manifest)
        assert started.is_set()
        aborting.join(WAIT_S)
        assert not aborting.is_alive()
        assert WorkerRef(7) in world.planes[1].connected()
        raw.close()


def is_inside(thread: threading.Thread, function: str) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


def want_first_chunk(raw: socket.socket, manifest: Manifest) -> None:
    """Of 16 MiB; until it comes, but not further."""
    wanted = WantedChunks(copy_id(manifest), CHUNK_BYTES_MAX, (ChunkRange(0, 1),)).encode()
    raw.sendall(Frame(FrameKind.WANT, WorkerRef(7), 5, payload_bytes=len(wanted)).encode())
    raw.sendall(wanted)
    raw.recv(HEADER_BYTES, socket.MSG_WAITALL)


@pytest.mark.parametrize("is_shm", [False, True])
def test_what_is_withdrawn_is_read_by_nobody(is_shm: bool, tmp_path: Path) -> None:
    limits = {"shm_directory": tmp_path} if is_shm else {"uplink_bytes_per_s": SLOW}
    with World(3, 4 * MIB, order_wait_s=0.05, **limits) as world:
        manifest = write_model(world.arenas[0], [MIB, MIB])
        world.planes[0].offer(manifest)
        feed = world.feed(0, manifest, CHUNK)
        readers = [world.receive(1, manifest, node, [feed], CHUNK) for node in (1, 2)]
        for node in (1, 2):
            world.wait_chunks(node, 2)
        world.planes[0].withdraw(manifest)
        # What comes from now on cannot be the model's bytes.
        world.arenas[0].view(0, 4 * MIB)[:] = bytes(4 * MIB)
        for node, reader in enumerate(readers, start=1):
            reader.wait("feed_failed", "completed")
            for entry in manifest.layers:
                if ("layer_arrived", entry.layer) in reader.news:
                    continue
                chunks = grid(manifest, CHUNK)
                for _, chunk, size, _ in world.chunks[node]:
                    layer, offset, _ = chunks.place(chunk)
                    place = manifest.layers[layer].offset_bytes + offset
                    assert any(world.arenas[node].view(place, size)), "withdrawn bytes were read"
        assert world.planes[0].usage().parameter_sent_bytes < 4 * MIB or is_shm
        world.planes[0].withdraw(manifest)


def test_a_peer_that_does_not_read_cannot_hold_up_a_withdrawal() -> None:
    with World(1, 16 * MIB, withdraw_wait_s=0.05) as world:
        manifest = write_model(world.arenas[0], [16 * MIB])
        world.planes[0].offer(manifest)
        raw = open_as(world, 0, WorkerRef(7))
        want_first_chunk(raw, manifest)
        world.planes[0].withdraw(manifest)
        assert world.planes[0].connected() == ()
        raw.close()


def test_memory_is_used_once() -> None:
    with World(2, 4 * MIB) as world:
        manifest = write_model(world.arenas[0], [MIB], seed=1)
        other = write_model(Arena(4 * MIB), [1000], seed=2, base_bytes=MIB - 1)
        feeds = [world.feed(0, manifest, CHUNK)]
        first = world.receive(1, manifest, 1, feeds, CHUNK)
        world.receive(1, other, 1, (), CHUNK).check_failed("plan 1", "already")
        world.receive(2, manifest, 1, feeds, CHUNK).check_failed("plan 2", "same memory")
        world.receive(3, manifest, 1, feeds, CHUNK, offset_bytes=2 * MIB).check_failed("already")
        world.receive(4, other, 1, (), CHUNK).check_failed("plan 4", "'model-1'", "same memory")
        for call in (world.planes[1].offer, lambda m: world.planes[1].fill(m, CHUNK)):
            with pytest.raises(ArenaError, match="same memory"):
                call(other)
        world.planes[0].offer(manifest)
        first.check_completed(manifest)
        world.planes[1].withdraw(manifest)
        world.planes[1].offer(other)


@pytest.mark.parametrize(
    ("feeds", "story"),
    [
        ((Feed(FromStorage(), (ChunkRange(0, 1),)),), "storage"),
        ((Feed(FromWorker(WorkerRef(0)), (ChunkRange(0, 65),)),), "65 of 64"),
    ],
)
def test_orders_that_cannot_be_carried_out_fail(feeds: tuple[Feed, ...], story: str) -> None:
    with World(2, 4 * MIB) as world:
        manifest = write_model(world.arenas[0], [MIB])
        world.receive(1, manifest, 1, feeds, CHUNK).check_failed("plan 1", story)
        recorder = world.receive(2, manifest, 1, (), CHUNK)
        with pytest.raises(ValueError, match=story):
            world.planes[1].amend(2, feeds)
        world.planes[1].amend(3, feeds)  # a plan that is over, or never was
        world.planes[1].abort(2)
        recorder.check_failed("aborted")
    with World(1, KIB) as world:
        world.receive(1, manifest, 0, (), CHUNK).check_failed("plan 1", "needs 1048576 bytes")


def test_closing_ends_everything_that_is_in_flight() -> None:
    with World(3, 4 * MIB, uplink_bytes_per_s=100_000) as world:
        manifest = write_model(world.arenas[0], [MIB])
        lonely = write_model(world.arenas[1], [KIB], seed=2, base_bytes=2 * MIB)
        world.planes[0].offer(manifest)
        begun = world.chain(1, manifest, CHUNK, 0, 1, 2)
        waiting = world.receive(2, lonely, 0, [world.feed(2, lonely, CHUNK)], CHUNK)
        world.planes[0].post(world.refs[2], bytes(MIB))
        begun[0].wait("first_byte")
        for plane in world.planes:
            plane.close()
            plane.close()
        for recorder in (*begun, waiting):
            recorder.check_failed("closed its data plane")
        world.receive(4, lonely, 1, (), CHUNK).check_failed("plan 4", "closed")


# -- parcels --------------------------------------------------------------------------------------


def test_parcels_overtake_chunks_in_order() -> None:
    came: list[tuple[WorkerRef, bytes]] = []
    both = threading.Event()

    def on_parcel(sender: WorkerRef, body: bytes) -> None:
        came.append((sender, body))
        if len(came) == 3:
            both.set()

    with World(2, 4 * MIB, uplink_bytes_per_s=SLOW, on_parcel=on_parcel) as world:
        manifest = write_model(world.arenas[0], [MIB])
        world.planes[0].offer(manifest)
        [recorder] = world.chain(1, manifest, CHUNK, 0, 1)
        recorder.wait("first_byte")
        for body in (b"one", bytes(100_000), b""):
            world.planes[0].post(world.refs[1], body)
        assert both.wait(WAIT_S)
        assert recorder.news == [("first_byte",)]
        assert came == [(world.refs[0], b) for b in (b"one", bytes(100_000), b"")]
        recorder.check_completed(manifest)


def test_parcels_have_bounds() -> None:
    with World(2, MIB, uplink_bytes_per_s=1000) as world:
        with pytest.raises(TransferError, match="above"):
            world.planes[0].post(world.refs[1], bytes(16 * MIB + 1))
        with pytest.raises(TransferError, match=r"w9\.0"):
            world.planes[0].post(WorkerRef(9), b"x")
        with pytest.raises(TransferError, match="too many parcels"):
            post_many(world, 6)


def post_many(world: World, parcels: int) -> None:
    for _ in range(parcels):
        world.planes[0].post(world.refs[1], bytes(16 * MIB))


# -- connections ----------------------------------------------------------------------------------


def test_a_newer_life_of_a_peer_replaces_an_older() -> None:
    with World(2, MIB) as world, Arena(MIB) as memory:
        manifest = write_model(world.arenas[0], [1000])
        world.planes[0].offer(manifest)
        reborn = DataPlane(WorkerRef(1, 1), memory)
        world.planes[0].introduce(reborn.worker, reborn.address)
        reborn.introduce(world.refs[0], world.planes[0].address)
        with pytest.raises(TransferError, match=r"w1\.0 .* followed by w1\.1"):
            world.planes[0].introduce(world.refs[1], world.planes[1].address)
        with pytest.raises(TransferError, match=r"w0\.0 .* w0\.0"):
            world.planes[0].introduce(world.refs[0], world.planes[0].address)
        # The older life is not answered any more.
        with pytest.raises(ConnectionError):
            open_as(world, 0, world.refs[1])
        # From the side that is asked: there the connection is open when this returns.
        world.planes[0].post(reborn.worker, b"")
        assert world.planes[0].connected() == (reborn.worker,)
        reborn.close()


def test_connections_are_opened_when_they_are_needed() -> None:
    with World(4, MIB, eager_peers_max=1) as world:
        manifest = write_model(world.arenas[3], [1000])
        world.planes[3].offer(manifest)
        for plane, peer in ((0, 1), (0, 2), (0, 3)):
            world.planes[plane].post(world.refs[peer], b"")
        assert world.planes[0].connected() == tuple(world.refs[1:])
        world.planes[0].disconnect(WorkerRef(1, 9))
        world.planes[0].disconnect(world.refs[1])
        assert world.refs[1] not in world.planes[0].connected()
        with pytest.raises(TransferError):
            world.planes[0].post(world.refs[1], b"")
        world.chain(1, manifest, 100, 3, 0)[0].check_completed(manifest)


def is_closed(raw: socket.socket) -> bool:
    raw.settimeout(WAIT_S)
    try:
        while raw.recv(65_536):
            pass
        return True
    except TimeoutError:
        return False
    except ConnectionError:
        return True


ME = WorkerRef(7)
KINDS = st.sampled_from(list(FrameKind))
FRAMES = st.builds(
    lambda kind, sender, plan, chunk, payload: (
        Frame(kind, sender, plan, 0, chunk, len(payload)).encode() + payload
    ),
    KINDS,
    st.sampled_from([ME, ME, ME, WorkerRef(8)]),
    st.integers(0, 3),
    st.integers(0, 2**32 - 1),
    st.binary(max_size=80),
)


@pytest.fixture(scope="module")
def target() -> World:  # type: ignore[misc]
    with World(2, 4 * MIB, order_wait_s=0.05) as world:
        yield world


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(says_hello=st.booleans(), said=st.lists(FRAMES | st.binary(max_size=200), max_size=6))
def test_whatever_is_said_harms_nobody(target: World, says_hello: bool, said: list[bytes]) -> None:
    address = target.planes[1].address
    with open_as(target, 1, ME) if says_hello else socket.create_connection(address) as raw:
        with contextlib.suppress(OSError):
            for message in said:
                raw.sendall(message)
            raw.shutdown(socket.SHUT_WR)
        assert is_closed(raw)


def test_after_all_that_was_said_a_plan_is_carried_out(target: World) -> None:
    manifest = write_model(target.arenas[0], [200_000])
    target.planes[0].offer(manifest)
    target.chain(1, manifest, CHUNK, 0, 1)[0].check_completed(manifest)
    assert target.planes[1].connected() == (target.refs[0],)


@pytest.mark.parametrize(
    "chunk",
    [
        Frame(FrameKind.CHUNK, ME, 5, 1, 0, 1000),
        Frame(FrameKind.CHUNK, ME, 5, 0, 0, 999),
        Frame(FrameKind.CHUNK, ME, 5, 0, 0, 1001),
    ],
)
def test_a_chunk_that_is_not_what_its_number_says_fails_the_feed(chunk: Frame) -> None:
    with World(1, 4 * KIB) as world:
        manifest = write_model(Arena(4 * KIB), [1000, 1000])
        raw = open_as(world, 0, ME)
        feed = Feed(FromWorker(ME), (ChunkRange(0, 2),))
        recorder = world.receive(5, manifest, 0, [feed], 1000)
        wanted = decode_header(raw.recv(HEADER_BYTES, socket.MSG_WAITALL))
        assert decode_wanted(raw.recv(wanted.payload_bytes)).ranges == feed.chunks
        # Not asked for, of no plan: taken and thrown away.
        for number, plan in ((2, 5), (0, 6)):
            stray = Frame(FrameKind.CHUNK, ME, plan, 0, number, 1000)
            raw.sendall(stray.encode() + b"\xff" * 1000)
        raw.sendall(chunk.encode() + b"\xff" * chunk.payload_bytes)
        assert is_closed(raw)
        raw.close()
        _, upstream, reason = recorder.wait("feed_failed")
        assert upstream == ME
        assert "does not keep to the protocol" in reason
        assert bytes(world.arenas[0].view(0, 4 * KIB)) == bytes(4 * KIB)


def test_an_abort_in_the_middle_of_a_chunk_writes_nothing_after_it() -> None:
    with World(1, 8 * KIB) as world:
        data = write_model(Arena(8 * KIB), [4 * KIB])
        raw = open_as(world, 0, ME)
        feed = Feed(FromWorker(ME), (ChunkRange(0, 1),))
        first = world.receive(5, data, 0, [feed], 4 * KIB)
        read_frame(raw)
        chunk = Frame(FrameKind.CHUNK, ME, 5, 0, 0, 4 * KIB).encode() + b"\xff" * 4 * KIB
        raw.sendall(chunk[: 2 * KIB])
        first.wait("first_byte")
        world.planes[0].abort(5)
        assert read_frame(raw)[0].kind is FrameKind.STOP
        world.arenas[0].view(0, 8 * KIB)[:] = b"\xaa" * 8 * KIB
        raw.sendall(chunk[2 * KIB :])
        # What comes next is understood, so all of the first chunk is through.
        with Arena(8 * KIB) as memory:
            other = write_model(memory, [KIB], seed=2, base_bytes=4 * KIB)
            payload = bytes(memory.view(4 * KIB, KIB))
        second = world.receive(6, other, 0, [feed], 4 * KIB)
        read_frame(raw)
        raw.sendall(Frame(FrameKind.CHUNK, ME, 6, 0, 0, KIB).encode() + payload)
        second.check_completed(other)
        assert bytes(world.arenas[0].view(0, 4 * KIB)) == b"\xaa" * 4 * KIB
        raw.close()


def test_what_a_holder_began_and_does_not_end_comes_from_another() -> None:
    """Its process hangs, its system goes on: the connection itself stays open."""
    with World(2, 8 * KIB, stall_s=0.05) as world:
        manifest = write_model(world.arenas[1], [4 * KIB])
        world.planes[1].offer(manifest)
        raw = open_as(world, 0, ME)
        feeds = (Feed(FromWorker(ME), (ChunkRange(0, 2),)),)
        recorder = world.receive(5, manifest, 0, feeds, 2 * KIB)
        read_frame(raw)
        raw.sendall(Frame(FrameKind.CHUNK, ME, 5, 0, 0, 2 * KIB).encode() + bytes(KIB))
        assert recorder.wait("feed_stalled")[1] == ME
        world.planes[0].amend(5, (world.feed(1, manifest, 2 * KIB),))
        recorder.check_completed(manifest, recorder.verdict()[1])
        assert world.holds(0, manifest)
        assert is_closed(raw)
        raw.close()


def test_what_was_corrupt_is_asked_for_verified_and_given_only_so() -> None:
    with World(1, 8 * KIB) as world, Arena(8 * KIB) as memory:
        manifest = write_model(memory, [2 * KIB])
        halves = [bytes(memory.view(start, KIB)) for start in (0, KIB)]
        raw = open_as(world, 0, ME)
        feed = Feed(FromWorker(ME), (ChunkRange(0, 2),))
        recorder = world.receive(5, manifest, 0, [feed], KIB)
        assert not decode_wanted(read_frame(raw)[1]).is_verified_only

        def send(chunk: int, payload: bytes) -> None:
            raw.sendall(Frame(FrameKind.CHUNK, ME, 5, 0, chunk, KIB).encode() + payload)

        def want(plan: int, is_verified_only: bool) -> None:
            chunks = (ChunkRange(0, 1),)
            body = WantedChunks(copy_id(manifest), KIB, chunks, is_verified_only).encode()
            head = Frame(FrameKind.WANT, ME, plan, payload_bytes=len(body)).encode()
            raw.sendall(head + body)

        send(0, halves[0])
        send(1, b"\xff" * KIB)
        again = decode_wanted(read_frame(raw)[1])
        assert again.is_verified_only
        assert again.ranges == feed.chunks
        send(0, halves[0])
        # Chunk 0 is there, but its layer is not verified: only the second want gets it.
        want(1, is_verified_only=True)
        want(2, is_verified_only=False)
        assert read_frame(raw) == (
            Frame(FrameKind.CHUNK, world.refs[0], 2, 0, 0, KIB, is_unproved=True),
            halves[0],
        )
        send(1, halves[1])
        recorder.check_completed(manifest, 4 * KIB)
        # Words go first: it needs no more.
        said = sorted((frame.kind, frame.plan) for frame, _ in (read_frame(raw), read_frame(raw)))
        assert said == [(FrameKind.CHUNK, 1), (FrameKind.STOP, 5)]
        raw.close()


def test_a_silent_or_impatient_stranger_is_let_go() -> None:
    with World(1, MIB, handshake_s=0.05) as world:
        silent = socket.create_connection(world.planes[0].address, WAIT_S)
        assert is_closed(silent)
        silent.close()
        nonce = bytes(NONCE_BYTES)
        impostor = Frame(FrameKind.HELLO, world.refs[0], payload_bytes=len(nonce))
        for first in (Frame(FrameKind.STOP, ME), impostor):
            with socket.create_connection(world.planes[0].address, WAIT_S) as raw:
                raw.sendall(first.encode() + nonce)
                assert is_closed(raw)
