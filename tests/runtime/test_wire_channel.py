"""What a wire puts on its socket, and when."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.messages.attempts import Cancel
from livescale.runtime.wire.wire_channel import Wire
from slowness import patient

WAIT_S = 60.0
MESSAGES = [Cancel(f"request-{number}", 0) for number in range(5)]
LARGE = Cancel("x" * 100_000, 0)
#: one message; messages of LARGE's size that are above the bound, with what the system buffers
HUGE_BYTES, BEYOND_BOUND = 20 << 20, 110
Work = Callable[[], Coroutine[Any, Any, None]]


def in_a_loop(work: Work) -> Callable[[], None]:
    """A test that is a coroutine."""

    def run() -> None:
        asyncio.run(asyncio.wait_for(work(), patient(WAIT_S)))

    run.__doc__ = work.__doc__
    return run


@asynccontextmanager
async def wire_and_socket() -> AsyncIterator[tuple[Wire[Cancel], socket.socket]]:
    """A wire, and what is at its other end."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=ours)
    wire: Wire[Cancel] = Wire(reader, writer, Cancel)
    try:
        yield wire, theirs
    finally:
        wire.close()
        theirs.close()


def frames(content: bytes) -> list[Cancel]:
    found = []
    while content:
        (size,) = struct.unpack_from(">I", content)
        found.append(msgspec.msgpack.decode(content[4 : 4 + size], type=Cancel))
        content = content[4 + size :]
    return found


@in_a_loop
async def test_what_is_sent_in_one_turn_goes_out_together_and_in_order() -> None:
    async with wire_and_socket() as (wire, other):
        for message in MESSAGES:
            wire.send(message)
        with pytest.raises(BlockingIOError):
            other.recv(1)
        await asyncio.sleep(0)
        assert frames(other.recv(1 << 16)) == MESSAGES
        wire.send(MESSAGES[0])
        await asyncio.sleep(0)
        assert frames(other.recv(1 << 16)) == MESSAGES[:1]


@in_a_loop
async def test_much_of_one_turn_does_not_wait_for_its_end() -> None:
    async with wire_and_socket() as (wire, other):
        wire.send(MESSAGES[0])
        wire.send(LARGE)
        assert frames(other.recv(1 << 20)) == [MESSAGES[0], LARGE]
        wire.send(MESSAGES[1])
        await asyncio.sleep(0)
        assert frames(other.recv(1 << 16)) == [MESSAGES[1]]


@in_a_loop
async def test_what_was_sent_before_the_end_still_comes() -> None:
    async with wire_and_socket() as (wire, other):
        wire.send(MESSAGES[0])
        wire.close()
        wire.send(MESSAGES[1])
        await asyncio.sleep(0)
        assert frames(other.recv(1 << 16)) == MESSAGES[:1]
        assert other.recv(1) == b""


@in_a_loop
async def test_a_peer_that_reads_nothing_is_cut_off() -> None:
    async with wire_and_socket() as (wire, _):
        check_cut_off(wire)


@in_a_loop
async def test_a_peer_that_reads_gets_a_message_above_the_bound_and_those_after_it() -> None:
    async with wire_and_socket() as (wire, other):
        sent = [Cancel("x" * HUGE_BYTES, 0), *MESSAGES]
        for message in sent:
            wire.send(message)
            # A turn of its own for each.
            await asyncio.sleep(0)
        wire.close()
        content, loop = bytearray(), asyncio.get_running_loop()
        while part := await loop.sock_recv(other, 1 << 20):
            content += part
        assert wire.error is None
        assert frames(bytes(content)) == sent


@in_a_loop
async def test_a_peer_that_does_not_read_a_message_above_the_bound_is_cut_off() -> None:
    async with wire_and_socket() as (wire, _):
        wire.send(Cancel("x" * HUGE_BYTES, 0))
        check_cut_off(wire)


@in_a_loop
async def test_a_message_above_the_bound_raises_it_only_until_it_is_read() -> None:
    async with wire_and_socket() as (wire, other):
        wire.send(Cancel("x" * HUGE_BYTES, 0))
        unread, loop = HUGE_BYTES, asyncio.get_running_loop()
        while unread > 0:
            unread -= len(await loop.sock_recv(other, 1 << 20))
        # The transport sees in this turn that all has gone.
        await asyncio.sleep(0)
        check_cut_off(wire)


def check_cut_off(wire: Wire[Cancel]) -> None:
    """Before much more than the bound waits."""
    for _ in range(BEYOND_BOUND):
        wire.send(LARGE)
        if wire.is_closed:
            break
    assert wire.is_closed
    assert wire.error == "the peer does not read"


BODY = msgspec.msgpack.encode(MESSAGES[0])


@given(st.binary(max_size=60), st.integers(0, len(BODY)), st.integers(0, len(BODY)))
def test_a_frame_that_is_no_message_ends_the_wire_with_an_error(
    inserted: bytes, first: int, second: int
) -> None:
    """Random bytes alone, and in place of a part of a message."""
    start, stop = sorted((first, second))
    asyncio.run(take_one(BODY[:start] + inserted + BODY[stop:]))


@pytest.mark.parametrize("invalid", [b"\xff", b"\xc3", b"\xed\xa0\x80"])
def test_a_text_that_is_not_utf_8_ends_the_wire_with_an_error(invalid: bytes) -> None:
    body = msgspec.msgpack.encode(Cancel("x" * len(invalid), 0))
    asyncio.run(take_one(body.replace(b"x" * len(invalid), invalid), is_message=False))


async def take_one(body: bytes, is_message: bool | None = None) -> None:
    """Either the frame is a message, or it ends the wire."""
    async with wire_and_socket() as (wire, other):
        # A frame of length 0 is a heartbeat: what comes then is the end of the connection.
        other.sendall(struct.pack(">I", len(body)) + body)
        other.shutdown(socket.SHUT_WR)
        found = await wire.receive()
        assert is_message is None or (found is not None) == is_message
        if found is None:
            assert wire.error is not None
            assert wire.is_closed
        else:
            assert wire.error is None
