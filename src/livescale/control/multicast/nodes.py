"""Nodes of chains: elements that a scale-up network joins, and who reads from which head.

BlitzScale §5.1 treats what a scale-up network joins as one node, and pairs sources with targets
under one leaf, so that slow links between leaves are crossed as rarely as possible.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from livescale.clusters.topology import LinkKind, LinkUse
from livescale.control.multicast.fabric import IN, OUT, UNLIMITED, Fabric, Layout
from livescale.control.multicast.placing import Element, by_group
from livescale.values.types import WorkerRef

_ALIKE = (3, 4)
"""A chain may go on at so much of its pace for the sake of staying under a leaf."""


@dataclass(slots=True)
class Node:
    """Elements in one scale-up group, or one element alone. `pace` orders nodes: the slower
    direction of the fastest element, then how fast it receives. `out` is the fastest way out."""

    elements: list[Element]
    group: str
    hosts: tuple[str, ...]
    leaves: tuple[str, ...]
    pace: tuple[int, int]
    out: int
    serves: bool

    @property
    def first(self) -> Element:
        return self.elements[0]


@dataclass(slots=True)
class Head:
    """Where a chain starts: copies that are read together (none: storage), and what follows.

    `copy_hosts` are the hosts of copies in host memory, `device_hosts` those of devices; `pace` is
    how fast bytes can leave the end of the chain, `ends` are the leaves it has reached there, and
    `load` counts the elements in it.
    """

    elements: list[Element]
    groups: tuple[str, ...]
    copy_hosts: tuple[str, ...]
    device_hosts: tuple[str, ...]
    leaves: tuple[str, ...]
    pace: int
    ends: tuple[str, ...]
    nodes: list[Node] = field(default_factory=list)
    load: int = 0

    def add(self, node: Node) -> None:
        self.nodes.append(node)
        self.load += len(node.elements)
        if _joined(self, node):
            self.pace = max(self.pace, node.out)
            self.ends = (*self.ends, *(leaf for leaf in node.leaves if leaf not in self.ends))
        else:
            self.pace = min(self.pace, node.pace[0])
            self.ends = node.leaves


def make_nodes(targets: Sequence[Element], by: Layout) -> list[Node]:
    """The targets as nodes in falling order of bandwidth; nodes whose NIC is to serve while it
    loads come last, because the last of a chain sends nothing."""

    def group_of(element: Element) -> str:
        groups = {by.fabric.topology.group_of(worker) for worker in element}
        return groups.pop() if len(groups) == 1 else ""

    busy = {use for use in by.request.busy if use.direction is OUT}
    together = by_group(targets, group_of)
    nodes = [_node(group, elements, busy, by.fabric) for group, elements in together]
    return sorted(nodes, key=lambda n: (n.serves, (-n.pace[0], -n.pace[1]), ids(n.first)))


def make_head(elements: Sequence[Element], fabric: Fabric) -> Head:
    topology = fabric.topology
    workers = [worker for element in elements for worker in element]
    leaves = tuple({topology.leaf_of(w): None for w in workers})
    return Head(
        list(elements),
        tuple({g: None for w in workers if (g := topology.group_of(w))}),
        tuple({topology.host_of(w): None for w in workers if _is_linked_memory(w, fabric)}),
        tuple({topology.host_of(w): None for w in workers if not w.is_agent}),
        leaves,
        max((fabric.nic_bytes_per_s(w, OUT) for w in workers), default=UNLIMITED),
        leaves,
    )


def deal(nodes: Sequence[Node], heads: Sequence[Head], fabric: Fabric) -> None:
    """Give every node to a head. What a scale-up network or a host's own link joins to a head
    comes first in its chain; then each node goes behind the chain that feeds it fastest, of these
    one that ends under its leaf, of these the shortest.

    A leaf with a limited spine link and no head of its own is crossed into once: all its nodes
    follow each other. Under other leaves nodes that are about as fast do (`_side_by_side`). What
    serves outward comes last, because the last one sends nothing.
    """
    others: list[Node] = []
    for node in nodes:
        joined = [head for head in heads if _joined(head, node)]
        if joined:
            min(joined, key=lambda head: head.load).add(node)
        else:
            others.append(node)
    home = {leaf for head in heads for leaf in head.leaves}
    others = _side_by_side(others, home)
    crossings: dict[str, int] = {}
    runs: dict[str, list[Node]] = {}
    for number, node in enumerate(others):
        limited = [leaf for leaf in node.leaves if fabric.is_limited(leaf)]
        if limited and not home.intersection(node.leaves):
            runs.setdefault(limited[0], []).append(node)
        else:
            runs[f"\0{number}"] = [node]
    for run in _by_spine(runs, fabric):
        head = _choose(run[0], heads, crossings, fabric)
        _cross(head, run[0], crossings)
        for node in run:
            head.add(node)
    for head in heads:
        head.nodes.sort(key=lambda node: node.serves)


def ids(element: Element) -> tuple[int, ...]:
    """What ties are broken by."""
    return tuple(number for ref in element for number in (ref.worker, ref.incarnation))


# -- helpers, in the order used -------------------------------------------------------------------


def _node(group: str, elements: list[Element], busy: set[LinkUse], fabric: Fabric) -> Node:
    topology = fabric.topology
    paces = []
    outs = []
    for element in elements:
        into = min([fabric.nic_bytes_per_s(worker, IN) for worker in element])
        out = min([fabric.nic_bytes_per_s(worker, OUT) for worker in element])
        paces.append((min(into, out), into))
        outs.append(out)
    workers = [worker for element in elements for worker in element]
    return Node(
        elements,
        group,
        tuple(
            {
                topology.host_of(worker): None
                for worker in workers
                if not worker.is_agent or _is_linked_memory(worker, fabric)
            }
        ),
        tuple({topology.leaf_of(worker): None for worker in workers}),
        max(paces),
        max(outs),
        bool(busy) and any(LinkUse(LinkKind.NIC, str(worker), OUT) in busy for worker in workers),
    )


def _is_linked_memory(ref: WorkerRef, fabric: Fabric) -> bool:
    """A host's memory to which the host's devices have links of their own."""
    return ref.is_agent and fabric.topology.agents[ref].has_device_links


def _joined(head: Head, node: Node) -> bool:
    """A scale-up network or the host's own link joins them."""
    hosts = head.device_hosts if node.first[0].is_agent else head.copy_hosts
    return node.group in head.groups or any(host in hosts for host in node.hosts)


