"""Transfers through NIXL, over TCP on the loopback interface."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading

import msgspec
import psutil
import pytest
from transfer_world import WAIT_S, Recorder, World, grid, total_bytes, write_model

from livescale.common.settings import ConfigError
from livescale.config.reading import load_config
from livescale.transfer.carriers.nixl import READS_MAX, NixlCarrier
from livescale.transfer.carriers.tcp import TcpCarrier
from livescale.transfer.carriers.token_bucket import TokenBucket
from livescale.transfer.formats.carrier import WritePermit
from livescale.transfer.memory.arena import Arena, ArenaError
from livescale.transfer.memory.open_writes import OpenWrites
from livescale.transfer.plane.data_plane import DataPlane
from livescale.transfer.plane.options import PlaneOptions
from livescale.values.chunks import Feed
from livescale.values.types import FromWorker, Manifest, WorkerRef

pytestmark = pytest.mark.usefixtures("machine")

MIB = 1 << 20
KIB = 1 << 10
CHUNK = 16 * KIB
SLOW = 4_000_000
# Of reads that are to be under way: more chunks than a window.
READ = 256 * KIB
MODEL = 2 * READS_MAX * READ
HOLDER_NUMBER = 9
HAS_NIXL = importlib.util.find_spec("nixl_cu12") is not None
needs_nixl = pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed (extra rdma)")


@pytest.fixture(autouse=True)
def _network(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the carrier chooses for itself does not outlive the test."""
    for name in ("UCX_NET_DEVICES", "UCX_TLS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.skipif(HAS_NIXL, reason="NIXL is installed")
def test_without_the_package_the_error_says_what_to_install() -> None:
    with Arena(MIB) as memory, pytest.raises(ImportError, match=r"livescale\[rdma\]"):
        DataPlane(WorkerRef(0), memory, PlaneOptions(carrier="nixl"))
    with pytest.raises(ConfigError, match=r"carrier.*livescale\[rdma\]"):
        load_config(None, ["a"], {}, {"carrier": "nixl"})


@needs_nixl
def test_a_chain_delivers_identical_bytes_and_only_loopback_listens() -> None:
    with World(3, 4 * MIB, carrier="nixl") as world:
        manifest = write_model(world.arenas[0], [100_000, 1_000_000, 1_000_000, 65_536, 7])
        world.planes[0].offer(manifest)
        for node, recorder in enumerate(world.chain(1, manifest, CHUNK, 0, 1, 2), start=1):
            recorder.check_completed(manifest)
            assert world.holds(node, manifest)
            used = world.planes[node].usage()
            assert used.parameter_received_bytes == total_bytes(manifest)
        assert world.planes[2].probe(world.refs[0], MIB) > 0
        listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"]
        # Each plane has two: for frames, and UCX's own.
        assert listening.count("127.0.0.1") >= 6
        assert set(listening) == {"127.0.0.1"}


@needs_nixl
def test_a_holder_that_dies_is_replaced() -> None:
    with World(4, 4 * MIB, carrier="nixl", uplink_bytes_per_s=SLOW) as world:
        manifest = write_model(world.arenas[0], [512 * KIB, 512 * KIB])
        write_model(world.arenas[3], [512 * KIB, 512 * KIB])
        for node in (0, 3):
            world.planes[node].offer(manifest)
        first, second = world.chain(1, manifest, CHUNK, 0, 1, 2)
        world.wait_chunks(2, 3)
        world.planes[0].close()
        assert first.wait("feed_failed")[1] == world.refs[0]
        world.planes[1].amend(1, (world.feed(3, manifest, CHUNK),))
        for node, recorder in ((1, first), (2, second)):
            recorder.check_completed(manifest, recorder.verdict()[1])
            assert world.holds(node, manifest)
        assert world.planes[3].usage().parameter_sent_bytes < total_bytes(manifest)


@needs_nixl
def test_what_is_withdrawn_is_read_by_nobody() -> None:
    with World(2, 4 * MIB, carrier="nixl", order_wait_s=0.05, uplink_bytes_per_s=SLOW) as world:
        manifest = write_model(world.arenas[0], [MIB, MIB])
        world.planes[0].offer(manifest)
        reader = world.receive(1, manifest, 1, [world.feed(0, manifest, CHUNK)], CHUNK)
        world.wait_chunks(1, 3)
        world.planes[0].withdraw(manifest)
        world.arenas[0].view(0, 2 * MIB)[:] = bytes(2 * MIB)
        assert "gave the model up" in reader.wait("feed_failed")[2]
        # All that came is of the model: none of it was read after the withdrawal.
        write_model(world.arenas[0], [MIB, MIB])
        world.planes[0].offer(manifest)
        world.planes[1].amend(1, (world.feed(0, manifest, CHUNK),))
        reader.check_completed(manifest)
        assert world.planes[1].usage().discarded_bytes == 0


@needs_nixl
def test_a_peer_without_nixl_is_told_apart_at_once() -> None:
    with World(2, MIB, carrier=["nixl", "auto"], handshake_s=WAIT_S) as world:
        manifest = write_model(world.arenas[0], [1000])
        world.planes[0].offer(manifest)
        recorder = world.receive(1, manifest, 1, [world.feed(0, manifest, CHUNK)], CHUNK)
        assert recorder.wait("feed_failed")[1] == world.refs[0]


@needs_nixl
def test_a_corrupt_layer_comes_from_another_holder() -> None:
    with World(3, 4 * MIB, carrier="nixl") as world:
        manifest = write_model(world.arenas[0], [512 * KIB, 512 * KIB])
        write_model(world.arenas[2], [512 * KIB, 512 * KIB])
        world.arenas[0].view(600 * KIB, 1)[:] = b"?"
        for node in (0, 2):
            world.planes[node].offer(manifest)
        reader = world.receive(1, manifest, 1, [world.feed(0, manifest, CHUNK)], CHUNK)
        assert "layer 1" in reader.wait("feed_failed")[2]
        world.planes[1].amend(1, (world.feed(2, manifest, CHUNK),))
        assert reader.verdict()[0] == "completed"
        assert world.holds(1, manifest)


@needs_nixl
def test_a_receiver_reads_as_many_chunks_at_once_as_it_wants_to_and_all_come() -> None:
    chunks = 3 * READS_MAX
    buckets = TokenBucket(None), TokenBucket(None)
    with Arena(chunks * CHUNK) as source, Arena(chunks * CHUNK) as target:
        write_model(source, [chunks * CHUNK])
        writes = [OpenWrites(), OpenWrites()]
        carriers = [
            NixlCarrier(TcpCarrier("127.0.0.1", view, *buckets), view, *buckets, own, reads_max)
            for view, own, reads_max in (
                (source.view(0, chunks * CHUNK), writes[0], READS_MAX),
                (target.view(0, chunks * CHUNK), writes[1], 3),
            )
        ]

        def send() -> None:
            channel = carriers[0].accept()
            channel.share_memory(WAIT_S)
            for chunk in range(chunks):
                channel.send_range(b"h", chunk * CHUNK, CHUNK)
            channel.settle()
            channel.send(b"all were read")
            channel.receive(1, WAIT_S)
            channel.close()

        sender = threading.Thread(target=send)
        sender.start()
        channel = carriers[1].connect(carriers[0].address, WAIT_S)
        channel.share_memory(WAIT_S)
        landed: list[int] = []
        for chunk in range(chunks):
            assert channel.receive(1, WAIT_S) == b"h"
            channel.receive_range(chunk * CHUNK, CHUNK, WritePermit(), landed.append)
            assert len(writes[1].ranges(0, chunks * CHUNK)) <= 3
        assert channel.receive(13, WAIT_S) == b"all were read"
        channel.send(b".")
        channel.close()
        assert landed == [CHUNK] * chunks
        assert source.view(0, chunks * CHUNK) == target.view(0, chunks * CHUNK)
        sender.join(WAIT_S)
        for carrier in carriers:
            carrier.break_off()
            carrier.close()


HOLDER = f"""
import sys
import msgspec
from livescale.transfer.memory.arena import Arena
from livescale.transfer.plane.data_plane import DataPlane
from livescale.transfer.plane.options import PlaneOptions
from livescale.values.types import WorkerRef
from transfer_world import write_model
plane = DataPlane(WorkerRef({HOLDER_NUMBER}), Arena({MODEL}), PlaneOptions(carrier="nixl"))
manifest = write_model(plane._memory, [{MODEL}])
plane.offer(manifest)
print(msgspec.json.encode((plane.address, manifest)).decode(), flush=True)
sys.stdin.read()
"""


class _FrozenHolder:
    """A process that holds a model and is stopped when the first chunk of it is about to be read:
    reads are under way then that do not end."""

    def __init__(self, world: World) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", HOLDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        address, self.manifest = msgspec.json.decode(answer, type=tuple[tuple[str, int], Manifest])
        self.ref = WorkerRef(HOLDER_NUMBER)
        for plane in world.planes:
            plane.introduce(self.ref, address)
        self._world = world

    def feed(self) -> Feed:
        return Feed(FromWorker(self.ref), grid(self.manifest, READ).all())

    def give(self, plan: int) -> Recorder:
        """Node 0 has begun to read from it, and cannot go on."""
        recorder = Recorder()
        recorder.on_news = self._freeze
        self._world.receive(plan, self.manifest, 0, [self.feed()], READ, recorder)
        _wait_for_reads(self._world, are_there=True)
        return recorder

    def _freeze(self, name: str, *_: object) -> None:
        if name == "first_byte":
            self._process.send_signal(signal.SIGSTOP)
            os.waitpid(self._process.pid, os.WUNTRACED)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> _FrozenHolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


def _other_model(world: World) -> Manifest:
    """Node 1 holds a model that is to lie in the same bytes."""
    manifest = write_model(world.arenas[1], [MODEL], seed=1)
    world.planes[1].offer(manifest)
    return manifest


@needs_nixl
def test_bytes_of_an_aborted_plan_are_given_to_nothing_until_its_reads_have_ended() -> None:
    with World(2, 2 * MODEL, carrier="nixl", withdraw_wait_s=0.05) as world:
        other = _other_model(world)
        feeds = [world.feed(1, other, READ)]
        with _FrozenHolder(world) as holder:
            aborted = holder.give(1)
            world.planes[0].abort(1)
            aborted.check_failed("aborted")
            refused = world.receive(2, other, 0, feeds, READ)
            refused.check_failed("may still be written by a read that has not ended")
            with pytest.raises(ArenaError, match="may still be written"):
                world.planes[0].offer(other)
            with pytest.raises(ArenaError, match="may still be written"):
                world.planes[0].fill(other, READ)
            elsewhere = world.receive(3, other, 0, feeds, READ, offset_bytes=MODEL)
            elsewhere.check_completed(other)
            world.planes[0].withdraw(other)
            # Its reads end, and what they bring lies where nothing else does.
            holder.go_on()
            _wait_for_reads(world, are_there=False)
            world.receive(4, other, 0, feeds, READ).check_completed(other)
            assert world.holds(0, other)


@needs_nixl
def test_a_holder_that_dies_in_mid_read_gives_the_bytes_back() -> None:
    with World(2, 2 * MODEL, carrier="nixl") as world:
        other = _other_model(world)
        with _FrozenHolder(world) as holder:
            reader = holder.give(1)
            holder.kill()
            assert reader.wait("feed_failed")[1] == holder.ref
            _wait_for_reads(world, are_there=False)
        world.planes[0].abort(1)
        world.receive(2, other, 0, [world.feed(1, other, READ)], READ).check_completed(other)
        assert world.holds(0, other)


@needs_nixl
def test_chunks_of_a_holder_that_hangs_come_from_another_one_when_its_reads_have_ended() -> None:
    with World(2, 2 * MODEL, carrier="nixl", stall_s=0.5) as world, _FrozenHolder(world) as holder:
        write_model(world.arenas[1], [MODEL])
        world.planes[1].offer(holder.manifest)
        reader = holder.give(1)
        reader.wait("feed_stalled")
        world.planes[0].amend(1, (world.feed(1, holder.manifest, READ),))
        # Those that are not under way come at once.
        world.wait_chunks(0, MODEL // READ - READS_MAX)
        assert world.planes[0].writes.ranges(0, MODEL)
        holder.go_on()
        reader.check_completed(holder.manifest)
        assert world.holds(0, holder.manifest)
        assert world.planes[1].usage().parameter_sent_bytes == MODEL


@needs_nixl
def test_a_plan_whose_read_never_ends_fails_and_its_bytes_stay_taken() -> None:
    limits = {"stall_s": 0.1, "withdraw_wait_s": 0.05}
    with World(2, 2 * MODEL, carrier="nixl", **limits) as world, _FrozenHolder(world) as holder:
        other = _other_model(world)
        reader = holder.give(1)
        reader.wait("feed_stalled")
        world.planes[0].disconnect(holder.ref)
        reader.check_failed("has not ended")
        refused = world.receive(2, other, 0, [world.feed(1, other, READ)], READ)
        refused.check_failed("may still be written")


def _wait_for_reads(world: World, are_there: bool) -> None:
    """Reads into the first model's bytes are under way, or none is."""
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if bool(world.planes[0].writes.ranges(0, MODEL)) == are_there:
            return
        pause.wait(0.01)
    raise AssertionError("a read has not ended" if not are_there else "no read has begun")
