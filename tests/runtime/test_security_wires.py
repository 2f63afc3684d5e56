"""Wires of a pool with certificates: who may talk on them, and what the network sees. (The rows of
the table in docs/security.md that are about wires.)"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path

import pytest
from certificates import Cluster

from livescale.common.credentials import Credentials
from livescale.runtime.wire.doors import Door, OutcastError, StrangerError
from livescale.runtime.wire.protocol import (
    Address,
    Catalog,
    Examine,
    GatewayHello,
    ToController,
    ToExaminer,
)
from livescale.runtime.wire.wire_channel import Wire, open_wire
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")

HOST = "127.0.0.1"
SECRET = "a pool's secret, of 128 bits"
DOOR = "controller"
WAIT_S = 30.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("cluster") / "pool")


def run(story: Awaitable[None]) -> None:
    async def in_time() -> None:
        await asyncio.wait_for(story, patient(WAIT_S))

    asyncio.run(in_time())


@contextlib.asynccontextmanager
async def door(
    tls: Credentials | None,
    served: list[Wire[ToController]] | None = None,
    name: str = DOOR,
    secret: str = SECRET,
) -> AsyncIterator[Address]:
    """Every message is answered behind it."""
    wires: list[Wire[ToController]] = [] if served is None else served

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire: Wire[ToController] = Wire(reader, writer, ToController)
        wires.append(wire)
        async for _ in wire:
            wire.send(Catalog(()))

    server = await asyncio.start_server(Door(secret, name, serve, tls=tls).accept, HOST, 0)
    try:
        yield Address(*server.sockets[0].getsockname()[:2])
    finally:
        server.close()
        for wire in wires:
            wire.break_off("the test is over")


async def enter(
    address: Address, tls: Credentials | None, secret: str = SECRET, name: str = DOOR
) -> Wire[ToExaminer]:
    return await open_wire(address, ToExaminer, secret=secret, door=name, tls=tls)


async def is_answered(wire: Wire[ToExaminer]) -> bool:
    wire.send(Examine("c"))
    return isinstance(await wire.receive(), Catalog)


class Tap:
    """Carries the bytes of connections to an address, keeps them, and may change them."""

    def __init__(self, to: Address, flip_at: int | None = None) -> None:
        """The bit of the caller's byte `flip_at` is another one."""
        self._to = to
        self._flip_at = flip_at
        self.sent = bytearray()
        self.answered = bytearray()
        self._listener = socket.create_server((HOST, 0))
        self.address = Address(*self._listener.getsockname()[:2])
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(patient(WAIT_S))

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                called = socket.create_connection((self._to.host, self._to.port))
                self._ends += [caller, called]
                carrying = threading.Thread(target=self._carry, args=(caller, called))
                self._threads.append(carrying)
                carrying.start()

    def _carry(self, caller: socket.socket, called: socket.socket) -> None:
        back = threading.Thread(target=self._pass, args=(called, caller, self.answered))
        back.start()
        self._pass(caller, called, self.sent, self._flip_at)
        back.join(patient(WAIT_S))
        caller.close()
        called.close()

    @staticmethod
    def _pass(
        source: socket.socket, sink: socket.socket, kept: bytearray, flip_at: int | None = None
    ) -> None:
        with contextlib.suppress(OSError):
            while part := bytearray(source.recv(1 << 16)):
                place = -1 if flip_at is None else flip_at - len(kept)
                if 0 <= place < len(part):
                    part[place] ^= 1
                kept += part
                sink.sendall(part)
        for end in (sink, source):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def closing(tap: Tap) -> Iterator[Tap]:
    try:
        yield tap
    finally:
        tap.close()


# -- members ----------------------------------------------------------------------------------


def test_members_talk_and_the_network_reads_nothing(cluster: Cluster) -> None:
    async def story() -> None:
        async with door(cluster.head()) as address:
            with closing(Tap(address)) as tap:
                wire = await enter(tap.address, cluster.member("alice"))
                wire.send(GatewayHello("a-word-that-is-secret"))
                assert isinstance(await wire.receive(), Catalog)
                assert await is_answered(wire)
                wire.close()
                for kept in (tap.sent, tap.answered):
                    assert b"a-word-that-is-secret" not in kept
                    assert SECRET.encode() not in kept
                    assert b"LSw2" not in kept
                    assert kept

    run(story())


