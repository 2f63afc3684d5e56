"""A member hears of others that the controller lost, from whichever life of it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from livescale.messages.epochs import FIRST_EPOCH, Acting
from livescale.runtime.controller_link import Acquaintances, ControllerLink
from livescale.runtime.doors import CONTROLLER_DOOR, Door
from livescale.runtime.heartbeat import Heartbeats
from livescale.runtime.protocol import Address, Holder, Holders, ToController
from livescale.runtime.wire_channel import Wire
from livescale.transfer.arena import Arena
from livescale.transfer.data_plane import DataPlane
from livescale.types import WorkerRef

WAIT_S = 20.0
OWN = WorkerRef(0)


class Controllers:
    """One life after the other."""

    def __init__(self) -> None:
        self.lives: asyncio.Queue[Wire[ToController]] = asyncio.Queue()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire: Wire[ToController] = Wire(reader, writer, ToController)
        wire.send(Acting(FIRST_EPOCH))
        self.lives.put_nowait(wire)
        async for _ in wire:
            raise AssertionError("the member has nothing to say")


def holders(*refs: WorkerRef) -> Holders:
    """They listen where nobody is."""
    nowhere = Address("127.0.0.1", 1)
    return Holders(tuple(Holder(ref, nowhere, "elsewhere") for ref in (OWN, *refs)))


@pytest.fixture
def data_plane():
    plane = DataPlane(OWN, Arena(1 << 16))
    yield plane
    plane.close()


def test_members_that_a_controller_lost_are_gone(data_plane: DataPlane) -> None:
    one, other, next_life = WorkerRef(1), WorkerRef(2), WorkerRef(2, 1)
    gone: asyncio.Queue[WorkerRef] = asyncio.Queue()

    async def story() -> None:
        controllers = Controllers()
        door = Door("a secret", CONTROLLER_DOOR, controllers.serve)
        server = await asyncio.start_server(door.accept, "127.0.0.1", 0)
        link = ControllerLink(
            [Address(*server.sockets[0].getsockname()[:2])],
            "a secret",
            Acquaintances(OWN, "here", data_plane, measures_links=False),
            hello=lambda _: [],
            obey=lambda *_: None,
            refused=lambda _: None,
            gone=gone.put_nowait,
            heartbeats=Heartbeats(60_000),
        )
        running = asyncio.create_task(link.run())
        life = await controllers.lives.get()
        for message in (holders(one), holders(one, other), holders(other), holders(next_life)):
            life.send(message)
        # A restarted member is not the one that was lost.
        assert [await gone.get(), await gone.get()] == [one, other]
        life.close()
        # The next controller learns of the living one by one: who is not there yet is not gone.
        life = await controllers.lives.get()
        for message in (holders(), holders(one), holders(one, next_life), holders(next_life)):
            life.send(message)
        assert await gone.get() == one
        assert gone.empty()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        life.close()
        server.close()

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


def test_ways_are_probed_once_also_by_callers_at_the_same_time(data_plane: DataPlane) -> None:
    peer = DataPlane(WorkerRef(1), Arena(1 << 16))
    try:
        known = Acquaintances(OWN, "here", data_plane, measures_links=True)
        assert known.probe() == []  # there is no other member yet
        address = Address(*peer.address)
        known.meet(Holders((Holder(WorkerRef(1), address, "elsewhere"),)))
        with ThreadPoolExecutor(8) as callers:
            found = [call.result() for call in [callers.submit(known.probe) for _ in range(8)]]
        assert sorted(map(len, found)) == [0] * 7 + [1]
    finally:
        peer.close()
