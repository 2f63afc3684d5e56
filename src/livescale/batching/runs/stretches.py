"""How many Runs of the same decodes follow one another, whatever they sample.

Arithmetic only. Such a stretch is one event where nothing waits for its single steps: a Run of
several steps, with the tokens, blocks and times of as many Runs of one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from livescale.batching.runs.blocks import BlockPool
from livescale.batching.runs.sequence import SequenceState


def all_stay(
    running: Collection[SequenceState],
    first_waiting: SequenceState | None,
    segments: int,
    places: int,
) -> bool:
    """All that runs decodes, and goes on to, and what waits goes on waiting.

    Each further token only takes room from those that wait. What they find in the prefix index
    may grow, though, if a running one writes what the first of them begins with.
    """
    if len(running) != segments or not all(map(_decodes_on, running)):
        return False
    if first_waiting is None or len(running) >= places:
        return True
    content = first_waiting.spec.content
    return content != "" and all(s.spec.content not in ("", content) for s in running)


def _decodes_on(sequence: SequenceState) -> bool:
    """It is no prompt any more, so it has one token left to compute, and none can be its end."""
    is_decode = sequence.computed >= sequence.prefill_tokens
    return is_decode and not sequence.spec.sampling.stop_token_ids


def steps_ahead(pool: BlockPool, running: Sequence[SequenceState], steps_max: int) -> int:
    """Steps until the first of the running decodes has its last token, or blocks run out."""
    steps = min(steps_max, *[sequence.outputs_left for sequence in running])
    while steps > 1 and _blocks_lacking(pool, running, steps) > pool.free:
        steps //= 2
    return steps


def advance(
    pool: BlockPool, running: Sequence[SequenceState], token_ids: Sequence[Sequence[int]]
) -> None:
    """All steps of a Run but the last are over: their tokens were the next steps' input.

    Blocks are published and taken in the order of single steps, so that the same ones leave the
    prefix index.
    """
    changes: list[tuple[int, bool, int, int]] = []
    for place, (sequence, tokens) in enumerate(zip(running, token_ids, strict=True)):
        steps = len(tokens) - 1
        changes += _block_changes(sequence, steps, pool.block_tokens, place)
        sequence.learn(tokens[:-1])
        sequence.computed += steps
    for _, is_taken, place, number in sorted(changes):
        sequence = running[place]
        if is_taken:
            sequence.block_table += (pool.take(),)
        else:
            pool.publish(sequence.block_table[number : number + 1], [sequence.key(number)])


def _block_changes(
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
    """Blocks that they take until the last of so many steps begins. They have those for the first:
    no count is below 0."""
    size, ahead = pool.block_tokens, steps - 1
    return sum([-(-(s.known_tokens + ahead) // size) - len(s.block_table) for s in running])
