"""Loads under way: who gets which model from whom, and what happens when a sender fails.

Receivers keep what they have when a feed fails; here they are given another one (BlitzScale's
chains, made to survive). Whom to ask instead is worked out in `multicast/repair`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from livescale.clusters.topology import Direction, LinkKind, LinkUse
from livescale.control.state.holdings import Holding
from livescale.control.state.pool import ParameterPool
from livescale.messages.events import FeedFailed
from livescale.values.chunks import Feed, senders
from livescale.values.types import FromWorker, HoldingId, WorkerRef

FeedsByReceiver = dict[WorkerRef, tuple[Feed, ...]]

# So many times longer than another stall lasts one in a circle before a sender is blamed.
_CIRCLE_GRACES = 5
# A load is late after so many times what was predicted, and this on top: predictions know nothing
# of a busy machine.
_LATE_TIMES = 4
_LATE_EXTRA_NS = 2_000_000_000


@dataclass(slots=True)
class OpenLoad:
    """A holding that arrives, until its terminal event."""

    id: HoldingId
    model: str
    rank: int
    feeds: tuple[Feed, ...]
    #: the unit that its feeds are in
    chunk_bytes: int
    #: how long it should take (None: not known, or judged already), and when it is late
    predicted_ns: int | None = None
    late_at_ns: int | None = None
    #: upstreams that failed and have not been replaced
    failed: dict[WorkerRef, None] = field(default_factory=dict)
    #: every upstream that ever failed this load: it is not asked again, so that repairs end
    shunned: dict[WorkerRef, None] = field(default_factory=dict)
    #: upstreams that stall, and since when that is counted against them
    stalled: dict[WorkerRef, int] = field(default_factory=dict)
    #: upstreams that stall because they wait for a feed that was replaced, and since when
    excused: dict[WorkerRef, int] = field(default_factory=dict)

    @property
    def receiver(self) -> WorkerRef:
        return self.id.member

    @property
    def is_waiting(self) -> bool:
        """Some upstream sends nothing at present, whichever of them is to blame."""
        return bool(self.stalled or self.excused)

    def fail(self, upstream: WorkerRef) -> None:
        """Nothing more is expected from there."""
        self.failed[upstream] = None
        self.shunned[upstream] = None
        self.stalled.pop(upstream, None)
        self.excused.pop(upstream, None)


class Loads:
    """All open loads. Keeps the pool's list of readers true."""

    def __init__(self, pool: ParameterPool) -> None:
        self._pool = pool
        self.open: dict[HoldingId, OpenLoad] = {}
        #: what members that were lost were receiving, by model, rank and unit, until repairs
        self._lost: dict[tuple[str, int, int], FeedsByReceiver] = {}

    def begin(self, holding: Holding, predicted_ns: int | None = None) -> None:
        """The holding arrives by the feeds of its order, and should take so long (None: not
        known)."""
        order = holding.order
        assert holding.id not in self.open, f"{self.open[holding.id]} is open already"
        load = OpenLoad(
            id=holding.id,
            model=order.model,
            rank=order.rank,
            feeds=order.feeds,
            chunk_bytes=order.chunk_bytes,
            predicted_ns=predicted_ns,
        )
        self.open[holding.id] = load
        self._read(load)

    def end(self, holding: HoldingId) -> None:
        """The load completed or failed. Does nothing if it is not open."""
        load = self.open.pop(holding, None)
        if load is not None:
            self._stop_reading(load)

    def beside(self, load: OpenLoad) -> FeedsByReceiver:
        """By receiver, the feeds of all loads of the same rank of a model that are in the same
        unit, and those that members which are lost since the last repairs had."""
        kind = load.model, load.rank, load.chunk_bytes
        found = dict(self._lost.get(kind, {}))
        for other in self.open.values():
            if (other.model, other.rank, other.chunk_bytes) == kind:
                found[other.receiver] = other.feeds
        return found

    def chunk_bytes_of(self, model: str) -> int | None:
        """The unit of what is on its way of a model: the one of all its loads, but for those that
        two controllers ordered. None if nothing is."""
        return min((o.chunk_bytes for o in self.open.values() if o.model == model), default=None)

    # -- what goes wrong ----------------------------------------------------------------------

    def feed_failed(self, event: FeedFailed, now_ns: int) -> bool:
        """Nothing more comes from there, or nothing has come for a while. False if that is no news
        of an open load."""
        load, upstream = self.open.get(event.holding), event.upstream
        if load is None or FromWorker(upstream) not in senders(load.feeds):
            return False
        if not event.is_stalled:
            load.fail(upstream)
        elif upstream not in load.failed:
            load.stalled.setdefault(upstream, now_ns)
        return True

    def lose(self, worker: WorkerRef) -> None:
        """The worker receives nothing any more, and all that read from it need another feed."""
        for load in [load for load in self.open.values() if load.receiver == worker]:
            kind = load.model, load.rank, load.chunk_bytes
            self._lost.setdefault(kind, {})[worker] = load.feeds
            self.end(load.id)
        for load in self.open.values():
            if FromWorker(worker) in senders(load.feeds):
                load.fail(worker)

    def fail_readers(self, sender: WorkerRef, model: str) -> None:
        """Its load failed, it has nothing of the model: who reads from it needs another feed, or it
        might be told to get the model from one of them."""
        for load in self.open.values():
            if load.model == model and FromWorker(sender) in senders(load.feeds):
                load.fail(sender)

    def fail_hopeless(self) -> None:
        """Senders that a load was adopted with may have died while no controller was there, or
        been told by another controller to drop the model. And two controllers may have ordered
        loads that wait for one another: from none of them a way leads to a whole copy."""
        rooted = self._rooted()
        for load in self.open.values():
            for upstream in senders(load.feeds):
                is_there = self._pool.has(upstream.worker, load.model)
                if not is_there or load.id not in rooted:
                    load.fail(upstream.worker)

    def _rooted(self) -> dict[HoldingId, None]:
        """Loads that get something from storage, from a whole copy, or from such a load."""
        found: dict[HoldingId, None] = {}
        sources = {
            (load.model, load.rank): {h.member for h in self._pool.whole(load.model, load.rank)}
            for load in self.open.values()
        }
        before = -1
        while len(found) > before:
            before = len(found)
            for load in self.open.values():
                known = sources[load.model, load.rank]
                if any(
                    not isinstance(feed.upstream, FromWorker) or feed.upstream.worker in known
                    for feed in load.feeds
                ):
                    found[load.id] = None
                    known.add(load.receiver)
        return found

    def amend(self, load: OpenLoad, feeds: tuple[Feed, ...], now_ns: int) -> None:
        """The receiver is told to get what it misses by these feeds. Those behind it may stall
        until its new bytes come, and are told of nothing: that is no fault of theirs or its."""
        self._stop_reading(load)
        load.feeds = feeds
        load.failed = {}
        kept = [upstream.worker for upstream in senders(feeds)]
        load.stalled = {w: since for w, since in load.stalled.items() if w in kept}
        load.excused = {w: since for w, since in load.excused.items() if w in kept}
        self._read(load)
        for other in self.open.values():
            if load.receiver in other.stalled:
                del other.stalled[load.receiver]
                other.excused[load.receiver] = now_ns

    def repaired(self) -> None:
        """Every failed feed has been replaced."""
        self._lost = {}

    # -- who is to blame when nothing comes ---------------------------------------------------

    def progressed(self, holding: HoldingId, now_ns: int) -> None:
        """The receiver has a layer more: it does not stall, and those behind it should not."""
        load = self.open.get(holding)
        if load is not None and load.is_waiting:
            load.stalled, load.excused = {}, {}
        self._expect_of(holding.member, now_ns)

    def completed(self, holding: HoldingId, now_ns: int) -> None:
        """The receiver has everything."""
        self.end(holding)
        self._expect_of(holding.member, now_ns)

    def blame_stalled(self, now_ns: int, grace_ns: int) -> None:
        """Stalls become failures where the sender is to blame.

        A sender that waits for its own upstream stalls everybody behind it; only the one in front
        of all stalls is at fault. `grace_ns` after a report all have spoken. Where receivers feed
        one another none may be in front: then the oldest stall is taken for the cause, later. No
        excuse lasts longer there: what was replaced may wait for the one that it excuses.
        """
        waiting = [load for load in self.open.values() if load.is_waiting]
        receivers = {load.receiver for load in waiting}
        guilty = [
            (since_ns, load.id, upstream)
            for load in waiting
            for upstream, since_ns in load.stalled.items()
            if upstream not in receivers and now_ns >= since_ns + grace_ns
        ]
        circle = _in_circles(waiting)
        stalls = [(ns, load.id, worker) for load in circle for worker, ns in load.stalled.items()]
        excuses = [(ns, load.id, worker) for load in circle for worker, ns in load.excused.items()]
        if circle:
            oldest = min(stalls or excuses)
            since_ns = max(oldest[0], *(ns for ns, _, _ in excuses), 0)
            if now_ns >= since_ns + _CIRCLE_GRACES * grace_ns:
                guilty.append(oldest)
        for _, holding, upstream in guilty:
            self.open[holding].fail(upstream)

    def blame_slow(self, now_ns: int) -> None:
        """Late loads get another sender, once, where another complete copy can be read.

        As with stalls, only the sender in front is at fault: those behind it get their time anew,
        and a reader of a sender that loads itself waits for as long as that one may take.
        Loads with several senders are left alone, because nothing says which of them is slow.
        """
        late = self._late(now_ns)
        judged = False
        for load in late.values():
            upstreams = senders(load.feeds)
            if len(upstreams) != 1 or len(load.feeds) != 1 or upstreams[0].worker in late:
                continue
            in_time_ns = self._in_time_until_ns(load, upstreams[0].worker, now_ns)
            if in_time_ns is not None:
                load.late_at_ns = in_time_ns
                continue
            if self._has_other(load, upstreams[0].worker):
                load.fail(upstreams[0].worker)
                judged = True
            load.predicted_ns = load.late_at_ns = None
        for load in late.values():
            if judged and load.predicted_ns is not None:
                load.late_at_ns = _late_at_ns(now_ns, load.predicted_ns)

    def blame_deadlines_ns(self, now_ns: int, grace_ns: int) -> list[int]:
        """When stalls will have lasted long enough to be judged, and when loads are late."""
        self._start_clocks(now_ns)
        times = [
            since
            for load in self.open.values()
            for since in (*load.stalled.values(), *load.excused.values())
        ]
        late = [load.late_at_ns for load in self.open.values() if load.late_at_ns is not None]
        return [since + n * grace_ns for since in times for n in (1, _CIRCLE_GRACES)] + late

    def links(self) -> tuple[LinkUse, ...]:
        """NIC directions that open loads use, once per use."""
        uses = []
        for load in self.open.values():
            for upstream in senders(load.feeds):
                uses.append(LinkUse(LinkKind.NIC, str(upstream.worker), Direction.OUT))
                uses.append(LinkUse(LinkKind.NIC, str(load.receiver), Direction.IN))
        return tuple(uses)

    def _late(self, now_ns: int) -> dict[WorkerRef, OpenLoad]:
        """Loads that take too long, by receiver."""
        self._start_clocks(now_ns)
        return {
            load.receiver: load
            for load in self.open.values()
            if load.late_at_ns is not None and now_ns >= load.late_at_ns
        }

    def _start_clocks(self, now_ns: int) -> None:
        """The time of loads that are new begins now."""
        for load in self.open.values():
            if load.predicted_ns is not None and load.late_at_ns is None:
                load.late_at_ns = _late_at_ns(now_ns, load.predicted_ns)

    def _in_time_until_ns(self, load: OpenLoad, sender: WorkerRef, now_ns: int) -> int | None:
        """Until when the sender, which gets the same bytes itself, may take (None: no longer)."""
        for other in self.open.values():
            is_same = other.receiver == sender and other.model == load.model
            if is_same and other.late_at_ns is not None and now_ns < other.late_at_ns:
                return other.late_at_ns
        return None

    def _has_other(self, load: OpenLoad, sender: WorkerRef) -> bool:
        """A complete copy that this load could read instead."""
        others = [holding.member for holding in self._pool.whole(load.model, load.rank)]
        return any(w not in (sender, load.receiver) and w not in load.shunned for w in others)

    def _expect_of(self, sender: WorkerRef, now_ns: int) -> None:
        """It has something new: loads that stall behind it should go on soon."""
        for load in self.open.values():
            if sender in load.stalled or sender in load.excused:
                load.excused.pop(sender, None)
                load.stalled[sender] = now_ns

    def _read(self, load: OpenLoad) -> None:
        for upstream in senders(load.feeds):
            self._pool.reads.begin(load.id, load.model, upstream.worker)

    def _stop_reading(self, load: OpenLoad) -> None:
        for upstream in senders(load.feeds):
            self._pool.reads.end(load.id, load.model, upstream.worker)


def _in_circles(waiting: list[OpenLoad]) -> list[OpenLoad]:
    """Those of the waiting loads that wait for one another alone, and for no sender in front."""
    left = waiting
    before = len(left) + 1
    while len(left) < before:
        before, receivers = len(left), {load.receiver for load in left}
        left = [load for load in left if receivers.issuperset((*load.stalled, *load.excused))]
    return left


def _late_at_ns(now_ns: int, predicted_ns: int) -> int:
    return now_ns + _LATE_TIMES * predicted_ns + _LATE_EXTRA_NS
