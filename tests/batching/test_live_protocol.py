"""Words of a live pair that cross each other, each in its worst order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from livescale.batching.contract.live_messages import (
    Declined,
    Gone,
    Handover,
    KvLayer,
    KvWanted,
    LiveMessage,
    Offer,
    Parted,
    Settled,
    Taken,
)
from livescale.batching.live.live_batch import LiveLimits
from livescale.batching.live.live_batcher import LiveBatcher
from livescale.batching.runs.batcher import Batcher, BatcherConfig
from livescale.batching.runs.run import SequenceSpec
from livescale.values.routes import Partner
from livescale.values.types import LayerSpan, SamplingParams, WorkerRef

_SPAN = LayerSpan(0, 6)
_CONFIG = BatcherConfig(64, 4, 64, 16, growth_tokens=4)
_LIMITS = LiveLimits(answer_ns=50)
_SOURCE, _TARGET = WorkerRef(0), WorkerRef(1)


def _spec(attempt: int = 1, outputs: int = 3) -> SequenceSpec:
    return SequenceSpec("r", attempt, range(6), SamplingParams(outputs))


def _source(limits: LiveLimits = _LIMITS) -> LiveBatcher:
    source = LiveBatcher(Batcher(_CONFIG, _SPAN), 1, limits)
    source.layers_arrived(_SPAN.stop)
    return source


def _target(spec: SequenceSpec) -> LiveBatcher:
    """Has run two decoder layers of the only request."""
    target = LiveBatcher(Batcher(_CONFIG, _SPAN), 2, _LIMITS, "zigzag", [Partner(1, _SOURCE)])
    target.layers_arrived(3)
    target.add(spec)
    for _ in range(2):
        run = target.next()
        assert run is not None
        target.done(run, [], 0)
    return target


def _told(sender: LiveBatcher, now_ns: int = 0) -> list[LiveMessage]:
    return [message for _, message in sender.take_outbox(now_ns)]


def _tell(
    receiver: LiveBatcher, peer: WorkerRef, messages: list[LiveMessage], now_ns: int = 0
) -> None:
    for message in messages:
        receiver.take_message(peer, message, now_ns)
        receiver.validate()


def _handed_over(source: LiveBatcher, target: LiveBatcher) -> Handover:
    """Offer and Pull are said; this is the answer, on its way."""
    _tell(source, _TARGET, _told(target))
    _tell(target, _SOURCE, _told(source))
    handover = _told(target)[0]
    assert isinstance(handover, Handover)
    assert handover.next_layer == 3
    return handover


@settings(max_examples=examples(50))
@given(ahead=st.integers(1, 6), outputs=st.integers(1, 3))
def test_kv_follows_the_rows_unasked(ahead: int, outputs: int) -> None:
    """So many layers as the pull says, and only where a request decodes. Others are asked for."""
    source = _source(LiveLimits(kv_layers_ahead=ahead))
    target = _target(_spec(outputs=outputs))
    _tell(source, _TARGET, _told(target))
    _tell(target, _SOURCE, _told(source))
    handover, *kv = [m for m in _told(target) if not isinstance(m, Offer)]
    assert isinstance(handover, Handover)
    layers = [1, 2] if outputs > 1 else []
    assert kv == [KvLayer(handover.batch, layer) for layer in layers[:ahead]]
    _tell(source, _TARGET, [handover])
    first = Settled(handover.batch) if not layers else Taken(handover.batch)
    told = _told(source)
    assert first in told
    assert not any(isinstance(m, KvWanted) for m in told), "nothing is asked for twice"
    _tell(source, _TARGET, kv)
    following = _told(source)
    asked = [KvWanted(handover.batch, layer) for layer in layers[ahead:]]
    assert following == (asked or ([Settled(handover.batch)] if layers else []))


def test_taken_comes_after_the_target_has_given_the_source_up() -> None:
    """The source has said elsewhere, too, that the requests are its own: the target drops them."""
    source, target = _source(LiveLimits(answer_ns=50, kv_layers_ahead=1)), _target(_spec())
    handover = _handed_over(source, target)
    deadline_ns = target.deadline_ns()
    assert deadline_ns is not None
    assert Parted(2) in _told(target, deadline_ns)
    assert target.requests() == [("r", 1)]
    _tell(source, _TARGET, [handover])
    assert _told(source) == [Taken(handover.batch)]
    _tell(source, _TARGET, [KvLayer(handover.batch, 1)])
    answers = [Taken(handover.batch), *_told(source)]
    assert answers[1:] == [KvWanted(handover.batch, 2)]
    _tell(target, _SOURCE, answers)
    assert target.requests() == []
    assert target.batcher.pool.used == 0
    assert set(_told(target)) == {Gone(handover.batch)}
    # KV will not come: everything is computed anew.
    _tell(source, _TARGET, [Gone(handover.batch)])
    assert source.batcher.waiting == 1
    assert not source.holds(handover.batch)
    assert source.requests() == [("r", 1)]


def test_what_was_taken_cannot_be_declined() -> None:
    source, target = _source(), _target(_spec())
    handover = _handed_over(source, target)
    _tell(source, _TARGET, [handover])
    _tell(target, _SOURCE, [*_told(source), Declined(handover.batch)])
    assert target.requests() == []
    assert target.next() is None
    assert not target.cancel("r", 1), "it is the source's"
    assert source.cancel("r", 1)


def test_what_was_declined_is_not_offered_again() -> None:
    source, target = _source(), _target(_spec())
    handover = _handed_over(source, target)
    _told(target)
    _tell(target, _SOURCE, [Declined(handover.batch)])
    assert _told(target) == [], "nothing else is to be had"
    assert target.requests() == [("r", 1)]
    target.layers_arrived(_SPAN.stop)
    while run := target.next():
        target.done(run, [[5]] * sum(segment.samples for segment in run.segments), 0)
    assert not target.batcher.has_work
    assert not target.batches.line
    assert not target.batches.taken
    assert Parted(2) in _told(target)


def test_a_batch_brings_a_later_attempt() -> None:
    """The earlier one runs at the source, and nobody has told it yet to stop."""
    source = _source()
    source.add(_spec(attempt=1))
    run = source.next()
    assert run is not None
    source.done(run, [[5]], 0)
    target = _target(_spec(attempt=2))
    _tell(source, _TARGET, [_handed_over(source, target)])
    assert source.requests() == [("r", 2)]


def test_a_batch_brings_an_earlier_attempt() -> None:
    """Nothing of it is kept, and the later one goes on."""
    target = _target(_spec(attempt=1))
    source = _source()
    handover = _handed_over(source, target)
    source.add(_spec(attempt=2))
    _tell(source, _TARGET, [handover])
    assert source.requests() == [("r", 2)]
    assert not source.holds(handover.batch)
    _tell(target, _SOURCE, _told(source))
    assert target.batcher.pool.used == 0


def test_cancelled_while_its_kv_is_on_its_way() -> None:
    """Its first token is out already: it must not decode when the KV is here."""
    source, target = _source(), _target(_spec())
    handover = _handed_over(source, target)
    _tell(source, _TARGET, [handover])
    asked = _told(source)
    while run := source.next():
        source.done(run, [[5]] * sum(segment.samples for segment in run.segments), 0)
    assert source.requests() == [("r", 1)]
    assert source.cancel("r", 1)
    assert source.batcher.pool.used == 0
    _tell(target, _SOURCE, [*asked, *_told(source)])
    assert target.batcher.pool.used == 0
    _tell(source, _TARGET, _told(target))
    assert source.next() is None


def _other() -> SequenceSpec:
    return SequenceSpec("s", 1, range(60), SamplingParams(3))


def test_a_target_that_is_to_work_alone_returns_what_nobody_has_pulled() -> None:
    """What was handed over stays where it is; what comes later is finished here."""
    source, target = _source(), _target(_spec())
    target.add(_other())
    handover = _handed_over(source, target)
    target.work_alone()
    target.validate()
    assert target.take_returned() == [("s", 1)]
    assert target.take_returned() == []
    _tell(source, _TARGET, [handover, *_told(target)])
    _tell(target, _SOURCE, _told(source))
    assert source.requests() == [("r", 1)]
    assert target.requests() == []
    later = SequenceSpec("later", 1, range(6), SamplingParams(1))
    target.add(later)
    assert not [m for m in _told(target) if isinstance(m, Offer)]
    target.layers_arrived(_SPAN.stop)
    while run := target.next():
        target.done(run, [[5]] * sum(segment.samples for segment in run.segments), 0)
    assert target.requests() == []


def test_a_pull_that_crosses_the_end_of_a_pair_gets_nothing() -> None:
    source, target = _source(), _target(_spec())
    _tell(source, _TARGET, _told(target))
    pulls = _told(source)
    target.work_alone()
    assert target.take_returned() == [("r", 1)]
    _tell(target, _SOURCE, pulls)
    _tell(source, _TARGET, _told(target))
    assert source.requests() == target.requests() == []
    assert source.batcher.pool.used == target.batcher.pool.used == 0


def test_a_target_with_everything_goes_on_sharing() -> None:
    target = _target(_spec())
    target.layers_arrived(_SPAN.stop)
    target.work_alone()
    assert target.take_returned() == []
    assert target.requests() == [("r", 1)]
