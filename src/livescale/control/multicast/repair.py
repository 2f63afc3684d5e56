"""Whom to ask instead when a sender of a plan dies, stalls or delivers corrupt bytes.

Receivers keep what they have; here the feeds that failed get another upstream with the same
chunks. No ids, no orders and no time: the controller tells the receivers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from livescale.clusters.topology import Topology
from livescale.control.multicast.ranges import covers, overlap
from livescale.values.chunks import ChunkRange, Feed
from livescale.values.types import FromStorage, FromWorker, Upstream, WorkerRef

FeedsByReceiver = Mapping[WorkerRef, tuple[Feed, ...]]


@dataclass(frozen=True, slots=True)
class Ways:
    """Who else has the rank: `holders` have complete copies of it, agents among them; `readers`
    counts who reads from each already. No receiver is sent to those that are `avoided`."""

    topology: Topology
    holders: Sequence[WorkerRef] = ()
    readers: Mapping[WorkerRef, int] = field(default_factory=dict)
    has_storage: bool = False
    avoided: Collection[WorkerRef] = ()


def repair(
    feeds_of: FeedsByReceiver, lost: WorkerRef, receivers: Sequence[WorkerRef], ways: Ways
) -> dict[WorkerRef, tuple[Feed, ...]]:
    """All feeds of each of the `receivers`, with those from `lost` replaced chunk for chunk.

    `feeds_of` are the feeds of everybody who is loading this rank of the model now, those of
    `lost` too while they are known (they may be those it had when it died).

    In this order: the lost one's own upstream for these chunks, so that a chain closes over the
    gap; a holder (idle ones first, then by nearness: same group, host, leaf); a receiver of
    the same chunks; storage. No member is ever fed by one that waits for it. A receiver
    without any way is not in the answer.
    """
    answer: dict[WorkerRef, tuple[Feed, ...]] = {}
    now = dict(feeds_of)
    load = dict(ways.readers)
    whole = [holder for holder in ways.holders if holder != lost]
    left = replace(ways, holders=whole, readers=load)
    for receiver in sorted(receivers):
        feeds: list[Feed] = []
        for feed in now[receiver]:
            if feed.upstream != FromWorker(lost):
                feeds.append(feed)
                continue
            found = _instead(receiver, feed, lost, now, left)
            upstream: Upstream
            if found is not None:
                load[found] = load.get(found, 0) + 1
                upstream = FromWorker(found)
            elif ways.has_storage:
                upstream = FromStorage()
            else:
                break
            feeds.append(msgspec.structs.replace(feed, upstream=upstream))
        else:
            answer[receiver] = tuple(feeds)
            now[receiver] = answer[receiver]
    return answer


def nearest(
    receiver: WorkerRef,
    holders: Sequence[WorkerRef],
    topology: Topology,
    readers: Mapping[WorkerRef, int],
) -> list[WorkerRef]:
    """Holders in the order in which a receiver should ask them: those that fewest read from, then
    the same group, host and leaf, then by id. Holders that the topology lost are left out."""

    def distance(holder: WorkerRef) -> tuple[int, int, WorkerRef]:
        group = topology.group_of(receiver)
        if group and group == topology.group_of(holder):
            far = 0
        elif topology.host_of(holder) == topology.host_of(receiver):
            far = 1
        else:
            far = 2 if topology.leaf_of(holder) == topology.leaf_of(receiver) else 3
        return readers.get(holder, 0), far, holder

    known = [h for h in holders if h in topology.devices or h in topology.agents]
    return sorted((holder for holder in known if holder != receiver), key=distance)


def waits_for(
    feeds_of: FeedsByReceiver, waiting: WorkerRef, other: WorkerRef, chunks: Sequence[ChunkRange]
) -> bool:
    """Some of the chunks reach `waiting` by way of `other` (or it is `other`)."""
    stack = [waiting]
    seen: dict[WorkerRef, None] = {}
    while stack:
        at = stack.pop()
        if at == other:
            return True
        if at in seen:
            continue
        seen[at] = None
        for feed in feeds_of.get(at, ()):
            if isinstance(feed.upstream, FromWorker) and overlap(feed.chunks, chunks):
                stack.append(feed.upstream.worker)
    return False


# -- helpers, in the order used -------------------------------------------------------------------


def _instead(
    receiver: WorkerRef,
    feed: Feed,
    lost: WorkerRef,
    feeds_of: FeedsByReceiver,
    ways: Ways,
) -> WorkerRef | None:
    """Who in the cluster's memory feeds the receiver from now on."""
    order = nearest(receiver, ways.holders, ways.topology, ways.readers)
    mates = [other for other in feeds_of if other != lost]
    mates = nearest(receiver, mates, ways.topology, ways.readers)
    known = dict.fromkeys([*order, *mates])
    above = [
        theirs.upstream.worker
        for theirs in feeds_of.get(lost, ())
        if isinstance(theirs.upstream, FromWorker) and covers(theirs.chunks, feed.chunks)
    ]
    candidates = dict.fromkeys([*(u for u in above if u in known), *order, *mates])
    holders = dict.fromkeys(order)
    for candidate in candidates:
        if candidate in ways.avoided:
            continue
        if candidate in holders:
            return candidate
        waits = [waits_for(feeds_of, candidate, other, feed.chunks) for other in (receiver, lost)]
        if not any(waits):
            return candidate
    return None
