"""Teams of instances that serve together before any of them has all layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from live_parts import Node
from live_worlds import SOURCE
from team_worlds import ENDS, LAYERS, TeamWorld
from test_decode_giver import cancel, disown

from effort import examples
from livescale.batching.contract.live_messages import LiveMessage, UnexpectedMessage
from livescale.batching.contract.visit_messages import Lead, Quota, Stop, Visit, Visited
from livescale.batching.lines.team_parting import moving_pays
from livescale.batching.live.live_batch import LiveLimits
from livescale.batching.runs.batcher import BatcherConfig
from livescale.batching.runs.run import Run, Segment
from livescale.values.routes import Partner, Team, TeamMember
from livescale.values.types import LayerSpan, SamplingParams, WorkerRef


def ran(world: TeamWorld) -> dict[WorkerRef, Counter[LayerSpan]]:
    """Runs of each instance by span, from now on."""
    found: dict[WorkerRef, Counter[LayerSpan]] = {ref: Counter() for ref in world.nodes}

    def watch(node: Node, run: Run) -> None:
        found[node.ref][run.span] += 1

    world.watch = watch
    return found


cuts = st.sets(st.integers(2, LAYERS), min_size=1, max_size=4).map(sorted)
events = st.tuples(
    st.integers(0, 6_000),
    st.sampled_from(("lose", "cut", "cancel", "disown", "fail", "end", "again")),
    st.integers(0, 11),
    st.integers(0, 5),
)

#: orders that come late, after the answers to members that were told are late, or never
lates = st.lists(st.sampled_from([0, 0, 0, 0, 200, 3_000, 150_000, None]), max_size=5)


@given(
    cuts,
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=14),
    st.lists(events, max_size=5),
    st.lists(st.integers(0, 60), min_size=1, max_size=4),
    st.integers(4, 64),
    st.integers(0, 3_000),
    st.integers(0, 30_000),
    st.booleans(),
    st.sampled_from(ENDS),
    lates,
)
@settings(max_examples=examples(400), deadline=None)
def test_whatever_happens_tokens_are_right_and_kv_is_freed(
    cuts: list[int],
    sizes: list[tuple[int, int]],
    happens: list[tuple[int, str, int, int]],
    delays: list[int],
    smallest_blocks: int,
    start_ns: int,
    more_ns: int,
    is_shared: bool,
    end: tuple[str, int],
    late_ns: list[int | None],
) -> None:
    """Members, the leader, the instance beside them and links are lost, loads fail, clients go, the
    team ends, at any time; one member has less room than the others, and some are told late or
    never."""
    smallest = BatcherConfig(max(smallest_blocks, 16), 4, 64, 16, growth_tokens=4)
    world = TeamWorld(
        cuts,
        smallest=smallest,
        delays=delays,
        start_ns=start_ns,
        stop_ns=start_ns + more_ns,
        end=end,
        late_ns=late_ns,
    )
    found = ran(world)
    for number, (prompt, output) in enumerate(sizes):
        first = 0 if is_shared else number
        logprobs = 1 if number % 7 == 6 else None
        ask = partial(
            world.request,
            f"r{number}",
            world.leader,
            range(first, first + prompt),
            output,
            logprobs=logprobs,
        )
        world.at(number * 37, ask)
    refs = world.members
    for at_ns, what, which, other in happens:
        ref, second = refs[which % len(refs)], refs[other % len(refs)]
        if what == "lose":
            world.at(at_ns, partial(world.lose, [*world.nodes][which % len(world.nodes)]))
        elif what == "cut" and ref != second:
            world.at(at_ns, partial(world.cut, ref, second))
        elif what == "cancel":
            world.at(at_ns + 90, partial(cancel, world, f"r{which % len(sizes)}"))
        elif what == "disown":
            world.at(at_ns + 90, partial(disown, world, f"r{which % len(sizes)}"))
        elif what == "fail":
            world.at(at_ns, partial(world.fail_load, ref))
        elif what in ("end", "again"):
            # The next team of the same members, or none.
            again = Team(2 + at_ns, world.team.members) if what == "again" else None
            for member in refs:
                told_ns = max(at_ns, world.told_ns[member] + 1) + (which if again else 0)
                join = partial(world.join_if_loading, member, again)
                world.at(told_ns, partial(world.between, member, join))
    world.play()
    world.check_end()
    visits = sum(n for ref in refs for s, n in found[ref].items() if s.stop - s.start < LAYERS + 2)
    event(f"visits: {min(visits // 20, 3) * 20} and more")


@pytest.mark.parametrize("cuts", [[2], [4], [6], [2, 5], [2, 3, 4, 5, 6]])
def test_every_member_runs_its_layers_of_every_run(cuts: list[int]) -> None:
    world = TeamWorld(cuts)
    found = ran(world)
    for number in range(8):
        ask = partial(world.request, f"r{number}", world.leader, range(number, number + 9), 7)
        world.at(10, ask)
    world.play()
    world.check_end()
    spans = [member.span for member in world.team.members]
    counts = {tuple(found[ref].items()) for ref in world.members}
    assert [[*found[ref]] for ref in world.members] == [[span] for span in spans]
    assert len({n for items in counts for _, n in items}) == 1, "each Run visits all"


@pytest.mark.parametrize("which", [(0, 1), (0, 2), (1, 2)])
def test_a_leader_tells_where_its_team_broke(which: tuple[int, int]) -> None:
    """Also a link that is none of its own. Until it is in another team, or in none."""
    world = TeamWorld([3, 5])
    first, second = (world.members[number] for number in which)
    for number in range(8):
        ask = partial(world.request, f"r{number}", world.leader, range(number, number + 9), 40)
        world.at(10, ask)
    world.at(900, partial(world.cut, first, second))
    broke = []

    def look() -> None:
        for ref in world.members:
            serving = world.nodes[ref].serving
            assert serving is not None
            broke.append(serving.team_broke)

    for at_ns in (890, 20_000, 60_000):
        world.at(at_ns, look)
    world.play()
    world.check_end()
    before, [of_leader, *others], after = broke[:3], broke[3:6], broke[6:]
    assert {*before, *others, *after} == {None}
    assert of_leader is not None
    assert (of_leader.instance, of_leader.team) == (world.team.leader.instance, 1)
    assert of_leader.between is not None
    assert {*of_leader.between} == {first, second}


def test_a_leader_may_be_told_later_than_its_members() -> None:
    """What they grant before is not lost."""
    world = TeamWorld([3, 5], late_ns=[200])
    found = ran(world)
    world.at(10, partial(world.request, "r", world.leader, range(9), 7))
    world.play()
    world.check_end()
    assert all(sum(found[ref].values()) == 7 for ref in world.members)


@pytest.mark.parametrize("how", ["cut", "lose"])
def test_a_member_that_is_told_when_the_team_is_over_keeps_no_blocks(how: str) -> None:
    """Disbanded came there before it had kept any."""
    world = TeamWorld([3, 5], late_ns=[0, 0, 3_000])
    leader, second, late = world.members
    world.at(10, partial(world.request, "r", leader, range(9), 7))
    breaks = {"cut": partial(world.cut, leader, second), "lose": partial(world.lose, second)}
    world.at(1_000, breaks[how])
    used = []
    world.at(10_000, lambda: used.append(world.nodes[late].serving.kv_in_use))
    world.play()
    world.check_end()
    assert used == [0]


def test_a_member_whose_leader_is_never_told_keeps_no_blocks() -> None:
    """The controller died between its two orders, and the next one ends the team."""
    world = TeamWorld([3], late_ns=[None, 0])
    member = world.members[1]
    end = partial(world.join_if_loading, member, None)
    world.at(5_000, partial(world.between, member, end))
    world.play()
    world.check_end()


def test_a_team_of_m_has_m_runs_and_one_more_in_flight() -> None:
    world = TeamWorld([2, 4, 6])
    flying: dict[int, None] = {}
    most = 0

    def listen(sender: WorkerRef, receiver: WorkerRef, message: LiveMessage) -> None:
        nonlocal most
        if isinstance(message, Visit):
            flying[message.run] = None
        elif isinstance(message, Visited):
            flying.pop(message.run, None)
        most = max(most, len(flying))

    world.listen = listen
    for number in range(20):
        world.at(10, partial(world.request, f"r{number}", world.leader, range(number, 20), 9))
    world.play()
    world.check_end()
    assert len(world.members) == 4
    assert most == 5


def test_the_leader_counts_with_the_smallest_quota_and_preempts() -> None:
    small = BatcherConfig(9, 4, 64, 16, growth_tokens=0)
    world = TeamWorld([4], smallest=small)
    for number in range(4):
        ask = partial(world.request, f"r{number}", world.leader, range(number, number + 7), 9)
        world.at(10, ask)
    serving = world.nodes[world.leader].serving
    assert serving is not None
    preempted = 0

    def listen(sender: WorkerRef, receiver: WorkerRef, message: LiveMessage) -> None:
        nonlocal preempted
        if serving.side.lead is not None and serving.side.lead.batcher is not None:
            assert serving.side.lead.batcher.pool.blocks == 9
            preempted = max(preempted, serving.side.lead.batcher.room.preemptions)

    world.listen = listen
    world.play()
    world.check_end()
    assert preempted > 0


def test_what_begins_alike_is_found_at_every_member() -> None:
    """The leader's prefix index stands for the blocks of all."""
    world = TeamWorld([3])
    positions: Counter[WorkerRef] = Counter()

    def watch(node: Node, run: Run) -> None:
        positions[node.ref] += run.token_count

    world.watch = watch
    for number in range(3):
        world.at(
            10 + number * 9_000, partial(world.request, f"r{number}", world.leader, range(33), 2)
        )
    world.play()
    world.check_end()
    assert set(positions.values()) == {33 + 1 + 2 * (1 + 1)}


