"""The cost model: when every layer of every receiver is complete, and what each link carries.

Integers only (bytes, nanoseconds). A plan's feeds run at the same time. A direction that several
of them cross is shared in proportion to their bytes, so that all of them end when it has carried
everything. A receiver that passes on while it receives adds the time of one chunk (cut-through);
behind it nothing is faster than what it gets itself. For a chain this is BlitzScale's law, §5.1:
(chunks + n - 1) / chunks of one copy's time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from livescale.control.multicast.fabric import Fabric
from livescale.control.multicast.ranges import overlap
from livescale.values.chunks import ChunkGrid, ChunkRange, Feed
from livescale.values.types import FromWorker, Upstream, WorkerRef
from livescale.values.units import NS_PER_S

Receiver = tuple[WorkerRef, int]
"""Who receives, and which rank: a host's agent may receive several ranks of one model."""
Feeds = Mapping[Receiver, tuple[Feed, ...]]
Chunks = tuple[ChunkRange, ...]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of a plan: per receiver when each layer is complete (empty: nothing on the way has a known
    rate), and the bytes that each link of the fabric carries, by the fabric's numbers."""

    layer_ns: dict[Receiver, tuple[int, ...]]
    link_bytes: list[int]

    @property
    def completed_ns(self) -> int | None:
        """When the last receiver is complete; None if that is not known of all."""
        times = [max(layers, default=None) for layers in self.layer_ns.values()]
        return None if None in times else max((t for t in times if t is not None), default=None)


@dataclass(slots=True)
class _Flow:
    """One feed as the model sees it: its bytes i arrive at lag_ns + i / size_bytes * time_ns.

    `own_ns` is how long its own links need, whatever the upstream does. `is_known` says that some
    link on the way from a whole copy has a known rate.
    """

    size_bytes: int
    own_ns: int
    is_known: bool
    time_ns: int = -1
    lag_ns: int = 0

    @property
    def is_timed(self) -> bool:
        return self.time_ns >= 0


