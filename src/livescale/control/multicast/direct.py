"""Strategies without forwarding in a row: trees, one source for all, a share for each source, host
memory, storage.

They are baselines of the papers, and sometimes the best there is: host memory for a device whose
own host has a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from livescale.control.multicast.binomial import BLOCKS, cut_blocks, k_way_orders
from livescale.control.multicast.chain import FeedsOf, give
from livescale.control.multicast.fabric import Layout
from livescale.control.multicast.nodes import make_nodes
from livescale.control.multicast.placing import Element
from livescale.values.chunks import ChunkGrid, ChunkRange, Feed
from livescale.values.types import FromStorage

STORAGE = FromStorage()


def tree_feeds(by: Layout, sources: Sequence[Element], targets: Sequence[Element]) -> FeedsOf:
    """Binary trees (FaaSNet, as λScale §7 compares with it): one per source, the targets dealt in
    falling order of bandwidth, everyone sends to at most two."""
    feeds: FeedsOf = {}
    ordered = [e for node in make_nodes(targets, by) for e in node.elements]
    count = min(len(sources), len(ordered))
    for k in range(count):
        members = [sources[k], *ordered[k::count]]
        for i, element in enumerate(members[1:]):
            give(feeds, members[i // 2], element, by.grid.all())
    return feeds


def unicast_feeds(grid: ChunkGrid, source: Element | None, targets: Sequence[Element]) -> FeedsOf:
    """One source sends to every target itself (None: storage)."""
    feeds: FeedsOf = {}
    for element in targets:
        give(feeds, source, element, grid.all())
    return feeds


def direct_feeds(by: Layout, sources: Sequence[Element], targets: Sequence[Element]) -> FeedsOf:
    """Every source sends its share of the targets the whole model, and none forwards (BlitzScale
    §6.3's "+Network"): a target takes the source in its own fast network, else the one that fewest
    read from."""
    groups = {e: by.fabric.topology.group_of(e[0]) for e in (*sources, *targets)}
    readers = dict.fromkeys(sources, 0)
    feeds: FeedsOf = {}
    for element in targets:
        near = [s for s in sources if groups[s] and groups[s] == groups[element]]
        chosen = min(near or sources, key=lambda source: readers[source])
        readers[chosen] += 1
        give(feeds, chosen, element, by.grid.all())
    return feeds


def host_feeds(by: Layout, copies: Sequence[Element], targets: Sequence[Element]) -> FeedsOf:
    """Every target from host memory: its own host's where that has a copy, else the copy that
    fewest read from; where caches are local (ServerlessLLM), else storage."""
    topology = by.fabric.topology
    feeds: FeedsOf = {}
    readers = dict.fromkeys(copies, 0)
    for element in targets:
        hosts = {topology.host_of(worker) for worker in element}
        local = [copy for copy in copies if hosts == {topology.host_of(copy[0])}]
        if not local and by.request.is_cache_local:
            give(feeds, None, element, by.grid.all())
            continue
        chosen = local[0] if local else min(copies, key=lambda copy: readers[copy])
        if not local:
            readers[chosen] += 1
        give(feeds, chosen, element, by.grid.all())
    return feeds


def k_way_host_feeds(feeds: FeedsOf, grid: ChunkGrid) -> FeedsOf:
    """The same feeds, but the first blocks of the first copy's targets are the last ones of the
    next copy's, and so on: λScale's k-way orders without a multicast (§4.4, warm start), so that
    targets together have the model early."""
    copies = {f.upstream: None for its in feeds.values() for f in its if f.upstream != STORAGE}
    blocks = cut_blocks(grid, BLOCKS, max(len(copies), 1))
    orders = k_way_orders(len(blocks), len(copies)) if copies else ()
    begins = {copy: blocks[order[0]].start for copy, order in zip(copies, orders, strict=True)}

    def turned(feed: Feed) -> Feed:
        start = begins.get(feed.upstream, 0)
        if not start:
            return feed
        return Feed(feed.upstream, (ChunkRange(start, grid.chunks), ChunkRange(0, start)))

    return {receiver: tuple(map(turned, its)) for receiver, its in feeds.items()}
