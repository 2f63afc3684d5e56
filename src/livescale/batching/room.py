"""Who fits on an instance beside whom: places, and KV blocks with some to grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from livescale.batching.blocks import BlockPool
from livescale.batching.held import HeldSequences
from livescale.batching.sequence import SequenceState
from livescale.types import RequestId


class Room:
    """Reckons with what runs, what is held for live batches, and what is reserved for others.

    A running request keeps room for `growth_tokens` more tokens, or for all that it may generate.
    At most `places` requests run, or will without having to wait.
    """

    def __init__(
        self,
        pool: BlockPool,
        running: Mapping[RequestId, SequenceState],
        held: HeldSequences,
        *,
        places: int,
        growth_tokens: int,
    ) -> None:
        self._pool = pool
        self._running = running
        self._held = held
        self._places = places
        self._growth_tokens = growth_tokens

    @property
    def taken_places(self) -> int:
        return len(self._running) + len(self._held) + self._held.reserved

    @property
    def has_place(self) -> bool:
        return self.taken_places < self._places

    def growth(self, sequence: SequenceState) -> int:
        """Blocks that it lacks for its growth."""
        if sequence.is_elsewhere:
            return 0
        most = self._blocks([(sequence.known_tokens, sequence.tokens_max)])
        return most - len(sequence.block_table)

    def growing(self) -> int:
        """Blocks that all lack for their growth."""
        return sum(map(self.growth, (*self._running.values(), *self._held)))

    def growing_max(self) -> int:
        """No less than `growing`, without counting."""
        beside = len(self._running) + len(self._held)
        return beside * (self._pool.blocks_for(self._growth_tokens) + 1)

    def fits(self, needs: Sequence[tuple[int, int]]) -> bool:
        """There is room for further requests. Of each: known tokens, and the most that it can ever
        need KV for."""
        if self.taken_places + len(needs) > self._places:
            return False
        return self._blocks(needs) + self.growing() <= self._pool.free

    def fits_alone(self, needs: Sequence[tuple[int, int]]) -> bool:
        """There would be room if nothing else were here, and for each alone until it ends."""
        pool = self._pool
        return (
            len(needs) <= self._places
            and self._blocks(needs) <= pool.blocks
            and all(pool.blocks_for(tokens_max) <= pool.blocks for _, tokens_max in needs)
        )

    def _blocks(self, needs: Sequence[tuple[int, int]]) -> int:
        """Blocks for these requests with their growth."""
        growth = self._growth_tokens
        return sum(self._pool.blocks_for(min(known + growth, most)) for known, most in needs)
