"""Who does not know the pool's secret neither learns it, nor is read, nor keeps members out."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from livescale.config.pool import PoolConfig
from livescale.control.state.config import ControllerConfig
from livescale.messages.epochs import Acting
from livescale.runtime.children.pool_process import Child
from livescale.runtime.gateway_process.pool_backend import PoolBackend
from livescale.runtime.wire.boot import ControllerBoot, GatewayBoot
from livescale.runtime.wire.examination import ExamineBoot, examine
from livescale.runtime.wire.protocol import (
    Address,
    Catalog,
    Examine,
    Examining,
    GatewayHello,
    ToController,
    ToExaminer,
)
from livescale.runtime.wire.wire_channel import Wire, open_wire
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")

WAIT_S = 30.0
HOST = "127.0.0.1"
SECRET = "a pool's secret, of 128 bits"
NONCE = bytes(range(32))
PROTOCOL = b"LSw2"
DOOR = "controller"
STRANGERS = 200

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def proof(secret: str, side: bytes, nonces: bytes, door: str = DOOR) -> bytes:
    """What the modules' documentation says, once more."""
    names = b"a wire of a pool, to " + door.encode()
    return hmac.new(secret.encode(), side + nonces + names, hashlib.sha256).digest()


def run(story: Awaitable[None]) -> None:
    async def in_time() -> None:
        await asyncio.wait_for(story, patient(WAIT_S))

    asyncio.run(in_time())


@contextlib.asynccontextmanager
async def listening(serve: Serve) -> AsyncIterator[Address]:
    server = await asyncio.start_server(serve, HOST, 0)
    try:
        yield Address(*server.sockets[0].getsockname()[:2])
    finally:
        server.close()


@contextlib.asynccontextmanager
async def guarded(
    served: list[Wire[ToController]], **bounds: int | float
) -> AsyncIterator[Address]:
    """A door behind which every message is answered."""
    from livescale.runtime.wire.doors import Door

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire: Wire[ToController] = Wire(reader, writer, ToController)
        served.append(wire)
        async for _ in wire:
            wire.send(Catalog(()))

    async with listening(Door(SECRET, DOOR, serve, **bounds).accept) as address:  # type: ignore[arg-type]
        try:
            yield address
        finally:
            for wire in served:
                wire.close()


async def enter(address: Address, secret: str = SECRET, door: str = DOOR) -> Wire[ToExaminer]:
    return await open_wire(address, ToExaminer, secret=secret, door=door)


async def is_ended(reader: asyncio.StreamReader) -> bool:
    """Nothing comes but the end."""
    try:
        return await reader.read(1) == b""
    except ConnectionError:
        return True


# -- the secret -----------------------------------------------------------------------------------


def gateway_boot(controller: Address) -> GatewayBoot:
    """As little as a gateway needs to look for its controller."""
    return GatewayBoot(
        secret=SECRET,
        gateway="g0",
        listen_fd=-1,
        controller=controller,
        catalog=Catalog(()),
        pool=PoolConfig(queue_requests_max=1, drain_timeout_s=1, slo="ttft=1s"),
        key_digests=(),
    )


async def as_gateway(controller: Address) -> None:
    await PoolBackend(gateway_boot(controller)).run()


async def as_examiner(controller: Address) -> None:
    await examine(ExamineBoot(SECRET, controller))


@pytest.mark.parametrize("caller", [as_gateway, as_examiner])
@pytest.mark.parametrize("answer", [b"", b"x" * 68, PROTOCOL + NONCE + bytes(32)])
def test_a_false_controller_learns_nothing(
    caller: Callable[[Address], Awaitable[None]], answer: bytes
) -> None:
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = await reader.read(36)
        writer.write(answer)
        if not answer:
            writer.write_eof()
        with contextlib.suppress(ConnectionError):
            said += await reader.read(1 << 16)
        heard.put_nowait(said)
        writer.close()

    async def story() -> None:
        async with listening(listen) as address:
            calling = asyncio.ensure_future(caller(address))
            said = await heard.get()
            calling.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await calling
        assert SECRET.encode() not in said
        assert said.startswith(PROTOCOL)
        assert len(said) == len(PROTOCOL) + len(NONCE)

    run(story())


FORGERIES: dict[str, Callable[[bytes], bytes]] = {
    "another secret": lambda a: proof("guess", b"caller", NONCE + a[:32]),
    "no secret": lambda a: proof("", b"caller", NONCE + a[:32]),
    "its own proof": lambda a: a[32:],
    "a proof of the other side": lambda a: proof(SECRET, b"called", NONCE + a[:32]),
    "a proof of another time": lambda a: proof(SECRET, b"caller", NONCE + NONCE),
    "a proof for another door": lambda a: proof(
        SECRET, b"caller", NONCE + a[:32], "tokens of w0.0"
    ),
}


@pytest.mark.parametrize("name", [*FORGERIES, "the right one"])
def test_only_the_right_proof_is_let_in(name: str) -> None:
    async def story() -> None:
        served: list[Wire[ToController]] = []
        async with guarded(served) as address:
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(PROTOCOL + NONCE)
            said = await reader.readexactly(68)
            assert said.startswith(PROTOCOL)
            answer = said[4:]
            assert answer[32:] == proof(SECRET, b"called", NONCE + answer[:32])
            if name in FORGERIES:
                writer.write(FORGERIES[name](answer))
                assert await is_ended(reader)
                assert not served
                writer.close()
            else:
                writer.write(proof(SECRET, b"caller", NONCE + answer[:32]))
                wire: Wire[ToExaminer] = Wire(reader, writer, ToExaminer)
                wire.send(GatewayHello("g0"))
                assert await wire.receive() == Catalog(())
                wire.close()

    run(story())


