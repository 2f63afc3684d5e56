"""Which positions of the running requests a Run computes."""

from __future__ import annotations

from collections.abc import Iterable

from livescale.batching.kv_room import KvRoom
from livescale.batching.run import Segment
from livescale.batching.sequence import SequenceState
from livescale.batching.sharing import share_tokens


def choose_segments(
    running: Iterable[SequenceState], room: KvRoom, tokens_max: int, oldest_prompt_percent: int
) -> tuple[Segment, ...]:
    """One token of every decode, and chunks of prompts that share what is left of `tokens_max`
    (Sarathi-Serve, OSDI'24; `sharing.py`).

    Decodes are in every Run: a long prompt must not stretch the time between two tokens of others.
    The budget has room for them, and for one token of every prompt besides.
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
            segments.append(_segment(sequence, 1, samples=True))
    if not prompts:
        return tuple(segments)
    counts = share_tokens(
        [sequence.tokens_left for sequence in prompts],
        [sequence.next_key() for sequence in prompts],
        tokens_max - len(segments),
        oldest_prompt_percent,
    )
    segments += [
        _segment(sequence, count, samples=count == sequence.tokens_left)
        for sequence, count in zip(prompts, counts, strict=True)
        if count > 0
    ]
    return tuple(segments)


def _segment(sequence: SequenceState, count: int, *, samples: bool) -> Segment:
    spec, first = sequence.spec, sequence.computed
    return Segment(
        request=spec.request,
        attempt=spec.attempt,
        first_position=first,
        token_ids=sequence.token_ids(first, first + count),
        block_table=sequence.block_table,
        samples=samples,
        sampling=spec.sampling,
        prompt_ids=spec.prompt_ids,
        generated_ids=sequence.generated,
    )
