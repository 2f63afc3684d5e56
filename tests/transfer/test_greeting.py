"""Who has a wrong token gets nothing: no bytes, no descriptor, no word but HELLO."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_world import WAIT_S, World, write_model

from effort import examples
from livescale.transfer.formats.frames import HEADER_BYTES, Frame, FrameKind, decode_header
from livescale.values.types import WorkerRef

pytestmark = pytest.mark.usefixtures("machine")

MIB = 1 << 20
CHUNK = 64 << 10
SECRET = "a pool's secret"
ME, IT = WorkerRef(7, 1), WorkerRef(0)
NONCE = bytes(range(32))


def proof(secret: str, side: bytes, nonces: bytes, caller: WorkerRef, called: WorkerRef) -> bytes:
    """What the module's documentation says, once more."""
    names = struct.pack(
        ">IQIQ", caller.worker, caller.incarnation, called.worker, called.incarnation
    )
    return hmac.new(secret.encode(), side + nonces + names, hashlib.sha256).digest()


def hello(payload: bytes, sender: WorkerRef = ME) -> bytes:
    return Frame(FrameKind.HELLO, sender, payload_bytes=len(payload)).encode() + payload


def hear(raw: socket.socket) -> bytes:
    """The payload of the HELLO that comes; empty if the connection ends."""
    header = raw.recv(HEADER_BYTES, socket.MSG_WAITALL)
    if not header:
        return b""
    frame = decode_header(header)
    assert frame.kind is FrameKind.HELLO
    return raw.recv(frame.payload_bytes, socket.MSG_WAITALL)


@contextlib.contextmanager
def calling(world: World, is_shm: bool) -> Iterator[socket.socket]:
    """A raw connection to worker 0."""
    path = world.planes[0].shm_path
    raw = socket.socket(socket.AF_UNIX if is_shm else socket.AF_INET)
    raw.settimeout(WAIT_S)
    raw.connect(path if is_shm else world.planes[0].address)
    with raw:
        yield raw


def is_refused(raw: socket.socket) -> bool:
    """Nothing comes but the end: neither bytes nor descriptors."""
    try:
        data, descriptors, _, _ = socket.recv_fds(raw, 4096, 4)
    except ConnectionError:
        return True
    return not data and not descriptors


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("shm")
    with World(1, MIB, secret=SECRET, shm_directory=directory, host_name="one") as world:
        yield world


@pytest.mark.parametrize("is_shm", [False, True])
def test_who_proves_that_it_knows_the_secret_is_let_in(guarded: World, is_shm: bool) -> None:
    with calling(guarded, is_shm) as raw:
        raw.sendall(hello(NONCE))
        answer = hear(raw)
        nonces = NONCE + answer[:32]
        assert answer[32:] == proof(SECRET, b"called", nonces, ME, IT)
        raw.sendall(hello(proof(SECRET, b"caller", nonces, ME, IT)))
        if is_shm:
            data, descriptors, _, _ = socket.recv_fds(raw, 4096, 2)
            assert data
            assert len(descriptors) == 2
            for descriptor in descriptors:
                socket.close(descriptor)
        else:
            raw.sendall(Frame(FrameKind.PROBE, ME, 3, chunk=5).encode())
            header = raw.recv(HEADER_BYTES, socket.MSG_WAITALL)
            assert decode_header(header).kind is FrameKind.PROBED


FORGERIES: dict[str, Callable[[bytes], bytes]] = {
    "another secret": lambda a: proof("guess", b"caller", NONCE + a[:32], ME, IT),
    "no secret": lambda a: proof("", b"caller", NONCE + a[:32], ME, IT),
    "its own proof": lambda a: a[32:],
    "a proof of the other side": lambda a: proof(SECRET, b"called", NONCE + a[:32], ME, IT),
    "a proof of another time": lambda a: proof(SECRET, b"caller", NONCE + NONCE, ME, IT),
    "a proof of another worker": lambda a: proof(
        SECRET, b"caller", NONCE + a[:32], WorkerRef(7, 2), IT
    ),
    "a proof for another worker": lambda a: proof(
        SECRET, b"caller", NONCE + a[:32], ME, WorkerRef(1)
    ),
}


