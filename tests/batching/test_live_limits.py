"""What bounds live work: sizes of batches, time between decodes, room, answers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_parts import Target
from live_worlds import SOURCE, LiveWorld

from effort import examples
from livescale.batching.contract.live_messages import Declined, Gone, Handover, Offer, Parted, Pull
from livescale.batching.live.live_batch import LiveLimits
from livescale.batching.live.live_batcher import LiveBatcher
from livescale.batching.runs.batcher import Batcher, BatcherConfig
from livescale.batching.runs.run import BatchKey, Run, SequenceSpec
from livescale.values.routes import Partner
from livescale.values.types import LayerSpan, SamplingParams, WorkerRef

_SPAN = LayerSpan(0, 6)
_CONFIG = BatcherConfig(64, 4, 64, 16, growth_tokens=4)
_TARGET = WorkerRef(1)


def _spec(number: int, tokens: int, outputs: int = 2) -> SequenceSpec:
    return SequenceSpec(f"r{number}", 1, range(tokens), SamplingParams(outputs), (), f"{number}")


def _target(limits: LiveLimits, config: BatcherConfig = _CONFIG) -> LiveBatcher:
    live = LiveBatcher(Batcher(config, _SPAN), 2, limits, "zigzag", [Partner(1, SOURCE)])
    live.layers_arrived(2)
    return live


def _source(limits: LiveLimits, config: BatcherConfig = _CONFIG) -> LiveBatcher:
    live = LiveBatcher(Batcher(config, _SPAN), 1, limits)
    live.layers_arrived(_SPAN.stop)
    return live


def _pull(key: BatchKey, *, without_rows: bool = False) -> Pull:
    """What a source asks for: with all KV behind the rows, if it wants rows."""
    return Pull(key, without_rows, 0 if without_rows else _SPAN.stop - 2)


def _batches(live: LiveBatcher) -> list[list[int]]:
    return [[s.known_tokens for s in batch.sequences] for batch in live.batches.line]


@settings(max_examples=examples(100))
@given(tokens=st.lists(st.integers(1, 20), min_size=1, max_size=6), most=st.integers(1, 30))
def test_batches_keep_to_their_tokens(tokens: list[int], most: int) -> None:
    """As many prompts as fit, in order; a longer one is a batch alone."""
    live = _target(LiveLimits(batch_tokens_max=most))
    for number, count in enumerate(tokens):
        live.add(_spec(number, count))
    live.take_outbox(0)
    batches = _batches(live)
    assert [count for batch in batches for count in batch] == tokens[: sum(map(len, batches))]
    for batch, following in zip(batches, [*batches[1:], []], strict=True):
        assert len(batch) == 1 or sum(batch) <= most
        assert not following or sum(batch) + following[0] > most


def test_batches_are_as_large_as_a_layer_of_them_may_take() -> None:
    live = _target(LiveLimits(batch_tokens_max=1000, span_ns=1000, gap_ns=1000, batches_max=4))
    live.add(_spec(0, 40))
    run = live.next()
    assert run is not None
    live.done(run, [], 40 * 100)  # 100 ns per token and layer: 10 tokens in a gap
    for number in range(1, 9):
        live.add(_spec(number, 4))
    live.take_outbox(0)
    assert _batches(live) == [[40], [4, 4], [4, 4], [4, 4]]


def test_decodes_do_not_say_what_a_prompt_takes() -> None:
    """A step of many decodes reads weights and KV; it is no measure of a prompt's token."""
    live = _source(LiveLimits())
    for number in range(16):
        live.add(_spec(number, 1, 3))
    for elapsed_ns in (1000, 1_000_000):
        run = live.next()
        assert run is not None
        assert run.token_count == 16
        live.done(run, [[1]] * 16, elapsed_ns)
    assert live.pace.prefill_tokens_per_s() is None


@given(st.lists(st.tuples(st.integers(17, 64), st.integers(1, 10**9)), min_size=1, max_size=4))
def test_reports_say_what_runs_with_prompts_took(runs: list[tuple[int, int]]) -> None:
    """Of the whole model on an instance that serves: tokens and time add up from Run to Run."""
    live = _source(LiveLimits())
    tokens = elapsed = 0
    for number, (prompt, run_ns) in enumerate(runs):
        live.add(_spec(number, prompt))
        run = live.next()
        assert run is not None
        tokens, elapsed = tokens + run.prefill_tokens, elapsed + run_ns
        live.done(run, [[1]] * sum(segment.samples for segment in run.segments), run_ns)
        assert tokens > 0
        report = live.report()
        assert (report.prefill_tokens, report.prefill_ns) == (tokens, elapsed)


