"""What can be seen of a member's holdings from its inputs and effects alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from livescale.batching.contract.live_order import LIVE_ORDERS
from livescale.member.effects import (
    AmendFetch,
    Assign,
    DropFetch,
    Effect,
    Fetch,
    Materialize,
    Measure,
    Release,
    Report,
    TakeUp,
)
from livescale.member.inputs import (
    AllCame,
    ControllerMet,
    ExecutorReady,
    FeedEnded,
    FetchFailed,
    LayerCame,
    MemberInput,
    Ordered,
    RateMeasured,
)
from livescale.messages.commands import (
    AmendHolding,
    ChangeDuty,
    DropHolding,
    ReleaseHolding,
    StartHolding,
)
from livescale.messages.events import (
    FeedFailed,
    HoldingCompleted,
    HoldingDropped,
    HoldingFailed,
    HoldingReport,
    LayerArrived,
    RoleChanged,
)
from livescale.values.chunks import Feed
from livescale.values.types import HoldingId, PlanId, Role, WorkerRef


@dataclass(eq=False)
class Seen:
    """A holding, as it must be after the inputs so far."""

    order: StartHolding
    layer_bytes: tuple[int, ...]
    feeds: tuple[Feed, ...]
    is_fetched: bool = False
    arrived: set[int] = field(default_factory=set)
    #: layers that the member has reported
    told: set[int] = field(default_factory=set)
    troubles: list[FeedFailed] = field(default_factory=list)
    materialized: set[int] = field(default_factory=set)
    is_ready: bool = False
    is_whole: bool = False
    #: it serves no more
    is_spare: bool = False
    #: as who moved them counted
    received_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        return sum(self.layer_bytes)

    @property
    def watermark(self) -> int:
        return self.prefix(self.arrived)

    @property
    def is_measured(self) -> bool:
        """The rate of prefills is measured, in any case, before it counts as whole."""
        duty = self.order.duty
        if duty is None or not self.order.measure_capacity:
            return False
        return duty.live_order is None or not LIVE_ORDERS[duty.live_order].is_live

    def prefix(self, layers: set[int]) -> int:
        """The first layer of the span that is not among these."""
        span = self.order.span
        return next(n for n in range(span.start, span.stop + 1) if n not in layers)

    def report(self) -> HoldingReport:
        feeds = () if self.is_whole else self.feeds
        order = msgspec.structs.replace(self.order, feeds=feeds)
        beyond = tuple(sorted(n for n in self.arrived if n > self.watermark))
        beyond = () if self.is_whole else beyond
        return HoldingReport(order, self.watermark, self.is_whole, self.is_spare, beyond)


class HoldingWitness:
    """Judges a member step by step: orders end once, memory is not overdrawn, reports are true."""

    def __init__(self, ref: WorkerRef, memory_bytes: int, address_bytes: int) -> None:
        self.ref = ref
        self._memory_bytes = memory_bytes
        self._address_bytes = address_bytes
        #: holdings that must be there, by plan
        self.seen: dict[PlanId, Seen] = {}
        #: (offset, size) between Fetch and DropFetch, by plan
        self.present: dict[PlanId, tuple[int, int]] = {}
        #: the plan of the model that the executor has
        self._assigned: PlanId | None = None
        #: answers to drops that are due
        self._due: Counter[HoldingId] = Counter()
        #: plans that were ordered, and those whose order has ended
        self._started: dict[PlanId, Seen] = {}
        self.ended: dict[PlanId, type] = {}
        #: orders for which there was no memory
        self._too_large: set[PlanId] = set()
        #: layers that arrived in this step, and troubles that are due
        self._news: Counter[tuple[PlanId, int]] = Counter()
        self._troubles: Counter[FeedFailed] = Counter()
        #: roles that instances were told to have in this step, and did not have
        self._new_roles: list[tuple[HoldingId, Role]] = []

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
            news, LayerCame | AllCame | FetchFailed | FeedEnded | ExecutorReady | RateMeasured
        ):
            held = self.seen.get(news.plan)
            if held is not None and held.is_fetched:
                self._about(held, news)

    def _order(self, ordered: Ordered) -> None:
        command = ordered.command
        plan = command.holding.plan
        if isinstance(command, StartHolding):
            seen = Seen(command, ordered.layer_bytes, command.feeds)
            self._started[plan] = seen
            if command.spare is not None:
                # Everything is there, and the member has said so before.
                assert self.seen.pop(command.spare).is_spare
                seen.arrived = set(range(command.span.start, command.span.stop))
                self.seen[plan] = seen
                return
            held_bytes = sum(other.size_bytes for other in self.seen.values())
            if held_bytes + seen.size_bytes <= self._memory_bytes:
                self.seen[plan] = seen
            else:
                self._too_large.add(plan)
        elif isinstance(command, AmendHolding):
            held = self.seen.get(plan)
            if held is not None and not held.is_whole:
                held.feeds, held.troubles = command.feeds, []
        elif isinstance(command, ReleaseHolding):
            held = self.seen.get(plan)
            if held is not None and held.is_whole:
                held.is_spare = True
        elif isinstance(command, ChangeDuty):
            held = self.seen.get(plan)
            if held is not None:
                before = held.order.duty
                assert before is not None
                if before.role is not command.duty.role and not held.is_spare:
                    self._new_roles.append((command.holding, command.duty.role))
                held.order = msgspec.structs.replace(held.order, duty=command.duty)
        elif isinstance(command, DropHolding):
            self._due[command.holding] += 1
            self.seen.pop(plan, None)

    def _about(self, seen: Seen, news: MemberInput) -> None:
        plan = seen.order.holding.plan
        if isinstance(news, LayerCame):
            seen.arrived.add(news.layer)
            self._news[plan, news.layer] += 1
        elif isinstance(news, FetchFailed):
            del self.seen[plan]
        elif isinstance(news, ExecutorReady):
            seen.is_ready = True
            seen.is_whole = seen.order.spare is not None and not seen.is_measured
        elif isinstance(news, FeedEnded):
            holding = HoldingId(plan, self.ref)
            trouble = FeedFailed(holding, news.upstream, news.reason, news.is_stalled)
            seen.troubles.append(trouble)
            self._troubles[trouble] += 1
        else:
            if isinstance(news, AllCame):
                seen.received_bytes = news.received_bytes
            seen.is_whole = isinstance(news, RateMeasured) or not seen.is_measured

    # -- effects, in order ------------------------------------------------------------------------

    def watch(self, effect: Effect) -> None:
        if isinstance(effect, Fetch):
            self._fetched(effect)
        elif isinstance(effect, TakeUp):
            seen = self._started[effect.plan]
            assert effect.order == seen.order
            seen.is_fetched = True
            self.present[effect.plan] = self.present.pop(effect.spare)
        elif isinstance(effect, AmendFetch | Assign | Measure | Release):
            assert effect.plan in self.present, f"{effect} names what is gone"
            if isinstance(effect, Assign):
                self._assigned = effect.plan
            elif isinstance(effect, Measure):
                # It may have been dropped since, in the same step.
                self._measures(self._started[effect.plan])
        elif isinstance(effect, DropFetch):
            del self.present[effect.plan]
        elif isinstance(effect, Materialize):
            self._materialized(effect)
        elif isinstance(effect, Report):
            self.reported(effect)

    def _measures(self, seen: Seen) -> None:
        """A live instance that has had no work is measured as others are."""
        assert seen.order.measure_capacity
        assert seen.watermark == seen.order.span.stop
        seen.is_whole = False

    def _fetched(self, effect: Fetch) -> None:
        assert effect.plan == effect.order.holding.plan
        seen = self._started[effect.plan]
        assert not seen.is_fetched, "each order is carried out once"
        seen.is_fetched = True
        start, size = effect.offset_bytes, seen.size_bytes
        assert start >= 0
        assert start + size <= self._address_bytes
        assert seen.order.duty is None or start == seen.order.offset_bytes
        for other, other_size in self.present.values():
            assert start + size <= other or other + other_size <= start, "regions overlap"
        self.present[effect.plan] = start, size
        assert sum(size for _, size in self.present.values()) <= self._memory_bytes

    def _materialized(self, effect: Materialize) -> None:
        assert self._assigned in self.present
        seen = self._started[self._assigned]
        assert seen.is_ready
        assert effect.layer not in seen.materialized, "each layer comes once"
        assert effect.layer in seen.arrived
        seen.materialized.add(effect.layer)

    def reported(self, effect: Report) -> None:
        event = effect.event
        holding = getattr(event, "holding", None)
        assert holding is None or holding.member == self.ref
        if isinstance(event, HoldingCompleted | HoldingFailed):
            self._end(event)
        elif isinstance(event, HoldingDropped):
            self._due[event.holding] -= 1
        elif isinstance(event, RoleChanged):
            assert (event.holding, event.role) == self._new_roles.pop(0)
        elif isinstance(event, LayerArrived):
            plan = event.holding.plan
            self._news[plan, event.layer] -= 1
            assert plan not in self.ended, "a layer after the end"
            seen = self._started[plan]
            seen.told.add(event.layer)
            assert event.watermark == seen.prefix(seen.told)
        elif isinstance(event, FeedFailed):
            self._troubles[event] -= 1

    def _end(self, event: HoldingCompleted | HoldingFailed) -> None:
        plan = event.holding.plan
        assert plan not in self.ended, f"{event} after {self.ended[plan]}"
        self.ended[plan] = type(event)
        seen = self._started[plan]
        if isinstance(event, HoldingCompleted):
            assert event.received_bytes == seen.received_bytes
            assert len(seen.arrived) == len(seen.layer_bytes), "it is not whole"
        else:
            assert plan not in self.present, "what failed was dropped before"
            assert (not seen.is_fetched) == (plan in self._too_large), f"{event} with memory for it"

    # -- after a step -----------------------------------------------------------------------------

    def check(self, reports: Sequence[HoldingReport]) -> None:
        """`reports` are what a new controller would be given."""
        assert list(reports) == [seen.report() for seen in self.seen.values()]
        assert sorted(self.present) == sorted(self.seen)
        for counter in (self._due, self._news, self._troubles):
            assert not any(counter.values()), f"not reported as often as due: {counter}"
            counter.clear()
        assert not self._new_roles, f"not told: {self._new_roles}"
        for plan, seen in self._started.items():
            is_over = plan not in self.seen or seen.is_whole
            assert (plan in self.ended) == is_over, f"{seen} has {self.ended.get(plan)}"
