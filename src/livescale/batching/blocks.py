"""KV accounting: which blocks of an instance's KV pool belong to which request.

Only ids are kept here; the bytes live in the executor. One block holds `block_tokens` positions
of every layer, so one block table serves all layers of a request.
"""

from __future__ import annotations

from livescale.types import RequestId


class BlockPool:
    """Hands out KV block ids, lowest id first, and takes them back."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        if blocks < 1 or block_tokens < 1:
            raise ValueError(f"a KV pool of {blocks} blocks of {block_tokens} tokens is empty")
        self.blocks = blocks
        self.block_tokens = block_tokens
        # A stack with the lowest id on top: a fresh pool hands out 0, 1, 2, …
        self._free = list(range(blocks - 1, -1, -1))
        self._tables: dict[RequestId, tuple[int, ...]] = {}

    @property
    def used(self) -> int:
        return self.blocks - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` positions need."""
        return -(-tokens // self.block_tokens)

    def can_hold(self, tokens: int) -> bool:
        return self.blocks_for(tokens) <= len(self._free)

    def reserve(self, request: RequestId, tokens: int) -> tuple[int, ...]:
        """Give the request blocks for `tokens` positions. The caller asked `can_hold` first."""
        assert request not in self._tables, f"{request} holds blocks already"
        assert self.can_hold(tokens), f"{request} wants {tokens} tokens, {len(self._free)} free"
        table = tuple(self._free.pop() for _ in range(self.blocks_for(tokens)))
        self._tables[request] = table
        return table

    def release(self, request: RequestId) -> None:
        self._free.extend(reversed(self._tables.pop(request)))

    def validate(self) -> None:
        """Every block is free or in exactly one table. Raises AssertionError otherwise."""
        held = [block for table in self._tables.values() for block in table]
        assert sorted(held + self._free) == list(range(self.blocks)), "a KV block is lost or shared"

    def __repr__(self) -> str:
        return f"<BlockPool {self.used}/{self.blocks} blocks, {len(self._tables)} requests>"