def _side_by_side(nodes: Sequence[Node], home: Collection[str]) -> list[Node]:
    """Nodes in falling order of bandwidth, but those that are about as fast leaf by leaf, first
    where the chain is: what links between leaves carry may not be known, and rates that were
    measured differ a little where the links do not."""
    found: list[Node] = []
    here = home
    while len(found) < len(nodes):
        first, leaves = nodes[len(found)], dict[tuple[str, ...], list[Node]]()
        for number in range(len(found), len(nodes)):
            node = nodes[number]
            is_slower = node.pace[0] * _ALIKE[1] < first.pace[0] * _ALIKE[0]
            if is_slower or node.serves != first.serves:
                break
            leaves.setdefault(node.leaves, []).append(node)
        order = sorted(leaves, key=lambda its: not any(leaf in here for leaf in its))
        here = order[-1]
        found += [node for its in order for node in leaves[its]]
    return found


def _by_spine(runs: dict[str, list[Node]], fabric: Fabric) -> list[list[Node]]:
    """Runs behind faster spine links first: a chain is as slow as what lies before."""

    def slowest(leaf: str) -> int:
        """Nodes whose leaf is no limit, or has a head, are alone in a run, and come first."""
        found = fabric.topology.leaves.get(leaf)
        rates = (found.uplink_bytes_per_s, found.downlink_bytes_per_s) if found else ()
        return min((rate for rate in rates if rate is not None), default=UNLIMITED)

    # (Sorting is stable: runs that are equal stay in falling order of bandwidth.)
    return [runs[leaf] for leaf in sorted(runs, key=lambda leaf: -slowest(leaf))]


def _choose(node: Node, heads: Sequence[Head], crossings: dict[str, int], fabric: Fabric) -> Head:
    if len(heads) == 1:
        return heads[0]
    return min(heads, key=lambda head: _reach(head, node, crossings, fabric))


def _reach(
    head: Head, node: Node, crossings: dict[str, int], fabric: Fabric
) -> tuple[int, int, int]:
    """Orders heads: the rate at which the node would be fed, as far as it matters to it; whether
    the spine is crossed; and what the head has behind it already."""
    rate = min(head.pace, node.pace[1])
    if set(head.ends).intersection(node.leaves):
        return -rate, 0, head.load
    topology = fabric.topology
    out, into = (topology.leaves.get(leaves[0]) for leaves in (head.ends or ("",), node.leaves))
    if out is not None and out.uplink_bytes_per_s is not None:
        rate = min(rate, out.uplink_bytes_per_s // (1 + crossings.get(f"out {out.name}", 0)))
    if into is not None and into.downlink_bytes_per_s is not None:
        rate = min(rate, into.downlink_bytes_per_s // (1 + crossings.get(f"in {into.name}", 0)))
    return -rate, 1, head.load


def _cross(head: Head, node: Node, crossings: dict[str, int]) -> None:
    """Count the spine links that the head's chain crosses if it goes on to the node."""
    if head.ends and not set(head.ends).intersection(node.leaves):
        for name in (f"out {head.ends[0]}", f"in {node.leaves[0]}"):
            crossings[name] = crossings.get(name, 0) + 1
