"""Requests whose KV blocks are on an instance while no Run of the Batcher computes them.

They are parts of live batches: some of their layers have been run, here or elsewhere. Their blocks
are theirs until they join the running requests, or leave.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from livescale.batching.runs.blocks import BlockPool
from livescale.batching.runs.lines import Lines
from livescale.batching.runs.run import SequenceSpec
from livescale.batching.runs.sequence import SequenceState
from livescale.values.types import RequestId

Table = tuple[int, ...]
Tables = tuple[Table, ...]


class HeldSequences:
    """All held requests of one instance, and blocks that are reserved for others to come."""

    def __init__(self, pool: BlockPool, lines: Lines) -> None:
        self._pool = pool
        self._lines = lines
        #: by request, attempt: an older attempt may be on its way out
        self._held: dict[tuple[RequestId, int], SequenceState] = {}
        self._reserved: dict[int, Tables] = {}
        self._reservations = 0
        #: requests that blocks are reserved for
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
            sequence.block_table = self._pool.take_table(count)
        sequence.was_held = True
        self._held[key] = sequence
        self._lines.admit(sequence)

    def arrive(self, spec: SequenceSpec, block_table: tuple[int, ...]) -> SequenceState:
        """A request that is computed elsewhere so far; its blocks were reserved."""
        self._lines.arrivals += 1
        sequence = SequenceState.of(spec, self._lines.arrivals, self._pool.block_tokens)
        sequence.block_table = block_table
        self.add(sequence)
        return sequence

    def take_running(self, sequence: SequenceState) -> None:
        """A running request is held from now on: it may go elsewhere. Between two Runs."""
        del self._lines.running[sequence.spec.request]
        self.add(sequence)

    def resume(self, sequence: SequenceState) -> None:
        """A held request that was running here goes on."""
        self._remove(sequence)
        self._lines.run(sequence)

    def join(self, sequence: SequenceState) -> None:
        """Every layer of what is computed is written here: from now on it runs as others do."""
        computed, sequence.computed = sequence.computed, 0
        sequence.write(self._pool, computed)
        self.resume(sequence)

    def put_back(self, sequence: SequenceState) -> None:
        """It waits again, before those that came after it, and is computed anew."""
        self.drop(sequence)
        self._lines.wait_anew(sequence)

    def drop(self, sequence: SequenceState) -> None:
        """It is held no longer, and its blocks are free."""
        self._remove(sequence)
        self._pool.release(sequence.block_table)
        sequence.block_table = ()

    def _remove(self, sequence: SequenceState) -> None:
        del self._held[sequence.spec.request, sequence.spec.attempt]

    # -- reservations ---------------------------------------------------------------------------

    def reserve(self, tokens: Sequence[int]) -> int:
        """Blocks for requests with so many known tokens, by a number. The caller asked for room."""
        self._reservations += 1
        pool = self._pool
        self._reserved[self._reservations] = tuple(
            pool.take_table(pool.blocks_for(count)) for count in tokens
        )
        self.reserved += len(tokens)
        return self._reservations

    def tables_of(self, number: int) -> Tables:
        """The reserved blocks, one table per request."""
        return self._reserved[number]

    def take_reserved(self, number: int) -> Tables:
        """The blocks, one table per request; they are no longer reserved."""
        tables = self._reserved.pop(number)
        self.reserved -= len(tables)
        return tables

    def move_reserved(self, number: int, blocks: Table) -> None:
        """These blocks of one table belong to a request from now on."""
        (table,) = self._reserved[number]
        moved = dict.fromkeys(blocks)
        self._reserved[number] = (tuple([block for block in table if block not in moved]),)

    def shrink_reserved(self, number: int, kept: Table) -> None:
        """Of one table only these blocks stay reserved."""
        (table,) = self._reserved[number]
        stays = dict.fromkeys(kept)
        self._reserved[number] = (kept,)
        self._pool.release([block for block in table if block not in stays])

    def cancel_reserved(self, number: int) -> None:
        """The batch did not come: its blocks are free."""
        for table in self.take_reserved(number):
            self._pool.release(table)

    def tables(self) -> Iterator[tuple[int, ...]]:
        """Every block table of a held request or a reservation."""
        yield from (sequence.block_table for sequence in self._held.values())
        for tables in self._reserved.values():
            yield from tables
