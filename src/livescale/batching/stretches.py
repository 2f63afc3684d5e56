"""How many Runs of the same decodes follow one another, whatever they sample.

Arithmetic only. Such a stretch is one event where nobody waits for its single steps: a Run of
several steps, with the tokens, blocks and times of as many Runs of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from livescale.batching.blocks import BlockPool
from livescale.batching.sequence import SequenceState


def decodes_on(sequence: SequenceState) -> bool:
    """It is no prompt any more, so it has one token left to compute, and none can be its end."""
    is_decode = sequence.computed >= sequence.prefill_tokens
    return is_decode and not sequence.spec.sampling.stop_token_ids


def steps_ahead(pool: BlockPool, running: Sequence[SequenceState], steps_max: int) -> int:
    """Steps until the first of the running decodes has its last token, or blocks run out."""
    left = min(s.spec.sampling.output_tokens_max - len(s.generated) for s in running)
    steps = min(steps_max, left)
    while steps > 1 and _blocks_lacking(pool, running, steps) > pool.free:
        steps //= 2
    return steps


def block_changes(
    sequence: SequenceState, steps: int, block_tokens: int, place: int
) -> Iterator[tuple[int, bool, int, int]]:
    """(step, whether it is taken, `place`, number) of the blocks that the next steps fill and take.

    Sorted, the changes of several sequences are in the order of single steps: in each, first all
    blocks that it filled are published, then those are taken that the next one writes.
    """
    computed, known = sequence.computed, sequence.known_tokens
    for number in range(computed // block_tokens, (computed + steps) // block_tokens):
        yield (number + 1) * block_tokens - computed - 1, False, place, number
    first = len(sequence.block_table)
    for number in range(first, -(-(known + steps) // block_tokens)):
        yield number * block_tokens - known, True, place, number


def _blocks_lacking(pool: BlockPool, running: Sequence[SequenceState], steps: int) -> int:
    """Blocks that they take until the last of so many steps begins."""
    return sum(
        max(0, pool.blocks_for(s.known_tokens + steps - 1) - len(s.block_table)) for s in running
    )
