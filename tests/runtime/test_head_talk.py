"""Hosts and gateways that join keep their wire to the head, whatever silence the pool allows."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import slowness
from livescale import __version__
from livescale.config.pool import PoolConfig
from livescale.control.cluster.host_ledger import HostNumbers
from livescale.messages.epochs import FIRST_EPOCH, Acting
from livescale.runtime.join.head_talk import HeadAccess, HeadTalk
from livescale.runtime.wire.doors import CONTROLLER_DOOR, Door
from livescale.runtime.wire.heartbeat import Heartbeats
from livescale.runtime.wire.joining import (
    Farewell,
    GatewayJoins,
    GatewayWelcome,
    HostHello,
    Welcome,
)
from livescale.runtime.wire.protocol import Address
from livescale.runtime.wire.wire_channel import Wire

pytestmark = pytest.mark.usefixtures("machine")
WAIT_S = 60.0
LONG = 4
"""Periods after which one that does not show that it works has been cut off."""
SECRET = "of the pool"


class Head:
    """A head that welcomes whoever comes, and gives up on one that is silent. It lets one go that
    was there for `LONG` periods."""

    def __init__(self, pool: PoolConfig) -> None:
        self.pool = pool
        self.met = 0
        self.heartbeats = Heartbeats(pool.lost_after_ms)
        self.errors: list[str | None] = []

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.met += 1
        wire: Wire[Any] = Wire(reader, writer, HostHello | GatewayJoins | Farewell)
        self.heartbeats.add(wire)
        wire.send(Acting(FIRST_EPOCH))
        hello = await wire.receive()
        if isinstance(hello, GatewayJoins):
            wire.send(GatewayWelcome(self.pool))
        else:
            wire.send(Welcome(HostNumbers(0, 0), self.pool))
        ending = asyncio.create_task(wire.receive())
        await asyncio.wait([ending], timeout=LONG * self.pool.lost_after_ms / 1000)
        self.errors.append(wire.error)
        wire.send(Farewell())
        await ending
        wire.close()


def hello_of(kind: type[Welcome | GatewayWelcome]) -> HostHello | GatewayJoins:
    if kind is GatewayWelcome:
        return GatewayJoins(__version__, "bob")
    return HostHello(__version__, "alice", 1, 0)


@pytest.mark.parametrize("kind", [Welcome, GatewayWelcome])
@pytest.mark.parametrize("lost_after_ms", [200, 500])
def test_what_joins_stays_connected_whatever_silence_the_pool_allows(
    kind: type[Welcome | GatewayWelcome], lost_after_ms: int
) -> None:
    head = Head(PoolConfig(lost_after_ms=slowness.patient_ms(lost_after_ms)))
    talk: HeadTalk[Any]

    async def stay(wire: Wire[Any], welcome: Welcome | GatewayWelcome) -> bool:
        try:
            return await talk.hold(wire, asyncio.Event().wait())
        finally:
            wire.close()

    async def told() -> None:
        nonlocal talk
        server = await asyncio.start_server(
            Door(SECRET, CONTROLLER_DOOR, head.accept).accept, "127.0.0.1", 0
        )
        beating = asyncio.create_task(head.heartbeats.run())
        address = Address(*server.sockets[0].getsockname()[:2])
        talk = HeadTalk(HeadAccess(address, SECRET, patience_s=WAIT_S), kind)
        await talk.run(lambda: hello_of(kind), stay, lambda: bool(head.errors))
        beating.cancel()
        server.close()

    asyncio.run(asyncio.wait_for(told(), slowness.patient(WAIT_S)))
    assert head.errors == [None]
    assert head.met == 1
