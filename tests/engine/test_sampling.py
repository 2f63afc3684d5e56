"""Tokens are chosen as the parameters say, whatever else is in the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from sampling_reference import (
    reference_log_weights,
    reference_logits,
    reference_token,
    segment,
)

from effort import examples
from livescale.batching.runs.run import Segment
from livescale.engine.sampling.cuts import Candidates
from livescale.engine.sampling.sampling import TILE_LOGITS, choose_tokens, final_candidates
from livescale.values.types import SamplingParams

GREEDY = SamplingParams(output_tokens_max=100)
DRAWN = replace(GREEDY, temperature=1.0)
BIG = 5000
"""A vocabulary with more tokens than are ever listed."""


def dense(found: Candidates, vocabulary: int) -> torch.Tensor:
    """The candidates' log-weights as whole rows."""
    rows = torch.full((len(found.log_weights), vocabulary), -math.inf)
    token_ids = found.token_ids.long().expand(found.log_weights.shape)
    return rows.scatter_(1, token_ids, found.log_weights)


@st.composite
def rows_of_logits(draw: st.DrawFn, vocabulary: int) -> np.ndarray:
    """A row: smooth or full of ties, flat or steep, with holes or without."""
    noise = np.random.Generator(np.random.PCG64(draw(st.integers(0, 2**32))))
    row = (noise.standard_normal(vocabulary) * draw(st.sampled_from([0.01, 1, 4, 30]))).astype("f4")
    kind = draw(st.sampled_from(["smooth", "bf16", "few values", "equal"]))
    if kind == "bf16":
        row = torch.tensor(row).bfloat16().float().numpy()
    elif kind == "few values":
        row = row.round()
    elif kind == "equal":
        row[:] = row[0]
    if draw(st.booleans()):
        holes = noise.random(vocabulary) < 0.5
        holes[int(noise.integers(vocabulary))] = False
        row[holes] = -math.inf
    return row


@st.composite
def segments_of(draw: st.DrawFn, vocabulary: int, name: str) -> Segment:
    """A segment with any parameters."""
    ids = st.integers(0, vocabulary - 1)
    penalty = st.sampled_from([0.0, 0.0, 0.5, -1.3, 2.0])
    sampling = SamplingParams(
        output_tokens_max=100,
        stop_token_ids=tuple(draw(st.lists(st.integers(0, vocabulary + 3), max_size=3))),
        output_tokens_min=draw(st.sampled_from([0, 0, 1, 3])),
        temperature=draw(st.sampled_from([0.0, 0.01, 0.6, 1.0, 1.7, 50.0])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.95, 0.5, 1e-6]) | st.floats(1e-6, 1)),
        top_k=draw(st.sampled_from([0, 0, 1, 3, 20, 255, 256, 300, vocabulary, 10**6])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 1.0]) | st.floats(0, 1)),
        frequency_penalty=draw(penalty),
        presence_penalty=draw(penalty),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.1, 0.7, 3.0])),
        seed=draw(st.integers(0, 2**63 - 1)),
        logit_bias=tuple(draw(st.dictionaries(ids, st.floats(-100, 100), max_size=3)).items()),
        logprobs=draw(st.none() | st.integers(0, 20)),
    )
    prompt_ids = draw(st.lists(ids, min_size=1, max_size=8))
    return segment(sampling, prompt_ids, draw(st.lists(ids, max_size=6)), name)


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, list[Segment]]:
    vocabulary = draw(st.sampled_from([1, 2, 7, 40, 290, BIG]))
    count = draw(st.integers(1, 3 if vocabulary == BIG else 7))
    logits = np.stack([draw(rows_of_logits(vocabulary)) for _ in range(count)])
    return logits, [draw(segments_of(vocabulary, f"r{index}")) for index in range(count)]


# -- against the plain reference ------------------------------------------------------------------


@given(batch=batches())
@settings(max_examples=examples(250))
def test_every_choice_is_the_references(batch: tuple[np.ndarray, list[Segment]]) -> None:
    logits, segments = batch
    given_logits = torch.tensor(logits)
    token_ids, logprobs = choose_tokens(given_logits, segments)
    assert torch.equal(given_logits, torch.tensor(logits)), "the logits were changed"
    assert token_ids == [reference_token(row, of) for row, of in zip(logits, segments, strict=True)]
    wanting = [s.request for s in segments if s.sampling.logprobs is not None]
    assert sorted(logprobs) == sorted(wanting)


@given(batch=batches())
@settings(max_examples=examples(100))
def test_final_candidates_are_the_references(batch: tuple[np.ndarray, list[Segment]]) -> None:
    logits, segments = batch
    drawn = [row for row, s in enumerate(segments) if s.sampling.temperature > 0]
    assume(drawn)
    found = final_candidates(torch.tensor(logits[drawn]), [segments[row] for row in drawn])
    for row, log_weights in zip(drawn, dense(found, logits.shape[1]), strict=True):
        wanted = reference_log_weights(logits[row], segments[row])
        np.testing.assert_array_equal(log_weights.numpy(), wanted)


