"""What Runs give besides tokens comes to the leader whose they are, however prompts are cut."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.batching.contract.visit_messages import Lead, Visited
from livescale.batching.runs.run import BatchKey, EmittedTokens, Run, Segment
from livescale.engine.base.run_result import RunResult
from livescale.runtime.member_process.live_parcels import Assembler, Letter, ParcelError, pack
from livescale.runtime.member_process.run_answers import SUM_BYTES, Besides, RunAnswers
from livescale.values.types import LayerSpan, SamplingParams, TokenLogprobs

HIDDEN = 3
MEMBER = 9
EMBEDS = SamplingParams(1, embeds=True)


def segment(request: str, first: int, stop: int, tokens: int) -> Segment:
    return Segment(
        request=request,
        attempt=1,
        first_position=first,
        token_ids=(0,) * (stop - first),
        block_table=(0,),
        samples=stop == tokens,
        sampling=EMBEDS,
    )


def result(run: Run) -> RunResult:
    """A row has its position's number, times 1, 2 and 3."""
    sums = {
        s.request: np.arange(1, HIDDEN + 1, dtype=np.float32)
        * sum(range(s.first_position, s.context_tokens))
        for s in run.segments
    }
    return RunResult(None, [0] * len(run.segments), {}, sums)


def deliver(answers: RunAnswers, key: BatchKey, leader: RunAnswers) -> None:
    """As bytes, with the leader's check of their number."""
    besides, content = answers.leaves(key)
    message = Visited(Lead(key.target, 1), key.number, (0,))
    letter = Letter(message, (), len(content), besides)
    wanted = Assembler(lambda its: SUM_BYTES * HIDDEN * len(its.besides.summed))
    [parcel] = pack(letter, [memoryview(content)])
    complete = wanted.take(parcel)
    assert complete is not None
    came, values = complete
    assert came.besides is not None
    leader.came(came.besides, values)


@given(
    st.lists(st.sets(st.integers(1, 40), min_size=1, max_size=5), min_size=1, max_size=4),
    st.booleans(),
)
def test_embeddings_come_to_their_leaders(cuts: list[set[int]], is_led_here: bool) -> None:
    """Each leader has one prompt; its chunks are in Runs with those of the others."""
    chunks = [[*pairwise([0, *sorted(own)])] for own in cuts]
    leaders = [RunAnswers() for _ in cuts]
    answers = RunAnswers()
    if is_led_here:
        leaders[0] = answers
    for number in range(max(map(len, chunks))):
        ran = [n for n, own in enumerate(chunks) if number < len(own)]
        keys = [BatchKey(MEMBER + n if is_led_here else n, number) for n in ran]
        segments = tuple(segment(f"r{n}", *chunks[n][number], max(cuts[n])) for n in ran)
        merged = tuple((key, 1) for key in keys) if len(ran) > 1 else ()
        run = Run(number, LayerSpan(0, 3), segments, 1, keys[0], True, merged)
        answers.ran(run, result(run), MEMBER if is_led_here else None)
        for n, key in zip(ran, keys, strict=True):
            if leaders[n] is not answers:
                deliver(answers, key, leaders[n])
            else:
                assert answers.leaves(key) == (None, b"")
    for n, (leader, own) in enumerate(zip(leaders, cuts, strict=True)):
        _, vector = leader.of(EmittedTokens(f"r{n}", 1, 0, (0,), None))
        assert vector is not None
        mean = (max(own) - 1) / 2
        assert np.frombuffer(vector, "<f4") == pytest.approx([mean, 2 * mean, 3 * mean])
        assert leader.is_empty


def test_what_belongs_to_no_request_any_more_is_forgotten() -> None:
    answers = RunAnswers()
    logprobs = TokenLogprobs(-1.0)
    answers.came(Besides((("r", 1, logprobs), ("s", 2, logprobs))), bytearray())
    answers.keep([("s", 2), ("r", 2)])
    assert answers.of(EmittedTokens("r", 1, 0, (0,), None)) == (None, None)
    assert answers.of(EmittedTokens("s", 2, 0, (0,), None)) == (logprobs, None)
    assert answers.is_empty


def test_sums_of_another_size_are_no_message() -> None:
    letter = Letter(Visited(Lead(1, 1), 3, (0,)), (), 8, Besides())
    [parcel] = pack(letter, [memoryview(bytes(8))])
    with pytest.raises(ParcelError, match="Visited with 8 bytes, not 0"):
        Assembler(lambda _: 0).take(parcel)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(letter), type=Letter) == letter
