"""How prompts share a Run: the oldest always moves on, short ones overtake, equal ones wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.batching.runs.batcher import Batcher, BatcherConfig
from livescale.batching.runs.choosing import share_tokens
from livescale.batching.runs.run import SequenceSpec
from livescale.values.types import LayerSpan, SamplingParams

KEYS = st.sampled_from([None, b"a", b"b"])
PROMPTS = st.lists(st.tuples(st.integers(2, 50), KEYS), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("lefts", "percent", "counts"),
    [
        ([100], 50, [8]),
        ([100, 3], 50, [5, 3]),
        ([100, 20, 3], 50, [4, 1, 3]),
        ([100, 100], 50, [8, 0]),
        ([100, 3], 100, [8, 0]),
        ([100, 20, 9], 1, [1, 0, 7]),
        ([3, 100, 20], 50, [3, 0, 5]),
    ],
)
def test_examples(lefts: list[int], percent: int, counts: list[int]) -> None:
    assert share_tokens(lefts, [None] * len(lefts), 8, percent) == counts


def test_of_equal_beginnings_one_is_computed() -> None:
    assert share_tokens([9, 9, 9, 4], [b"a", b"a", b"a", b"b"], 20, 50) == [9, 0, 0, 4]
    assert share_tokens([90, 9, 9], [None, b"a", b"a"], 40, 50) == [31, 9, 0]


@given(prompts=PROMPTS, budget=st.integers(1, 100), percent=st.integers(1, 100))
def test_shares(prompts: list[tuple[int, bytes | None]], budget: int, percent: int) -> None:
    lefts, keys = [left for left, _ in prompts], [key for _, key in prompts]
    counts = share_tokens(lefts, keys, budget, percent)
    assert all(0 <= count <= left for count, left in zip(counts, lefts, strict=True))
    assert counts[0] >= min(lefts[0], budget * percent / 100)
    served = [number for number, count in enumerate(counts) if count > 0]
    served_keys = [keys[number] for number in served if keys[number] is not None]
    assert len(set(served_keys)) == len(served_keys), "equal blocks are computed once"
    # These want more, and nothing but the budget is in their way.
    hungry = [
        number
        for number, left in enumerate(lefts)
        if counts[number] < left and (number in served or keys[number] not in served_keys)
    ]
    assert sum(counts) <= budget
    assert sum(counts) == budget or not hungry
    for number in served[1:]:
        assert all(lefts[number] <= lefts[n] for n in hungry), "the shortest go first"


@given(
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    decodes=st.integers(0, 3),
    spare=st.integers(0, 12),
    percent=st.integers(1, 100),
)
def test_every_prompt_is_computed_within_its_bound(
    prompts: list[int], decodes: int, spare: int, percent: int
) -> None:
    """No later than at the oldest's share of the smallest budget, one prompt after the other."""
    sequences_max = decodes + len(prompts)
    config = BatcherConfig(1000, 4, sequences_max + spare, sequences_max, percent)
    batcher = Batcher(config, LayerSpan(0, 3))
    for number in range(decodes):
        add(batcher, f"d{number}", 1, 1000)
    bounds: dict[str, int] = {}
    runs = 0
    share = -(-(config.run_tokens_max - (sequences_max - 1)) * percent // 100)
    for number, tokens in enumerate(prompts):
        add(batcher, f"p{number}", tokens, 1)
        runs += -(-tokens // share)
        bounds[f"p{number}"] = runs
    runs = 0
    while bounds:
        run = batcher.next()
        assert run is not None
        runs += 1
        decoding = [s for s in run.segments if s.request.startswith("d")]
        assert len(decoding) == decodes, "a prompt never holds up a decode"
        for emission in batcher.done(run, [[1]] * sum(s.samples for s in run.segments)):
            if emission.finish_reason is not None:
                assert runs <= bounds.pop(emission.request)


@given(
    long=st.integers(200, 400),
    short=st.integers(1, 40),
    later=st.integers(0, 4),
    percent=st.integers(1, 90),
)
def test_a_short_prompt_does_not_wait_for_a_long_one(
    long: int, short: int, later: int, percent: int
) -> None:
    batcher = Batcher(BatcherConfig(1000, 4, 16, 4, percent), LayerSpan(0, 3))
    add(batcher, "long", long, 1)
    for _ in range(later):
        run = batcher.next()
        if run is None:
            return
        batcher.done(run, [[1]] * sum(s.samples for s in run.segments))
    add(batcher, "short", short, 1)
    runs = 0
    is_over = False
    while not is_over:
        run = batcher.next()
        assert run is not None
        runs += 1
        emissions = batcher.done(run, [[1]] * sum(s.samples for s in run.segments))
        is_over = any(emission.request == "short" for emission in emissions)
    rest = 16 - -(-16 * percent // 100)
    assert runs <= -(-short // rest), "the share that is not the oldest's is its own"


def add(batcher: Batcher, request: str, prompt: int, output: int) -> None:
    spec = SequenceSpec(request, 1, range(prompt), SamplingParams(output), cache_salt=request)
    batcher.add(spec)
