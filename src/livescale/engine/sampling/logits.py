"""Logits as the sampling parameters want them, up to the temperature.

Rows are changed in place, in the order of vLLM, whose users compare:

1. `logit_bias` is added; stop tokens fall to -inf while fewer than `output_tokens_min` tokens are
   generated (not if no other token is left);
2. repetition penalty (prompt and generated tokens: logits above 0 are divided, others multiplied),
   then frequency and presence penalty (generated tokens: count * frequency, then presence, are
   subtracted);
3. temperature.

What is cut then stands in `cuts.py`; no choice is made here.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np
import torch

from livescale.batching.runs.run import Segment


def is_adjusting(segment: Segment) -> bool:
    """True when `adjust` changes the segment's row."""
    sampling = segment.sampling
    return (
        bool(sampling.logit_bias)
        or _holds_stops_back(segment)
        or sampling.repetition_penalty != 1
        or sampling.frequency_penalty != 0
        or sampling.presence_penalty != 0
    )


def adjust(logits: torch.Tensor, segments: Sequence[Segment]) -> None:
    """Bias, minimal length and penalties are in the fp32 rows: argmax is the greedy choice."""
    _add_bias(logits, segments)
    _hold_stops_back(logits, segments)
    _penalize_repetition(logits, segments)
    _penalize_counts(logits, segments)


def scale(logits: torch.Tensor, segments: Sequence[Segment]) -> None:
    """Temperatures, which are above 0, are in the fp32 rows; the maximum of each row is 0.

    A row without a finite maximum (a model that computes NaN) becomes uniform over what caused it.
    """
    temperatures = [segment.sampling.temperature for segment in segments]
    assert all(temperature > 0 for temperature in temperatures), f"{temperatures}"
    divisors = torch.tensor(temperatures, dtype=torch.float32, device=logits.device)
    logits.sub_(logits.amax(dim=1, keepdim=True)).div_(divisors.unsqueeze(1))
    logits.nan_to_num_(nan=0.0, neginf=-math.inf)


# -- helpers, in the order used -------------------------------------------------------------------


def _add_bias(logits: torch.Tensor, segments: Sequence[Segment]) -> None:
    vocabulary = logits.shape[1]
    places: list[int] = []
    biases: list[float] = []
    for row, segment in enumerate(segments):
        for token_id, bias in segment.sampling.logit_bias:
            assert 0 <= token_id < vocabulary, f"{segment.request}: bias of token {token_id}"
            places.append(row * vocabulary + token_id)
            biases.append(bias)
    if places:
        added = torch.tensor(biases, device=logits.device)
        logits.view(-1).index_add_(0, torch.tensor(places, device=logits.device), added)


def _holds_stops_back(segment: Segment) -> bool:
    sampling = segment.sampling
    return bool(sampling.stop_token_ids) and len(segment.generated_ids) < sampling.output_tokens_min


def _hold_stops_back(logits: torch.Tensor, segments: Sequence[Segment]) -> None:
    vocabulary = logits.shape[1]
    for row, segment in enumerate(segments):
        if not _holds_stops_back(segment):
            continue
        # A configuration may name an end token beyond the vocabulary: it never comes.
        stops = [i for i in segment.sampling.stop_token_ids if 0 <= i < vocabulary]
        ids = torch.tensor(stops, dtype=torch.long, device=logits.device)
        held = logits[row, ids]
        logits[row, ids] = -math.inf
        if logits[row].amax() == -math.inf:
            logits[row, ids] = held


def _penalize_repetition(logits: torch.Tensor, segments: Sequence[Segment]) -> None:
    rows = [r for r, s in enumerate(segments) if s.sampling.repetition_penalty != 1]
    if not rows:
        return
    histories = [(*segments[row].prompt_ids, *segments[row].generated_ids) for row in rows]
    places, lengths = _places(rows, histories, logits.shape[1])
    penalties = np.array([segments[row].sampling.repetition_penalty for row in rows], np.float32)
    index = torch.from_numpy(places).to(logits.device)
    penalty = torch.from_numpy(penalties.repeat(lengths)).to(logits.device)
    flat = logits.view(-1)
    seen = flat[index]
    # A token that comes twice is written twice, with the same value.
    flat[index] = torch.where(seen > 0, seen / penalty, seen * penalty)


def _penalize_counts(logits: torch.Tensor, segments: Sequence[Segment]) -> None:
    rows = [
        row
        for row, segment in enumerate(segments)
        if segment.sampling.frequency_penalty or segment.sampling.presence_penalty
    ]
    if not rows:
        return
    vocabulary = logits.shape[1]
    places, _ = _places(rows, [segments[row].generated_ids for row in rows], vocabulary)
    places, counts = np.unique(places, return_counts=True)
    samplings = [segment.sampling for segment in segments]
    frequency = np.array([s.frequency_penalty for s in samplings], np.float32)
    presence = np.array([s.presence_penalty for s in samplings], np.float32)
    of_row = places // vocabulary
    index = torch.from_numpy(places).to(logits.device)
    flat = logits.view(-1)
    for penalty in (frequency[of_row] * counts.astype(np.float32), presence[of_row]):
        flat[index] -= torch.from_numpy(penalty).to(logits.device)


def _places(
    rows: Sequence[int], histories: Sequence[Sequence[int]], vocabulary: int
) -> tuple[np.ndarray, list[int]]:
    """Places of the histories' tokens in the flat logits, and each history's length."""
    parts = []
    for row, history in zip(rows, histories, strict=True):
        # Much faster than a tensor or a numpy array from a list.
        ids = np.frombuffer(array("q", history), dtype=np.int64)
        wrong = ids[(ids < 0) | (ids >= vocabulary)]
        assert not len(wrong), f"token {wrong[0]} of {vocabulary}"
        parts.append(ids + row * vocabulary)
    return np.concatenate(parts), [len(part) for part in parts]
