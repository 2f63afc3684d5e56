"""One node of a Ray cluster as a host of a pool: an actor that does what `livescale join` does.

Ray places it and starts it again; the host's wires, processes and bytes are LiveScale's own. Runs
inside an actor of Ray: what it is given crossed Ray's wires.
"""

from __future__ import annotations

import asyncio

import ray
from ray.util import get_node_ip_address

from livescale.runtime.join.head_talk import HeadAccess
from livescale.runtime.join.joined_host import JoinedAs, JoinedHost
from livescale.runtime.wire.doors import open_credentials
from livescale.runtime.wire.protocol import Address
from livescale.runtime.wire.token import JoinToken, check_authority
from livescale.values.types import Value


class HostOrder(Value, frozen=True):
    """Which pool the host belongs to, how many workers it brings, and which label of its node
    names its rack. `tls_dir` is on the host: a key never crosses Ray's wires."""

    head: Address
    token: JoinToken
    workers: int
    rack_label: str | None = None
    tls_dir: str | None = None


def own_label(name: str | None) -> str:
    """What the label says of this process's node of Ray; empty if the node has none of that name.
    Blocks."""
    own = ray.get_runtime_context().get_node_id()
    labels = [node.get("Labels", {}) for node in ray.nodes() if node["NodeID"] == own]
    return str(labels[0].get(name, "")) if labels else ""


class HostActor:
    """After a restart only this has run: the caller's `run` is sent again by Ray."""

    def __init__(self) -> None:
        self._host: JoinedHost | None = None
        #: kept: nodes that come later do not change it
        self._name = ""
        #: ends before the next one begins: two of one name would be refused
        self._turn = asyncio.Lock()

    @ray.method(max_task_retries=0)
    async def name(self) -> str:
        """Of this host in the pool: its node's, which Ray takes from the address unless told
        otherwise. A node whose name another one has already is told apart by its id."""
        if self._name:
            return self._name
        own = ray.get_runtime_context().get_node_id()
        nodes = await asyncio.to_thread(ray.nodes)
        names = {node["NodeID"]: str(node["NodeName"]) for node in nodes if node["Alive"]}
        name = names.get(own) or get_node_ip_address()
        has_twins = list(names.values()).count(name) > 1
        # What asks at the same time gets the same: the first answer.
        self._name = self._name or (f"{name}-{own[-8:]}" if has_twins else name)
        return self._name

    async def run(self, order: HostOrder) -> None:
        """Until the pool ends, or the host has left. Raises UserError where it is no host. Another
        call takes its place: the pool's head may have moved."""
        if self._host is not None:
            self._host.kill()
        async with self._turn:
            tls = open_credentials(order.tls_dir)
            fingerprint = None if tls is None else tls.fingerprint
            check_authority("the token of the pool", order.token, fingerprint)
            joined_as = JoinedAs(
                await self.name(),
                get_node_ip_address(),
                order.workers,
                # Paths of the head mean nothing here.
                {"tls_dir": order.tls_dir},
                rack=await asyncio.to_thread(own_label, order.rack_label),
            )
            self._host = JoinedHost(HeadAccess(order.head, order.token.secret, tls), joined_as)
            try:
                await self._host.run()
            finally:
                self._host = None

    @ray.method(max_task_retries=0)
    async def leave(self) -> None:
        """Leave the pool in order; `run` returns then."""
        if self._host is not None:
            self._host.leave()