def test_a_top_p_of_1_keeps_unlikely_tokens_beside_a_row_with_less() -> None:
    logits = torch.zeros(2, 50)
    logits[:, 1] = -40  # e**-40 has no mass when shares are counted
    logits[:, 2:] = -math.inf
    segments = [segment(replace(DRAWN, top_k=2)), segment(replace(DRAWN, top_k=2, top_p=0.99))]
    found = dense(final_candidates(logits, segments), 50)
    assert found[:, :2].tolist() == [[0, -40], [0, -math.inf]]


def test_a_batch_of_many_tiles_chooses_what_each_row_chooses_alone() -> None:
    rows = 3 * (TILE_LOGITS // BIG) + 5
    logits = torch.randn(rows, BIG, generator=torch.Generator().manual_seed(1)) * 2
    ways = [
        GREEDY,
        DRAWN,
        replace(DRAWN, top_p=0.9),
        replace(DRAWN, top_k=40),
        replace(DRAWN, top_k=700, temperature=0.5, frequency_penalty=0.4),
        replace(GREEDY, repetition_penalty=1.2),
        replace(DRAWN, temperature=0.7, top_k=20, top_p=0.8, min_p=0.01, logprobs=3),
    ]
    segments = [
        segment(replace(ways[row % 7], seed=row), range(row, row + 9), (row, 5), f"r{row}")
        for row in range(rows)
    ]
    alone = [choose_tokens(logits[row : row + 1], segments[row : row + 1]) for row in range(rows)]
    token_ids, logprobs = choose_tokens(logits, segments)
    assert token_ids == [tokens[0] for tokens, _ in alone]
    backwards, _ = choose_tokens(logits.flip(0), segments[::-1])
    assert backwards == token_ids[::-1]
    for _, of_row in alone:
        for name, values in of_row.items():
            assert logprobs[name].chosen == pytest.approx(values.chosen, abs=1e-5)
            assert [i for i, _ in logprobs[name].top] == [i for i, _ in values.top]


# -- what single parameters mean ------------------------------------------------------------------


@given(row=rows_of_logits(60), seed=st.integers(0, 2**63 - 1))
@settings(max_examples=examples(100))
def test_what_leaves_only_the_highest_logits_chooses_as_greedy(row: np.ndarray, seed: int) -> None:
    logits = torch.tensor(row).unsqueeze(0)
    highest = set(np.flatnonzero(row == row.max()).tolist())
    (greedy,), _ = choose_tokens(logits, [segment(GREEDY)])
    assert greedy == min(highest)
    for sampling in (
        replace(DRAWN, top_k=1),
        replace(DRAWN, top_p=1e-6),
        replace(DRAWN, top_p=0.0),
        replace(DRAWN, min_p=1.0),
        replace(DRAWN, temperature=1e-30),
        replace(DRAWN, temperature=1e-60),  # 0 in fp32
    ):
        (token_id,), _ = choose_tokens(logits, [segment(replace(sampling, seed=seed))])
        assert token_id in highest, sampling


@given(row=rows_of_logits(60), forced=st.integers(0, 59), temperature=st.sampled_from([0.0, 1.0]))
@settings(max_examples=examples(50))
def test_bias_forces_and_bans(row: np.ndarray, forced: int, temperature: float) -> None:
    row[row == -math.inf] = -50
    logits = torch.tensor(row.clip(-60, 60)).unsqueeze(0)
    sampling = replace(GREEDY, temperature=temperature)
    forcing = segment(replace(sampling, logit_bias=((forced, 200.0),)))
    assert choose_tokens(logits, [forcing])[0] == [forced]
    banned = tuple((i, -200.0) for i in range(60) if i != forced)
    assert choose_tokens(logits, [segment(replace(sampling, logit_bias=banned))])[0] == [forced]


def test_bias_outside_the_vocabulary_is_our_bug() -> None:
    for token_id in (-1, 8):
        with pytest.raises(AssertionError, match=f"bias of token {token_id}"):
            choose_tokens(
                torch.zeros(2, 8), [segment(replace(GREEDY, logit_bias=((token_id, 1.0),)))] * 2
            )


def test_history_outside_the_vocabulary_is_our_bug() -> None:
    sampling = replace(GREEDY, repetition_penalty=2.0)
    with pytest.raises(AssertionError, match="token 8"):
        choose_tokens(torch.zeros(2, 8), [segment(sampling, (8,)), segment(sampling, (7,))])


@given(
    row=rows_of_logits(12),
    stops=st.sets(st.integers(0, 14), min_size=1, max_size=11),
    temperature=st.sampled_from([0.0, 1.0, 30.0]),
    generated=st.lists(st.integers(0, 11), max_size=4),
)
@settings(max_examples=examples(100))
def test_no_stop_token_before_the_minimum(
    row: np.ndarray, stops: set[int], temperature: float, generated: list[int]
) -> None:
    row[row == -math.inf] = -50
    logits = torch.tensor(row).unsqueeze(0)
    sampling = replace(
        GREEDY, temperature=temperature, stop_token_ids=tuple(stops), output_tokens_min=3
    )
    free = replace(sampling, output_tokens_min=0)
    for seed in range(5):
        of = segment(replace(sampling, seed=seed), generated_ids=generated)
        (token_id,), _ = choose_tokens(logits, [of])
        if len(generated) < 3:
            assert token_id not in stops
        else:
            without = segment(replace(free, seed=seed), generated_ids=generated)
            assert [token_id] == choose_tokens(logits, [without])[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_minimum_that_leaves_no_token_is_not_kept(temperature: float) -> None:
    sampling = replace(
        GREEDY, temperature=temperature, stop_token_ids=tuple(range(6)), output_tokens_min=9
    )
    logits = torch.tensor([[0.0, -50, -50, 90, -50, 10]])
    assert choose_tokens(logits, [segment(sampling)])[0] == [3]


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[2.0, -2, 4, -4, 0, 1]])
    sampling = replace(DRAWN, repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5)
    of = segment(sampling, prompt_ids=(0, 1, 1), generated_ids=[2, 3, 2])
    found = dense(final_candidates(logits.clone(), [of]), 6)
    # 0 and 1 are only in the prompt: repetition alone. 2 came twice, 3 once.
    adjusted = torch.tensor([[1.0, -4, 2 - 0.5 - 0.5, -8 - 0.25 - 0.5, 0, 1]])
    assert torch.equal(found, adjusted - 1)


