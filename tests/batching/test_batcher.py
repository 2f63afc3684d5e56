"""Batcher by example: order of Runs, endings, refusals."""

from __future__ import annotations

import pytest

from livescale.batching.runs.batcher import Batcher, BatcherConfig
from livescale.batching.runs.run import Run, SequenceSpec
from livescale.values.types import FinishReason, LayerSpan, SamplingParams

SPAN = LayerSpan(0, 4)


def make_batcher(kv_blocks: int = 64, run_tokens_max: int = 8, sequences_max: int = 4) -> Batcher:
    return Batcher(BatcherConfig(kv_blocks, 4, run_tokens_max, sequences_max), SPAN)


def spec(
    request: str,
    prompt: int = 3,
    output: int = 2,
    generated: tuple[int, ...] = (),
    stop: tuple[int, ...] = (),
    attempt: int = 1,
) -> SequenceSpec:
    sampling = SamplingParams(output, stop_token_ids=stop)
    return SequenceSpec(request, attempt, range(100, 100 + prompt), sampling, generated)


def shape(run: Run | None) -> list[tuple[str, int, int, bool]]:
    assert run is not None
    return [(s.request, s.first_position, s.token_count, s.samples) for s in run.segments]


def test_decodes_go_first_and_prompts_fill_the_budget_in_chunks() -> None:
    batcher = make_batcher()
    batcher.add(spec("a", prompt=3, output=5))
    run = batcher.next()
    assert shape(run) == [("a", 0, 3, True)]
    assert run is not None
    batcher.done(run, [[7]])
    batcher.add(spec("b", prompt=12))
    batcher.add(spec("c", prompt=2))
    run = batcher.next()
    assert shape(run) == [("a", 3, 1, True), ("b", 0, 5, False), ("c", 0, 2, True)]
    assert run is not None
    assert run.segments[0].token_ids == (7,)
    assert run.prefill_tokens == 7
    batcher.done(run, [[8], [9]])
    run = batcher.next()
    assert shape(run) == [("a", 4, 1, True), ("c", 2, 1, True), ("b", 5, 6, False)]


def test_a_request_ends_on_a_stop_token_or_its_length() -> None:
    batcher = make_batcher()
    batcher.add(spec("a", output=9, stop=(5,)))
    batcher.add(spec("b", output=1))
    run = batcher.next()
    assert run is not None
    a, b = batcher.done(run, [[5], [6]])
    assert (a.index, a.finish_reason) == (0, FinishReason.STOP)
    assert (b.index, b.finish_reason) == (0, FinishReason.LENGTH)
    assert not batcher.has_work
    assert batcher.pool.used == 0
    assert batcher.emitted_tokens == 2


def test_a_retry_computes_earlier_tokens_as_prompt_and_counts_on() -> None:
    batcher = make_batcher()
    batcher.add(spec("a", prompt=3, output=4, generated=(50, 51), attempt=2))
    assert batcher.queued_prefill_tokens == 5
    run = batcher.next()
    assert run is not None
    assert shape(run) == [("a", 0, 5, True)]
    assert run.segments[0].token_ids == (100, 101, 102, 50, 51)
    (emission,) = batcher.done(run, [[52]])
    assert (emission.index, emission.attempt, emission.finish_reason) == (2, 2, None)


def test_nobody_overtakes_a_request_that_waits_for_blocks() -> None:
    batcher = make_batcher(kv_blocks=4)
    batcher.add(spec("a", prompt=7, output=2))
    batcher.add(spec("large", prompt=12, output=2))
    batcher.add(spec("small", prompt=1, output=1))
    run = batcher.next()
    assert shape(run) == [("a", 0, 7, True)]
    assert batcher.lines.take_admitted() == (("a", 1),)
    assert batcher.lines.take_admitted() == ()
    assert batcher.waiting == 2
    assert batcher.requests() == (("a", 1), ("large", 1), ("small", 1))