class CostModel:
    """Predicts plans over one grid and fabric. `lagging` are holders that are still loading."""

    def __init__(self, grid: ChunkGrid, fabric: Fabric, lagging: Sequence[WorkerRef] = ()) -> None:
        self._grid = grid
        self._fabric = fabric
        self._lagging = frozenset(lagging)
        #: the time of one chunk counts at every hop
        self._unit_bytes = min(grid.chunk_bytes, max(grid.layer_bytes, default=0))
        self._flows: dict[Receiver, list[tuple[Feed, _Flow]]] = {}
        self._layers: dict[object, tuple[int, ...]] = {}

    def predict(self, feeds_of: Feeds) -> Prediction:
        """Raises KeyError for a sender or receiver that the topology does not have."""
        link_bytes = self._lay_out(feeds_of)
        for receiver, flows in self._flows.items():
            for feed, flow in flows:
                if not flow.is_timed:
                    self._time(receiver, feed, flow)
        layer_ns = {receiver: self._layer_ns(flows) for receiver, flows in self._flows.items()}
        return Prediction(layer_ns, link_bytes)

    # -- helpers, in the order used -------------------------------------------------------------

    def _lay_out(self, feeds_of: Feeds) -> list[int]:
        """Make a flow of every feed, with its share of the links that it crosses."""
        fabric = self._fabric
        paths: list[tuple[int, ...]] = []
        link_bytes = [0] * len(fabric.links)
        sizes: list[int] = []
        for (receiver, _), feeds in feeds_of.items():
            for feed in feeds:
                path = fabric.path(feed.upstream, receiver)
                size = shape_of(self._grid, feed.chunks)[0]
                for number in path:
                    if number >= len(link_bytes):
                        link_bytes += [0] * (len(fabric.links) - len(link_bytes))
                    link_bytes[number] += size
                paths.append(path)
                sizes.append(size)
        link_ns = [
            None if rate is None else carried * NS_PER_S // rate
            for rate, carried in zip(fabric.rates, link_bytes, strict=True)
        ]
        at = 0
        self._flows = {}
        for key, feeds in feeds_of.items():
            flows = []
            for feed in feeds:
                known = [t for number in paths[at] if (t := link_ns[number]) is not None]
                flows.append((feed, _Flow(sizes[at], max(known, default=0), bool(known))))
                at += 1
            self._flows[key] = flows
        return link_bytes

    def _time(self, receiver: Receiver, feed: Feed, flow: _Flow) -> None:
        """Set lag and time of a feed, after those of the feeds that bring its upstream the same
        chunks. A stack and no recursion: chains are long."""
        before = self._before(receiver[1], feed)
        if all(its.is_timed for _, its in before):
            self._follow(feed.upstream, flow, [its for _, its in before])
            return
        stack = [(receiver[1], feed, flow)]
        visited: set[int] = set()
        while stack:
            rank, feed, flow = stack[-1]
            before = self._before(rank, feed)
            waiting = [
                (rank, other, its)
                for other, its in before
                if not its.is_timed and id(its) not in visited
            ]
            if waiting and id(flow) not in visited:
                visited.add(id(flow))
                stack += waiting
                continue
            stack.pop()
            if not flow.is_timed:
                self._follow(feed.upstream, flow, [its for _, its in before if its.is_timed])

    def _before(self, rank: int, feed: Feed) -> list[tuple[Feed, _Flow]]:
        """The feeds that bring a feed's upstream what it passes on."""
        if not isinstance(feed.upstream, FromWorker):
            return []
        theirs = self._flows.get((feed.upstream.worker, rank), [])
        same = [pair for pair in theirs if pair[0].chunks == feed.chunks]
        return same or [pair for pair in theirs if overlap(pair[0].chunks, feed.chunks)]

    def _follow(self, upstream: Upstream, flow: _Flow, before: list[_Flow]) -> None:
        unit = min(self._unit_bytes, flow.size_bytes)
        if not before:
            flow.time_ns = flow.own_ns
            if isinstance(upstream, FromWorker) and upstream.worker in self._lagging:
                flow.lag_ns = unit * flow.own_ns // max(1, flow.size_bytes)
            return
        slowest = max(other.time_ns for other in before)
        flow.time_ns = max(flow.own_ns, slowest)
        hop_ns = unit * min(flow.own_ns, slowest) // max(1, flow.size_bytes)
        flow.lag_ns = max(other.lag_ns for other in before) + hop_ns
        flow.is_known = flow.is_known or any(other.is_known for other in before)

    def _layer_ns(self, flows: list[tuple[Feed, _Flow]]) -> tuple[int, ...]:
        """When each layer is complete: its last byte over all feeds. Receivers in the same place
        of their chains differ in the lag alone, so what is counted from it is kept."""
        if not flows or not all(flow.is_known for _, flow in flows):
            return ()
        first = min(flow.lag_ns for _, flow in flows)
        key: object
        if len(flows) == 1:
            feed, flow = flows[0]
            key = (feed.chunks, flow.time_ns)
        else:
            key = frozenset((f.chunks, flow.time_ns, flow.lag_ns - first) for f, flow in flows)
        base = self._layers.get(key)
        if base is None:
            parts = [self._feed_ns(feed, flow, flow.lag_ns - first) for feed, flow in flows]
            base = tuple(map(max, zip(*parts, strict=True))) if len(parts) > 1 else parts[0]
            self._layers[key] = base
        return tuple([first + ns for ns in base]) if first else base

    def _feed_ns(self, feed: Feed, flow: _Flow, lag_ns: int) -> tuple[int, ...]:
        size, ends = shape_of(self._grid, feed.chunks)
        return tuple(lag_ns + flow.time_ns * end // size if end else 0 for end in ends)


@lru_cache(maxsize=1024)
def shape_of(grid: ChunkGrid, chunks: Chunks) -> tuple[int, tuple[int, ...]]:
    """Bytes of the chunks, and per layer the bytes up to its last chunk among them, in the order
    listed (0: none of them is the layer's). Counts by layers, not by chunks; kept, because plan
    after plan asks for the same."""
    ends = [0] * len(grid.layer_bytes)
    total = 0
    for part in chunks:
        layer = grid.layer(part.start)
        last = grid.layer(part.start + (len(part) - 1) * part.step)
        while layer <= last:
            size = bytes_in_layer(grid, part, layer)
            if size:
                total += size
                ends[layer] = total
            layer += 1
    return total, tuple(ends)


def bytes_in_layer(grid: ChunkGrid, part: ChunkRange, layer: int) -> int:
    """Bytes of the range's chunks that belong to the layer."""
    lower, upper = max(grid.first[layer], part.start), min(grid.first[layer + 1], part.stop)
    skipped = -(-(lower - part.start) // part.step)
    count = max(0, -(-(upper - part.start) // part.step) - skipped)
    if not count:
        return 0
    last = grid.first[layer + 1] - 1
    size = count * grid.chunk_bytes
    if last in part:
        size -= (last - grid.first[layer] + 1) * grid.chunk_bytes - grid.layer_bytes[layer]
    return size
