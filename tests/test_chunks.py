"""The chunk grid: every byte is in one chunk, no chunk crosses a layer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.messages.scale_plan import PlannedLoad, ScalePlan
from livescale.values.chunks import ChunkGrid, ChunkRange, Feed, fitting_chunk_bytes, ranges_of
from livescale.values.types import FromStorage, FromWorker, WorkerRef, agent_ref

LAYERS = st.lists(st.integers(0, 40), min_size=1, max_size=8)


@given(LAYERS, st.integers(1, 17))
def test_chunks_cover_every_byte_once(layer_bytes: list[int], chunk_bytes: int) -> None:
    grid = ChunkGrid(layer_bytes, chunk_bytes)
    covered = [bytearray(size) for size in layer_bytes]
    for chunk in range(grid.chunks):
        layer, offset, size = grid.place(chunk)
        assert 0 < size <= chunk_bytes
        assert chunk in grid.of_layer(layer)
        for at in range(offset, offset + size):
            covered[layer][at] += 1
    assert all(set(layer) <= {1} for layer in covered)
    assert [chunk for part in grid.all() for chunk in part] == list(range(grid.chunks))
    assert sum(map(sum, covered)) == sum(layer_bytes)


@given(st.lists(st.integers(0, 60), unique=True, max_size=30))
def test_ranges_list_the_same_chunks_in_the_same_order(chunks: list[int]) -> None:
    assert [c for part in ranges_of(chunks) for c in part] == chunks


def test_a_stripe_is_one_range() -> None:
    assert ranges_of(range(1, 1000, 4)) == (ChunkRange(1, 998, 4),)
    assert len(ChunkRange(1, 998, 4)) == 250
    assert 5 in ChunkRange(1, 998, 4)
    assert 6 not in ChunkRange(1, 998, 4)


@pytest.mark.parametrize("range_", [(3, 3, 1), (-1, 2, 1), (0, 2, 0)])
def test_an_empty_range_is_refused(range_: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="no chunks"):
        ChunkRange(*range_)


def test_a_plan_reads_as_paths() -> None:
    whole = (ChunkRange(0, 4),)
    a, b, c = (WorkerRef(n) for n in range(3))
    plan = ScalePlan(
        *(7, "m", "chain", ((b,), (c,))),
        (
            PlannedLoad(b, (Feed(FromWorker(agent_ref(0)), whole),)),
            PlannedLoad(c, (Feed(FromWorker(b), whole),)),
            PlannedLoad(a, (Feed(FromWorker(b), whole), Feed(FromStorage(), whole))),
        ),
        *(1 << 20, 100, None),
    )
    assert plan.routes() == ("h0.0 -> w1.0 -> w2.0", "w1.0 + storage => w0.0")


@given(
    own=st.integers(1 << 12, 1 << 24),
    rates=st.lists(st.one_of(st.none(), st.integers(1, 1 << 34)), max_size=3),
)
def test_chunks_are_no_longer_on_a_slow_link_than_messages_may_wait(
    own: int, rates: list[int | None]
) -> None:
    """4 ms at most on the slowest link, but chunks of 64 KiB are small enough."""
    fitting = fitting_chunk_bytes(own, rates)
    assert fitting <= own
    in_4_ms = min((rate for rate in rates if rate is not None), default=1 << 60) * 4 // 1000
    assert fitting <= max(64 << 10, in_4_ms)
    assert fitting == own or 2 * fitting > in_4_ms
