"""Teams of loading instances: who serves together, which layers each runs, and when.

The figures are those of λScale's example (Figure 5) and of its schedules, played step by step: k
sources of N nodes, b blocks. Nodes are numbered as in the paper, the sources first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples, mostly_long
from livescale.control.multicast.binomial import (
    binomial_steps,
    cut_blocks,
    k_way_orders,
    sub_groups,
)
from livescale.control.multicast.cost import bytes_in_layer
from livescale.control.together.team_spans import ORDERS_MAX, Loading, TeamModel, even_spans
from livescale.control.together.teams import (
    TEAM_STRATEGIES,
    form_teams,
    pipelines,
)
from livescale.values.chunks import ChunkGrid
from livescale.values.routes import Partner, Stage, Team, TeamMember
from livescale.values.types import InstanceId, LayerSpan, WorkerRef

# -- steps, played --------------------------------------------------------------------------------


def played(nodes: int, k: int, blocks: int) -> Iterator[dict[int, tuple[int, set[int]]]]:
    """Sub-group and blocks of every target after 0, 1, 2, … steps."""
    orders = k_way_orders(blocks, k)
    groups = [[k + 1 + place for place in group] for group in sub_groups(k, nodes - k)]
    plans = [binomial_steps(len(group) + 1, blocks) for group in groups]
    have = {node: (g, set[int]()) for g, group in enumerate(groups) for node in group}
    yield have
    for number in range(max(map(len, plans))):
        for group, steps, order in zip(groups, plans, orders, strict=True):
            for move in steps[number] if number < len(steps) else ():
                have[group[move.receiver - 1]][1].add(order[move.block])
        yield have


def as_layers(have: dict[int, tuple[int, set[int]]], blocks: int) -> list[Loading]:
    """Every block is a decoder layer; the first one brings the embedding, the last one the head."""
    return [
        loading(node, [b + 1 for b in sorted(held)], group=group, layers=blocks)
        for node, (group, held) in have.items()
    ]


def loading(node: int, decoder: Sequence[int], *, layers: int, group: int = 0) -> Loading:
    """An instance with these decoder layers, the embedding with the first and the head with the
    last one."""
    ends = [0] * (1 in decoder) + [layers + 1] * (layers in decoder)
    return Loading(InstanceId(node), group, frozenset([*decoder, *ends]))


Formed = tuple[int, tuple[Stage, ...]]
"""A team, and the step after which it is there."""


def formed_of(strategy: str, model: TeamModel, steps: Iterable[list[Loading]]) -> list[Formed]:
    """Of what has come after each step; a team once formed stays."""
    found: list[Formed] = []
    for step, some in enumerate(steps):
        taken = {instance for _, team in found for instance, _ in team}
        free = [one for one in some if one.instance not in taken]
        found += [(step, team) for team in form_teams(strategy, free, model)]
    return found


def formed(strategy: str, nodes: int, k: int, blocks: int) -> list[tuple[int, tuple[int, ...]]]:
    """Steps after which each team is there, and its members."""
    steps = (as_layers(have, blocks) for have in played(nodes, k, blocks))
    teams = formed_of(strategy, TeamModel(blocks), steps)
    return [(step, members_of(team)) for step, team in teams]


def members_of(team: Sequence[Stage]) -> tuple[int, ...]:
    return tuple(sorted(instance for instance, _ in team))


def test_the_papers_example() -> None:
    """λScale §4.2, Figure 5: 2 to 8 nodes, four blocks, all there after 5 steps. The paper has a
    first pipeline after b / k = 2 steps; its own come later, a wider one does not."""
    assert sorted(formed("pairs", 8, 2, 4)) == [(3, (4, 7)), (3, (5, 8)), (4, (3, 6))]
    assert formed("cover", 8, 2, 4) == [(2, (3, 4, 6, 7)), (3, (5, 8))]


@pytest.mark.parametrize(
    ("nodes", "k", "of", "first", "sizes", "pairs"),
    [
        (8, 1, 18, 16, 3, [16]),
        (8, 2, 17, 8, 4, [9, 9, 10]),
        (8, 4, 16, 4, 4, [4]),
        (11, 3, 17, 6, 4, [7, 8, 12]),
        (12, 4, 17, 4, 4, [4, 5]),
    ],
)
def test_when_teams_are_there(
    nodes: int, k: int, of: int, first: int, sizes: int, pairs: list[int]
) -> None:
    """Sixteen blocks, all there after `of` steps. One source sends each block once: nothing can
    serve before step 16. The last pair of eleven nodes is of the two groups that have one left."""
    assert len(list(played(nodes, k, 16))) == of + 1
    step, members = formed("cover", nodes, k, 16)[0]
    assert (step, len(members)) == (first, sizes)
    assert sorted(step for step, _ in formed("pairs", nodes, k, 16)) == pairs


@pytest.mark.parametrize(
    ("strategy", "nodes", "k", "gain"),
    [
        *[("pairs", 8, 1, 10.7), ("pairs", 8, 2, 46), ("pairs", 8, 4, 48)],
        *[("cover", 8, 1, 3.4), ("cover", 8, 2, 36.6), ("cover", 8, 4, 48)],
        *[("pairs", 12, 2, 76), ("cover", 12, 2, 66.9)],
        *[("pairs", 12, 4, 100), ("cover", 12, 4, 100)],
    ],
)
def test_what_teams_compute_before_all_is_there(
    strategy: str, nodes: int, k: int, gain: float
) -> None:
    """In instances times steps of sixteen blocks: a full team is as fast as its slowest member.

    `cover` is first, but a span of eight blocks beside one of one block counts as two members of
    four; what it has taken is missing to pairs a step later.
    """
    model = TeamModel(16)
    steps = [as_layers(have, 16) for have in played(nodes, k, 16)]
    done = sum(
        (len(steps) - 1 - step) * 16 / max(runs_of(team))
        for step, team in formed_of(strategy, model, steps)
    )
    assert round(done, 1) == gain


CASES = [
    (nodes, k)
    for nodes in range(2, 25)
    for k in range(1, 5)
    if k <= nodes - k  # every source has a target
]
A_FEW = [(2, 1), (8, 2), (11, 3), (12, 4), (15, 2), (19, 3), (23, 3), (24, 4)]


@pytest.mark.parametrize(("nodes", "k"), mostly_long(CASES, A_FEW))
def test_a_team_is_there_as_soon_as_the_model_is(nodes: int, k: int) -> None:
    """λScale §4.2: after ⌈b / k⌉ steps the blocks of all targets are the model, for every b from
    k to 32, and at that very step some of them have it in one run of blocks each."""
    for blocks in range(k, 33):
        model = TeamModel(blocks)
        for step, have in enumerate(played(nodes, k, blocks)):
            union = set[int]().union(*(held for _, held in have.values()))
            if len(union) == blocks:
                assert step == -(-blocks // k)
                is_alone = k == 1 and any(len(held) == blocks for _, held in have.values())
                assert is_alone or form_teams("cover", as_layers(have, blocks), model)
                break


@pytest.mark.parametrize(
    ("head", "parts", "steps"),
    [(328, 1, [9, 9, 10]), (329, 1, [10, 10, 11]), (329, 2, [9, 9, 10])],
)
@pytest.mark.parametrize("strategy", sorted(TEAM_STRATEGIES))
def test_blocks_that_end_inside_layers_cost_steps(
    strategy: str, head: int, parts: int, steps: list[int]
) -> None:
    """Megabytes like Llama-2-13B's in 16 blocks of equal bytes, 2 to 8 nodes. A layer in two
    blocks is there with both: no team is before the pairs. If the middle of the model is inside a
    layer, and be it by the head's norm, these blocks are far apart in one of the orders, and all
    are a step later: so the two parts of the orders are cut at the end of a layer."""
    grid = ChunkGrid((328, *[634] * 40, head), 1)
    cut = cut_blocks(grid, 16, parts)
    needs = [
        {n for n, block in enumerate(cut) if bytes_in_layer(grid, block, x)} for x in range(42)
    ]
    came = [
        [
            Loading(InstanceId(node), group, frozenset(x for x in range(42) if needs[x] <= held))
            for node, (group, held) in have.items()
        ]
        for have in played(8, 2, 16)
    ]
    assert [step for step, _ in formed_of(strategy, TeamModel(40), came)] == steps


# -- Algorithm 2 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", mostly_long(range(9), range(5)))
def test_algorithm_2_uses_each_node_once(groups: int) -> None:
    for sizes in itertools.product(range(5), repeat=groups):
        nodes = [[(group, place) for place in range(size)] for group, size in enumerate(sizes)]
        found = pipelines(nodes)
        assert sorted(itertools.chain(*found)) == sorted(itertools.chain(*nodes))
        for members in found[:-1]:
            assert len({group for group, _ in members}) == len(members) > 1


@given(sizes=st.lists(st.integers(0, 5), max_size=6), data=st.data())
def test_what_works_together_does_not_depend_on_who_began(
    sizes: list[int], data: st.DataObject
) -> None:
    """Without the nodes of some pipelines Algorithm 2 gives the others."""
    nodes = [[(group, place) for place in range(size)] for group, size in enumerate(sizes)]
    found = pipelines(nodes)
    gone = data.draw(st.sets(st.sampled_from(range(len(found))))) if found else set()
    out = {node for number in gone for node in found[number]}
    rest = pipelines([[node for node in group if node not in out] for group in nodes])
    assert rest == [members for number, members in enumerate(found) if number not in gone]


@given(sizes=st.lists(st.integers(0, 5), max_size=5), data=st.data())
def test_what_cannot_work_together_does_not(sizes: list[int], data: st.DataObject) -> None:
    """Each node is still in one pipeline, and without the nodes of some there are the others."""
    nodes = [[(group, place) for place in range(size)] for group, size in enumerate(sizes)]
    everyone = list(itertools.chain(*nodes))
    links = [frozenset(pair) for pair in itertools.combinations(everyone, 2)]
    cut = data.draw(st.sets(st.sampled_from(links))) if links else set()

    def may_join(members: Sequence[tuple[int, int]], node: tuple[int, int]) -> bool:
        return not any(frozenset((one, node)) in cut for one in members)

    found = pipelines(nodes, may_join)
    assert sorted(itertools.chain(*found)) == sorted(everyone)
    for members in found:
        assert not {frozenset(pair) for pair in itertools.combinations(members, 2)} & cut
    gone = data.draw(st.sets(st.sampled_from(range(len(found))))) if found else set()
    out = {node for number in gone for node in found[number]}
    rest = pipelines([[node for node in group if node not in out] for group in nodes], may_join)
    assert rest == [members for number, members in enumerate(found) if number not in gone]


# -- spans ----------------------------------------------------------------------------------------


@st.composite
def loads(draw: st.DrawFn, count: int, layers: int) -> tuple[TeamModel, list[Loading]]:
    """Up to `count` instances with some layers each, mostly in runs."""
    model = TeamModel(draw(st.integers(1, layers)), draw(st.booleans()))
    found = []
    for number in range(draw(st.integers(1, count))):
        bounds = draw(st.lists(st.integers(0, model.layers + 2), min_size=2, max_size=4))
        has = {x for a, b in itertools.pairwise(sorted(bounds)) if a % 3 for x in range(a, b)}
        has |= set(range(*sorted(bounds[:2])))
        group = draw(st.integers(0, 2))
        found.append(Loading(InstanceId(number), group, frozenset(has)))
    return model, found


def runs_of(stages: Sequence[Stage]) -> list[int]:
    """How many decoder layers each member runs."""
    layers = stages[-1][1].stop - 2
    return [len(set(range(span.start, span.stop)) - {0, layers + 1}) for _, span in stages]


def all_spans(members: Sequence[Loading], model: TeamModel) -> Iterator[tuple[Stage, ...]]:
    """Every way to serve together, tried one after the other."""
    for cuts in itertools.combinations(range(2, model.layers + 1), len(members) - 1):
        edges = [0, *cuts, model.layers + 2]
        spans = [LayerSpan(a, b) for a, b in itertools.pairwise(edges)]
        for order in itertools.permutations(members):
            needs = [set(range(span.start, span.stop)) for span in spans]
            needs[-1] |= {0} if model.is_tied else set()
            if all(need <= one.layers for need, one in zip(needs, order, strict=True)):
                instances = [one.instance for one in order]
                yield tuple(zip(instances, spans, strict=True))


@settings(max_examples=examples(600))
@given(case=loads(count=4, layers=7))
def test_spans_are_as_even_as_presence_allows(case: tuple[TeamModel, list[Loading]]) -> None:
    model, members = case
    possible = list(all_spans(members, model))
    stages = even_spans(members, model)
    if not possible:
        assert stages is None
        return
    assert stages in possible
    best = min(max(runs_of(stages)) for stages in possible)
    assert stages is not None
    assert max(runs_of(stages)) == best


@given(case=loads(count=4, layers=7))
def test_spans_make_a_team(case: tuple[TeamModel, list[Loading]]) -> None:
    """Also of many members, whose order is given."""
    model, members = case
    many = [*members, *[loading(9 + n, range(1, 8), layers=7) for n in range(ORDERS_MAX)]]
    for some in (members, many):
        if len(some) > 1 and (stages := even_spans(some, model)):
            Team(1, tuple(TeamMember(partner(i), span) for i, span in stages))
            assert stages[-1][1].stop == model.layers + 2
            assert not {1, model.layers + 1} & {span.start for _, span in stages}


def partner(instance: InstanceId) -> Partner:
    return Partner(instance, WorkerRef(instance, 0))


def test_a_tied_head_needs_the_embedding() -> None:
    halves = [loading(1, [1, 2], layers=4), loading(2, [3, 4], layers=4)]
    assert even_spans(halves, TeamModel(4)) == (
        (1, LayerSpan(0, 3)),
        (2, LayerSpan(3, 6)),
    )
    assert even_spans(halves, TeamModel(4, is_tied=True)) is None
    second = Loading(InstanceId(2), 0, halves[1].layers | {0})
    assert even_spans([halves[0], second], TeamModel(4, is_tied=True))


def test_the_others_share_what_one_cannot_take() -> None:
    """The last has one layer only; the first two have the others in halves."""
    first, second = (loading(n, range(1, 8), layers=8) for n in (1, 2))
    stages = even_spans([loading(0, [8], layers=8), first, second], TeamModel(8))
    assert stages is not None
    assert runs_of(stages) in ([4, 3, 1], [3, 4, 1])


def test_a_model_has_decoder_layers() -> None:
    with pytest.raises(ValueError, match="a model of 0 decoder layers"):
        TeamModel(0)


# -- strategies -----------------------------------------------------------------------------------


def is_whole(one: Loading, model: TeamModel) -> bool:
    return set(range(model.layers + 2)) <= one.layers


@settings(max_examples=examples(400))
@given(case=loads(count=6, layers=6), strategy=st.sampled_from(sorted(TEAM_STRATEGIES)))
def test_teams_can_serve_and_share_no_instance(
    case: tuple[TeamModel, list[Loading]], strategy: str
) -> None:
    model, some = case
    by_id = {one.instance: one for one in some}
    teams = form_teams(strategy, some, model)
    used = [instance for team in teams for instance, _ in team]
    assert len(set(used)) == len(used)
    for team in teams:
        members = [by_id[instance] for instance, _ in team]
        assert len(members) > 1
        assert not any(is_whole(one, model) for one in members)
        assert team in list(all_spans(members, model))


@settings(max_examples=examples(300))
@given(case=loads(count=6, layers=6))
def test_a_cover_has_the_fewest_members(case: tuple[TeamModel, list[Loading]]) -> None:
    """And behind the last one no further team is possible."""
    model, some = case
    free = [one for one in some if not is_whole(one, model)]
    teams = form_teams("cover", some, model)
    for team in [*teams, None]:
        fewest = next(
            (
                count
                for count in range(1, len(free) + 1)
                for members in itertools.combinations(free, count)
                if any(all_spans(members, model))
            ),
            None,
        )
        assert fewest == (team and len(team))
        free = [one for one in free if team and one.instance not in members_of(team)]


def cut_links(some: Sequence[Loading]) -> st.SearchStrategy[set[tuple[InstanceId, InstanceId]]]:
    links = list(itertools.combinations([one.instance for one in some], 2))
    return st.sets(st.sampled_from(links)) if links else st.just(set())


@settings(max_examples=examples(300))
@given(
    case=loads(count=6, layers=6), strategy=st.sampled_from(sorted(TEAM_STRATEGIES)), data=st.data()
)
def test_instances_that_do_not_reach_one_another_are_in_no_team(
    case: tuple[TeamModel, list[Loading]], strategy: str, data: st.DataObject
) -> None:
    model, some = case
    cut = data.draw(cut_links(some))
    teams = form_teams(strategy, some, model, apart=cut)
    by_id = {one.instance: one for one in some}
    for team in teams:
        instances = [instance for instance, _ in team]
        assert team in list(all_spans([by_id[i] for i in instances], model))
        assert not cut & {*itertools.permutations(instances, 2)}
    if strategy == "cover":
        used = {instance for team in teams for instance, _ in team}
        free = [one for one in some if one.instance not in used and not is_whole(one, model)]
        assert not any(
            any(all_spans(members, model))
            for count in range(2, len(free) + 1)
            for members in itertools.combinations(free, count)
            if not cut & {*itertools.combinations([one.instance for one in members], 2)}
        ), "no further team is possible"


def halves(*firsts: bool) -> list[Loading]:
    """Instances with the first or the last two of four layers, from 1 on."""
    return [
        loading(number, [1, 2] if first else [3, 4], layers=4, group=number % 2)
        for number, first in enumerate(firsts, 1)
    ]


def test_an_instance_is_at_one_place_of_the_way() -> None:
    """One has the first and the third of three layers, another the second: together the model,
    and no team."""
    model = TeamModel(3)
    apart = [loading(1, [1, 3], layers=3), loading(2, [2], layers=3, group=1)]
    for strategy in TEAM_STRATEGIES:
        assert form_teams(strategy, apart, model) == []
    (team,) = form_teams("cover", [*apart, loading(3, [3], layers=3)], model)
    assert [instance for instance, _ in team] == [1, 2, 3]


def test_one_with_everything_is_in_no_team() -> None:
    whole = loading(3, [1, 2, 3, 4], layers=4, group=1)
    one, two = halves(True, False)
    for strategy in TEAM_STRATEGIES:
        assert form_teams(strategy, [one, whole], TeamModel(4)) == []
        assert [members_of(t) for t in form_teams(strategy, [one, whole, two], TeamModel(4))] in (
            [(1, 2)],
            [],
        )


@pytest.mark.parametrize("strategy", sorted(TEAM_STRATEGIES))
def test_no_instances_are_no_team(strategy: str) -> None:
    assert form_teams(strategy, [], TeamModel(4)) == []