@settings(max_examples=examples(25))
@given(span=st.integers(1, 2000), gap=st.integers(1, 2000), tokens=st.integers(16, 60))
def test_pulled_batches_leave_time_for_decodes(span: int, gap: int, tokens: int) -> None:
    """No live Run at the source is longer than three `span_ns`, nor all of them between two decodes
    longer than `gap_ns` together, but for single layers, and a sixteenth."""
    token_layer_ns = 2
    span_max, gap_max = 3 * span + 3 * span // 16, gap + gap // 16
    limits = LiveLimits(span_ns=span, gap_ns=gap, batch_tokens_max=tokens)
    target = Target((0,) * 3 + (10**6,) * 5, _CONFIG)
    world = LiveWorld(6, _CONFIG, [target], limits, token_layer_ns=token_layer_ns)
    runs: list[Run] = []
    world.watch = lambda node, run: runs.append(run) if node.ref == SOURCE else None
    world.at(0, lambda: world.request("decodes", SOURCE, range(2), 60, salt="d"))
    for number in range(3):
        name = f"r{number}"
        world.at(100, lambda r=name: world.request(r, _TARGET, range(tokens), 2, salt=r))
    world.play()
    world.check_end()
    assert world.handovers == 3
    assert sum(run.span.start > 0 for run in runs) >= 3
    together: list[int] = []
    for run in runs:
        if any(segment.request == "decodes" for segment in run.segments):
            together = []
        elif run.span.start > 0:
            layers = min(run.span.stop, 7) - run.span.start
            together.append(layers * run.token_count * token_layer_ns)
            assert layers == 1 or together[-1] <= span_max
            assert (layers == 1 and len(together) == 1) or sum(together) <= gap_max


def test_a_batch_that_the_source_can_never_hold_stays() -> None:
    """The target is told, offers the next one, and finishes the first itself."""
    small = BatcherConfig(4, 4, 64, 16, growth_tokens=4)
    source = _source(LiveLimits(), small)
    offer = Offer(1, BatchKey(2, 1), (8,), (40,))
    source.take_message(_TARGET, offer, 0)
    assert source.take_outbox(0) == [(_TARGET, Declined(offer.batch))]
    target = _target(LiveLimits(batch_tokens_max=8))
    target.add(_spec(1, 8, 33))
    target.add(_spec(2, 4))
    target.take_outbox(0)
    target.take_message(SOURCE, Declined(BatchKey(2, 1)), 0)
    assert target.take_outbox(0) == [(SOURCE, Offer(1, BatchKey(2, 1), (), ()))]
    assert [batch.stays for batch in target.batches.line] == [True, False]


def test_a_batch_that_waits_for_a_busy_source_keeps_nobody_waiting() -> None:
    """Its turn was at a target that has everything now: what comes later runs there."""
    batcher = Batcher(_CONFIG, _SPAN)
    target = LiveBatcher(batcher, 2, LiveLimits(), "best-effort", [Partner(1, SOURCE)])
    target.layers_arrived(3)
    target.add(_spec(1, 4))
    turn = target.next()
    assert turn is not None
    target.done(turn, [], 0)
    target.layers_arrived(_SPAN.stop)
    target.add(_spec(2, 4))
    run = target.next()
    assert run is not None
    assert [segment.request for segment in run.segments] == ["r2"]
    assert _batches(target) == [[4]]


def test_a_run_is_chosen_while_one_is_in_flight() -> None:
    """The rest of a batch that was taken over, and decodes of others, but nothing twice."""
    source = _source(LiveLimits(span_ns=1, gap_ns=8))
    source.add(_spec(1, 4, 9))
    first = source.next()
    assert first is not None
    assert source.next() is None, "its token decides what is next"
    source.done(first, [[1]], 0)
    source.pace.token_layer_ps = 1000
    key = BatchKey(2, 1)
    source.take_message(_TARGET, Offer(1, key, (8,), (8,)), 0)
    assert source.take_outbox(0) == [(_TARGET, _pull(key))]
    source.take_message(_TARGET, Handover(key, (_spec(2, 8, 1),), 2), 0)
    runs = [source.next(), source.next()]
    assert source.next() is None, "two are enough"
    spans = [run.span for run in runs if run is not None]
    assert spans == [LayerSpan(2, 3), _SPAN], "decodes go on between two layers"
    source.take_message(_TARGET, Offer(1, BatchKey(2, 2), (8,), (8,)), 0)
    with pytest.raises(AssertionError, match="in flight"):
        source.take_message(_TARGET, Gone(key), 0)
    assert runs[0] is not None
    source.done(runs[0], [], 8)
    following = source.next()
    assert following is not None
    assert following.span == LayerSpan(3, 4)
    assert source.batches.taken[key].next_layer == 3
    source.validate()