def test_a_request_that_no_quota_can_hold_waits_for_the_end_of_the_load() -> None:
    small = BatcherConfig(4, 4, 64, 16, growth_tokens=0)
    world = TeamWorld([4], smallest=small, stop_ns=20_000)
    world.at(10, partial(world.request, "long", world.leader, range(30), 9))
    world.at(10, partial(world.request, "short", world.leader, range(5), 9))
    world.play()
    world.check_end()
    assert world.transcripts["short"].finished_ns < 20_000 < world.transcripts["long"].finished_ns


def test_embeddings_wait_for_the_end_of_the_load() -> None:
    world = TeamWorld([4], stop_ns=20_000)
    world.at(10, partial(world.request, "mean", world.leader, range(30), 1, embeds=True))
    world.at(10, partial(world.request, "text", world.leader, range(30), 1))
    world.play()
    world.check_end()
    assert world.transcripts["text"].finished_ns < 20_000 < world.transcripts["mean"].finished_ns


@pytest.mark.parametrize("team_kv", [True, False])
def test_at_the_end_of_a_team_no_token_comes_twice_and_none_is_lost(team_kv: bool) -> None:
    """Half of what has not ended goes on at the leader; the other half at the other member, with
    KV of both, or elsewhere, anew."""
    world = TeamWorld([4], stop_ns=3_000, end=ENDS[0 if team_kv else 1])
    found = ran(world)
    prompts: Counter[WorkerRef] = Counter()
    watch = world.watch

    def watched(node: Node, run: Run) -> None:
        prompts[node.ref] += run.prefill_tokens if not run.is_visit else 0
        watch(node, run)

    world.watch = watched
    for number in range(6):
        ask = partial(world.request, f"r{number}", world.leader, range(number, number + 9), 40)
        world.at(10, ask)
    world.play()
    world.check_end()
    whole = LayerSpan(0, LAYERS + 2)
    assert found[world.leader][whole]
    other = world.members[1] if team_kv else SOURCE
    assert found[other][whole]
    assert not found[SOURCE if team_kv else world.members[1]][whole]
    assert bool(sum(prompts.values())) is not team_kv, "nothing is computed again"


