"""Requests that decode move to an instance with fewer: which ones, when, and when not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from livescale.batching.contract.live_messages import (
    Balance,
    Declined,
    Gone,
    Handover,
    LiveMessage,
    Offer,
    Parted,
    Pull,
)
from livescale.batching.live.live_batch import LiveLimits
from livescale.batching.live.live_batcher import LiveBatcher
from livescale.batching.runs.batcher import Batcher, BatcherConfig
from livescale.batching.runs.run import SequenceSpec
from livescale.values.routes import Partner
from livescale.values.types import LayerSpan, SamplingParams, WorkerRef

_SPAN = LayerSpan(0, 6)
_CONFIG = BatcherConfig(1000, 4, 64, 16, growth_tokens=4)
_FEWER, _MORE = WorkerRef(1), WorkerRef(0)
_STEP_NS = 1000


def _serving(outputs: list[int], limits: LiveLimits, *, logprobs: int | None = None) -> LiveBatcher:
    """An instance that decodes requests r0…, each with a prompt of one token."""
    live = LiveBatcher(Batcher(_CONFIG, _SPAN), 1, limits)
    live.layers_arrived(_SPAN.stop)
    for number, count in enumerate(outputs):
        sampling = SamplingParams(count, logprobs=logprobs)
        live.add(SequenceSpec(f"r{number}", 1, (number,), sampling))
    _steps(live, 2)
    return live


def _steps(live: LiveBatcher, count: int) -> None:
    for _ in range(count):
        run = live.next()
        assert run is not None
        live.done(run, [[5]] * sum(segment.samples for segment in run.segments), _STEP_NS)


def _told(live: LiveBatcher, *messages: LiveMessage) -> list[LiveMessage]:
    """What it answers to these messages of the one that has fewer."""
    for message in messages:
        live.take_message(_FEWER, message, 0)
    live.validate()
    return [message for peer, message in live.take_outbox(0) if peer == _FEWER]


def _moved(live: LiveBatcher, balance: Balance) -> list[str]:
    """Requests that go over."""
    offers = _told(live, balance)
    if not offers:
        return []
    (offer,) = offers
    assert isinstance(offer, Offer)
    handover = _told(live, Pull(offer.batch))[0]
    assert isinstance(handover, Handover)
    assert handover.decoding
    assert handover.next_layer == _SPAN.stop
    assert handover.rows == 0
    assert len(handover.requests) == len(offer.tokens)
    return [spec.request for spec in handover.requests]


@given(st.lists(st.integers(20, 400), min_size=1, max_size=16), st.integers(0, 16))
def test_half_of_the_difference_moves_and_whoever_has_most_to_generate(
    outputs: list[int], requests: int
) -> None:
    live = _serving(outputs, LiveLimits(move_factor=1))
    moved = _moved(live, Balance(1, 2, requests, 1))
    count = min(max(len(outputs) - requests, 0) // 2, len(outputs) - 1)
    by_length = sorted(range(1, len(outputs)), key=lambda number: (-outputs[number], number))
    assert moved == [f"r{number}" for number in by_length[:count]]


def test_how_long_a_move_takes_is_seen_with_one_request() -> None:
    assert len(_moved(_serving([100] * 8, LiveLimits(move_factor=1)), Balance(1, 2, 0, 0))) == 1


@given(st.integers(1, 40), st.integers(1, 10**6))
def test_nobody_pauses_for_longer_than_it_is_worth(factor: int, kv_token_ps: int) -> None:
    """All have 98 of 100 tokens left, and two positions of KV."""
    moved = _moved(
        _serving([100] * 8, LiveLimits(move_factor=factor)), Balance(1, 2, 0, kv_token_ps)
    )
    worth = 98 * _STEP_NS
    pause_ns = 2 * len(moved) * kv_token_ps // 1000
    longer_ns = 2 * (len(moved) + 1) * kv_token_ps // 1000
    assert factor * pause_ns <= worth
    assert len(moved) == 4 or factor * longer_ns > worth


def test_tokens_whose_logprobs_are_told_are_generated_where_they_began() -> None:
    live = _serving([100] * 8, LiveLimits(move_factor=1), logprobs=2)
    assert _moved(live, Balance(1, 2, 0, 1)) == []


def test_an_offer_that_has_become_too_small_is_made_anew() -> None:
    live = _serving([200] * 8, LiveLimits(move_factor=1))
    (first,) = _told(live, Balance(1, 2, 0, 1))
    assert isinstance(first, Offer)
    _steps(live, max(first.tokens))
    gone, second = sorted(_told(live, Pull(first.batch)), key=lambda m: isinstance(m, Offer))
    assert gone == Gone(first.batch)
    assert isinstance(second, Offer)
    assert min(second.tokens) > max(first.tokens)
    assert isinstance(_told(live, Pull(second.batch))[0], Handover)


def test_an_offer_of_what_has_ended_is_taken_back() -> None:
    live = _serving([20] * 8, LiveLimits(move_factor=1))
    (offer,) = _told(live, Balance(1, 2, 0, 1))
    _steps(live, 18)
    assert not live.requests()
    assert _told(live) == [Offer(2, offer.batch, (), ())]
    assert live.is_alone
    assert _told(live, Pull(offer.batch)) == [Gone(offer.batch)]


def test_who_does_not_want_them_is_not_asked_again() -> None:
    for answer in (Declined, Parted):
        live = _serving([200] * 8, LiveLimits(move_factor=1))
        (offer,) = _told(live, Balance(1, 2, 0, 1))
        named = offer.batch if answer is Declined else 1
        assert _told(live, answer(named)) == []
        assert live.is_alone
        _steps(live, 1)
        assert len(live.requests()) == 8


def test_what_is_declined_or_not_answered_goes_on_where_it_was() -> None:
    for answers in ((Declined,), ()):
        live = _serving([200] * 8, LiveLimits(move_factor=1, answer_ns=50))
        (offer,) = _told(live, Balance(1, 2, 0, 1))
        _told(live, Pull(offer.batch), *(answer(offer.batch) for answer in answers))
        live.take_outbox(51)
        live.validate()
        assert len(live.batcher.lines.running) == 8
        assert live.is_alone
        _steps(live, 1)


def test_what_was_taken_back_has_moved_once_more() -> None:
    """The peer that did not answer may have taken the requests: its late report must not count
    more than that of the one that gets them next (seed 1997)."""
    live = _serving([200] * 4, LiveLimits(move_factor=1, answer_ns=50))
    moves: dict[str, int] = {}
    for now_ns, peer in ((0, _FEWER), (100, WorkerRef(2))):
        live.take_message(peer, Balance(1, 2, 0, 1), now_ns)
        offer = next(m for _, m in live.take_outbox(now_ns) if isinstance(m, Offer))
        live.take_message(peer, Pull(offer.batch), now_ns)
        handover = next(m for _, m in live.take_outbox(now_ns) if isinstance(m, Handover))
        again = [spec for spec in handover.requests if spec.request in moves]
        assert len(again) == (len(handover.requests) if now_ns else 0)
        assert all(spec.moves > moves[spec.request] for spec in again)
        moves |= {spec.request: spec.moves for spec in handover.requests}
        live.take_outbox(now_ns + 51)
        live.validate()


def test_a_cancelled_request_does_not_come_back() -> None:
    live = _serving([200] * 4, LiveLimits(move_factor=1))
    (offer,) = _told(live, Balance(1, 2, 0, 1))
    handover = _told(live, Pull(offer.batch))[0]
    assert isinstance(handover, Handover)
    first, *others = [spec.request for spec in handover.requests]
    assert live.cancel(first, 1)
    _told(live, Declined(offer.batch))
    assert others
    assert sorted(request for request, _ in live.requests()) == sorted(
        {f"r{number}" for number in range(4)} - {first}
    )


def test_numbers_are_told_only_where_requests_may_move() -> None:
    for factor in (0, 1):
        limits = LiveLimits(move_factor=factor)
        live = LiveBatcher(Batcher(_CONFIG, _SPAN), 2, limits, "zigzag", [Partner(1, _MORE)])
        live.layers_arrived(_SPAN.stop)
        told = [message for _, message in live.take_outbox(0)]
        assert told == [Parted(2), Balance(1, 2, 0, 0)][: 1 + factor]