@settings(max_examples=examples(50))
@given(
    prompt=st.integers(2, 60),  # with one token it would be no Run with prompts
    behind=st.integers(0, 60),
    early_permille=st.integers(0, 2000),
)
def test_the_next_batch_is_asked_for_before_the_last_prompt_is_computed(
    prompt: int, behind: int, early_permille: int
) -> None:
    """While a Run is in flight nothing can be asked for. So the batch is asked for at its beginning
    if little enough is left behind it; without the setting when all is done. A Run that is longer
    than a batch is waited for: the target would lose the batch for all that time."""
    source = _source(LiveLimits(batch_tokens_max=20, pull_early_permille=early_permille))
    source.pace.token_layer_ps = 1000
    source.add(_spec(1, prompt, 1))
    run = source.next()
    assert run is not None
    if behind:
        source.add(_spec(2, behind, 1))
    offer = Offer(1, BatchKey(2, 1), (8,), (8,))
    source.take_message(_TARGET, offer, 0)
    left = behind if early_permille and prompt <= 20 else prompt + behind
    is_early = left * 1000 <= 20 * early_permille
    assert source.take_outbox(0) == ([(_TARGET, _pull(offer.batch))] if is_early else [])
    source.done(run, [[1]], prompt * 4)
    source.validate()


def test_a_pull_that_waited_for_the_end_of_a_run_teaches_nothing() -> None:
    """Else all batches would be asked for as early as a whole Run takes."""
    source = _source(LiveLimits(batch_tokens_max=60, pull_early_permille=1))
    source.pace.token_layer_ps = 1000
    for number, (asked_ns, answered_ns, key) in enumerate([(0, 300, 1), (400, 405, 2)], 1):
        source.add(_spec(10 * number, 60, 1))
        run = source.next()
        assert run is not None
        source.take_message(_TARGET, Offer(1, BatchKey(2, key), (8,), (8,)), asked_ns)
        assert (_TARGET, _pull(BatchKey(2, key))) in source.take_outbox(asked_ns)
        source.done(run, [[1]], 240)
        source.take_message(
            _TARGET, Handover(BatchKey(2, key), (_spec(number, 8, 1),), 2), answered_ns
        )
        while (run := source.next()) is not None:
            source.done(run, [[1]] if run.span.stop == _SPAN.stop else [], 8)
    assert source.taker.calm_ns() == -5, "the one that came at once counts"


def test_decodes_have_their_turn_between_live_work_and_prompts() -> None:
    """A Run with prompts comes behind live work: requests that decode would wait for both."""
    for decodes_first in (True, False):
        source = _source(LiveLimits(gap_ns=1000, decodes_first=decodes_first))
        source.add(_spec(1, 4, 9))
        first = source.next()
        assert first is not None
        source.done(first, [[1]], 0)
        source.pace.token_layer_ps = 1000
        key = BatchKey(2, 1)
        source.take_message(_TARGET, Offer(1, key, (60,), (60,)), 0)
        source.take_outbox(0)
        source.take_message(_TARGET, Handover(key, (_spec(2, 60, 1),), 2), 0)
        while (run := source.next()) is not None and run.batch is not None:
            source.done(run, [[1]] if run.span.stop == _SPAN.stop else [], 100)
            source.add(_spec(3, 60, 1)) if run.span.stop == _SPAN.stop else None
        assert run is not None
        requests = [segment.request for segment in run.segments]
        assert requests == (["r1"] if decodes_first else ["r1", "r3"])
        source.done(run, [[2]] if decodes_first else [[2], [1]], 100)
        following = source.next()
        assert following is not None
        assert [segment.request for segment in following.segments][:1] == ["r1"]
        assert (len(following.segments) == 2) == decodes_first, "prompts wait no longer than that"