def test_large_messages_come_whole_both_ways(cluster: Cluster) -> None:
    """More than a stream reader's buffer and many TLS records, beside heartbeats."""

    async def story() -> None:
        async with door(cluster.head()) as address:
            wire = await enter(address, cluster.member("alice"))
            for size in (1, 100_000, 3_000_000):
                wire.beat()
                wire.send(GatewayHello("x" * size))
                assert isinstance(await wire.receive(), Catalog)
            wire.close()

    run(story())


# -- refused ----------------------------------------------------------------------------------


def test_a_certificate_of_another_authority_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    strange = Cluster(tmp_path / "strange")

    async def story() -> None:
        served: list[Wire[ToController]] = []
        async with door(cluster.head(), served) as address:
            with pytest.raises(StrangerError, match="certificate"):
                await enter(address, strange.head())
        async with door(strange.head(), served) as address:
            with pytest.raises(StrangerError, match="certificate"):
                await enter(address, cluster.member("alice"))
        assert served == []

    run(story())


def test_a_member_without_a_certificate_is_refused(cluster: Cluster) -> None:
    """TLS alone is not enough, nor is the secret."""

    async def story() -> None:
        served: list[Wire[ToController]] = []
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(cluster.head_dir / "ca.pem")
        async with door(cluster.head(), served) as address:
            reader, writer = await asyncio.open_connection(HOST, address.port, ssl=context)
            with pytest.raises((OSError, EOFError)):
                await reader.readexactly(1)
            writer.transport.abort()
        assert served == []

    run(story())


def test_a_certificate_does_without_the_secret_as_little(cluster: Cluster) -> None:
    """A token of before, or none."""

    async def story() -> None:
        served: list[Wire[ToController]] = []
        async with door(cluster.head(), served) as address:
            for secret in ("the secret of before, 128 bits", ""):
                with pytest.raises(StrangerError, match="has a wrong token"):
                    await enter(address, cluster.member("alice"), secret)
        assert served == []

    run(story())


def test_only_a_head_is_taken_for_the_controller(cluster: Cluster) -> None:
    """A member's key does not make another machine the head; gateways it may call."""

    async def story() -> None:
        async with door(cluster.member("mallory")) as address:
            with pytest.raises(OSError, match="not a head node's"):
                await enter(address, cluster.member("alice"))
        async with door(cluster.member("bob"), name="tokens of w1.0") as address:
            wire = await enter(address, cluster.head(), name="tokens of w1.0")
            assert await is_answered(wire)
            wire.close()

    run(story())


def test_plain_text_is_refused_where_tls_is_asked_for(cluster: Cluster) -> None:
    async def story() -> None:
        served: list[Wire[ToController]] = []
        async with door(cluster.head(), served) as address:
            with pytest.raises(ConnectionError, match="is not the controller"):
                await enter(address, None)
        assert served == []

    run(story())


def test_a_member_with_a_certificate_never_talks_in_plain_text(cluster: Cluster) -> None:
    async def story() -> None:
        async with door(None) as address:
            with closing(Tap(address)) as tap:
                with pytest.raises(OSError, match="is not the controller"):
                    await enter(tap.address, cluster.member("alice"))
                # The first record of TLS and nothing that is ours.
                assert tap.sent.startswith(b"\x16\x03")
                assert b"LSw2" not in tap.sent

    run(story())


def test_older_versions_of_tls_are_refused(cluster: Cluster) -> None:
    """From either side: nothing is agreed on but 1.3."""

    def context(protocol: int) -> ssl.SSLContext:
        old = ssl.SSLContext(protocol)
        old.check_hostname = False
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        old.load_verify_locations(cluster.head_dir / "ca.pem")
        old.load_cert_chain(cluster.head_dir / "cert.pem", cluster.head_dir / "key.pem")
        return old

    async def story() -> None:
        served: list[Wire[ToController]] = []
        async with door(cluster.head(), served) as address:
            with pytest.raises(OSError):  # noqa: PT011 - the library's words differ
                await asyncio.open_connection(
                    HOST, address.port, ssl=context(ssl.PROTOCOL_TLS_CLIENT)
                )
        assert served == []

        async def nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        server = await asyncio.start_server(nothing, HOST, 0, ssl=context(ssl.PROTOCOL_TLS_SERVER))
        async with server:
            old = Address(*server.sockets[0].getsockname()[:2])
            with pytest.raises(ConnectionError, match=r"do not match|is not the controller"):
                await enter(old, cluster.member("alice"))

    run(story())


