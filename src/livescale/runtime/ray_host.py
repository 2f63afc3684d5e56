"""One node of a Ray cluster as a host of a pool: an actor that does what `livescale join` does.

Ray places it and starts it again; the host's wires, processes and bytes are LiveScale's own. Runs
inside an actor of Ray: what it is given crossed Ray's wires.
"""

from __future__ import annotations

import asyncio

import ray
from ray.util import get_node_ip_address

from livescale.runtime.joined_host import JoinedAs, JoinedHost
from livescale.runtime.news import log_news
from livescale.runtime.protocol import Address
from livescale.runtime.token import JoinToken
from livescale.types import Value


class HostOrder(Value, frozen=True):
    """Which pool the host belongs to, and how many workers it brings."""

    head: Address
    token: JoinToken
    workers: int


class HostActor:
    """After a restart only this has run: the caller's `run` is sent again by Ray."""

    def __init__(self) -> None:
        self._host: JoinedHost | None = None
        #: ends before the next one begins: two of one name would be refused
        self._turn = asyncio.Lock()

    @ray.method(max_task_retries=0)
    async def name(self) -> str:
        """Of this host in the pool: its node's, which Ray takes from the address unless told
        otherwise. Nodes that share a name are told apart by their ids."""
        own = ray.get_runtime_context().get_node_id()
        nodes = await asyncio.to_thread(ray.nodes)
        names = {node["NodeID"]: str(node["NodeName"]) for node in nodes if node["Alive"]}
        name = names.get(own) or get_node_ip_address()
        has_twins = list(names.values()).count(name) > 1
        return f"{name}-{own[:8]}" if has_twins else name

    async def run(self, order: HostOrder) -> None:
        """Until the pool ends, or the host has left. Raises UserError where it is no host. Another
        call takes its place: the pool's head may have moved."""
        if self._host is not None:
            self._host.kill()
        async with self._turn:
            joined_as = JoinedAs(await self.name(), get_node_ip_address(), order.workers)
            self._host = JoinedHost(order.head, order.token.secret, joined_as, log_news)
            try:
                await self._host.run()
            finally:
                self._host = None

    @ray.method(max_task_retries=0)
    async def leave(self) -> None:
        """Leave the pool in order; `run` returns then."""
        if self._host is not None:
            self._host.leave()
