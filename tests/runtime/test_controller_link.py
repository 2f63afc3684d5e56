"""A member learns of others that the controller lost, from whichever life of it, and has one wire
to a life, however many addresses lead there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest

from livescale.messages.epochs import FIRST_EPOCH, Acting, ControllerEpoch, Fenced
from livescale.runtime.member_process.controller_link import Acquaintances, ControllerLink
from livescale.runtime.wire.doors import CONTROLLER_DOOR, Door
from livescale.runtime.wire.heartbeat import Heartbeats
from livescale.runtime.wire.protocol import Address, Holder, Holders, MemberHello, ToController
from livescale.runtime.wire.wire_channel import Wire
from livescale.transfer.memory.arena import Arena
from livescale.transfer.plane.data_plane import DataPlane
from livescale.values.types import WorkerRef
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")

WAIT_S = 20.0
OWN = WorkerRef(0)


class Controllers:
    """One life after the other."""

    def __init__(self) -> None:
        self.lives: asyncio.Queue[Wire[ToController]] = asyncio.Queue()
        #: what members say
        self.received: asyncio.Queue[ToController] = asyncio.Queue()
        self.left: asyncio.Queue[Wire[ToController]] = asyncio.Queue()
        self.epoch = FIRST_EPOCH

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire: Wire[ToController] = Wire(reader, writer, ToController)
        wire.send(Acting(self.epoch))
        self.lives.put_nowait(wire)
        async for message in wire:
            self.received.put_nowait(message)
        self.left.put_nowait(wire)


def holders(*refs: WorkerRef) -> Holders:
    """They listen where nobody is."""
    nowhere = Address("127.0.0.1", 1)
    return Holders(tuple(Holder(ref, nowhere, "elsewhere") for ref in (OWN, *refs)))


async def listening(controllers: Controllers) -> tuple[asyncio.Server, Address]:
    door = Door("a secret", CONTROLLER_DOOR, controllers.serve)
    server = await asyncio.start_server(door.accept, "127.0.0.1", 0)
    return server, Address(*server.sockets[0].getsockname()[:2])


def link_to(
    addresses: list[Address],
    data_plane: DataPlane,
    gone: Callable[[WorkerRef], None] = lambda _: None,
    met: Callable[[ControllerEpoch], None] = lambda _: None,
) -> ControllerLink:
    def greet(epoch: ControllerEpoch) -> list[MemberHello]:
        met(epoch)
        return []

    return ControllerLink(
        addresses,
        "a secret",
        Acquaintances(OWN, "here", data_plane, measures_links=False),
        hello=greet,
        obey=lambda *_: None,
        refused=lambda _: None,
        gone=gone,
        heartbeats=Heartbeats(60_000),
    )


async def end(running: asyncio.Task[None]) -> None:
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


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
        server, address = await listening(controllers)
        link = link_to([address], data_plane, gone.put_nowait)
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
        assert controllers.received.empty()
        await end(running)
        life.close()
        server.close()

    asyncio.run(asyncio.wait_for(story(), patient(WAIT_S)))


def test_a_head_that_begins_anew_may_give_numbers_again(data_plane: DataPlane) -> None:
    """Its members remember who had the number before, and when they lived on, nobody told them that
    it was lost: a rack without power. Whoever has the number now is reached, and reaches them."""
    before, after = WorkerRef(1, 1_000_000), WorkerRef(1)
    gone: asyncio.Queue[WorkerRef] = asyncio.Queue()

    async def introduced(life: Wire[ToController], other: DataPlane) -> None:
        holder = Holder(other.worker, Address(*other.address), "elsewhere")
        life.send(Holders((Holder(OWN, Address(*data_plane.address), "here"), holder)))
        while other.worker not in data_plane.connected():
            await asyncio.sleep(0)

    async def story() -> None:
        controllers = Controllers()
        server, address = await listening(controllers)
        running = asyncio.create_task(link_to([address], data_plane, gone.put_nowait).run())
        with closing(DataPlane(before, Arena(1 << 16))) as earlier:
            life = await controllers.lives.get()
            await introduced(life, earlier)
        controllers.epoch = ControllerEpoch("anew")
        life.close()
        with closing(DataPlane(after, Arena(1 << 16))) as later:
            life = await controllers.lives.get()
            await introduced(life, later)
            assert await asyncio.to_thread(data_plane.probe, after, 1 << 12) > 0
            later.introduce(OWN, data_plane.address)
            assert await asyncio.to_thread(later.probe, OWN, 1 << 12) > 0
        assert await gone.get() == before
        await end(running)
        life.close()
        server.close()

    asyncio.run(asyncio.wait_for(story(), patient(WAIT_S)))


def test_two_addresses_of_one_controller_are_one_wire(data_plane: DataPlane) -> None:
    """As the name of a Service and the address of its pod; whichever way leads there first."""

    async def story() -> None:
        controllers, met = Controllers(), list[ControllerEpoch]()
        ways = [await listening(controllers) for _ in range(3)]
        link = link_to([address for _, address in ways], data_plane, met=met.append)
        running = asyncio.create_task(link.run())
        epochs = [FIRST_EPOCH, ControllerEpoch(FIRST_EPOCH.line, FIRST_EPOCH.number + 1)]
        for epoch in epochs:
            controllers.epoch = epoch
            wires = [await controllers.lives.get() for _ in ways]
            # The other two are left with a word to the controller that needs no answer.
            assert [await controllers.received.get() for _ in ways[1:]] == [Fenced(epoch)] * 2
            for _ in ways[1:]:
                wires.remove(await controllers.left.get())
            assert controllers.lives.empty()
            # All ways lead to the next life.
            wires[0].close()
            assert await controllers.left.get() == wires[0]
        assert met == epochs
        await end(running)
        for server, _ in ways:
            server.close()

    asyncio.run(asyncio.wait_for(story(), patient(WAIT_S)))


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
