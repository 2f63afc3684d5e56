"""λScale's binomial pipeline: steps, orders, and the plans that come of them."""

from __future__ import annotations

import itertools
import math

import pytest
from clusters import W, check_reaches_all, copies, request, singles
from hypothesis import given
from hypothesis import strategies as st

from livescale.control.multicast.binomial import (
    binomial_steps,
    cut_blocks,
    k_way_orders,
    sub_groups,
)
from livescale.control.multicast.planner import make_plan
from livescale.values.chunks import ChunkGrid


@pytest.mark.parametrize("nodes", range(2, 17))
def test_steps_are_as_few_as_can_be(nodes: int) -> None:
    """λScale §4.2: b + ceil(log2 N) - 1 steps; everyone sends one block and receives one block
    per step, and only what he has."""
    for blocks in range(1, 33):
        steps = binomial_steps(nodes, blocks)
        assert len(steps) == blocks + math.ceil(math.log2(nodes)) - 1
        have: list[set[int]] = [set() for _ in range(nodes)]
        have[0] = set(range(blocks))
        for step in steps:
            assert len({move.sender for move in step}) == len(step)
            assert len({move.receiver for move in step}) == len(step)
            assert all(move.block in have[move.sender] for move in step)
            assert all(move.block not in have[move.receiver] for move in step)
            for move in step:
                have[move.receiver].add(move.block)
        assert all(len(held) == blocks for held in have)


def test_orders_of_the_papers_example() -> None:
    """λScale Figure 5: two sources, eight nodes, four blocks."""
    assert k_way_orders(4, 2) == ((0, 1, 2, 3), (2, 3, 0, 1))
    assert sub_groups(2, 6) == ((0, 1, 2), (3, 4, 5))


@given(blocks=st.integers(1, 40), k=st.integers(1, 8))
def test_orders_list_every_block_once_and_begin_apart(blocks: int, k: int) -> None:
    orders = k_way_orders(blocks, k)
    assert all(sorted(order) == list(range(blocks)) for order in orders)
    if blocks >= k:
        assert [order[0] for order in orders] == [i * blocks // k for i in range(k)]
        assert len(set(orders)) == k


@given(sources=st.integers(1, 9), more=st.integers(0, 40))
def test_sub_groups_are_even(sources: int, more: int) -> None:
    groups = sub_groups(sources, sources + more)
    assert sorted(sum(groups, ())) == list(range(sources + more))
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


def first_step_with_everything(k: int, rotate: bool) -> int:
    """Steps until some pair of nodes of the two sub-groups (λScale: an execution pipeline) holds
    all four blocks together, in the example of Figure 5."""
    orders = k_way_orders(4, 2) if rotate else ((0, 1, 2, 3),) * 2
    steps = binomial_steps(4, 4)
    have: list[list[set[int]]] = [[set() for _ in range(4)] for _ in range(2)]
    for number, step in enumerate(steps, 1):
        for group in range(k):
            for move in step:
                have[group][move.receiver].add(orders[group][move.block])
        pairs = [have[0][node] | have[1][node] for node in (1, 2, 3)]
        if any(len(pair) == 4 for pair in pairs):
            return number
    raise AssertionError("never")


def test_the_first_whole_model_comes_sooner_with_rotated_orders() -> None:
    """The paper says b/k = 2 steps; with its own schedule it is b/k + ceil(log2 L) - 1 = 3, and 5
    when both sub-groups begin with the same blocks."""
    assert first_step_with_everything(2, rotate=True) == 3
    assert first_step_with_everything(2, rotate=False) == 5


@given(
    layers=st.lists(st.integers(0, 30), min_size=1, max_size=9).filter(any),
    chunk_bytes=st.integers(1, 20),
    blocks=st.integers(1, 20),
    parts=st.integers(1, 6),
)
def test_blocks_cut_the_model(layers: list[int], chunk_bytes: int, blocks: int, parts: int) -> None:
    grid = ChunkGrid(layers, chunk_bytes)
    cut = cut_blocks(grid, blocks, parts)
    assert [chunk for block in cut for chunk in block] == list(range(grid.chunks))
    assert len(cut) == min(blocks, grid.chunks)


@pytest.mark.parametrize("layers", [32, 40, 80])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_parts_of_the_orders_end_with_layers(layers: int, parts: int) -> None:
    """A model of that many decoder layers, its embedding and head half as large, in 16 blocks: no
    layer is in two parts, members of a team get as many layers each but for one, and no block is
    longer than the others by more than an eighth."""
    grid = ChunkGrid((50, *[100] * layers, 51), 1)
    cut = cut_blocks(grid, 16, parts)
    ends = [cut[16 * part // parts - 1].stop for part in range(1, parts + 1)]
    assert set(ends) <= set(grid.first)
    if 16 % parts == 0:
        decoders = [min(max(grid.first.index(end) - 1, 0), layers) for end in (0, *ends)]
        counts = [b - a for a, b in itertools.pairwise(decoders)]
        assert max(counts) - min(counts) <= 1
    sizes = [len(block) for block in cut]
    assert max(sizes) <= 1.125 * sum(sizes) / 16


@pytest.mark.parametrize("targets", [1, 3, 6, 7])
def test_a_plan_takes_its_steps(targets: int) -> None:
    asked = request(copies(W[0]), W[1 : 1 + targets])
    plan = make_plan(asked, singles(8), "binomial")
    check_reaches_all(plan, asked)
    steps = 16 + math.ceil(math.log2(targets + 1)) - 1
    assert plan.predicted_ns == steps * 20 * (1 << 20) * 80  # 20 chunks a block
    assert all(feed.window for load in plan.loads for feed in load.feeds)


def test_time_grows_with_the_logarithm_over_the_blocks() -> None:
    """λScale §4.2: T is proportional to M (1 + log N / b)."""
    one, sixteen = (
        make_plan(request(copies(W[0]), W[1:n]), singles(32), "binomial").predicted_ns
        for n in (2, 32)
    )
    assert one is not None
    assert sixteen == one * (16 + 5 - 1) // 16


def test_several_sources_serve_sub_groups_in_orders_of_their_own() -> None:
    asked = request(copies(W[0], W[1]), W[2:8])
    plan = make_plan(asked, singles(8), "binomial")
    check_reaches_all(plan, asked)
    firsts = [plan.load_of(worker).feeds[0] for worker in (W[2], W[5])]
    assert [(str(f.upstream), f.chunks[0].start) for f in firsts] == [("w0.0", 0), ("w1.0", 160)]
    assert plan.predicted_ns == (16 + 2 - 1) * 20 * (1 << 20) * 80
