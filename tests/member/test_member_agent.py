"""A host agent as a Member: any orders and any news, each order ended once, memory never overdrawn.

The agent is stepped with several inputs at once, so that news are late by some orders.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holding_witness import HoldingWitness
from hypothesis import example, given, settings
from hypothesis import strategies as st

from effort import examples
from livescale.member.effects import DropFetch, Effect, Fetch, Report
from livescale.member.inputs import (
    AllCame,
    ControllerMet,
    FeedEnded,
    FetchFailed,
    FirstByteCame,
    LayerCame,
    MemberInput,
    MemoryKept,
    Ordered,
)
from livescale.member.member import ADDRESS_SPACES, Member
from livescale.messages.commands import AmendHolding, DropHolding, StartHolding
from livescale.messages.events import HoldingFailed
from livescale.values.chunks import ChunkRange, Feed
from livescale.values.types import (
    FromStorage,
    FromWorker,
    HoldingId,
    LayerSpan,
    WorkerRef,
    agent_ref,
)

AGENT = agent_ref(0)
PEER = WorkerRef(3)
MEMORY_BYTES = 1 << 20
FEEDS = (
    (Feed(FromStorage(), (ChunkRange(0, 8),)),),
    (Feed(FromWorker(PEER), (ChunkRange(0, 4),)), Feed(FromStorage(), (ChunkRange(4, 8),))),
)
#: copies of half the memory, of pages, and of odd sizes
SIZES = st.sampled_from([MEMORY_BYTES // 2, MEMORY_BYTES // 3, 64 << 10, 20_000, 4096, 1, 0])
PLACES = st.integers(0, 9)


@dataclass
class AgentPlay:
    """An agent, the transfers that it started, and a witness of all that it does."""

    member: Member = field(
        default_factory=lambda: Member(
            AGENT, MEMORY_BYTES, address_bytes=ADDRESS_SPACES * MEMORY_BYTES
        )
    )
    witness: HoldingWitness = field(
        default_factory=lambda: HoldingWitness(AGENT, MEMORY_BYTES, ADDRESS_SPACES * MEMORY_BYTES)
    )
    effects: list[Effect] = field(default_factory=list)
    inbox: list[MemberInput] = field(default_factory=list)
    plans: list[int] = field(default_factory=list)
    #: layers that are still to come, by plan
    missing: dict[int, list[int]] = field(default_factory=dict)
    #: where each copy lies or lay: first byte and end
    places: dict[int, tuple[int, int]] = field(default_factory=dict)
    #: of copies that are gone and may still be written
    kept: dict[int, tuple[int, int]] = field(default_factory=dict)
    is_kept_next: bool = False

    def do(self, what: str, *details: int) -> None:
        getattr(self, f"_{what}")(*details)

    def step(self) -> None:
        inputs, self.inbox = self.inbox, []
        self.witness.absorb(inputs)
        effects = self.member.step(7, inputs)
        for effect in effects:
            self.witness.watch(effect)
            if isinstance(effect, Fetch):
                span = effect.order.span
                self._check_place(effect)
                self.missing[effect.plan] = list(range(span.start, span.stop))
                self.inbox.append(FirstByteCame(effect.plan))
            elif isinstance(effect, DropFetch):
                # Late news are in the inbox already.
                self.missing.pop(effect.plan, None)
                self._keep_place(effect.plan)
        self.effects += effects
        self.witness.check(self.member.reports)
        assert self.member.wake_ns() is None

    def end(self) -> None:
        """Everything arrives, and everything is dropped."""
        self.step()
        while self.missing:
            self._layer(0, 0)
        self.step()
        for place in range(len(self.plans)):
            self._drop(place)
        self.step()
        assert self.member.holdings == self.member.reports == ()
        assert sorted(self.witness.ended) == self.plans

    def _check_place(self, effect: Fetch) -> None:
        start, size = self.witness.present[effect.plan]
        place = self.places[effect.plan] = (start, start + size)
        met = [kept for kept in self.kept.values() if kept[0] < place[1] and place[0] < kept[1]]
        assert not met, f"{place} may still be written for another copy"

    def _keep_place(self, plan: int) -> None:
        start, stop = self.places[plan]
        if self.is_kept_next and start < stop:
            self.is_kept_next = False
            self.kept[plan] = (start, stop)
            self.inbox.append(MemoryKept(plan, ((start, stop - start),)))

    def _keep(self) -> None:
        """What is dropped next is still written when it is gone. There is always another place."""
        self.is_kept_next = len(self.kept) < ADDRESS_SPACES // 2

    def _close(self) -> None:
        """Nothing is written any more for the copy that was kept first."""
        for plan in list(self.kept)[:1]:
            del self.kept[plan]
            self.inbox.append(MemoryKept(plan, ()))

    def _copy(self, size_bytes: int, layers: int, feeds: int) -> None:
        plan = len(self.plans) + 1
        self.plans.append(plan)
        sizes = (*(size_bytes // layers,) * (layers - 1), size_bytes - size_bytes // layers)
        sizes = sizes if layers > 1 else (size_bytes,)
        order = StartHolding(
            holding=HoldingId(plan, AGENT),
            model=f"m{plan % 3}",
            span=LayerSpan(plan % 3, plan % 3 + layers),
            feeds=FEEDS[feeds % 2],
            chunk_bytes=4096,
            rank=plan % 2,
            reason="test",
        )
        self.inbox.append(Ordered(order, sizes, order.model))

    def _drop(self, place: int) -> None:
        if self.plans:
            plan = self.plans[-1 - place % len(self.plans)]
            self.inbox.append(Ordered(DropHolding(HoldingId(plan, AGENT), "test")))

    def _amend(self, place: int, feeds: int) -> None:
        if self.plans:
            plan = self.plans[-1 - place % len(self.plans)]
            order = AmendHolding(HoldingId(plan, AGENT), FEEDS[feeds % 2])
            self.inbox.append(Ordered(order))

    def _layer(self, place: int, layer: int) -> None:
        if self.missing:
            plan = sorted(self.missing)[place % len(self.missing)]
            missing = self.missing[plan]
            self.inbox.append(LayerCame(plan, missing.pop(layer % len(missing))))
            if not missing:
                del self.missing[plan]
                self.inbox.append(AllCame(plan, 1000 + plan))

    def _fail(self, place: int) -> None:
        if self.missing:
            plan = sorted(self.missing)[place % len(self.missing)]
            del self.missing[plan]
            self.inbox.append(FetchFailed(plan, "no such file"))

    def _feed(self, place: int, is_stalled: int) -> None:
        if self.missing:
            plan = sorted(self.missing)[place % len(self.missing)]
            self.inbox.append(FeedEnded(plan, PEER, "gone", bool(is_stalled % 2)))

    def _meet(self) -> None:
        self.inbox.append(ControllerMet())

    def _step(self) -> None:
        self.step()


NEWS = st.one_of(
    st.tuples(st.just("copy"), SIZES, st.integers(1, 3), PLACES),
    st.tuples(st.just("drop"), PLACES),
    st.tuples(st.just("amend"), PLACES, PLACES),
    st.tuples(st.just("layer"), PLACES, PLACES),
    st.tuples(st.just("layer"), PLACES, PLACES),
    st.tuples(st.just("fail"), PLACES),
    st.tuples(st.just("feed"), PLACES, PLACES),
    st.tuples(st.just("meet")),
    st.tuples(st.just("keep")),
    st.tuples(st.just("close")),
    st.tuples(st.just("step")),
    st.tuples(st.just("step")),
)
STORIES = st.lists(NEWS, max_size=60)


def play_agent(story: list[tuple]) -> AgentPlay:
    play = AgentPlay()
    for news in story:
        play.do(*news)
    play.end()
    return play


HALF = ("copy", MEMORY_BYTES // 2, 1, 0)


@given(STORIES)
# The place of one that is dropped is not the next one's in the same step.
@example([HALF, ("keep",), ("step",), ("drop", 0), HALF])
@example([HALF, ("keep",), ("drop", 0), HALF])
@settings(max_examples=examples(800))
def test_every_order_ends_once_and_memory_is_never_overdrawn(story: list[tuple]) -> None:
    first, second = play_agent(story), play_agent(story)
    assert first.effects == second.effects


def test_a_member_without_another_place_uses_one_that_was_just_given_up() -> None:
    member = Member(AGENT, MEMORY_BYTES)

    def placed(story: list[tuple]) -> list[int | str]:
        """Offsets of what is fetched, and why not."""
        play = AgentPlay(plans=plans)
        for what in story:
            play.do(*what)
        effects = member.step(7, play.inbox)
        events = [effect.event for effect in effects if isinstance(effect, Report)]
        refused = [event.reason for event in events if isinstance(event, HoldingFailed)]
        return [e.offset_bytes for e in effects if isinstance(e, Fetch)] + refused

    plans: list[int] = []
    assert placed([HALF, HALF]) == [0, MEMORY_BYTES // 2]
    # Whether something still writes there is known to the data plane alone, which then refuses.
    assert placed([("drop", 1), HALF])[0] == 0
    member.step(7, [MemoryKept(1, ((4096, 1),)), FetchFailed(3, "may still be written")])
    [refused] = placed([HALF])
    assert "1 plans may still write" in refused
    member.step(7, [MemoryKept(1, ())])
    assert placed([HALF]) == [0]
