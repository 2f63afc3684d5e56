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

from livescale.messages.attempts import Cancel
from livescale.runtime.wire.wire_channel import Wire
from slowness import patient

WAIT_S = 60.0
MESSAGES = [Cancel(f"request-{number}", 0) for number in range(5)]
LARGE = Cancel("x" * 100_000, 0)
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
        for _ in range(1000):
            wire.send(LARGE)
            if wire.is_closed:
                break
        assert wire.is_closed
        assert wire.error == "the peer does not read"