async def is_reached(address: Address, tls: Credentials) -> bool:
    try:
        return await is_answered(await enter(address, tls))
    except OSError:
        return False


# -- replayed, changed ------------------------------------------------------------------------


@pytest.mark.parametrize("has_certificates", [True, False])
def test_what_a_member_once_sent_opens_no_door_again(
    cluster: Cluster, has_certificates: bool
) -> None:
    async def story() -> None:
        served: list[Wire[ToController]] = []
        tls = cluster.head() if has_certificates else None
        async with door(tls, served) as address:
            with closing(Tap(address)) as tap:
                own = cluster.member("alice") if has_certificates else None
                wire = await enter(tap.address, own)
                assert await is_answered(wire)
                wire.break_off("enough")
                sent = bytes(tap.sent)
            assert len(served) == 1
            reader, writer = await asyncio.open_connection(HOST, address.port)
            writer.write(sent)
            with contextlib.suppress(OSError):
                await reader.read()
            writer.transport.abort()
            assert len(served) == 1

    run(story())


def test_bytes_that_were_changed_on_the_way_end_the_wire(cluster: Cluster) -> None:
    """Whichever byte it is: of the handshake, the greeting, or a message."""

    async def story() -> None:
        async with door(cluster.head()) as address:
            with closing(Tap(address)) as tap:
                wire = await enter(tap.address, cluster.member("alice"))
                assert await is_answered(wire)
                wire.close()
                length = len(tap.sent)
            for flip_at in [*range(50, length - 60, length // 8), length - 60]:
                with closing(Tap(address, flip_at)) as tap:
                    assert not await is_reached(tap.address, cluster.member("alice"))

    run(story())


# -- revoked ----------------------------------------------------------------------------------


def test_a_member_that_is_revoked_is_cut_and_refused(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "pool")
    alice, bob = cluster.member("alice"), cluster.member("bob")

    async def story() -> None:
        served: list[Wire[ToController]] = []
        head = cluster.head()
        watching = asyncio.create_task(head.run())
        async with door(head, served) as address:
            of_alice, of_bob = await enter(address, alice), await enter(address, bob)
            assert await is_answered(of_alice)
            cluster.folder.revoke("alice")
            assert await of_alice.receive() is None, "the wire is cut"
            assert await is_answered(of_bob), "others go on"
            with pytest.raises(OutcastError, match="was revoked"):
                await enter(address, alice)
            assert len(served) == 2
            of_bob.close()
        watching.cancel()

    run(story())


def test_who_was_revoked_is_not_called_either(tmp_path: Path) -> None:
    """A worker's door, whose machine's certificate was revoked."""
    cluster = Cluster(tmp_path / "pool")
    alice = cluster.member("alice")
    cluster.folder.revoke("alice")

    async def story() -> None:
        async with door(alice, name="tokens of w1.0") as address:
            with pytest.raises(OSError, match="was revoked"):
                await enter(address, cluster.head(), name="tokens of w1.0")

    run(story())


def test_a_list_of_another_authority_or_an_older_one_changes_nothing(tmp_path: Path) -> None:
    cluster, strange = Cluster(tmp_path / "pool"), Cluster(tmp_path / "strange")
    first = (cluster.path / "revoked.pem").read_bytes()
    cluster.member_dir("bob")
    alice = cluster.member("alice")
    cluster.folder.revoke("bob")
    alice.look()
    known = alice.revoked_list
    for other in ((strange.path / "revoked.pem").read_bytes(), first, b"nonsense"):
        alice.keep(other)
        (cluster.member_dir("alice") / "revoked.pem").write_bytes(other)
        alice.look()
        assert alice.revoked_list == known
    with pytest.raises(ConnectionError, match="bob was revoked"):
        alice.check(der(cluster.path / "bob" / "cert.revoked"))


def der(path: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(path.read_text())


def test_strangers_that_only_begin_keep_no_member_out(cluster: Cluster) -> None:
    """Connections that never send a handshake's first byte are bounded as those of plain pools."""

    async def story() -> None:
        async with door(cluster.head()) as address:
            held = [await asyncio.open_connection(HOST, address.port) for _ in range(200)]
            wire = await enter(address, cluster.member("alice"))
            assert await is_answered(wire)
            wire.close()
            for _, writer in held:
                writer.transport.abort()

    run(story())