LEAD = Lead(2, 1)
SECOND = Partner(3, WorkerRef(2))


def visit(way: Sequence[Stop], segment: Segment) -> Visit:
    return Visit(LEAD, Partner(2, WorkerRef(1)), 1, tuple(way), (segment,), (1,))


def segment(first: int = 0, count: int = 3, table: tuple[int, ...] = (0,)) -> Segment:
    return Segment("r", 1, first, (0,) * count, table, False, SamplingParams(4))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (visit((), segment()), "a visit for"),
        (visit([Stop(Partner(9, WorkerRef(2)), LayerSpan(4, 8))], segment()), "a visit for"),
        (visit([Stop(SECOND, LayerSpan(3, 8))], segment()), "layers .* are not here"),
        (visit([Stop(SECOND, LayerSpan(7, 8))], segment()), "with a decoder layer"),
        (visit([Stop(SECOND, LayerSpan(0, 1))], segment()), "with a decoder layer"),
        (visit([Stop(SECOND, LayerSpan(4, 8))], segment(count=0)), "0 positions"),
        (visit([Stop(SECOND, LayerSpan(4, 8))], segment(first=-1)), "positions"),
        (visit([Stop(SECOND, LayerSpan(4, 8))], segment(count=5)), "5 positions"),
        (visit([Stop(SECOND, LayerSpan(4, 8))], segment(table=(64,))), "blocks beyond 64"),
        (visit([Stop(SECOND, LayerSpan(4, 8))], segment(table=(-1,))), "blocks beyond 64"),
    ],
)
def test_visits_that_cannot_be_are_refused(message: Visit, words: str) -> None:
    world = TeamWorld([4])
    for _ in range(6):
        world.play_one()
    serving = world.nodes[WorkerRef(2)].serving
    assert serving is not None
    with pytest.raises(UnexpectedMessage, match=words):
        serving.expected_tokens(WorkerRef(1), message)