def test_cancelling_frees_at_once_or_when_the_run_is_committed() -> None:
    batcher = make_batcher()
    batcher.add(spec("a", output=5))
    batcher.add(spec("b", output=5))
    assert batcher.cancel("b", 1)
    assert batcher.waiting == 1
    run = batcher.next()
    assert run is not None
    used = batcher.pool.used
    assert batcher.cancel("a", 1)
    assert not batcher.cancel("a", 1), "it is cancelled already"
    assert batcher.requests() == ()
    assert batcher.pool.used == used, "the Run in flight still writes its blocks"
    assert batcher.done(run, [[1]]) == []
    assert batcher.pool.used == 0


def test_cancelling_between_runs_frees_at_once() -> None:
    batcher = make_batcher()
    batcher.add(spec("a", output=5))
    run = batcher.next()
    assert run is not None
    batcher.done(run, [[1]])
    assert batcher.cancel("a", 1)
    assert batcher.pool.used == 0


def test_another_attempt_or_an_unknown_request_is_not_cancelled() -> None:
    batcher = make_batcher()
    batcher.add(spec("a"))
    assert not batcher.cancel("a", 2)
    assert not batcher.cancel("b", 1)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (spec("x", prompt=0), "x has an empty prompt"),
        (spec("x", output=0), "x has no tokens left to generate"),
        (spec("x", output=2, generated=(1, 2)), "x has no tokens left to generate"),
        (spec("x", prompt=256, output=2), "x needs KV for 257 tokens, the instance holds 256"),
        (spec("a"), "a is on this instance already"),
        (spec("w"), "w is on this instance already"),
    ],
)
def test_what_can_never_run_is_refused(bad: SequenceSpec, message: str) -> None:
    batcher = make_batcher(sequences_max=1)
    batcher.add(spec("a"))
    batcher.next()
    batcher.add(spec("w"))
    with pytest.raises(ValueError, match=message):
        batcher.add(bad)
    batcher.validate()


def test_the_largest_request_that_fits_is_accepted() -> None:
    batcher = make_batcher()
    batcher.add(spec("x", prompt=256, output=1))
    assert batcher.next() is not None


@pytest.mark.parametrize(
    ("run_tokens_max", "sequences_max", "message"),
    [(0, 1, "at least 1"), (1, 0, "at least 1"), (4, 5, "5 exceeds run_tokens_max 4")],
)
def test_limits_that_starve_are_refused(
    run_tokens_max: int, sequences_max: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        BatcherConfig(8, 4, run_tokens_max, sequences_max)


@pytest.mark.parametrize(
    ("percent", "growth", "message"),
    [(0, 0, "0 is not in 1…100"), (101, 0, "101 is not in"), (50, -1, "-1 is negative")],
)
def test_shares_that_starve_are_refused(percent: int, growth: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatcherConfig(8, 4, 8, 4, oldest_prompt_percent=percent, growth_tokens=growth)


def test_nothing_to_do_is_no_run() -> None:
    batcher = make_batcher()
    assert batcher.next() is None
    assert repr(batcher) == "<Batcher 0 running, 0 waiting, <BlockPool 0/64 blocks, 0 cached>>"


@pytest.mark.parametrize("kv_blocks", [64, 6])
def test_requests_without_a_place_or_kv_are_left_out(kv_blocks: int) -> None:
    """Two run, and one more has no place, or no KV. Who comes during a Run may yet be admitted."""
    places = 2 if kv_blocks == 64 else 8
    config = BatcherConfig(kv_blocks, 4, 8, places, growth_tokens=8)
    batcher = Batcher(config, SPAN)
    for name in "abc":
        batcher.add(spec(name, prompt=3, output=9))
    assert batcher.left_out == 0
    run = batcher.next()
    assert run is not None
    assert (batcher.running, batcher.left_out) == (2, 1)
    batcher.add(spec("d"))
    assert (batcher.waiting, batcher.left_out) == (2, 1)
    assert batcher.pool.used + batcher.room.growth_blocks <= kv_blocks
    for name in "abd":
        batcher.cancel(name, 1)
    batcher.done(run, [[1], [2]])
    batcher.next()
    assert (batcher.running, batcher.left_out) == (1, 0)
