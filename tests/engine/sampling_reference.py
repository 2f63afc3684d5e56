"""Sampling once more, plainly: one row after the other, numbers and lists, nothing shared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from livescale.batching.runs.run import Segment
from livescale.values.types import SamplingParams


def segment(
    sampling: SamplingParams,
    prompt_ids: Sequence[int] = (0,),
    generated_ids: Sequence[int] = (),
    name: str = "r",
) -> Segment:
    """The sampling segment of a request that has computed all but its last token."""
    known = (*prompt_ids, *generated_ids)
    return Segment(
        request=name,
        attempt=0,
        first_position=len(known) - 1,
        token_ids=known[-1:],
        block_table=(),
        samples=True,
        sampling=sampling,
        prompt_ids=prompt_ids,
        generated_ids=generated_ids,
    )


def reference_logits(logits: np.ndarray, of: Segment) -> np.ndarray:
    """The row with bias, minimal length and penalties."""
    row = logits.astype(np.float32)
    sampling = of.sampling
    for token_id, bias in sampling.logit_bias:
        row[token_id] += np.float32(bias)
    if len(of.generated_ids) < sampling.output_tokens_min:
        others = [i for i in range(len(row)) if i not in sampling.stop_token_ids]
        if any(row[i] > -math.inf for i in others):
            row[[i for i in sampling.stop_token_ids if i < len(row)]] = -math.inf
    penalty = np.float32(sampling.repetition_penalty)
    for token_id in {*of.prompt_ids, *of.generated_ids}:
        row[token_id] = row[token_id] / penalty if row[token_id] > 0 else row[token_id] * penalty
    for token_id, count in Counter(of.generated_ids).items():
        row[token_id] -= np.float32(sampling.frequency_penalty) * np.float32(count)
        row[token_id] -= np.float32(sampling.presence_penalty)
    return row


def reference_log_weights(logits: np.ndarray, of: Segment) -> np.ndarray:
    """What the token is drawn from: maximum 0, -inf where cut."""
    sampling = of.sampling
    row = reference_logits(logits, of)
    row = (row - row.max()) / np.float32(sampling.temperature)
    if sampling.min_p > 0:
        row[row < np.float32(math.log(sampling.min_p))] = -math.inf
    if 0 < sampling.top_k < len(row):
        row[row < sorted(row)[-sampling.top_k]] = -math.inf
    if sampling.top_p < 1:
        masses = [int(math.exp(float(logit)) * 2**40) for logit in row]
        wanted = max(sum(masses) * sampling.top_p, 1)
        above, kept = 0, set()
        for logit, mass in sorted(zip(row.tolist(), masses, strict=True), reverse=True):
            if above < wanted:
                kept.add(logit)
            above += mass
        row[[logit not in kept for logit in row.tolist()]] = -math.inf
    return row


def reference_uniforms(seed: int, position: int, vocabulary: int) -> list[float]:
    """The uniform number in (0, 1) of every token at the position."""
    key = _splitmix((_splitmix(seed % 2**64) + position) % 2**64)
    low, high = key % 2**32, key >> 32
    uniforms = []
    for token_id in range(vocabulary):
        bits = (token_id + low) % 2**32
        bits ^= bits >> 16
        bits = bits * 0x21F0AAAD % 2**32
        bits ^= bits >> 15
        bits = (bits ^ high) * 0x735A2D97 % 2**32
        bits ^= bits >> 15
        uniforms.append((bits % 2**31 * 2 + (bits >> 31) + 0.5) / 2**32)
    return uniforms


def reference_token(logits: np.ndarray, of: Segment) -> int:
    """The token that must be chosen."""
    if of.sampling.temperature == 0:
        return int(reference_logits(logits, of).argmax())
    log_weights = reference_log_weights(logits, of)
    uniforms = reference_uniforms(of.sampling.seed, of.context_tokens, len(log_weights))
    gumbels = [-math.log(-math.log1p(-uniform)) for uniform in uniforms]
    return int((log_weights.astype(np.float64) + gumbels).argmax())


def _splitmix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)