def test_messages_of_a_team_that_is_over_change_nothing() -> None:
    world = TeamWorld([4])
    for _ in range(6):
        world.play_one()
    serving = world.nodes[WorkerRef(1)].serving
    assert serving is not None
    for message in (Quota(Lead(2, 7), 3, 1), Visited(Lead(2, 7), 1, (5,)), Visited(LEAD, 99, (5,))):
        serving.take_message(WorkerRef(2), message, 0)
    assert serving.take_emitted() == []


@pytest.mark.parametrize("spans", [[(0, 4)], [(0, 4), (5, 8)], [(1, 4), (4, 8)], [(0, 4), (3, 8)]])
def test_spans_of_a_team_follow_one_another(spans: list[tuple[int, int]]) -> None:
    partners = [Partner(n, WorkerRef(n)) for n in range(len(spans))]
    members = [TeamMember(p, LayerSpan(*span)) for p, span in zip(partners, spans, strict=True)]
    with pytest.raises(ValueError, match="do not follow one another"):
        Team(1, tuple(members))


@pytest.mark.parametrize(
    ("how", "kv_token_ps", "rate", "moves"),
    [
        ("move", 10**12, 1, True),
        ("anew", 0, 1, False),
        # KV of 8B at 100 and at 10 Gbit/s, and prefill at 15,000 tokens/s: 66.7 us a token.
        ("cheaper", 10_485_760, 15_000, True),
        ("cheaper", 104_857_600, 15_000, True),
        ("cheaper", 134_000_000, 15_000, False),
        ("cheaper", 0, 15_000, True),
        ("cheaper", 10**12, None, True),
    ],
)
def test_kv_moves_where_that_should_be_sooner(
    how: str, kv_token_ps: int, rate: int | None, moves: bool
) -> None:
    """A team of two: each fetches half of the KV of what it gets."""
    assert moving_pays(how, pair_of(kv_token_ps), rate, in_full_runs=False) is moves
    assert moving_pays(how, pair_of(kv_token_ps), rate, in_full_runs=True) is moves


def test_many_requests_are_computed_anew_as_fast_as_full_runs_are() -> None:
    """Half of a token's KV takes 67 us. Lone prompts took 100 us a token, full Runs take 50."""
    team = pair_of(134_000_000, prefill_tokens_per_s=20_000)
    assert moving_pays("cheaper", team, 10_000, in_full_runs=False)
    assert not moving_pays("cheaper", team, 10_000, in_full_runs=True)
    assert not moving_pays("cheaper", team, None, in_full_runs=True)
    assert not moving_pays("cheaper", team, 30_000, in_full_runs=False)


def pair_of(kv_token_ps: int, prefill_tokens_per_s: int = 0) -> Team:
    spans = (LayerSpan(0, 4), LayerSpan(4, 8))
    members = [TeamMember(Partner(n, WorkerRef(n)), span) for n, span in enumerate(spans)]
    return Team(1, tuple(members), kv_token_ps, prefill_tokens_per_s)


def test_other_ends_are_refused() -> None:
    with pytest.raises(ValueError, match="team_end is 'never', not one of move, anew, cheaper"):
        LiveLimits(team_end="never")


def test_blocks_go_back_if_a_member_had_none_before_the_leader_knew() -> None:
    world = TeamWorld([4], late_ns=[200])
    serving = world.nodes[world.leader].serving
    assert serving is not None
    serving.take_message(SECOND.worker, Quota(LEAD, 3, 0), 0)
    serving.join(world.team)
    assert serving.side.lead is None
    assert serving.inner.batcher.pool.used == 0
