"""A member whose engine begins a step with the first layers, and waits inside for the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_other_engine import ALL_CAME, BLOCKS, DUTY, HOLDING, INSTANCE, OWN, PEER, SPAN, Witness

from livescale.batching.contract.live_messages import Offer
from livescale.batching.runs.run import BatchKey
from livescale.member.effects import (
    AmendFetch,
    Answer,
    Effect,
    GiveRunUp,
    Materialize,
    RefuseOrder,
)
from livescale.member.inputs import (
    ControllerMet,
    FeedEnded,
    FetchFailed,
    LayerCame,
    MemberInput,
    Ordered,
    PeerSent,
    RateMeasured,
)
from livescale.messages.attempts import AttemptReturned, Cancel
from livescale.messages.commands import AmendHolding, ChangeDuty, DropHolding, ReleaseHolding
from livescale.messages.epochs import ControllerEpoch
from livescale.messages.events import CapacityMeasured, FeedFailed, HoldingCompleted, LiveStarted
from livescale.values.chunks import ChunkRange, Feed
from livescale.values.routes import Duty, Partner, Taker
from livescale.values.types import FromStorage, Outcome

OVERLAP = Duty(INSTANCE, (OWN,), live_order="overlap")
DRAINS = Duty(INSTANCE, (OWN,), live_order="overlap", drains_to=(Taker(Partner(4, PEER)),))
FEEDS = (Feed(FromStorage(), (ChunkRange(0, 4),)),)
#: what may come in while a step waits; some of it waits for the step
MEANWHILE: dict[str, MemberInput] = {
    "drain": Ordered(ChangeDuty(HOLDING, DRAINS)),
    "release": Ordered(ReleaseHolding(HOLDING)),
    "met": ControllerMet(),
    "amend": Ordered(AmendHolding(HOLDING, FEEDS)),
    "feed": FeedEnded(1, PEER, "it died", is_stalled=False),
    "offer": PeerSent(PEER, Offer(INSTANCE, BatchKey(9, 1), (5,), (6,))),
    "cancel": Cancel("a", 1),
}


def begun() -> Witness:
    """Its step in flight has one layer, and waits for the next."""
    world = Witness()
    world.begin(duty=OVERLAP)
    world.submit(("a", 1))
    assert world.in_flight is None, "there is no layer yet"
    world.step(LayerCame(1, 0))
    assert world.in_flight is not None
    return world


def layers_in(effects: list[Effect]) -> list[int]:
    return [effect.layer for effect in effects if isinstance(effect, Materialize)]


@given(
    st.lists(st.sampled_from(sorted(MEANWHILE)), max_size=6), st.permutations(range(1, SPAN.stop))
)
def test_a_step_that_waits_gets_its_layers_whatever_else_waits(
    meanwhile: list[str], layers: list[int]
) -> None:
    """So do feeds that take the place of those that ended: the step would wait for ever."""
    world = begun()
    for place, layer in enumerate(layers):
        for name in meanwhile[place :: len(layers)]:
            found = world.step(MEANWHILE[name])
            amended = [effect for effect in found if isinstance(effect, AmendFetch)]
            assert amended == ([AmendFetch(1, FEEDS)] if name == "amend" else [])
        assert layers_in(world.step(LayerCame(1, layer))) == [layer]
        assert not any(isinstance(effect, GiveRunUp) for effect in world.effects)
    troubles = [event for event in world.reports() if isinstance(event, FeedFailed)]
    assert len(troubles) >= meanwhile.count("feed")
    world.step(ALL_CAME)
    while world.in_flight is not None:
        world.run()
    assert [name for name, _, _ in world.ended()] == ["a"]
    assert sum(isinstance(event, HoldingCompleted) for event in world.reports()) == 1
    assert not world.engine.held


def test_requests_are_taken_from_the_beginning_on() -> None:
    world = begun()
    assert any(isinstance(event, LiveStarted) for event in world.reports())
    world.step(*(LayerCame(1, layer) for layer in range(1, SPAN.stop)), ALL_CAME)
    world.run()
    world.run()
    assert world.ended() == [("a", 1, Outcome.FINISHED)]


@pytest.mark.parametrize(
    "news", [Ordered(DropHolding(HOLDING, "it is not wanted")), FetchFailed(1, "no such file")]
)
def test_a_load_that_is_given_up_ends_the_step_and_its_requests_return(news: MemberInput) -> None:
    world = begun()
    assert [effect for effect in world.step(news) if isinstance(effect, GiveRunUp)] == [GiveRunUp()]
    world.submit(("b", 1))
    world.give_up()
    answers = [effect.answer for effect in world.effects if isinstance(effect, Answer)]
    assert answers == [AttemptReturned("a", 1), AttemptReturned("b", 1)]
    assert world.in_flight is None


def test_a_step_that_was_given_up_for_an_order_that_is_refused_is_begun_again() -> None:
    world = begun()
    later = ControllerEpoch("", 7)
    world.step(ControllerMet(later))
    world.step(Ordered(DropHolding(HOLDING, "by an earlier life"), epoch=ControllerEpoch("", 6)))
    world.give_up()
    assert any(isinstance(effect, RefuseOrder) for effect in world.effects)
    assert world.in_flight is not None
    assert [spec.request for spec in world.in_flight.taken] == ["a"]
    world.step(*(LayerCame(1, layer) for layer in range(1, SPAN.stop)), ALL_CAME)
    world.run()
    world.run()
    assert world.ended() == [("a", 1, Outcome.FINISHED)]


def test_what_a_step_waited_says_nothing_of_the_rate() -> None:
    """A request before the last layer: the rate is that of later Runs."""
    world = Witness()
    world.begin(duty=OVERLAP, measures=True)
    world.step(LayerCame(1, 0))
    world.submit(("a", 1), tokens=1)
    world.step(*(LayerCame(1, layer) for layer in range(1, SPAN.stop)), ALL_CAME)
    world.run()
    rates = [event for event in world.reports() if isinstance(event, CapacityMeasured)]
    assert not rates
    world.submit(("b", 1))
    world.run()
    rates = [event for event in world.reports() if isinstance(event, CapacityMeasured)]
    assert rates == [CapacityMeasured("other", "m", 100_000_000, BLOCKS)]


def test_one_without_work_is_measured_before_it_serves() -> None:
    world = Witness()
    world.begin(duty=OVERLAP, measures=True)
    world.step(*(LayerCame(1, layer) for layer in range(SPAN.stop)), ALL_CAME)
    world.step(RateMeasured(1, 1000))
    rates = [event for event in world.reports() if isinstance(event, CapacityMeasured)]
    assert rates == [CapacityMeasured("other", "m", 1000, BLOCKS)]
    assert DUTY.live_order is None
