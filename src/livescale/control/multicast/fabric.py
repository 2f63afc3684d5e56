"""The links of a cluster as one plan sees them: which ones a feed crosses, and what each carries.

Values in, integers out. Links are numbered in the order in which they are first used, so that a
plan lists them the same way every time. What to move where is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from livescale.clusters.topology import Direction, Leaf, LinkKind, LinkUse, Topology
from livescale.control.multicast.request import PlanRequest, Source
from livescale.values.chunks import ChunkGrid
from livescale.values.types import FromStorage, Upstream, WorkerRef

IN, OUT = Direction.IN, Direction.OUT
UNLIMITED = 1 << 62
"""Stands for an unknown rate where rates are compared."""


class Fabric:
    """Paths and rates of a topology while `taken` directions and readers of `sources` share them.

    A direction that n others use gives a plan 1/(n+1) of its rate. Readers of a source use its
    NIC, and are often in `taken` as well: the larger count holds.
    """

    def __init__(
        self,
        topology: Topology,
        taken: Iterable[LinkUse] = (),
        sources: Iterable[Source] = (),
    ) -> None:
        self.topology = topology
        self.links: list[LinkUse] = []
        self.rates: list[int | None] = []
        self._numbers: dict[tuple[LinkKind, str | WorkerRef, Direction], int] = {}
        self._others: dict[LinkUse, int] = {}
        #: by host; made when it is first asked for: most plans read no storage
        self._agents: dict[str, WorkerRef] | None = None
        for use in taken:
            self._others[use] = self._others.get(use, 0) + 1
        for source in sources:
            for worker in source.workers if source.readers else ():
                use = LinkUse(LinkKind.NIC, str(worker), OUT)
                self._others[use] = max(self._others.get(use, 0), source.readers)

    @classmethod
    def of(cls, request: PlanRequest, topology: Topology) -> Fabric:
        return cls(topology, request.taken, request.sources)

    @property
    def is_quiet(self) -> bool:
        """No link is shared: rates are those of the topology."""
        return not self._others

    # -- paths ----------------------------------------------------------------------------------

    def path(self, upstream: Upstream, receiver: WorkerRef) -> tuple[int, ...]:
        """Numbers of the directions that bytes cross. Raises KeyError for a stranger.

        Inside a scale-up group bytes take the group's ports, between a device and its host's
        memory their own link, if there is one; everything else goes from NIC to NIC, and over the
        spine if these hang on different leaves.
        """
        if isinstance(upstream, FromStorage):
            return self._from_storage(receiver)
        sender = upstream.worker
        topology = self.topology
        group = topology.group_of(sender)
        if group and group == topology.group_of(receiver):
            ports = topology.group_bytes_per_s
            out = self._number(LinkKind.GROUP, sender, OUT, ports)
            return (out, self._number(LinkKind.GROUP, receiver, IN, ports))
        if topology.are_linked(sender, receiver):
            if sender.is_agent:
                return self._host_link(receiver, sender, IN)
            return self._host_link(sender, receiver, OUT)
        here, there = topology.leaf_of(sender), topology.leaf_of(receiver)
        if here == there:
            return (self.nic(sender, OUT), self.nic(receiver, IN))
        return (self.nic(sender, OUT), *self._spine(here, there), self.nic(receiver, IN))

    def nic(self, ref: WorkerRef, direction: Direction) -> int:
        """The number of one direction of a device's NIC, or of an agent's host's."""
        found = self._numbers.get((LinkKind.NIC, ref, direction))
        if found is not None:
            return found
        rate = self.topology.nic_bytes_per_s(ref, direction)
        return self._number(LinkKind.NIC, ref, direction, rate)

    def nic_bytes_per_s(self, ref: WorkerRef, direction: Direction) -> int:
        """What a NIC has left for a plan; UNLIMITED if its rate is not known.

        Numbers no link: placing looks at many devices that a plan then does not use.
        """
        topology = self.topology
        owner = topology.agents[ref] if ref.is_agent else topology.devices[ref]
        rate = owner.uplink_bytes_per_s if direction is OUT else owner.downlink_bytes_per_s
        if rate is None:
            return UNLIMITED
        if not self._others:
            return rate
        return self._left(LinkUse(LinkKind.NIC, str(ref), direction), rate)

    def is_limited(self, leaf: str) -> bool:
        """The leaf's links to the spine have a rate."""
        found = self.topology.leaves.get(leaf)
        return found is not None and (
            found.uplink_bytes_per_s is not None or found.downlink_bytes_per_s is not None
        )

    def agent_of(self, host: str) -> WorkerRef | None:
        """The agent that speaks for the host: the first, should there be two."""
        if self._agents is None:
            agents = self.topology.agents
            self._agents = {agents[ref].name: ref for ref in sorted(agents, reverse=True)}
        return self._agents.get(host)

    # -- helpers, in the order used -------------------------------------------------------------

    def _from_storage(self, receiver: WorkerRef) -> tuple[int, ...]:
        """Local storage (and the device's share of it) if known, else what all hosts share."""
        host = self.topology.host_of(receiver)
        agent = self.agent_of(host)
        last: tuple[int, ...] = ()
        if agent is not None and self.topology.are_linked(agent, receiver):
            last = self._host_link(receiver, agent, IN)
        local = None if agent is None else self.topology.agents[agent].storage_bytes_per_s
        remote = self.topology.remote_storage_bytes_per_s
        if local is not None or remote is None:
            own = None if receiver.is_agent else self.topology.devices[receiver].storage_bytes_per_s
            if own is not None:
                last = (self._number(LinkKind.STORAGE, receiver, IN, own), *last)
            return (self._number(LinkKind.STORAGE, host, IN, local), *last)
        shared = self._number(LinkKind.REMOTE_STORAGE, "storage", OUT, remote)
        return (shared, *(() if agent is None else (self.nic(agent, IN),)), *last)

    def _host_link(
        self, device: WorkerRef, agent: WorkerRef, direction: Direction
    ) -> tuple[int, ...]:
        rate = self.topology.agents[agent].device_bytes_per_s
        return (self._number(LinkKind.HOST, device, direction, rate),)

    def _spine(self, here: str, there: str) -> tuple[int, ...]:
        found = []
        leaf: Leaf | None
        if (leaf := self.topology.leaves.get(here)) is not None:
            found.append(self._number(LinkKind.SPINE, here, OUT, leaf.uplink_bytes_per_s))
        if (leaf := self.topology.leaves.get(there)) is not None:
            found.append(self._number(LinkKind.SPINE, there, IN, leaf.downlink_bytes_per_s))
        return tuple(found)

    def _number(
        self, kind: LinkKind, owner: str | WorkerRef, direction: Direction, rate: int | None
    ) -> int:
        key = (kind, owner, direction)
        number = self._numbers.get(key)
        if number is None:
            use = LinkUse(kind, str(owner), direction)
            number = self._numbers[key] = len(self.links)
            self.links.append(use)
            self.rates.append(None if rate is None else self._left(use, rate))
        return number

    def _left(self, use: LinkUse, rate: int) -> int:
        return max(1, rate // (1 + self._others.get(use, 0)))


class Layout(NamedTuple):
    """What every strategy lays out feeds by: what is asked for, over which links, and in which
    chunks."""

    request: PlanRequest
    fabric: Fabric
    grid: ChunkGrid
