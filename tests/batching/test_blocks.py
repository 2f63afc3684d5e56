"""BlockPool: blocks are handed out once and come back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.batching.blocks import BlockPool


def test_lowest_blocks_first() -> None:
    pool = BlockPool(4, 16)
    assert pool.reserve("a", 17) == (0, 1)
    assert pool.reserve("b", 1) == (2,)
    pool.release("a")
    assert pool.reserve("c", 33) == (0, 1, 3)
    assert repr(pool) == "<BlockPool 4/4 blocks, 2 requests>"


@given(
    blocks=st.integers(1, 20),
    block_tokens=st.integers(1, 5),
    wishes=st.lists(st.tuples(st.booleans(), st.integers(1, 40))),
)
def test_tables_are_disjoint_and_large_enough(
    blocks: int, block_tokens: int, wishes: list[tuple[bool, int]]
) -> None:
    pool = BlockPool(blocks, block_tokens)
    live: dict[str, tuple[int, ...]] = {}
    for number, (is_release, tokens) in enumerate(wishes):
        if is_release and live:
            request = next(iter(live))
            del live[request]
            pool.release(request)
        elif pool.can_hold(tokens):
            table = pool.reserve(str(number), tokens)
            assert (len(table) - 1) * block_tokens < tokens <= len(table) * block_tokens
            live[str(number)] = table
        pool.validate()
        held = [block for table in live.values() for block in table]
        assert len(set(held)) == len(held) == pool.used


@pytest.mark.parametrize(("blocks", "block_tokens"), [(0, 16), (4, 0)])
def test_an_empty_pool_is_refused(blocks: int, block_tokens: int) -> None:
    with pytest.raises(ValueError, match="is empty"):
        BlockPool(blocks, block_tokens)
