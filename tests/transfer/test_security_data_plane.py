"""Data planes of a pool with certificates: what the network sees of parcels and parameters, and who
may connect. (The rows of the table in docs/security.md that are about the data plane.)"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from transfer_world import WAIT_S, Recorder, World, write_model

from livescale.common.credentials import Credentials
from livescale.runtime.join.cluster_folder import ClusterFolder
from livescale.transfer.formats.orders import ContentChecks, TransferError
from livescale.transfer.formats.sealing import Protection
from livescale.values.types import Manifest

pytestmark = pytest.mark.usefixtures("machine")

MIB = 1 << 20
CHUNK = 300_000
LAYERS = [300_000, 0, 700_000, 200_000]
SECRET = "a pool's secret, of 128 bits"
PARCEL = b"rows and KV of a prompt that no other process may read" * 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cluster") / "pool"
    folder = ClusterFolder(path)
    folder.init()
    for name in ("alice", "bob"):
        folder.add(name)
    return path


def protection(folder: Path, *, seals: bool = True, secret: str = SECRET) -> Protection:
    return Protection(Credentials(folder), secret, lambda is_one_machine: seals)


def members(cluster: Path, *, seals: bool = True) -> list[Protection]:
    return [protection(cluster / name, seals=seals) for name in ("alice", "bob")]


class Tap:
    """Stands between two data planes: keeps what it passes on, and may change it."""

    def __init__(self, to: tuple[str, int]) -> None:
        self._to = to
        self.kept = bytearray()
        #: gets each part of the called side's bytes and where it begins; may change it
        self.change: Callable[[bytearray, int], None] = lambda part, start: None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()[:2]
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        for end in [self._listener, *self._ends]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_S)
        for end in [self._listener, *self._ends]:
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                called = socket.create_connection(self._to)
                self._ends += [caller, called]
                for source, sink, is_answer in ((caller, called, False), (called, caller, True)):
                    thread = threading.Thread(target=self._pass, args=(source, sink, is_answer))
                    self._threads.append(thread)
                    thread.start()

    def _pass(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while part := bytearray(source.recv(1 << 16)):
                if is_answer:
                    self.change(part, passed)
                    passed += len(part)
                self.kept += part
                sink.sendall(part)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def tapped(protections: list[Protection | None] | list[Protection]) -> Iterator[tuple[World, Tap]]:
    """Worker 1 reaches worker 0 through the tap, and worker 0 does not know worker 1's address."""
    with World(
        2, 2 * MIB, are_introduced=False, secret=SECRET, protection=protections, handshake_s=WAIT_S
    ) as world:
        tap = Tap(world.planes[0].address)
        try:
            world.planes[1].introduce(world.refs[0], tap.address)
            yield world, tap
        finally:
            tap.close()


def receive(world: World, manifest: Manifest) -> Recorder:
    checks = ContentChecks.NETWORK
    feed = world.feed(0, manifest, CHUNK)
    return world.receive(9, manifest, 1, [feed], CHUNK, content_checks=checks)


# -- what the network sees --------------------------------------------------------------------


@pytest.mark.parametrize("seals", [True, False])
def test_parcels_are_never_readable_and_parameters_as_was_asked(cluster: Path, seals: bool) -> None:
    came = threading.Event()
    bodies: list[bytes] = []

    def on_parcel(_: object, body: bytes) -> None:
        bodies.append(body)
        came.set()

    with tapped(members(cluster, seals=seals)) as (world, tap):
        world.planes[0].on_parcel = on_parcel
        manifest = write_model(world.arenas[0], LAYERS)
        world.planes[0].offer(manifest)
        large = PARCEL * 1000
        world.planes[1].post(world.refs[0], large)
        assert came.wait(WAIT_S)
        assert bodies == [large]
        receive(world, manifest).check_completed(manifest)
        assert world.holds(1, manifest)
        assert world.planes[1].probe(world.refs[0], MIB) > 0
        shown, parameters = bytes(tap.kept), world_bytes(manifest, world)
    assert PARCEL[:40] not in shown
    assert b"LScl" not in shown, "no header of a frame"
    assert (parameters[1000:1064] in shown) is not seals


def world_bytes(manifest: Manifest, world: World) -> bytes:
    return bytes(world.arenas[0].view(0, sum(entry.size_bytes for entry in manifest.layers)))


def test_one_side_that_wants_parameters_sealed_is_enough(cluster: Path) -> None:
    both = [protection(cluster / "alice", seals=True), protection(cluster / "bob", seals=False)]
    with tapped(both) as (world, tap):
        manifest = write_model(world.arenas[0], LAYERS)
        world.planes[0].offer(manifest)
        receive(world, manifest).check_completed(manifest)
        assert world_bytes(manifest, world)[1000:1064] not in bytes(tap.kept)


