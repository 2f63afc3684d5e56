"""KV room: which requests have blocks on an instance, and which more fit beside them.

A request is admitted when there are blocks for all its known tokens and for some growth of
everything that runs; further ones it takes as it generates. When none is left, the request that
arrived last is preempted: it goes back to the front of the waiting ones, keeps its tokens, and
computes them again as prompt.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from livescale.batching.runs.blocks import BlockPool
from livescale.batching.runs.held import HeldSequences
from livescale.batching.runs.lines import Lines
from livescale.batching.runs.sequence import SequenceState
from livescale.values.types import RequestId


class KvRoom:
    """Gives blocks to what runs; knows what is held for live batches, and reserved for others.

    A running request keeps room for `growth_tokens` more tokens, or for all that it may generate.
    At most `places` requests run, or will without having to wait.
    """

    def __init__(
        self,
        pool: BlockPool,
        lines: Lines,
        held: HeldSequences,
        *,
        places: int,
        growth_tokens: int,
    ) -> None:
        self._pool = pool
        self._lines = lines
        self._held = held
        self._places = places
        self._growth_tokens = growth_tokens
        #: times that a running request lost its blocks to the others
        self.preemptions = 0
        #: known tokens of requests when they were admitted: all of them were looked up
        self.prefix_lookup_tokens = 0
        #: of these, the ones that were found in the prefix index and not computed
        self.reused_tokens = 0

    def count_on(self, before: KvRoom) -> None:
        """This one goes on in place of another."""
        self.preemptions += before.preemptions
        self.prefix_lookup_tokens += before.prefix_lookup_tokens
        self.reused_tokens += before.reused_tokens

    # -- what fits --------------------------------------------------------------------------

    @property
    def taken_places(self) -> int:
        return len(self._lines.running) + len(self._held) + self._held.reserved

    @property
    def growth_blocks(self) -> int:
        """KV blocks, of those that are free, that are kept for what is here to grow: that many at
        most."""
        return min(self._growing_max(), self._pool.free)

    def fits(self, needs: Sequence[tuple[int, int]]) -> bool:
        """Further requests could be held besides all that grows here. Of each: known tokens, and
        the most that it can ever need KV for."""
        if self.taken_places + len(needs) > self._places:
            return False
        return self._blocks(needs) + self._growing() <= self._pool.free

    def fits_alone(self, needs: Sequence[tuple[int, int]]) -> bool:
        """There would be room if nothing else were here, and for each alone until it ends."""
        pool = self._pool
        return (
            len(needs) <= self._places
            and self._blocks(needs) <= pool.blocks
            and all(pool.blocks_for(tokens_max) <= pool.blocks for _, tokens_max in needs)
        )

    def _growth(self, sequence: SequenceState) -> int:
        """Blocks that it lacks for its growth."""
        if sequence.is_elsewhere:
            return 0
        most = min(sequence.known_tokens + self._growth_tokens, sequence.tokens_max)
        return self._pool.blocks_for(most) - len(sequence.block_table)

    def _growing(self) -> int:
        """Blocks that all lack for their growth."""
        return sum(map(self._growth, (*self._lines.running.values(), *self._held)))

    def _growing_max(self) -> int:
        """No less than `_growing`, without counting."""
        beside = len(self._lines.running) + len(self._held)
        return beside * (self._pool.blocks_for(self._growth_tokens) + 1)

    def _blocks(self, needs: Sequence[tuple[int, int]]) -> int:
        """Blocks for these requests with their growth."""
        growth = self._growth_tokens
        return sum(self._pool.blocks_for(min(known + growth, most)) for known, most in needs)

    # -- what is given ----------------------------------------------------------------------

    def lacks(self, sequence: SequenceState) -> bool:
        """The running request has no block for its last token."""
        return len(sequence.block_table) * self._pool.block_tokens < sequence.known_tokens

    def grow(self, busy: Container[tuple[RequestId, int]] = ()) -> None:
        """Every running request has blocks for all its known tokens: some wait again for it.

        Each lacks one block at most, and older ones take theirs first. The oldest gets it always,
        because it fits into the pool alone. Requests (and attempts) that are `busy` are in a Run:
        they keep what they have, and one that finds no block beside them goes on lacking one.
        """
        for sequence in [s for s in self._lines.running.values() if self.lacks(s)]:
            # A request that was preempted for an older one is met here without its blocks.
            while sequence.block_table and self.lacks(sequence):
                if self._pool.free:
                    sequence.block_table += (self._pool.take(),)
                elif not self._preempt_latest(sequence, busy):
                    return

    def _preempt_latest(
        self, lacking: SequenceState, busy: Container[tuple[RequestId, int]]
    ) -> bool:
        """The request that arrived last waits again: the one that lacks a block only if nothing
        else keeps what it could have. False if none does."""
        for request, sequence in reversed(self._lines.running.items()):
            if (request, sequence.spec.attempt) in busy:
                continue
            if sequence is lacking and busy:
                return False
            del self._lines.running[request]
            self._pool.release(sequence.block_table)
            self._lines.wait_anew(sequence)
            sequence.was_held = sequence.was_held or bool(busy)  # later ones go on
            self.preemptions += 1
            return True
        return False

    def admit(self) -> None:
        """Waiting requests run, the earliest first, while there is room for them and for growth."""
        lines, pool = self._lines, self._pool
        if not lines.waiting:
            return
        # No request grows by more: mostly there is room even so, and counting is not needed.
        growing = self._growing_max()
        is_counted = False
        while lines.waiting and self.taken_places < self._places:
            request, sequence = next(iter(lines.waiting.items()))
            found = pool.match(sequence.reusable_keys())
            wanted = self._growth(sequence) - len(found) + pool.free_among(found)
            if wanted + growing > pool.free and not is_counted:
                growing, is_counted = self._growing(), True
            if wanted + growing > pool.free:
                return  # first come, first served: no request overtakes another
            del lines.waiting[request]
            lines.run(sequence)
            pool.hold(found)
            blank = pool.blocks_for(sequence.known_tokens) - len(found)
            sequence.block_table = (*found, *pool.take_table(blank))
            sequence.computed = len(found) * pool.block_tokens
            growing += self._growth(sequence)
            if not sequence.spec.sampling.embeds:
                self.prefix_lookup_tokens += sequence.known_tokens
            self.reused_tokens += sequence.computed
            if not sequence.is_admitted:  # later it finds what it has written itself
                sequence.cached_tokens = sequence.computed
            lines.admit(sequence)

    def reuse(self, sequence: SequenceState) -> None:
        """Blocks that others have written since the prompt was admitted are not computed again."""
        pool = self._pool
        first = sequence.computed // pool.block_tokens
        found = pool.match(sequence.reusable_keys(first))
        if found:
            table, stop = sequence.block_table, first + len(found)
            pool.hold(found)
            pool.release(table[first:stop])
            sequence.block_table = (*table[:first], *found, *table[stop:])
            reused_tokens = stop * pool.block_tokens - sequence.computed
            self.reused_tokens += reused_tokens
            sequence.cached_tokens += reused_tokens
            sequence.computed = stop * pool.block_tokens

    def validate(self) -> None:
        """Running requests have their blocks. Raises AssertionError."""
        assert self.taken_places <= self._places
        assert 0 <= self.reused_tokens <= self.prefix_lookup_tokens
        for sequence in self._lines.running.values():
            self._check_table(sequence)

    def _check_table(self, sequence: SequenceState) -> None:
        """Its blocks hold what it computed, and only full ones belong to others, too."""
        table, request, pool = sequence.block_table, sequence.spec.request, self._pool
        assert pool.blocks_for(sequence.known_tokens - 1) <= len(table), request
        assert len(table) <= pool.blocks_for(sequence.known_tokens), request
        full = sequence.computed // pool.block_tokens
        # From scratch: the kept keys could be those of other tokens.
        fresh = SequenceState.of(sequence.spec, 0, pool.block_tokens)
        fresh.learn(sequence.generated[fresh.known_tokens - len(sequence.spec.prompt_ids) :])
        assert fresh.known_tokens == sequence.known_tokens, request
        for number, block in enumerate(table):
            if number < full:
                assert pool.key_of(block) in (None, fresh.key(number)), request
            else:
                assert pool.references(block) == 1, f"{request} writes a shared block"
                assert pool.key_of(block) is None, f"{request} writes a block that is found"
