"""What an instance that drains passes on, to whom, and what it keeps."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from livescale.batching.contract.live_messages import (
    Declined,
    Gone,
    Handover,
    LiveMessage,
    Offer,
    Parted,
    Pull,
    Settled,
    Taken,
)
from livescale.batching.live.live_batch import LiveLimits
from livescale.batching.live.live_batcher import LiveBatcher
from livescale.batching.runs.batcher import Batcher, BatcherConfig
from livescale.batching.runs.run import BatchKey, SequenceSpec
from livescale.values.routes import Partner, Taker
from livescale.values.types import LayerSpan, SamplingParams, WorkerRef

_SPAN = LayerSpan(0, 6)
_CONFIG = BatcherConfig(1000, 4, 64, 16, growth_tokens=4)
_OTHERS = [WorkerRef(number) for number in range(1, 4)]
_STEP_NS = 1000
_GAP_NS = 1_000_000


def _takers(count: int = 1, kv_token_ps: int = 1) -> list[Taker]:
    return [Taker(Partner(10 + ref.worker, ref), kv_token_ps) for ref in _OTHERS[:count]]


def _serving(
    outputs: list[int],
    *,
    logprobs: int | None = None,
    moves: int = 0,
    batch_tokens_max: int = 2048,
) -> LiveBatcher:
    """An instance that decodes requests r0…, each with a prompt of one token."""
    limits = LiveLimits(batch_tokens_max=batch_tokens_max, gap_ns=_GAP_NS, answer_ns=50)
    live = LiveBatcher(Batcher(_CONFIG, _SPAN), 1, limits)
    live.layers_arrived(_SPAN.stop)
    for number, count in enumerate(outputs):
        sampling = SamplingParams(count, logprobs=logprobs)
        live.add(SequenceSpec(f"r{number}", 1, (number,), sampling, moves=moves))
    _steps(live, 2)
    return live


def _steps(live: LiveBatcher, count: int) -> None:
    for _ in range(count):
        run = live.next()
        assert run is not None
        live.done(run, [[5]] * sum(segment.samples for segment in run.segments), _STEP_NS)


def _told(
    live: LiveBatcher, *messages: LiveMessage, peer: WorkerRef = _OTHERS[0]
) -> list[tuple[WorkerRef, LiveMessage]]:
    """What it says when the peer has said this."""
    for message in messages:
        live.take_message(peer, message, 0)
    live.validate()
    return live.take_outbox(0)


def _given(
    live: LiveBatcher, told: Sequence[tuple[WorkerRef, LiveMessage]] = ()
) -> list[tuple[WorkerRef, list[str]]]:
    """Who gets which requests, batch by batch, if all offers are pulled at once."""
    batches = []
    waiting = [*told, *_told(live)]
    while waiting:
        peer, message = waiting.pop(0)
        if isinstance(message, Offer) and message.tokens:
            assert message.decoding
            waiting += _told(live, Pull(message.batch), peer=peer)
        elif isinstance(message, Handover):
            assert message.decoding
            assert message.rows == 0
            batches.append((peer, [spec.request for spec in message.requests]))
            waiting += _told(live, Taken(message.batch), Settled(message.batch), peer=peer)
    return batches


@given(st.lists(st.integers(20, 400), min_size=1, max_size=16), st.integers(1, 3))
def test_all_that_decodes_goes_over(outputs: list[int], takers: int) -> None:
    live = _serving(outputs)
    live.drain_to(_takers(takers))
    moved = [request for _, batch in _given(live) for request in batch]
    assert sorted(moved) == sorted(f"r{number}" for number in range(len(outputs)))
    assert not live.requests()
    assert live.batcher.pool.used == 0


@given(st.integers(1, 10**9))
def test_no_more_kv_is_on_its_way_than_comes_in_time(kv_token_ps: int) -> None:
    """Each has two positions of KV."""
    live = _serving([3_000] * 8)
    live.drain_to(_takers(kv_token_ps=kv_token_ps))
    under_way = 0
    for _ in range(4):
        for peer, message in _told(live):
            if isinstance(message, Offer):
                (handover, *_) = _told(live, Pull(message.batch), peer=peer)
                assert isinstance(handover[1], Handover)
                under_way += 2 * len(handover[1].requests)
    assert under_way * kv_token_ps // 1000 <= _GAP_NS
    assert under_way == 16 or (under_way + 2) * kv_token_ps // 1000 > _GAP_NS


def test_a_prompt_that_lacks_one_position_does_not_decode_yet() -> None:
    """It goes back, or stays until it has its first token."""
    live = LiveBatcher(Batcher(_CONFIG, _SPAN), 1, LiveLimits(gap_ns=_GAP_NS, answer_ns=50))
    live.layers_arrived(_SPAN.stop)
    live.add(SequenceSpec("r", 1, range(_CONFIG.run_tokens_max + 1), SamplingParams(100)))
    _steps(live, 1)
    live.drain_to(_takers())
    assert not _given(live)
    _steps(live, 1)
    assert _given(live) == [(_OTHERS[0], ["r"])]


def test_takers_take_turns() -> None:
    live = _serving([1000] * 6, batch_tokens_max=1)
    live.drain_to(_takers(3))
    assert [peer for peer, _ in _given(live)] == [*_OTHERS, *_OTHERS]


def test_how_long_it_takes_is_seen_with_one_request() -> None:
    live = _serving([1000] * 6)
    live.drain_to(_takers(kv_token_ps=0))
    assert [len(requests) for _, requests in _given(live)][:2] == [1, 1]
    assert not live.requests()


def test_one_more_is_asked_while_others_have_no_room_and_the_first_gets_it() -> None:
    live = _serving([1000] * 4)
    live.drain_to(_takers(2))
    ((first, offer),) = _told(live)
    assert isinstance(offer, Offer)
    assert _told(live) == [], "it has had no time yet"
    _steps(live, 1)
    ((second, again),) = _told(live)
    assert isinstance(again, Offer)
    assert (first, second) == tuple(_OTHERS[:2])
    assert (again.batch, again.source) == (offer.batch, 12)
    told = dict(_told(live, Pull(offer.batch), peer=second))
    assert isinstance(told[second], Handover)
    assert told[first] == Offer(11, offer.batch, (), ())
    assert (first, Gone(offer.batch)) in _told(live, Pull(offer.batch), peer=first)


def test_one_batch_that_waited_does_not_make_kv_slow() -> None:
    live = _serving([1000] * 8, batch_tokens_max=1)
    live.drain_to(_takers())
    ((_, offer),) = _told(live)
    assert isinstance(offer, Offer)
    told = _told(live, Pull(offer.batch), Taken(offer.batch))
    live.take_message(_OTHERS[0], Settled(offer.batch), 10**15)
    offers = [(peer, message) for peer, message in told if isinstance(message, Offer)]
    assert len(_given(live, offers)) == 7
    assert not live.requests()


def test_what_waits_is_given_back_and_what_was_moved_often_stays() -> None:
    for moves in (0, 9):
        live = _serving([100] * 2, moves=moves)
        for number in range(3):
            live.add(SequenceSpec(f"w{number}", 1, (number,), SamplingParams(5), moves=moves))
        live.drain_to(_takers())
        offers = [message for _, message in _told(live)]
        returned = list(live.take_returned())
        assert len(offers) == (moves == 0)
        assert returned == ([("w0", 1), ("w1", 1), ("w2", 1)] if moves == 0 else [])
        assert len(live.requests()) == 5 - len(returned)


def test_prompts_that_are_computed_before_their_kv_comes_are_given_back() -> None:
    """Runs of 64 prompt tokens take 1 us: less than KV at 10 us a token."""
    live = _serving([400] * 3)
    live.add(SequenceSpec("long", 1, tuple(range(100)), SamplingParams(400)))
    _steps(live, 4)
    live.drain_to(_takers(kv_token_ps=10_000_000))
    assert _told(live) == []
    assert sorted(live.take_returned()) == [("long", 1), ("r0", 1), ("r1", 1), ("r2", 1)]
    assert live.batcher.pool.used == 0


def test_tokens_whose_logprobs_are_told_are_generated_where_they_began() -> None:
    live = _serving([100] * 4, logprobs=2)
    live.drain_to(_takers())
    assert _told(live) == []
    _steps(live, 98)
    assert not live.requests()


def test_who_is_wanted_again_takes_its_offer_back() -> None:
    live = _serving([100] * 4)
    live.drain_to(_takers())
    ((peer, offer),) = _told(live)
    assert isinstance(offer, Offer)
    live.drain_to(())
    assert _told(live) == [(peer, Offer(11, offer.batch, (), ()))]
    assert live.is_alone
    assert _told(live, Pull(offer.batch)) == [(peer, Gone(offer.batch))]
    assert len(live.requests()) == 4


def test_who_declines_or_does_not_answer_or_is_lost_gets_nothing_more() -> None:
    for end in ("declined", "parted", "late", "lost"):
        live = _serving([1000] * 4)
        live.drain_to(_takers())
        ((peer, offer),) = _told(live)
        assert isinstance(offer, Offer)
        _told(live, Pull(offer.batch))
        if end == "declined":
            _told(live, Declined(offer.batch))
        elif end == "parted":
            _told(live, Parted(1))
        elif end == "late":
            live.take_outbox(51)
        else:
            live.peer_lost(peer)
        live.validate()
        assert len(live.batcher.lines.running) == 4, end
        assert not any(isinstance(message, Offer) for _, message in _told(live)), end
        _steps(live, 1)


def test_who_drains_takes_nothing_that_decodes() -> None:
    live = _serving([100])
    live.drain_to(_takers(1))
    _told(live)
    batch = Offer(1, _key(), (2,), (90,), decoding=True)
    assert _told(live, batch, peer=_OTHERS[2]) == [(_OTHERS[2], Declined(_key()))]
    live.drain_to(())
    assert (_OTHERS[2], Pull(_key(), kv_layers=4)) in _told(live, batch, peer=_OTHERS[2])


def test_an_attempt_that_two_instances_have_stays_at_both() -> None:
    """One was given the attempt and told so too late: another one was given it, too. Both run it
    until the gateway says whose the request is, and neither is to break over it."""
    second = _serving([100, 100])
    first = _serving([100])
    _steps(first, 2)
    first.drain_to(_takers())
    ((_, offer),) = _told(first)
    assert isinstance(offer, Offer)
    (_, pull), *_ = _told(second, msgspec.structs.replace(offer, source=1))
    assert isinstance(pull, Pull)
    used = second.batcher.pool.used
    ((_, handover), *_) = _told(first, pull)
    assert isinstance(handover, Handover)
    assert second.expected_tokens(_OTHERS[0], handover) == 0
    assert _told(second, handover) == [(_OTHERS[0], Declined(offer.batch))]
    assert second.batcher.pool.used < used
    assert not any(isinstance(message, Offer) for _, message in _told(first, Declined(offer.batch)))
    for live, requests in ((first, ["r0"]), (second, ["r0", "r1"])):
        assert [request for request, _ in live.requests()] == requests
        _steps(live, 5)
        live.validate()
    # The gateway's word: one of them forgets the attempt.
    assert first.cancel("r0", 1)
    assert first.batcher.pool.used == 0


def _key() -> BatchKey:
    return BatchKey(7, 1)
