"""Is a greedy output right? Stock transformers as the judge; none of our execution code is used.

A token is right if one fp32 forward over the prompt and the output puts its logit within 1e-5 of
that position's standard deviation of logits below the maximum. Equal-looking choices are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

TOLERANCE_STDS = 1e-5
"""Distance from the maximal logit, in standard deviations, that counts as a tie."""

BATCH_TOKENS_MAX = 2048
"""Tokens (padding included) of one forward: bounds the memory of its logits."""

Pair = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class GreedyCheck:
    """Verdict on one output: tokens checked, indices of wrong ones, right ones that are not the
    argmax."""

    tokens: int
    wrong: tuple[int, ...]
    near_ties: int

    @property
    def is_right(self) -> bool:
        return not self.wrong


class GreedyOracle:
    """A model loaded once to judge many outputs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        auto: Any = AutoModelForCausalLM
        self._model = auto.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
        self._model.eval()

    def check(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> GreedyCheck:
        """Judge one output."""
        return self.check_many([(prompt_ids, output_ids)])[0]

    def check_many(self, pairs: Sequence[Pair]) -> list[GreedyCheck]:
        """Judge (prompt, output) pairs, in their order; similar lengths share a forward."""
        for prompt_ids, _ in pairs:
            if not prompt_ids:
                raise ValueError("an output can only be judged behind a prompt of one token")
        checks: dict[int, GreedyCheck] = {}
        for batch in _batches(pairs):
            for index, check in zip(batch, self._forward([pairs[i] for i in batch]), strict=True):
                checks[index] = check
        return [checks[index] for index in range(len(pairs))]

    def __repr__(self) -> str:
        return f"<GreedyOracle {self._directory}>"

    @torch.inference_mode()
    def _forward(self, pairs: Sequence[Pair]) -> list[GreedyCheck]:
        # Padding stands behind the sequences, where causal attention never looks.
        longest = max(len(prompt) + len(output) for prompt, output in pairs)
        token_ids = torch.zeros(len(pairs), longest, dtype=torch.long)
        for row, (prompt, output) in enumerate(pairs):
            sequence = [*prompt, *output]
            token_ids[row, : len(sequence)] = torch.tensor(sequence)
        first = min(len(prompt) for prompt, _ in pairs) - 1
        logits = self._model(
            input_ids=token_ids, use_cache=False, logits_to_keep=longest - first
        ).logits
        return [
            _judge(logits[row, len(prompt) - 1 - first :][: len(output)], output)
            for row, (prompt, output) in enumerate(pairs)
        ]


def _batches(pairs: Sequence[Pair]) -> Iterator[list[int]]:
    """Indices of pairs that share a forward: sorted by length, bounded in padded tokens."""
    lengths = [len(prompt) + len(output) for prompt, output in pairs]
    batch: list[int] = []
    for index in sorted(range(len(pairs)), key=lambda i: (lengths[i], i)):
        if batch and (len(batch) + 1) * lengths[index] > BATCH_TOKENS_MAX:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _judge(logits: torch.Tensor, output_ids: Sequence[int]) -> GreedyCheck:
    """`logits` (tokens, vocabulary): row i decides token i."""
    chosen_ids = torch.tensor(list(output_ids), dtype=torch.long)
    if not len(chosen_ids):
        return GreedyCheck(0, (), 0)
    maxima, argmaxima = logits.max(dim=-1)
    chosen = logits.gather(1, chosen_ids.unsqueeze(1)).squeeze(1)
    is_right = maxima - chosen <= TOLERANCE_STDS * logits.std(dim=-1)
    near_ties = is_right & (chosen_ids != argmaxima)
    wrong = (~is_right).nonzero().flatten().tolist()
    return GreedyCheck(len(chosen_ids), tuple(wrong), int(near_ties.sum()))
