"""Whether block tables can hold what is to be moved: the same for every executor. No torch."""

from __future__ import annotations

from collections.abc import Sequence


def check_places(block_table: Sequence[int], tokens: int, blocks: int, block_tokens: int) -> None:
    """Raises ValueError unless the first `tokens` positions of a request lie in these blocks, of a
    cache of `blocks` blocks of `block_tokens` positions."""
    held = len(block_table) * block_tokens
    if not 0 < tokens <= held:
        raise ValueError(f"KV of {tokens} tokens in blocks that hold {held}")
    if not all(0 <= block < blocks for block in block_table):
        raise ValueError(f"blocks {tuple(block_table)} of a cache of {blocks}")


def check_size(content: memoryview, kind: str, tokens: int, size_bytes: int) -> None:
    """Raises ValueError unless `content`, of this kind, has the size that `tokens` tokens have."""
    if tokens < 1 or content.nbytes != size_bytes:
        raise ValueError(f"{content.nbytes} bytes of {kind}, {tokens} tokens have {size_bytes}")
