"""The links of the simulated network: which ones bytes cross, and what they have carried."""

from __future__ import annotations

from livescale.clusters.topology import Direction, LinkKind, LinkUse, Topology
from livescale.control.multicast.fabric import Fabric
from livescale.sim.checkers.invariants import require
from livescale.sim.links.flows import NANO, SimLink
from livescale.values.types import FromStorage, Upstream, WorkerRef

#: kinds of which a hop crosses two; the sender's counts
_TWO_ENDED = (LinkKind.NIC, LinkKind.SPINE, LinkKind.GROUP)


class SimLinks:
    """Every direction of a link that was ever used. Members come and go in the topology, each
    incarnation with links of its own. Parameters get `parameter_percent` of a NIC's way out."""

    def __init__(self, topology: Topology, parameter_percent: int) -> None:
        self._topology = topology
        self._parameter_percent = parameter_percent
        self._fabric = Fabric(topology)
        self._agents = tuple(topology.agents)
        self._links: dict[LinkUse, SimLink] = {}
        #: by the fabric's numbers
        self._numbered: list[SimLink] = []
        #: NICs that do not carry their rate, by owner
        self._slowed: dict[str, int] = {}

    def path(self, upstream: Upstream, receiver: WorkerRef, now_ns: int) -> tuple[SimLink, ...]:
        """The links that bytes cross. KeyError for members that the topology does not have."""
        if isinstance(upstream, FromStorage) and tuple(self._topology.agents) != self._agents:
            # A fabric knows the agents of its beginning.
            self._fabric = Fabric(self._topology)
            self._agents = tuple(self._topology.agents)
            self._numbered = []
        numbers = self._fabric.path(upstream, receiver)
        for number in range(len(self._numbered), len(self._fabric.links)):
            self._numbered.append(self._link(number, now_ns))
        return tuple([self._numbered[number] for number in numbers])

    def slow_nic(self, member: WorkerRef, permille: int, now_ns: int) -> list[SimLink]:
        """Both directions of the member's NIC carry so much of their rate from now on. Returns
        those that exist."""
        owner = str(member)
        if permille == 1000:
            self._slowed.pop(owner, None)
        else:
            self._slowed[owner] = permille
        found = []
        for direction in Direction:
            link = self._links.get(LinkUse(LinkKind.NIC, owner, direction))
            if link is not None:
                link.slow(permille, now_ns)
                found.append(link)
        return found

    def is_cut(self, path: tuple[SimLink, ...]) -> bool:
        """Nothing gets through."""
        return bool(self._slowed) and any(not link.permille for link in path)

    def carried_bytes(self) -> dict[str, int]:
        """Parameters that links have carried, by kind. Of a hop's two ends the sender's counts."""
        totals: dict[str, int] = {}
        for use, link in self._links.items():
            if use.kind not in _TWO_ENDED or use.direction is Direction.OUT:
                totals[use.kind] = totals.get(use.kind, 0) + link.carried_nanobytes
        return {kind: total // NANO for kind, total in sorted(totals.items())}

    def check(self, now_ns: int) -> None:
        """Nothing has carried, or is given, more than its rate times time."""
        for link in self._links.values():
            if link.rated_bytes_per_s is None:
                continue
            check_rates(link)
            allowed = link.allowed_by(now_ns)
            rule = "no link carries more than its rate times time"
            carried = link.carried_nanobytes + link.served_nanobytes
            require(carried <= allowed, rule, link, carried, allowed)

    def _link(self, number: int, now_ns: int) -> SimLink:
        use, rate = self._fabric.links[number], self._fabric.rates[number]
        link = self._links.get(use)
        if link is None:
            link = self._links[use] = SimLink(use, rate, now_ns)
            if use.kind is LinkKind.NIC:
                link.permille = self._slowed.get(use.owner, 1000)
                if use.direction is Direction.OUT:
                    link.parameter_percent = self._parameter_percent
        return link


def check_rates(link: SimLink) -> None:
    """The flows of a link do not get more than it has (each gets one byte per second)."""
    given = sum(flow.rate for flow in link.flows)
    capacity = max(link.bytes_per_s, len(link.flows)) if link.permille else 0
    require(given <= capacity, "no link is given away above its rate", link, given, capacity)