@pytest.mark.parametrize(("secret", "door"), [("guess", DOOR), (SECRET, "tokens of w0.0")])
def test_a_caller_leaves_a_door_that_is_not_the_one_it_looks_for(secret: str, door: str) -> None:
    async def story() -> None:
        served: list[Wire[ToController]] = []
        async with guarded(served) as address:
            with pytest.raises(OSError, match="is not the"):
                await enter(address, secret, door)
        assert not served

    run(story())


@settings(max_examples=examples(40))
@given(first=st.binary(max_size=100), greets=st.booleans(), second=st.binary(max_size=100))
def test_whatever_a_stranger_sends_it_receives_one_answer_at_most(
    first: bytes, greets: bool, second: bytes
) -> None:
    async def story() -> None:
        served: list[Wire[ToController]] = []
        async with guarded(served) as address:
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write((PROTOCOL + NONCE if greets else first) + second)
            writer.write_eof()
            received = b""
            with contextlib.suppress(ConnectionError):
                received = await reader.read(1 << 16)
                assert await is_ended(reader)
            assert len(received) in (0, 68)
            writer.close()
        assert not served

    run(story())


# -- strangers ------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def controller() -> AsyncIterator[tuple[Address, Child]]:
    """A real controller process."""
    with socket.create_server((HOST, 0)) as listener:
        boot = ControllerBoot(
            secret=SECRET,
            listen_fd=listener.fileno(),
            config=ControllerConfig((), 0),
            pool=PoolConfig(),
            catalog=Catalog(()),
        )
        child = Child("controller", "controller", lambda _: boot, (listener.fileno(),))
        await child.start(PoolConfig())
        watching = asyncio.ensure_future(child.watch())
        try:
            await child.is_ready.wait()
            yield Address(*listener.getsockname()[:2]), child
        finally:
            child.signal(9)
            await watching


def test_a_stranger_makes_nobody_read_a_frame() -> None:
    """It claims 64 MiB, as a member may send, and is cut off long before."""

    async def story() -> None:
        async with controller() as (address, _):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write((64 << 20).to_bytes(4, "big"))
            sent = 0
            with contextlib.suppress(ConnectionError):
                while sent < 63 << 20:
                    writer.write(bytes(1 << 20))
                    await writer.drain()
                    sent += 1 << 20
            # What the system's buffers take, at most.
            assert sent < 32 << 20
            assert await is_ended(reader)
            writer.close()

    run(story())


def test_idle_strangers_keep_no_member_out() -> None:
    async def story() -> None:
        async with controller() as (address, _):
            strangers = [
                await asyncio.open_connection(address.host, address.port) for _ in range(STRANGERS)
            ]
            wire = await enter(address)
            wire.send(GatewayHello("g0"))
            assert isinstance(await wire.receive(), Acting)
            assert isinstance(await wire.receive(), Catalog)
            # Those who came first had to make room.
            assert await is_ended(strangers[0][0])
            # More of them do not drop who is in.
            strangers += [
                await asyncio.open_connection(address.host, address.port) for _ in range(STRANGERS)
            ]
            assert await is_ended(strangers[STRANGERS][0])
            wire.send(Examine("anybody there?"))
            answers = (message async for message in wire if isinstance(message, Examining))
            assert await anext(answers) == Examining("anybody there?", ())
            wire.close()
            for _, writer in strangers:
                writer.close()

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    run(story())


def test_strangers_have_little_time() -> None:
    async def story() -> None:
        served: list[Wire[ToController]] = []
        async with guarded(served, greeting_s=0.2) as address:
            silent = await asyncio.open_connection(address.host, address.port)
            member = await enter(address)
            halfway = await asyncio.open_connection(address.host, address.port)
            halfway[1].write(PROTOCOL + NONCE)
            assert len(await halfway[0].readexactly(68)) == 68
            for reader, writer in (silent, halfway):
                assert await is_ended(reader)
                writer.close()
            member.send(GatewayHello("g0"))
            assert await member.receive() == Catalog(())
            member.close()

    run(story())


@pytest.mark.parametrize("count", [1, 4, 5, 12])
def test_the_newest_strangers_stay(count: int) -> None:
    async def story() -> None:
        served: list[Wire[ToController]] = []
        async with guarded(served, strangers_max=4) as address:
            members = [await enter(address) for _ in range(6)]
            strangers = []
            for _ in range(count):
                reader, writer = await asyncio.open_connection(address.host, address.port)
                writer.write(PROTOCOL + NONCE)
                strangers.append((reader, writer, await reader.readexactly(68)))
            for reader, writer, _ in strangers[: max(0, count - 4)]:
                assert await is_ended(reader)
                writer.close()
            for reader, writer, answer in strangers[-4:]:
                writer.write(proof(SECRET, b"caller", NONCE + answer[4:36]))
                members.append(Wire(reader, writer, ToExaminer))
            for wire in members:
                wire.send(GatewayHello("g0"))
                assert await wire.receive() == Catalog(())
                wire.close()

    run(story())