# -- bytes that are changed -------------------------------------------------------------------


def change_one_byte(part: bytearray, start: int) -> None:
    """`start`: what has passed before `part`, in bytes. In the middle of the parameters."""
    place = 400_000 - start
    if 0 <= place < len(part):
        part[place] ^= 1


def test_sealed_bytes_that_were_changed_end_the_connection(cluster: Path) -> None:
    with tapped(members(cluster)) as (world, tap):
        manifest = write_model(world.arenas[0], LAYERS)
        world.planes[0].offer(manifest)
        tap.change = change_one_byte
        recorder = receive(world, manifest)
        assert "changed on the way" in str(recorder.wait("feed_failed", "failed"))


def test_plain_bytes_that_were_changed_are_no_layer(cluster: Path) -> None:
    """With data_plane_tls off: the manifest, which came over TLS, says what they should be."""
    with tapped(members(cluster, seals=False)) as (world, tap):
        manifest = write_model(world.arenas[0], LAYERS)
        world.planes[0].offer(manifest)
        tap.change = change_one_byte
        name, received_bytes = receive(world, manifest).verdict()
        assert name == "completed"
        assert world.holds(1, manifest)
        assert received_bytes > sum(LAYERS), "the layer was asked for again"


def test_a_member_that_sends_other_bytes_with_the_right_checksum(cluster: Path) -> None:
    """Such bytes cannot be made here: the manifest names another content hash instead."""
    with tapped(members(cluster, seals=False)) as (world, _):
        manifest = write_model(world.arenas[0], LAYERS)
        layers = list(manifest.layers)
        layers[2] = msgspec.structs.replace(layers[2], content_hash="0" * 64)
        changed = msgspec.structs.replace(manifest, layers=tuple(layers))
        world.planes[0].offer(changed)
        receive(world, changed).check_failed("layer 2", "SHA-256", "0" * 64)


# -- who may connect --------------------------------------------------------------------------


def check_no_way(protections: list[Protection | None]) -> None:
    with tapped(protections) as (world, _):
        with pytest.raises(TransferError):
            world.planes[1].post(world.refs[0], PARCEL)
        assert world.planes[0].connected() == ()


def test_strangers_find_no_way_in(cluster: Path, tmp_path: Path) -> None:
    """Each knows the pool's secret."""
    alice, bob = members(cluster)
    strange = ClusterFolder(tmp_path / "strange").init()
    check_no_way([alice, protection(strange)])
    check_no_way([protection(strange), bob])
    check_no_way([alice, None])
    check_no_way([None, bob])


def test_a_gateway_is_asked_for_nothing_and_gets_nothing(tmp_path: Path) -> None:
    """A certificate of the pool's own authority, for a machine that may be a gateway only."""
    folder = ClusterFolder(tmp_path / "pool")
    folder.init()
    alice, web = protection(folder.add("alice")), protection(folder.add("web", is_gateway=True))
    check_no_way([alice, web])
    check_no_way([web, alice])


def test_another_secret_is_no_way_in(cluster: Path) -> None:
    """Its keys are others."""
    alice, _ = members(cluster)
    check_no_way([alice, protection(cluster / "bob", secret="that of before, of 128 bits")])


def test_a_revoked_member_finds_no_way_in(tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path / "pool")
    folder.init()
    for name in ("alice", "bob"):
        folder.add(name)
    both: list[Protection | None] = list(members(tmp_path / "pool"))
    folder.revoke("bob")
    check_no_way(both)


# -- transfers as of plain pools --------------------------------------------------------------


@pytest.mark.parametrize("seals", [True, False])
def test_a_chain_of_five_moves_right_bytes_with_rates(cluster: Path, seals: bool) -> None:
    limits = {
        "uplink_bytes_per_s": 20_000_000,
        "downlink_bytes_per_s": 20_000_000,
        "protection": protection(cluster / "alice", seals=seals),
        "secret": SECRET,
    }
    came: queue.Queue[bytes] = queue.Queue()
    with World(5, 2 * MIB, on_parcel=lambda _, body: came.put(body), **limits) as world:
        manifest = write_model(world.arenas[0], LAYERS)
        world.planes[0].offer(manifest)
        recorders = []
        for node in range(1, 5):
            feed = world.feed(node - 1, manifest, CHUNK)
            recorders.append(world.receive(9, manifest, node, [feed], CHUNK))
        # It holds chunks back, and comes in several pieces.
        parcel = bytes(range(256)) * 2000
        world.planes[4].post(world.refs[1], parcel, WAIT_S)
        assert came.get(timeout=WAIT_S) == parcel
        for node, recorder in enumerate(recorders, 1):
            recorder.check_completed(manifest)
            assert world.holds(node, manifest)