def test_a_prompt_that_is_computed_in_part_is_finished_before_live_work() -> None:
    """It came before. And in a Run between the layers requests that decode would wait for the rest
    of it on top of live work."""
    for decodes_first in (True, False):
        limits = LiveLimits(gap_ns=1000, decodes_first=decodes_first)
        source = _source(limits, BatcherConfig(64, 4, 32, 16, growth_tokens=4))
        source.add(_spec(1, 4, 9))
        source.add(_spec(2, 60, 1))
        first = source.next()
        assert first is not None
        assert [segment.token_count for segment in first.segments] == [4, 28]
        key = BatchKey(2, 1)
        source.take_message(_TARGET, Offer(1, key, (20,), (20,)), 0)
        source.done(first, [[1]], 0)
        source.pace.token_layer_ps = 1000
        source.take_outbox(0)
        source.take_message(_TARGET, Handover(key, (_spec(3, 20, 1),), 2), 0)
        second = source.next()
        assert second is not None
        assert (second.batch is None) == decodes_first
        if decodes_first:
            assert [segment.token_count for segment in second.segments] == [1, 31]


def test_no_rows_are_pulled_while_a_computed_batch_waits_for_its_kv() -> None:
    """The link brings less KV than the source computes: of what is offered then the last in line is
    computed from its prompts, which need no KV; a single batch is left to the target."""
    for holds in (True, False):
        source = _source(LiveLimits(gap_ns=10, kv_holds_pulls=holds))
        source.pace.token_layer_ps = 1000
        key = BatchKey(2, 1)
        source.take_message(_TARGET, Offer(1, key, (8,), (9,)), 0)
        source.take_outbox(0)
        source.take_message(_TARGET, Handover(key, (_spec(1, 8),), 4), 0)
        while (run := source.next()) is not None:
            source.done(run, [[1]] if run.span.stop == _SPAN.stop else [], 8)
        offers = [Offer(1, BatchKey(2, number), (8,), (9,)) for number in (2, 3)]
        assert not [m for _, m in source.take_outbox(5) if isinstance(m, Pull)]
        source.take_message(_TARGET, offers[0], 16)
        pulls = [m for _, m in source.take_outbox(16) if isinstance(m, Pull)]
        assert pulls == ([] if holds else [_pull(BatchKey(2, 2))])
        source.take_message(_TARGET, offers[1], 16)
        pulls = [m for _, m in source.take_outbox(16) if isinstance(m, Pull)]
        assert pulls == [_pull(BatchKey(2, 3), without_rows=holds)]
        source.validate()


def test_nothing_is_pulled_while_a_run_is_in_flight() -> None:
    """A Run of several steps counts on the blocks that were free when it began."""
    source = _source(LiveLimits(), BatcherConfig(5, 4, 64, 16, growth_tokens=0))
    source.add(_spec(1, 4, 12))
    first = source.next()
    assert first is not None
    source.done(first, [[1]], 0)
    source.take_message(_TARGET, Offer(1, BatchKey(2, 1), (8,), (8,)), 0)
    run = source.next(steps_max=10)
    assert run is not None
    assert run.steps == 10
    assert source.take_outbox(0) == []
    source.done(run, [tuple([1] * run.steps)], 0)
    source.validate()
    assert source.take_outbox(0) == [], "there is no room any more"
    assert source.cancel("r1", 1)
    assert source.take_outbox(0) == [(_TARGET, _pull(BatchKey(2, 1)))]


def test_a_later_attempt_comes_before_an_earlier_one() -> None:
    """Dispatches and handovers come on different ways; only the latest attempt counts."""
    live = _source(LiveLimits())
    later = SequenceSpec("r", 2, range(4), SamplingParams(2))
    live.add(later)
    with pytest.raises(ValueError, match="later attempt"):
        live.add(SequenceSpec("r", 1, range(4), SamplingParams(2)))
    assert live.requests() == [("r", 2)]
    live.add(SequenceSpec("r", 3, range(4), SamplingParams(2)))
    assert live.requests() == [("r", 3)]


def test_a_target_that_does_not_answer_is_given_up() -> None:
    limits = LiveLimits(answer_ns=50)
    source = _source(limits)
    offer = Offer(1, BatchKey(2, 1), (8,), (9,))
    source.take_message(_TARGET, offer, 0)
    assert source.take_outbox(0) == [(_TARGET, _pull(offer.batch))]
    deadline_ns = source.deadline_ns()
    assert deadline_ns is not None
    assert source.take_outbox(deadline_ns - 1) == []
    told = source.take_outbox(deadline_ns)
    assert told == [(_TARGET, Declined(offer.batch)), (_TARGET, Parted(2))]
    assert source.batcher.pool.used == 0
    assert source.deadline_ns() is None
