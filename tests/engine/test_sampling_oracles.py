"""What tokens are drawn from agrees with the logits processors of stock transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from msgspec.structs import replace
from sampling_reference import segment
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from livescale.engine.sampling.sampling import choose_tokens, final_candidates
from livescale.values.types import SamplingParams

PROMPT = (3, 1, 4, 1, 5)
GENERATED = (9, 2, 6, 5, 3)
STOPS = (0, 7, 11)
DRAWN = SamplingParams(output_tokens_max=100, temperature=1.0, stop_token_ids=STOPS)


def processors(sampling: SamplingParams) -> LogitsProcessorList:
    """What transformers calls the same, in our order."""
    chosen: list[LogitsProcessor] = []
    if sampling.logit_bias:
        bias = {(token_id,): value for token_id, value in sampling.logit_bias}
        chosen.append(SequenceBiasLogitsProcessor(bias))
    if sampling.output_tokens_min:
        chosen.append(
            MinNewTokensLengthLogitsProcessor(
                len(PROMPT), sampling.output_tokens_min, list(sampling.stop_token_ids)
            )
        )
    if sampling.repetition_penalty != 1:
        chosen.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature not in (0, 1):
        chosen.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.min_p:
        chosen.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k:
        chosen.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chosen.append(TopPLogitsWarper(sampling.top_p))
    return LogitsProcessorList(chosen)


def stock_logits(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    history = torch.tensor([[*PROMPT, *GENERATED]]).expand(len(logits), -1)
    stock: torch.Tensor = processors(sampling)(history, logits.clone())
    return stock


def random_logits(rows: int, vocabulary: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


WAYS: Sequence[dict[str, object]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 400},
    {"top_k": 10_000_000},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"top_p": 0.9999},
    {"min_p": 0.1},
    {"min_p": 0.9},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.3, "min_p": 0.02, "top_p": 0.7},
    {"temperature": 1.3, "min_p": 0.05, "top_k": 30, "top_p": 0.8},
    {"temperature": 0.8, "min_p": 0.0001, "top_k": 500, "top_p": 0.97},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.6, "top_p": 0.9},
    {"output_tokens_min": 5},
    {"output_tokens_min": 6},
    {"logit_bias": ((2, 4.0), (8, -3.5), (0, 100.0))},
    {
        "logit_bias": ((2, 4.0), (3, -3.5), (0, 100.0)),
        "output_tokens_min": 6,
        "repetition_penalty": 1.2,
        "temperature": 0.7,
        "min_p": 0.001,
        "top_k": 100,
        "top_p": 0.9,
    },
]


@pytest.mark.parametrize("vocabulary", [30, 3000])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(way) or "plain")
def test_allowed_tokens_and_their_probabilities(way: dict[str, object], vocabulary: int) -> None:
    sampling = replace(DRAWN, **way)
    logits = random_logits(20, vocabulary, seed=vocabulary)
    wanted = stock_logits(logits, sampling).softmax(dim=1)
    found = final_candidates(logits.clone(), [segment(sampling, PROMPT, GENERATED)] * 20)
    weights = torch.zeros_like(logits).scatter_(
        1, found.token_ids.long().expand(found.log_weights.shape), found.log_weights.exp()
    )
    torch.testing.assert_close(
        weights / weights.sum(dim=1, keepdim=True), wanted, rtol=1e-4, atol=1e-7
    )
    assert torch.equal(weights > 0, wanted > 0), "other tokens are allowed"


@pytest.mark.parametrize("way", [WAYS[0], *WAYS[16:]], ids=lambda way: "-".join(way) or "plain")
def test_greedy_tokens(way: dict[str, object]) -> None:
    sampling = replace(DRAWN, **{**way, "temperature": 0.0})
    logits = random_logits(50, 200, seed=5)
    stock = replace(sampling, top_k=0, top_p=1.0, min_p=0.0)
    token_ids, _ = choose_tokens(logits, [segment(sampling, PROMPT, GENERATED)] * 50)
    assert token_ids == stock_logits(logits, stock).argmax(dim=1).tolist()


def test_the_ways_differ() -> None:
    """Each parameter has an effect on these rows, else agreement would say nothing."""
    logits = random_logits(20, 3000, seed=3000)
    plain = stock_logits(logits, DRAWN)
    idle = [{}, {"top_k": 10_000_000}, {"output_tokens_min": 5}]
    for way in WAYS:
        has_effect = not torch.equal(stock_logits(logits, replace(DRAWN, **way)), plain)
        assert has_effect == (way not in idle), way
    assert math.isinf(float(stock_logits(logits, replace(DRAWN, output_tokens_min=6))[0, 7]))