@pytest.mark.parametrize("history", [range(2, 40), list(range(2, 40)), tuple(range(2, 40))])
def test_history_is_any_sequence(history: range | list[int] | tuple[int, ...]) -> None:
    logits = torch.arange(50.0).unsqueeze(0)
    sampling = replace(GREEDY, repetition_penalty=1e3, presence_penalty=2.0)
    assert choose_tokens(logits, [segment(sampling, history)])[0] == [49]
    assert choose_tokens(logits, [segment(sampling, range(45, 50), history)])[0] == [44]


# -- rows that are not healthy --------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("cuts", [{}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.5}])
def test_rows_that_are_not_finite_give_tokens_and_leave_others_alone(
    value: float, cuts: dict[str, float]
) -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(3))
    segments = [segment(replace(DRAWN, seed=seed, **cuts)) for seed in range(3)]
    healthy, _ = choose_tokens(logits, segments)
    logits[1] = value
    token_ids, _ = choose_tokens(logits, segments)
    assert token_ids[::2] == healthy[::2]
    assert 0 <= token_ids[1] < 300


def test_a_logit_of_plus_infinity_wins() -> None:
    logits = torch.zeros(1, 9)
    logits[0, [2, 5]] = math.inf
    chosen = {choose_tokens(logits, [segment(replace(DRAWN, seed=s))])[0][0] for s in range(20)}
    assert chosen == {2, 5}


# -- logprobs -------------------------------------------------------------------------------------


@given(batch=batches(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=examples(60))
def test_logprobs_are_the_raw_ones(
    batch: tuple[np.ndarray, list[Segment]], dtype: torch.dtype
) -> None:
    raw = torch.tensor(batch[0]).to(dtype)
    segments = batch[1]
    token_ids, logprobs = choose_tokens(raw, segments)
    wanted = raw.double().log_softmax(dim=1)
    for row, of in enumerate(segments):
        count = of.sampling.logprobs
        if count is None:
            assert of.request not in logprobs
            continue
        found = logprobs[of.request]
        assert found.chosen == pytest.approx(float(wanted[row, token_ids[row]]), abs=1e-4)
        ranking = sorted(range(raw.shape[1]), key=lambda i: (-float(raw[row, i]), i))
        assert [i for i, _ in found.top] == ranking[:count]
        for token_id, logprob in found.top:
            assert logprob == pytest.approx(float(wanted[row, token_id]), abs=1e-4)


def test_the_adjusted_reference_is_not_the_raw_row() -> None:
    """The batches above do adjust rows, else they would say nothing about raw logprobs."""
    of = segment(replace(GREEDY, repetition_penalty=3.0, logprobs=1), (1,))
    logits = np.array([1.0, 2.0], np.float32)
    assert reference_logits(logits, of).argmax() == 0
    (token_id,), logprobs = choose_tokens(torch.tensor(logits).unsqueeze(0), [of])
    assert (token_id, logprobs["r"].top[0][0]) == (0, 1)
    assert logprobs["r"].chosen < logprobs["r"].top[0][1]
