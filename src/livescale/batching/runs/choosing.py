"""Which positions of the running requests a Run computes, and how prompts share its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from livescale.batching.runs.kv_room import KvRoom
from livescale.batching.runs.run import Segment
from livescale.batching.runs.sequence import SequenceState


class TokenBudget(NamedTuple):
    """Tokens of a Run at most: of one with prompts alone, or of a `mixed` one, in which requests
    decode, too."""

    most: int
    mixed: int

    def for_prompts(self, decodes: int) -> int:
        """What so many decodes leave: one token at least, so that prompts move on."""
        return max(min(self.most, self.mixed) - decodes, 1) if decodes else self.most


def choose_segments(
    running: Iterable[SequenceState], room: KvRoom, budget: TokenBudget, oldest_prompt_percent: int
) -> tuple[Segment, ...]:
    """One token of every decode, and chunks of prompts that share what is left of the budget
    (Sarathi-Serve, OSDI'24; `share_tokens`).

    Decodes are in every Run: a long prompt must not stretch the time between two tokens of others.
    """
    segments = []
    prompts = []
    for sequence in running:
        left = sequence.tokens_left
        if left > 1:
            room.reuse(sequence)
            left = sequence.tokens_left
        if left > 1:
            prompts.append(sequence)
        else:
            segments.append(sequence.segment(1, samples=True))
    if not prompts:
        return tuple(segments)
    counts = share_tokens(
        [sequence.tokens_left for sequence in prompts],
        [sequence.next_key() for sequence in prompts],
        budget.for_prompts(len(segments)),
        oldest_prompt_percent,
    )
    segments += [
        sequence.segment(count, samples=count == sequence.tokens_left)
        for sequence, count in zip(prompts, counts, strict=True)
        if count > 0
    ]
    return tuple(segments)


def share_tokens(
    lefts: Sequence[int],
    next_keys: Sequence[bytes | None],
    budget_tokens: int,
    oldest_percent: int,
) -> list[int]:
    """How many tokens each prompt computes now. Prompts come in order of arrival.

    `lefts` are the tokens that each has left. The oldest prompt gets `oldest_percent` of the
    budget (rounded up), so it always moves on; what remains goes to the prompts with the fewest
    tokens left, the oldest of equal ones first. So a short prompt does not wait for a long one,
    and no prompt waits for more than the prompts before it at that share.

    Of several prompts whose next block has the same content (equal `next_keys`, None: no such
    block) only the first served computes it; the others find it written in the next Run.
    """
    counts = [0] * len(lefts)
    if not counts:
        return counts
    counts[0] = min(-(-budget_tokens * oldest_percent // 100), lefts[0])
    budget_tokens -= counts[0]
    computed_now = {next_keys[0]}
    for number in sorted(range(len(lefts)), key=lambda number: lefts[number]):
        if budget_tokens == 0:
            break
        key = next_keys[number]
        if number > 0 and key is not None and key in computed_now:
            continue
        computed_now.add(key)
        count = min(budget_tokens, lefts[number] - counts[number])
        counts[number] += count
        budget_tokens -= count
    return counts