@pytest.mark.parametrize("is_shm", [False, True])
@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_proof_ends_the_connection(guarded: World, is_shm: bool, name: str) -> None:
    with calling(guarded, is_shm) as raw:
        raw.sendall(hello(NONCE))
        raw.sendall(hello(FORGERIES[name](hear(raw))))
        assert is_refused(raw)
    assert guarded.planes[0].connected() == ()


@settings(max_examples=examples(40))
@given(is_shm=st.booleans(), first=st.binary(max_size=100), second=st.binary(max_size=100))
def test_whatever_a_stranger_says_it_hears_at_most_one_hello(
    guarded: World, is_shm: bool, first: bytes, second: bytes
) -> None:
    for said in (first, hello(NONCE)):
        with calling(guarded, is_shm) as raw:
            raw.sendall(said)
            if said is not first:
                assert len(hear(raw)) == 64
            with contextlib.suppress(OSError):
                raw.sendall(hello(second[:32].ljust(32)) if len(second) > 50 else second)
                raw.shutdown(socket.SHUT_WR)
            assert is_refused(raw)
    assert guarded.planes[0].connected() == ()


def test_frames_in_the_place_of_a_proof_do_nothing(guarded: World) -> None:
    for kind in FrameKind:
        with calling(guarded, is_shm=False) as raw:
            raw.sendall(hello(NONCE))
            assert hear(raw)
            raw.sendall(Frame(kind, ME, 1, chunk=5).encode())
            raw.shutdown(socket.SHUT_WR)
            assert is_refused(raw)


def test_a_false_holder_hears_no_proof() -> None:
    """Whoever listens where a worker is expected must prove itself first."""
    with World(1, MIB, secret=SECRET) as world, socket.create_server(("127.0.0.1", 0)) as false:
        heard: list[bytes] = []

        def answer() -> None:
            raw, _ = false.accept()
            with raw:
                raw.settimeout(WAIT_S)
                nonces = hear(raw) + NONCE
                wrong = proof("guess", b"called", nonces, IT, ME)
                raw.sendall(hello(NONCE + wrong))
                heard.append(hear(raw))

        thread = threading.Thread(target=answer)
        thread.start()
        manifest = write_model(world.arenas[0], [1000])
        world.refs.append(ME)
        world.planes[0].introduce(ME, false.getsockname())
        recorder = world.receive(1, manifest, 0, [world.feed(1, manifest, CHUNK)], CHUNK)
        assert "has a wrong token" in recorder.wait("feed_failed")[2]
        thread.join(WAIT_S)
        assert heard == [b""]


def test_idle_strangers_keep_no_holder_out() -> None:
    """More of them than are listened to at a time; a member that comes then is in at once."""
    with (
        World(2, MIB, False, secret=SECRET, handshake_s=2 * WAIT_S) as world,
        contextlib.ExitStack() as stack,
    ):
        strangers = [stack.enter_context(calling(world, is_shm=False)) for _ in range(200)]
        # Those that came first had to make room.
        assert is_refused(strangers[0])
        first, second = world.planes
        first.introduce(second.worker, second.address)
        second.introduce(first.worker, first.address)
        manifest = write_model(world.arenas[0], [300_000])
        world.planes[0].offer(manifest)
        recorder = world.receive(1, manifest, 1, [world.feed(0, manifest, CHUNK)], CHUNK)
        recorder.check_completed(manifest)
        assert world.holds(1, manifest)


def test_pools_of_different_secrets_do_not_mix(tmp_path: Path) -> None:
    secrets = [SECRET, SECRET, "another pool's"]
    with World(3, MIB, secret=secrets, shm_directory=tmp_path, host_name="one") as world:
        manifest = write_model(world.arenas[0], [300_000])
        world.planes[0].offer(manifest)
        feed = world.feed(0, manifest, CHUNK)
        friend, stranger = (world.receive(1, manifest, k, [feed], CHUNK) for k in (1, 2))
        friend.check_completed(manifest)
        assert world.holds(1, manifest)
        assert stranger.wait("feed_failed")[1] == world.refs[0]
        assert world.planes[2].connected() == ()
        assert not any(world.arenas[2].view(0, MIB))
