"""What can be seen of a member's holdings from its inputs and effects alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from livescale.batching.live_order import LIVE_ORDERS
from livescale.chunks import Feed
from livescale.member.effects import (
    AmendFetch,
    Assign,
    Drop,
    Effect,
    Fetch,
    Materialize,
    Measure,
    Report,
)
from livescale.member.inputs import (
    AllCame,
    ControllerMet,
    ExecutorReady,
    FeedEnded,
    HoldingFailed,
    LayerCame,
    MemberInput,
    Ordered,
    RateMeasured,
)
from livescale.messages.commands import AmendLoad, DropCopy, Release, StartCopy, StartLoad
from livescale.messages.events import (
    CopyCompleted,
    CopyDropped,
    CopyFailed,
    CopyLayerArrived,
    CopyReport,
    FeedFailed,
    InstanceReport,
    LayerArrived,
    LoadCompleted,
    LoadFailed,
    Released,
)
from livescale.types import PlanId, WorkerRef

Start = StartLoad | StartCopy


@dataclass(eq=False)
class Seen:
    """A holding, as it must be after the inputs so far."""

    order: Start
    layer_bytes: tuple[int, ...]
    feeds: tuple[Feed, ...]
    #: None: the order was not carried out yet
    number: int | None = None
    arrived: set[int] = field(default_factory=set)
    troubles: list[FeedFailed] = field(default_factory=list)
    materialized: int = 0
    is_ready: bool = False
    is_whole: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(self.layer_bytes)

    @property
    def watermark(self) -> int:
        return next(n for n in range(len(self.layer_bytes) + 1) if n not in self.arrived)

    @property
    def is_measured(self) -> bool:
        """The rate of prefills is measured before it counts as whole."""
        order = self.order
        if isinstance(order, StartCopy) or not order.measure_capacity:
            return False
        return order.pairing is None or not LIVE_ORDERS[order.pairing.order].is_live

    def report(self) -> InstanceReport | CopyReport:
        order, feeds = self.order, () if self.is_whole else self.feeds
        if isinstance(order, StartCopy):
            return CopyReport(order.model, order.plan, self.is_whole, order.rank, feeds)
        return InstanceReport(
            instance=order.instance,
            model=order.model,
            attempt=order.attempt,
            watermark=self.watermark,
            is_loaded=self.is_whole,
            rank=order.rank,
            plan=order.plan,
            feeds=feeds,
            pairing=order.pairing,
        )


class HoldingWitness:
    """Judges a member step by step: orders end once, memory is not overdrawn, reports are true."""

    def __init__(self, ref: WorkerRef, memory_bytes: int, address_bytes: int) -> None:
        self.ref = ref
        self._memory_bytes = memory_bytes
        self._address_bytes = address_bytes
        #: holdings that must be there, by plan
        self.seen: dict[PlanId, Seen] = {}
        #: (offset, size) between Fetch and Drop, by number
        self.present: dict[int, tuple[int, int]] = {}
        self._numbers = 0
        #: terminal events that are due, by order
        self._due: Counter[tuple[str, int]] = Counter()
        #: plans that were ordered, and those whose order has ended
        self._started: dict[PlanId, Seen] = {}
        self.ended: dict[PlanId, type] = {}
        #: orders for which there was no memory
        self._too_large: set[PlanId] = set()
        #: layers that arrived in this step, and troubles that are due
        self._news: Counter[tuple[PlanId, int]] = Counter()
        self._troubles: Counter[FeedFailed] = Counter()

    # -- inputs, in order -------------------------------------------------------------------------

    def absorb(self, inputs: Sequence[MemberInput]) -> None:
        for news in inputs:
            self.take(news)

    def take(self, news: MemberInput) -> None:
        if isinstance(news, Ordered):
            self._order(news)
        elif isinstance(news, ControllerMet):
            for seen in self.seen.values():
                self._troubles.update(seen.troubles if not seen.is_whole else ())
        elif isinstance(
            news, LayerCame | AllCame | HoldingFailed | FeedEnded | ExecutorReady | RateMeasured
        ):
            held = next((s for s in self.seen.values() if s.number == news.holding), None)
            if held is not None:
                self._about(held, news)

    def _order(self, ordered: Ordered) -> None:
        command = ordered.command
        if isinstance(command, StartLoad | StartCopy):
            seen = Seen(command, ordered.layer_bytes, command.feeds)
            self._started[command.plan] = seen
            held_bytes = sum(other.size_bytes for other in self.seen.values())
            if held_bytes + seen.size_bytes <= self._memory_bytes:
                self.seen[command.plan] = seen
            else:
                self._too_large.add(command.plan)
        elif isinstance(command, AmendLoad):
            held = self.seen.get(command.plan)
            if held is not None and not held.is_whole:
                held.feeds, held.troubles = command.feeds, []
        elif isinstance(command, Release):
            self._due["Released", command.instance] += 1
            for seen in list(self.seen.values()):
                assert isinstance(seen.order, StartLoad)
                if seen.order.instance == command.instance:
                    del self.seen[seen.order.plan]
        elif isinstance(command, DropCopy):
            self._due["CopyDropped", command.plan] += 1
            self.seen.pop(command.plan, None)

    def _about(self, seen: Seen, news: MemberInput) -> None:
        plan = seen.order.plan
        if isinstance(news, LayerCame):
            seen.arrived.add(news.layer)
            self._news[plan, news.layer] += 1
        elif isinstance(news, HoldingFailed):
            del self.seen[plan]
        elif isinstance(news, ExecutorReady):
            seen.is_ready = True
        elif isinstance(news, FeedEnded):
            trouble = FeedFailed(plan, self.ref, news.upstream, news.reason, news.is_stalled)
            seen.troubles.append(trouble)
            self._troubles[trouble] += 1
        else:
            seen.is_whole = isinstance(news, RateMeasured) or not seen.is_measured

    # -- effects, in order ------------------------------------------------------------------------

    def watch(self, effect: Effect) -> None:
        if isinstance(effect, Fetch):
            self._fetched(effect)
        elif isinstance(effect, AmendFetch | Assign | Measure):
            assert effect.holding in self.present, f"{effect} names what is gone"
        elif isinstance(effect, Drop):
            del self.present[effect.holding]
        elif isinstance(effect, Materialize):
            self._materialized(effect)
        elif isinstance(effect, Report):
            self.reported(effect)

    def _fetched(self, effect: Fetch) -> None:
        assert effect.holding > self._numbers, "numbers are never used again"
        self._numbers = effect.holding
        seen = self._started[effect.order.plan]
        seen.number = effect.holding
        start, size = effect.offset_bytes, seen.size_bytes
        assert start >= 0
        assert start + size <= self._address_bytes
        for other, other_size in self.present.values():
            assert start + size <= other or other + other_size <= start, "regions overlap"
        self.present[effect.holding] = start, size
        assert sum(size for _, size in self.present.values()) <= self._memory_bytes

    def _materialized(self, effect: Materialize) -> None:
        (number,) = self.present
        seen = next(s for s in self._started.values() if s.number == number)
        assert seen.is_ready
        assert effect.layer == seen.materialized, "layers come in order, each once"
        assert effect.layer in seen.arrived
        seen.materialized += 1

    def reported(self, effect: Report) -> None:
        event = effect.event
        if isinstance(event, LoadCompleted | LoadFailed):
            self._end(self.plan_of(event.instance), event)
        elif isinstance(event, CopyCompleted | CopyFailed):
            self._end(event.plan, event)
        elif isinstance(event, Released):
            self._due["Released", event.instance] -= 1
        elif isinstance(event, CopyDropped):
            self._due["CopyDropped", event.plan] -= 1
        elif isinstance(event, LayerArrived | CopyLayerArrived):
            is_load = isinstance(event, LayerArrived)
            plan = self.plan_of(event.instance) if is_load else event.plan
            self._news[plan, event.layer] -= 1
            assert plan not in self.ended, "a layer after the end"
        elif isinstance(event, FeedFailed):
            self._troubles[event] -= 1

    def plan_of(self, instance: int) -> PlanId:
        """The plan of the last order that names the instance."""
        return next(
            plan
            for plan, seen in reversed(self._started.items())
            if isinstance(seen.order, StartLoad) and seen.order.instance == instance
        )

    def _end(
        self, plan: PlanId, event: LoadCompleted | LoadFailed | CopyCompleted | CopyFailed
    ) -> None:
        assert plan not in self.ended, f"{event} after {self.ended[plan]}"
        self.ended[plan] = type(event)
        seen = self._started[plan]
        if isinstance(event, LoadCompleted | CopyCompleted):
            assert event.received_bytes == seen.size_bytes
            assert len(seen.arrived) == len(seen.layer_bytes), "it is not whole"
        else:
            assert seen.number not in self.present, "what failed was dropped before"
            is_refused = seen.number is None
            assert is_refused == (plan in self._too_large), f"{event} with memory for it"

    # -- after a step -----------------------------------------------------------------------------

    def check(self, reports: Sequence[InstanceReport | CopyReport]) -> None:
        """`reports` are what a new controller would be given."""
        assert list(reports) == [seen.report() for seen in self.seen.values()]
        assert sorted(self.present) == sorted(s.number or 0 for s in self.seen.values())
        for counter in (self._due, self._news, self._troubles):
            assert not any(counter.values()), f"not reported as often as due: {counter}"
            counter.clear()
        for plan, seen in self._started.items():
            is_over = plan not in self.seen or seen.is_whole
            assert (plan in self.ended) == is_over, f"{seen} has {self.ended.get(plan)}"
