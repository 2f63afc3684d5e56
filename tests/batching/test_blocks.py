"""BlockPool: references, the prefix index and the order of eviction, against a naive model."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.batching.runs.blocks import BlockPool


def test_lowest_blank_blocks_first() -> None:
    pool = BlockPool(4, 16)
    assert [pool.take() for _ in range(3)] == [0, 1, 2]
    pool.release([1, 0])
    assert [pool.take(), pool.take(), pool.take()] == [0, 1, 3]
    assert repr(pool) == "<BlockPool 4/4 blocks, 0 cached>"


def test_the_end_of_a_request_is_overwritten_before_its_beginning() -> None:
    pool = BlockPool(3, 16)
    for key in (b"first", b"second", b"third"):
        pool.publish([pool.take()], [key])
    pool.release([0, 1, 2])
    assert (pool.used, pool.free, pool.cached) == (0, 3, 3)
    assert pool.match([b"first", b"second", b"third"]) == [0, 1, 2]
    assert pool.take() == 2
    assert pool.match([b"first", b"second", b"third"]) == [0, 1]
    assert pool.free_among([0, 1, 2]) == 2
    pool.validate([(2,)])


def test_of_equal_blocks_the_first_one_is_found() -> None:
    pool = BlockPool(3, 16)
    first, second = pool.take(), pool.take()
    pool.publish([first], [b"k"])
    pool.publish([second], [b"k"])
    assert pool.match([b"k"]) == [first]
    assert (pool.key_of(first), pool.key_of(second)) == (b"k", None)
    pool.release([second])
    assert pool.cached == 0
    pool.validate([(first,)])


@dataclass(slots=True)
class Model:
    """The pool as one would write it down first."""

    tables: list[list[int]] = field(default_factory=list)
    #: published blocks and their keys
    keys: dict[int, bytes] = field(default_factory=dict)
    #: unreferenced published blocks, least recently used first
    idle: list[int] = field(default_factory=list)

    def held(self) -> set[int]:
        return {block for table in self.tables for block in table}

    def taken(self, blocks: int) -> int:
        """Which block must be given out."""
        blank = set(range(blocks)) - self.held() - set(self.idle)
        return min(blank) if blank else self.idle[0]

    def take(self, table: list[int], block: int) -> None:
        if block in self.idle:
            self.idle.remove(block)
            del self.keys[block]
        table.append(block)

    def drop(self, table: list[int]) -> None:
        self.tables.remove(table)
        gone = [b for b in reversed(table) if b not in self.held() and b in self.keys]
        self.idle += gone


@given(blocks=st.integers(1, 6), data=st.data())
def test_the_pool_does_what_a_naive_one_does(blocks: int, data: st.DataObject) -> None:
    pool, model = BlockPool(blocks, 4), Model()
    for _ in range(data.draw(st.integers(1, 30), "calls")):
        call = data.draw(
            st.sampled_from(["new", "grow", "table", "publish", "share", "drop"]), "call"
        )
        if call in ("new", "grow") and pool.free:
            if call == "new" or not model.tables:
                model.tables.append([])
            table = model.tables[-1]
            block = model.taken(blocks)
            assert pool.take() == block
            model.take(table, block)
        elif call == "table" and pool.free:
            count = data.draw(st.integers(1, pool.free), "count")
            model.tables.append([])
            table = model.tables[-1]
            for block in (taken := pool.take_table(count)):
                assert block == model.taken(blocks)
                model.take(table, block)
            assert len(taken) == count
        elif call == "publish":
            mine = [b for b in sorted(model.held()) if b not in model.keys]
            if mine:
                block, key = mine[0], data.draw(st.sampled_from([b"a", b"b", b"c"]), "key")
                pool.publish([block], [key])
                if key not in model.keys.values():
                    model.keys[block] = key
        elif call == "share":
            wanted = data.draw(st.lists(st.sampled_from([b"a", b"b", b"c"]), unique=True), "keys")
            block_of = {key: block for block, key in model.keys.items()}
            found = []
            while len(found) < len(wanted) and wanted[len(found)] in block_of:
                found.append(block_of[wanted[len(found)]])
            assert pool.match(wanted) == found
            assert pool.free_among(found) == len(set(found) & set(model.idle))
            if found:
                pool.hold(found)
                model.idle = [b for b in model.idle if b not in found]
                model.tables.append(found)
        elif call == "drop" and model.tables:
            table = data.draw(st.sampled_from(model.tables), "table")
            pool.release(table)
            model.drop(table)
        pool.validate(model.tables)
        assert pool.used == len(model.held()) == blocks - pool.free
        assert pool.cached == len(model.idle)
        assert {b: pool.key_of(b) for b in range(blocks) if pool.key_of(b)} == model.keys
        references = [sum(table.count(b) for table in model.tables) for b in range(blocks)]
        assert [pool.references(b) for b in range(blocks)] == references


@given(tokens=st.integers(0, 100), block_tokens=st.integers(1, 20))
def test_blocks_for_are_just_enough(tokens: int, block_tokens: int) -> None:
    needed = BlockPool(1, block_tokens).blocks_for(tokens)
    assert (needed - 1) * block_tokens < tokens <= needed * block_tokens


@pytest.mark.parametrize(("blocks", "block_tokens"), [(0, 16), (4, 0)])
def test_an_empty_pool_is_refused(blocks: int, block_tokens: int) -> None:
    with pytest.raises(ValueError, match="is empty"):
        BlockPool(blocks, block_tokens)


@pytest.mark.parametrize("table", [[], [0, 0], [1]])
def test_tables_that_disagree_are_found(table: list[int]) -> None:
    pool = BlockPool(2, 16)
    pool.take()
    with pytest.raises(AssertionError):
        pool.validate([table])
