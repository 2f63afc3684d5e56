"""KV accounting: what each block of an instance's KV pool holds, and how many tables refer to it.

Only ids and keys are kept here; the bytes live in the executor. One block holds `block_tokens`
positions of every layer, so one block table serves all layers of a request. Which request has
which table is the Batcher's knowledge, not the pool's.

A block is *referenced* (by one block table or several), or *cached* (by none, but its content has
a key and may be used again), or *blank*. Cached blocks are as free as blank ones; they are
overwritten last, the least recently used first.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Counts references to KV blocks, and finds blocks again by the key of their content.

    A key stands for a full block's content together with all that comes before it
    (`SequenceState.key`). A block with a key is never written again before `take` gives it out
    anew.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        if blocks < 1 or block_tokens < 1:
            raise ValueError(f"a KV pool of {blocks} blocks of {block_tokens} tokens is empty")
        self.blocks = blocks
        self.block_tokens = block_tokens
        self._references = [0] * blocks
        #: blocks that never were given out begin here: a fresh pool gives out 0, 1, 2, …
        self._unused = 0
        #: blank ones among those that were, a heap
        self._blank: list[int] = []
        #: unreferenced blocks with a key, least recently used first
        self._cached: OrderedDict[int, None] = OrderedDict()
        #: the prefix index, and back
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    # -- what can be asked ------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Blocks that `take` can give out: blank and cached ones."""
        return self.blocks - self._unused + len(self._blank) + len(self._cached)

    @property
    def used(self) -> int:
        """Blocks that some table refers to."""
        return self.blocks - self.free

    @property
    def cached(self) -> int:
        """Blocks that are free, but would be found again by their key."""
        return len(self._cached)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` positions need."""
        return -(-tokens // self.block_tokens)

    def references(self, block: int) -> int:
        """How many tables refer to the block."""
        return self._references[block]

    def key_of(self, block: int) -> bytes | None:
        """The key of the block's content, if it is in the prefix index."""
        return self._key_of.get(block)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks that hold the content of the keys, up to the first that is not there."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def free_among(self, blocks: Iterable[int]) -> int:
        """How many of the blocks are free: holding them takes them from the others."""
        return sum(1 for block in blocks if self._references[block] == 0)

    # -- what changes -----------------------------------------------------------------------

    def take(self) -> int:
        """A blank block with one reference: the lowest, else the least recently used cached one.

        The caller asked `free` first.
        """
        if self._blank:
            block = heapq.heappop(self._blank)
        elif self._unused < self.blocks:
            block = self._unused
            self._unused += 1
        else:
            assert self._cached, f"{self!r} has no free block"
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
        self._references[block] = 1
        return block

    def take_table(self, count: int) -> tuple[int, ...]:
        """So many blocks, as by `take`."""
        first, stop = self._unused, self._unused + count
        if self._blank or stop > self.blocks:
            return tuple([self.take() for _ in range(count)])
        self._unused = stop
        self._references[first:stop] = [1] * count
        return tuple(range(first, stop))

    def hold(self, blocks: Iterable[int]) -> None:
        """One more table refers to each of these blocks, which `match` found."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One table fewer refers to each of these blocks; the content of full ones is kept.

        The last comes first, so that the beginning of a request outlives what follows it.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._key_of:
                    self._cached[block] = None
                else:
                    heapq.heappush(self._blank, block)

    def publish(self, blocks: Iterable[int], keys: Iterable[bytes]) -> None:
        """These blocks are full: every layer has written them. From now on each is found by its
        key.

        When another block holds the same content already, that one stays the one to be found.
        """
        references, block_of, key_of = self._references, self._block_of, self._key_of
        for block, key in zip(blocks, keys, strict=True):
            assert references[block] == 1, f"{self!r}: {block} is written by several"
            assert block not in key_of, f"{self!r}: {block} is published twice"
            if key not in block_of:
                block_of[key] = block
                key_of[block] = key

    # -- checks -----------------------------------------------------------------------------

    def validate(self, tables: Iterable[Sequence[int]]) -> None:
        """Check the pool against all block tables there are. Raises AssertionError."""
        held = Counter[int]()
        for table in tables:
            assert len(set(table)) == len(table), f"{table} names a block twice"
            held.update(table)
        assert [held[block] for block in range(self.blocks)] == self._references
        unused = range(self._unused, self.blocks)
        places = sorted([*unused, *self._blank, *self._cached, *held])
        assert places == list(range(self.blocks)), "a KV block is lost or in two places"
        assert all(block in self._key_of for block in self._cached), "cached without a key"
        assert not any(block in self._key_of for block in self._blank), "blank with a key"
        inverse = {key: block for block, key in self._key_of.items()}
        assert inverse == self._block_of, "the prefix index disagrees with itself"

    def __repr__(self) -> str:
        return f"<BlockPool {self.used}/{self.blocks} blocks, {self.cached} cached>"
