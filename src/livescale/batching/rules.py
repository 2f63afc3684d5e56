"""What holds for the requests on an instance after every step. Raises AssertionError."""

from __future__ import annotations

from collections.abc import Mapping

from livescale.batching.blocks import BlockPool
from livescale.batching.sequence import SequenceState
from livescale.types import RequestId


def check_lines(
    running: Mapping[RequestId, SequenceState], waiting: Mapping[RequestId, SequenceState]
) -> None:
    """Who runs, and who waits: first come, first served, but for those that were held."""
    for line in (running, waiting):
        orders = [s.order for s in line.values()]
        assert orders == sorted(set(orders)), "first come, first served"
    first = next(iter(waiting.values()), None)
    for request, sequence in running.items():
        overtakes = first is not None and sequence.order > first.order
        was_held = sequence.was_held or (first is not None and first.was_held)
        assert was_held or not overtakes, "first come, first served"
        assert sequence.is_started, request
        assert 0 <= sequence.computed < sequence.known_tokens, request
        assert len(sequence.generated) < sequence.spec.sampling.output_tokens_max, request
    for request, sequence in waiting.items():
        assert not sequence.block_table, request
        assert sequence.computed == 0, request


def check_table(sequence: SequenceState, pool: BlockPool) -> None:
    """A running one's blocks hold what it computed, and only full ones belong to others, too."""
    table, request = sequence.block_table, sequence.spec.request
    assert pool.blocks_for(sequence.known_tokens - 1) <= len(table), request
    assert len(table) <= pool.blocks_for(sequence.known_tokens), request
    full = sequence.computed // pool.block_tokens
    # From scratch: the kept keys could be those of other tokens.
    fresh = SequenceState.of(sequence.spec, 0, pool.block_tokens)
    fresh.generated = sequence.generated
    for number, block in enumerate(table):
        if number < full:
            assert pool.key_of(block) in (None, fresh.key(number)), request
        else:
            assert pool.references(block) == 1, f"{request} writes a shared block"
            assert pool.key_of(block) is None, f"{request} writes a block that is found"
