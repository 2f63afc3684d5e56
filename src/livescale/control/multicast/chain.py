"""Serial forwarding chains and their sharded form (BlitzScale §5.1, Algorithm 1 and Figure 14)."""

from __future__ import annotations

from collections.abc import Sequence

from livescale.clusters.topology import Direction
from livescale.control.multicast.cost import Chunks, Receiver
from livescale.control.multicast.fabric import IN, OUT, Fabric, Layout
from livescale.control.multicast.nodes import Head, Node, deal, ids, make_head, make_nodes
from livescale.control.multicast.placing import Element, by_group
from livescale.values.chunks import ChunkRange, Feed
from livescale.values.types import FromStorage, FromWorker, Upstream

FeedsOf = dict[Receiver, tuple[Feed, ...]]


def chain_feeds(by: Layout, sources: Sequence[Element], targets: Sequence[Element]) -> FeedsOf:
    """One chain per source that targets were dealt to; one from storage without a source.

    Every element passes on to the next, equal ranks joined. A chain enters a scale-up group once,
    goes through its elements over the group's own network, and leaves it from the element whose
    NIC is the nearest and fastest.
    """
    feeds: FeedsOf = {}
    for head in _heads([[source] for source in sources], by, targets):
        ways_out: list[Element] = head.elements
        for node in head.nodes:
            sender, entry = _partners(ways_out, node.elements, by.fabric)[0]
            for element in [entry, *(e for e in node.elements if e != entry)]:
                give(feeds, sender, element, by.grid.all())
                sender = element
            ways_out = _ways_out(ways_out, node, by.fabric)
    return feeds


def sharded_feeds(by: Layout, sources: Sequence[Element], targets: Sequence[Element]) -> FeedsOf:
    """Chains of groups: every sender sends its part of the chunks over its own NIC to its partner
    in the next group, and the partners exchange them over the scale-up network as they come.

    With groups of different sizes there are as many parts as the smaller one has members. Sources
    that are in no group are put together until they are as many as the largest group of targets.
    """
    width = max(len(node.elements) for node in make_nodes(targets, by))
    feeds: FeedsOf = {}
    for head in _heads(_bundles(sources, by.fabric, width), by, targets):
        senders = head.elements
        for node in head.nodes:
            _give_shards(feeds, senders, node.elements, by)
            senders = _ways_out(senders, node, by.fabric)
    return feeds


def give(feeds: FeedsOf, sender: Element | None, receiver: Element, chunks: Chunks) -> None:
    """Every rank of the receiver gets these chunks from the sender's (None: from storage)."""
    for rank, worker in enumerate(receiver):
        upstream: Upstream = FromStorage() if sender is None else FromWorker(sender[rank])
        feeds[worker, rank] = (Feed(upstream, chunks),)


# -- helpers, in the order used -------------------------------------------------------------------


def _heads(
    bundles: Sequence[Sequence[Element]], by: Layout, targets: Sequence[Element]
) -> list[Head]:
    """A head per bundle of copies, with the nodes dealt to it; those with none are left out."""
    heads = [make_head(bundle, by.fabric) for bundle in bundles or [[]]]
    deal(make_nodes(targets, by), heads, by.fabric)
    return [head for head in heads if head.nodes]


def _bundles(sources: Sequence[Element], fabric: Fabric, width: int) -> list[list[Element]]:
    """Copies that are read together: those of a group, put together up to `width`."""
    bundles: list[list[Element]] = []
    for _, members in by_group(sources, lambda element: _group(element, fabric)):
        if bundles and len(bundles[-1]) < width:
            bundles[-1] += members
        else:
            bundles.append(members)
    return bundles


def _give_shards(
    feeds: FeedsOf, senders: Sequence[Element], members: Sequence[Element], by: Layout
) -> None:
    chunks = by.grid.chunks
    pairs = _partners(senders, members, by.fabric)[:chunks]
    shards = [(ChunkRange(i, chunks, len(pairs)),) for i in range(min(len(pairs), chunks))]
    entries = {entry: i for i, (_, entry) in enumerate(pairs)}
    for rank in range(len(members[0])):
        outside = [
            Feed(FromStorage() if sender is None else FromWorker(sender[rank]), shard)
            for (sender, _), shard in zip(pairs, shards, strict=False)
        ]
        inside = [
            Feed(FromWorker(entry[rank]), shard)
            for (_, entry), shard in zip(pairs, shards, strict=False)
        ]
        for member in members:
            own = entries.get(member)
            feeds[member[rank], rank] = tuple(
                outside[i] if i == own else inside[i] for i in range(len(shards))
            )


def _partners(
    senders: Sequence[Element], members: Sequence[Element], fabric: Fabric
) -> list[tuple[Element | None, Element]]:
    """Who sends to whom from one group to the next: under one leaf where that can be, the others
    fastest first."""
    if not senders:
        return [(None, members[0])]
    if len(senders) == len(members) == 1:
        return [(senders[0], members[0])]
    count = min(len(senders), len(members))
    free: dict[tuple[str, ...], list[Element]] = {}
    for sender in sorted(senders, key=lambda e: _pace(e, OUT, fabric)):
        free.setdefault(_rails(sender, fabric), []).append(sender)
    receivers = sorted(members, key=lambda e: _pace(e, IN, fabric))
    pairs: list[tuple[Element | None, Element]] = []
    unmatched = []
    for receiver in receivers:
        found = free.get(_rails(receiver, fabric))
        if found:
            pairs.append((found.pop(0), receiver))
        else:
            unmatched.append(receiver)
    left = [sender for rest in free.values() for sender in rest]
    pairs += zip(left, unmatched, strict=False)
    return pairs[:count]


def _ways_out(senders: Sequence[Element], node: Node, fabric: Fabric) -> list[Element]:
    """Who can send to what follows a node: its elements, and senders in the same group."""
    beside = [e for e in senders if node.group and _group(e, fabric) == node.group]
    return [*beside, *node.elements]


def _group(element: Element, fabric: Fabric) -> str:
    return fabric.topology.group_of(element[0])


def _rails(element: Element, fabric: Fabric) -> tuple[str, ...]:
    return tuple(fabric.topology.leaf_of(worker) for worker in element)


def _pace(element: Element, direction: Direction, fabric: Fabric) -> tuple[int, tuple[int, ...]]:
    rate = min(fabric.nic_bytes_per_s(worker, direction) for worker in element)
    return -rate, ids(element)
