"""Requests whose KV blocks are on an instance while no Run of the Batcher computes them.

They are parts of live batches: some of their layers have been run, here or elsewhere. Their blocks
are theirs until they join the running requests, or leave.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from livescale.batching.blocks import BlockPool
from livescale.batching.sequence import SequenceState
from livescale.types import RequestId

Tables = tuple[tuple[int, ...], ...]


class HeldSequences:
    """All held requests of one instance, and blocks that are reserved for others to come."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        #: by request, attempt: an older attempt may be on its way out
        self._held: dict[tuple[RequestId, int], SequenceState] = {}
        self._reserved: dict[int, Tables] = {}
        self._reservations = 0
        #: requests that somebody has reserved blocks for
        self.reserved = 0

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(self._held.values())

    def get(self, request: RequestId, attempt: int) -> SequenceState | None:
        return self._held.get((request, attempt))

    def add(self, sequence: SequenceState) -> None:
        """It has its blocks, or takes them now: one per started block of known tokens."""
        key = (sequence.spec.request, sequence.spec.attempt)
        assert key not in self._held, f"{key} is held already"
        if not sequence.block_table:
            count = self._pool.blocks_for(sequence.known_tokens)
            sequence.block_table = tuple(self._pool.take() for _ in range(count))
        sequence.was_held = True
        self._held[key] = sequence

    def remove(self, sequence: SequenceState) -> None:
        """It is held no longer; its blocks stay with it."""
        del self._held[sequence.spec.request, sequence.spec.attempt]

    def drop(self, sequence: SequenceState) -> None:
        """It is held no longer, and its blocks are free."""
        self.remove(sequence)
        self._pool.release(sequence.block_table)
        sequence.block_table = ()

    # -- reservations ---------------------------------------------------------------------------

    def reserve(self, tokens: Sequence[int]) -> int:
        """Blocks for requests with so many known tokens, by a number. The caller asked for room."""
        self._reservations += 1
        pool = self._pool
        self._reserved[self._reservations] = tuple(
            tuple(pool.take() for _ in range(pool.blocks_for(count))) for count in tokens
        )
        self.reserved += len(tokens)
        return self._reservations

    def take_reserved(self, number: int) -> Tables:
        """The blocks, one table per request; they are no longer reserved."""
        tables = self._reserved.pop(number)
        self.reserved -= len(tables)
        return tables

    def cancel_reserved(self, number: int) -> None:
        """Nobody came: the blocks are free."""
        for table in self.take_reserved(number):
            self._pool.release(table)

    def tables(self) -> Iterator[tuple[int, ...]]:
        """Every block table of a held request or a reservation."""
        yield from (sequence.block_table for sequence in self._held.values())
        for tables in self._reserved.values():
            yield from tables
