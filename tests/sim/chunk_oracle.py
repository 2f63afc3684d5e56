"""An oracle of links: single chunks and messages move over them, and whenever one comes or ends all
rates are computed anew. Slow, and without anything of the simulator's flows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from chunk_worlds import ChunkWorld, Sending

from livescale.control.multicast.fabric import Fabric
from livescale.values.chunks import ChunkGrid, Feed
from livescale.values.types import FromWorker, WorkerRef

_NS_PER_S = 1_000_000_000
_ROUNDING_NS = 1e-6
_LEAST_RATE = 1.0
"""Bytes per second. Less is nothing: what rounding leaves of a full link."""

#: who has which chunks, in the order in which they came
Held = dict[WorkerRef, dict[int, None]]


@dataclasses.dataclass(eq=False)
class Queue:
    """What one worker sends another: numbers of sendings, and what is left of the first."""

    path: tuple[int, ...]
    waiting: list[tuple[int, Sending]]
    left_bytes: float = 0.0
    rate: float = 0.0


@dataclasses.dataclass(eq=False)
class Stream:
    """One feed: the chunks it still has to bring, and the one that moves."""

    receiver: WorkerRef
    feed: Feed
    path: tuple[int, ...]
    to_bring: list[int]
    chunk: int | None = None
    left_bytes: float = 0.0
    rate: float = 0.0


class ChunkOracle:
    """The world, chunk by chunk. Times are nanoseconds from the beginning of the loads.

    A feed moves one chunk after the other, that which its sender had first; from one worker to
    another messages go one after the other. Messages share links max-min fairly, and chunks what is
    left; with `is_equal` all share as one class.
    """

    def __init__(self, world: ChunkWorld, *, is_equal: bool = False) -> None:
        #: when each layer of each receiver is complete, and when each sending has arrived
        self.arrivals: dict[WorkerRef, dict[int, float]] = {}
        self.sent: dict[int, float] = {}
        #: from when to when serving traffic leaves parameters which part of the link where they
        #: are left least
        self.shares: list[tuple[float, float, float]] = []
        self._grid, self._fabric = world.grid, Fabric(world.topology)
        self._is_equal = is_equal
        self._held: Held = {w: dict.fromkeys(range(world.grid.chunks)) for w in world.sources}
        self._streams: list[Stream] = []
        self._queues: dict[tuple[WorkerRef, WorkerRef], Queue] = {}
        self._loads = sorted(world.loads, key=lambda load: load.start_ns)
        self._sendings = list(enumerate(world.sendings))
        self._now = 0.0
        while self._is_busy():
            self._go_on()

    def shared_ns(self, one_ns: float, other_ns: float) -> float:
        """The time between the two as parameters see it: weighed with what serving traffic leaves
        of the link where it leaves least."""
        low, high = sorted((one_ns, other_ns))
        inside = [(max(low, a), min(high, b), part) for a, b, part in self.shares]
        weighed = sum((b - a) * part for a, b, part in inside if a < b)
        return weighed + max(0.0, high - max(low, self._now))

    def _is_busy(self) -> bool:
        moving = any(queue.waiting for queue in self._queues.values())
        bringing = any(stream.to_bring for stream in self._streams)
        return bool(moving or bringing or self._loads or self._sendings)

    def _go_on(self) -> None:
        """Until the next one comes or ends."""
        self._take_in()
        streams = [s for s in self._streams if _moves(s, self._grid, self._held)]
        queues = [queue for queue in self._queues.values() if queue.waiting]
        left = self._share(streams, queues)
        moving: list[Stream | Queue] = [*streams, *queues]
        needs = [_need_ns(one) for one in moving]
        starts = [load.start_ns for load in self._loads[:1]]
        starts += [sending.start_ns for _, sending in self._sendings[:1]]
        step = min([*needs, *(start - self._now for start in starts)])
        assert step < math.inf, "nothing moves, and something is missing"
        self.shares.append((self._now, self._now + step, left))
        self._now += step
        for one, need in zip(moving, needs, strict=True):
            one.left_bytes -= one.rate * step / _NS_PER_S
            if need <= step + _ROUNDING_NS:
                self._end(one)

    def _take_in(self) -> None:
        """What begins now."""
        while self._loads and self._loads[0].start_ns <= self._now:
            load = self._loads.pop(0)
            self._held[load.receiver], self.arrivals[load.receiver] = {}, {}
            for feed in load.feeds:
                path = self._fabric.path(feed.upstream, load.receiver)
                chunks = [chunk for part in feed.chunks for chunk in part]
                self._streams.append(Stream(load.receiver, feed, path, chunks))
        while self._sendings and self._sendings[0][1].start_ns <= self._now:
            number, sending = self._sendings.pop(0)
            pair = (sending.sender, sending.receiver)
            if pair not in self._queues:
                path = self._fabric.path(FromWorker(pair[0]), pair[1])
                self._queues[pair] = Queue(path, [])
            queue = self._queues[pair]
            queue.waiting.append((number, sending))
            if len(queue.waiting) == 1:
                queue.left_bytes = sending.size_bytes

    def _share(self, streams: Sequence[Stream], queues: Sequence[Queue]) -> float:
        """Rates; returns the least part of a link that is left for parameters."""
        rates = {n: float(rate) for n, rate in enumerate(self._fabric.rates) if rate is not None}
        if self._is_equal:
            _max_min([*queues, *streams], rates)
            return 1.0
        left = _max_min(queues, rates)
        _max_min(streams, left)
        used = {number for stream in self._streams for number in stream.path if number in rates}
        return min((left[number] / rates[number] for number in sorted(used)), default=1.0)

    def _end(self, one: Stream | Queue) -> None:
        if isinstance(one, Stream):
            _arrive(one, self._grid, self._held, self.arrivals, self._now)
            return
        number, _ = one.waiting.pop(0)
        self.sent[number] = self._now
        one.left_bytes = one.waiting[0][1].size_bytes if one.waiting else 0.0


def slowest_chunk_ns(world: ChunkWorld) -> float:
    """What a chunk takes alone on the slowest link that is used."""
    fabric = Fabric(world.topology)
    for load in world.loads:
        for feed in load.feeds:
            fabric.path(feed.upstream, load.receiver)
    slowest = min((rate for rate in fabric.rates if rate is not None), default=_NS_PER_S)
    return world.grid.chunk_bytes * _NS_PER_S / slowest


def _need_ns(one: Stream | Queue) -> float:
    if one.left_bytes <= 0:
        return 0.0
    return one.left_bytes * _NS_PER_S / one.rate if one.rate >= _LEAST_RATE else math.inf


def _moves(stream: Stream, grid: ChunkGrid, held: Held) -> bool:
    """A chunk moves; if none does, one that the sender has begins."""
    if stream.chunk is None:
        upstream = stream.feed.upstream
        there: Iterable[int] = stream.to_bring
        if isinstance(upstream, FromWorker):
            there = held.get(upstream.worker, {})
        wanted = stream.to_bring if stream.feed.window is None else stream.to_bring[:1]
        for chunk in there:
            if chunk in wanted:
                stream.chunk, stream.left_bytes = chunk, grid.place(chunk)[2]
                break
    return stream.chunk is not None


def _arrive(
    stream: Stream,
    grid: ChunkGrid,
    held: Held,
    arrivals: dict[WorkerRef, dict[int, float]],
    now: float,
) -> None:
    assert stream.chunk is not None
    chunk, stream.chunk = stream.chunk, None
    stream.to_bring.remove(chunk)
    held[stream.receiver][chunk] = None
    layer = grid.layer(chunk)
    if all(chunk in held[stream.receiver] for chunk in grid.of_layer(layer)):
        arrivals[stream.receiver][layer] = now


def _max_min(moving: Iterable[Stream | Queue], rates: dict[int, float]) -> dict[int, float]:
    """Max-min fair: fill the link that gives its streams least, take it away, go on. Returns what
    is left of each link."""
    left, open_links = dict(rates), dict(rates)
    unset = list(moving)
    while unset:
        counts = {n: sum(n in one.path for one in unset) for n in open_links}
        shares = {n: left[n] / count for n, count in counts.items() if count}
        if not shares:
            for one in unset:
                one.rate = 1e18
            break
        fullest = min(shares, key=lambda n: shares[n])
        share = shares[fullest]
        for one in [one for one in unset if fullest in one.path]:
            one.rate = share
            for number in one.path:
                if number in left:
                    left[number] = max(0.0, left[number] - share)
            unset.remove(one)
        del open_links[fullest]
    return left
