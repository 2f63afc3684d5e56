"""Pipelines of stages: tokens are right whatever happens, and Runs that wait are merged."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from pipeline_worlds import StageWorld

from effort import examples
from livescale.batching.contract.visit_messages import Lead, Stop, Visit
from livescale.batching.lines.visit_merging import count_merged
from livescale.batching.runs.run import Segment
from livescale.values.routes import Partner
from livescale.values.types import LayerSpan, SamplingParams, WorkerRef

happenings = st.tuples(
    st.integers(0, 8_000), st.sampled_from(("lose", "form", "cancel", "cut")), st.integers(0, 143)
)


@given(
    st.lists(st.integers(1, 4), min_size=2, max_size=4),
    st.lists(st.tuples(st.integers(1, 45), st.integers(1, 16)), min_size=1, max_size=14),
    st.lists(happenings, max_size=4),
    st.lists(st.integers(1, 60), min_size=1, max_size=4),
    st.booleans(),
    st.booleans(),
    st.sampled_from((1, 20, 100)),
    st.lists(st.sampled_from((64, 80, 96)), min_size=1, max_size=4),
)
@example(  # a member says twice that it does not reach a lost one, once to a pipeline formed anew
    counts=[2, 1, 3, 2],
    sizes=[(4, 1), (1, 1), (1, 1), (1, 1)],
    happens=[(139, "lose", 7)],
    delays=[1],
    is_shared=False,
    merges=False,
    token_ns=1,
    kv_blocks=[64],
)
@example(  # a pipeline breaks again after the last instance was lost or cut off
    counts=[2, 1, 1],
    sizes=[(1, 8), (1, 8), (1, 1), (1, 1), (1, 1)],
    happens=[(0, "form", 0), (1_308, "cut", 35), (2_838, "cut", 16)],
    delays=[31, 1],
    is_shared=False,
    merges=False,
    token_ns=20,
    kv_blocks=[64],
)
@settings(max_examples=examples(160), deadline=None)
def test_whatever_happens_tokens_are_right_and_kv_is_freed(
    counts: list[int],
    sizes: list[tuple[int, int]],
    happens: list[tuple[int, str, int]],
    delays: list[int],
    is_shared: bool,
    merges: bool,
    token_ns: int,
    kv_blocks: list[int],
) -> None:
    """Instances are lost, or do not reach each other for a while, pipelines are formed anew, and
    clients go. Prompts may begin alike, and instances have unlike KV."""
    world = StageWorld(counts, merges=merges, delays=delays, token_ns=token_ns, kv_blocks=kv_blocks)
    for number, (prompt, output) in enumerate(sizes):
        first = 0 if is_shared else number
        ask = partial(world.request, f"r{number}", number, range(first, first + prompt), output)
        world.at(number * 37, ask)
    for at_ns, what, which in happens:
        if what == "lose":
            world.at(at_ns, partial(world.lose, which))
        elif what == "form":
            world.at(at_ns, world.form)
        elif what == "cut":
            first, far = which % 12, which // 12
            world.at(at_ns, partial(world.cut, first, far, 300 * (first + 1)))
        else:
            world.at(at_ns, partial(world.cancel, f"r{which % len(sizes)}"))
    world.play()
    world.check_end()
    assert merges or not world.merged
    event(f"merged: {min(world.merged // 10, 3) * 10} and more")


@given(
    st.sampled_from(([1, 2, 1], [1, 3, 1], [2, 4, 1], [1, 2, 2, 1])),
    st.lists(st.tuples(st.integers(30, 60), st.integers(1, 9)), min_size=1, max_size=4),
    st.integers(5_000, 20_000),
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 40)), min_size=1, max_size=8),
)
@settings(max_examples=examples(100), deadline=None)
def test_members_that_compute_while_their_leader_does_not_reach_them_harm_nothing(
    counts: list[int],
    before: list[tuple[int, int]],
    at_ns: int,
    which: int,
    after: list[tuple[int, int]],
) -> None:
    """Runs are long, and requests of other ways come meanwhile."""
    world = StageWorld(counts, token_ns=100)
    for number, (prompt, output) in enumerate([*before, *after]):
        prompt_ids = range(60 * number, 60 * number + prompt)
        ask = partial(world.request, f"r{number}", number, prompt_ids, output)
        world.at(1_000 if number < len(before) else at_ns + 10, ask)
    far = counts[0] + which % counts[1]
    world.at(at_ns, partial(world.cut, which % counts[0], far, 20_000))
    world.play()
    world.check_end()


@pytest.mark.parametrize("merges", [False, True])
def test_what_a_lost_member_still_computes_harms_no_later_request(merges: bool) -> None:
    """Its leader does not reach it any more, and gives the blocks to requests that come then. They
    go another way, to the same instance of the last stage, to which that member sends its Run."""
    world = StageWorld([1, 2, 1], merges=merges, token_ns=100)
    world.at(1_000, partial(world.request, "first", 0, range(100, 160), 5))
    world.at(8_500, partial(world.cut, 0, 1, 20_000))  # the member computes it
    for number in range(4):
        start = 9 * number
        world.at(8_510, partial(world.request, f"r{number}", 0, range(start, start + 9), 40))
    world.play()
    world.check_end()


@pytest.mark.parametrize("asked_ns", [500, 60_000])
@pytest.mark.parametrize("kv_blocks", [(64, 64, 32), (64, 32, 64), (32, 64, 32), (64, 64, 64)])
def test_an_instance_with_fewer_blocks_takes_over_when_no_other_is_left(
    kv_blocks: tuple[int, ...], asked_ns: int
) -> None:
    """Of requests that are under way, too."""
    world = StageWorld([1, 2], kv_blocks=kv_blocks, token_ns=20)
    for number in range(4):
        prompt_ids = range(9 * number, 9 * number + 9)
        world.at(asked_ns, partial(world.request, f"r{number}", 0, prompt_ids, 40))
    world.at(2_000, partial(world.lose, 1))
    world.play()
    world.check_end()


@given(
    st.lists(st.sampled_from((32, 48, 64)), min_size=3, max_size=5),
    st.lists(st.tuples(st.integers(0, 9_000), st.integers(1, 40)), min_size=1, max_size=8),
    st.lists(
        st.tuples(st.integers(0, 9_000), st.sampled_from(("lose", "cut")), st.integers(1, 4)),
        min_size=1,
        max_size=4,
    ),
)
@settings(max_examples=examples(60), deadline=None)
def test_requests_go_through_whichever_instances_are_left(
    kv_blocks: list[int], asked: list[tuple[int, int]], happens: list[tuple[int, str, int]]
) -> None:
    """One stage has instances with unlike KV."""
    world = StageWorld([1, len(kv_blocks) - 1], kv_blocks=kv_blocks)
    for number, (at_ns, output) in enumerate(asked):
        prompt_ids = range(9 * number, 9 * number + 9)
        world.at(at_ns, partial(world.request, f"r{number}", 0, prompt_ids, output))
    for at_ns, what, which in happens:
        happening = partial(world.lose, which)
        if what == "cut":
            happening = partial(world.cut, 0, which, 3_000)
        world.at(at_ns, happening)
    world.play()
    world.check_end()


def visit(leader: int, number: int, tokens: int, request: str) -> Visit:
    partner = Partner(9, WorkerRef(9))
    segment = Segment(
        request=request,
        attempt=leader,
        first_position=0,
        token_ids=(0,) * tokens,
        block_table=(0,),
        samples=True,
        sampling=SamplingParams(1),
    )
    way = (Stop(partner, LayerSpan(3, 6)),)
    return Visit(Lead(leader, 1), partner, number, way, (segment,), (number,))


@pytest.mark.parametrize(
    ("line", "tokens_max", "count"),
    [
        ([(1, 5, "a")], 0, 1),
        ([(1, 5, "a"), (2, 5, "b")], 0, 1),
        ([(1, 5, "a"), (2, 5, "b")], 9, 1),
        ([(1, 5, "a"), (2, 5, "b")], 10, 2),
        ([(1, 5, "a"), (1, 5, "b"), (2, 5, "c")], 12, 2),
        # the next ones do not pass the one that is too long
        ([(1, 5, "a"), (2, 9, "b"), (3, 1, "c")], 12, 1),
        # a request whose first leader was given up
        ([(1, 5, "a"), (2, 5, "a"), (3, 5, "b")], 99, 1),
        ([(1, 99, "a"), (2, 1, "b")], 64, 1),
    ],
)
def test_what_is_merged(line: list[tuple[int, int, str]], tokens_max: int, count: int) -> None:
    visits = [visit(leader, number, *rest) for number, (leader, *rest) in enumerate(line)]
    assert count_merged(visits, tokens_max) == count


@pytest.mark.parametrize("counts", [(3, 1), (4, 2, 1)])
def test_what_a_run_costs_is_paid_once_for_those_that_wait(counts: tuple[int, ...]) -> None:
    alone, merged = (_played(counts, merges=merges) for merges in (False, True))
    assert alone.merged == 0
    assert merged.executions < 0.8 * alone.executions
    assert _last_ns(merged) < 0.7 * _last_ns(alone)


def test_a_leader_with_members_of_its_own_has_little_to_merge() -> None:
    """Where stages are even its Runs are apart."""
    alone, merged = (_played((1, 2), merges=merges) for merges in (False, True))
    assert _last_ns(merged) <= _last_ns(alone)


def _played(counts: tuple[int, ...], *, merges: bool) -> StageWorld:
    world = StageWorld(counts, merges=merges, run_ns=1000)
    for number in range(12):
        ask = partial(world.request, f"r{number}", number, range(number, number + 9), 20)
        world.at(100, ask)
    world.play()
    world.check_end()
    return world


def _last_ns(world: StageWorld) -> int:
    return max(transcript.finished_ns for transcript in world.transcripts.values())
