"""A team loses its leader, a member, the instance that the layers come from, or a link, at each of
its messages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from live_worlds import SOURCE
from team_worlds import ENDS, TeamWorld

from effort import times
from livescale.batching.contract.live_messages import Handover, KvLayer, KvWanted, LiveMessage
from livescale.batching.contract.visit_messages import Disbanded, Kept, Quota, Visit, Visited
from livescale.batching.runs.batcher import BatcherConfig
from livescale.values.types import WorkerRef

SPLITS = [(3,), (2, 5)]
STOP_NS, DELAY_NS = 1_900, 5
STRIDE = 41
"""Without --long one of so many losses is tried."""

Lose = Callable[[TeamWorld], None]


def asked(cuts: Sequence[int], end: tuple[str, int]) -> TeamWorld:
    """Three requests for the leader and one for the instance beside it. Two decode when the team
    ends."""
    config = BatcherConfig(32, 4, 64, 16, growth_tokens=4)
    world = TeamWorld(cuts, config=config, end=end, delays=[DELAY_NS], stop_ns=STOP_NS)
    for number in range(4):
        ref, tokens = (SOURCE, 12) if number == 2 else (world.leader, 5)
        prompt = range(number, number + 17 + number)
        world.at(10 + 100 * number, partial(world.request, f"r{number}", ref, prompt, tokens))
    return world


def messages_of(world: TeamWorld) -> list[LiveMessage]:
    """Play the world: all that is sent in it, in order."""
    sent: list[LiveMessage] = []
    world.listen = lambda sender, receiver, message: sent.append(message)
    world.play()
    world.check_end()
    return sent


def losses(cuts: Sequence[int]) -> dict[str, Lose]:
    members = range(len(cuts) + 1)
    found: dict[str, Lose] = {"source": lambda world: world.lose(SOURCE)}
    for one in members:
        name = f"member {one}" if one else "leader"
        found[name] = lambda world, one=one: world.lose(world.members[one])
    for one, other in itertools.combinations(members, 2):
        ends = slice(one, other + 1, other - one)
        found[f"link {one}-{other}"] = lambda world, ends=ends: world.cut(*world.members[ends])
    return found


def play_with(world: TeamWorld, lose: Lose, number: int, *, is_there: bool) -> None:
    """The loss is when this message is on its way, or has just come to its receiver."""
    sent = 0

    def listen(sender: WorkerRef, receiver: WorkerRef, message: LiveMessage) -> None:
        nonlocal sent
        if sent == number:
            world.at(world.now_ns + (DELAY_NS + 1 if is_there else 0), partial(lose, world))
        sent += 1

    world.listen = listen
    world.play()
    assert sent > number
    world.check_end()


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("cuts", SPLITS)
def test_the_messages_are_those_of_a_whole_life_of_a_team(
    cuts: tuple[int, ...], end: tuple[str, int]
) -> None:
    kinds = {type(message) for message in messages_of(asked(cuts, end))}
    ending = {Kept, Handover, KvWanted, KvLayer}
    moves = end in (ENDS[0], ENDS[2])
    assert kinds >= {Quota, Visit, Visited, Disbanded} | (ending if moves else set())
    assert moves or not kinds & ending


@pytest.mark.more
@pytest.mark.parametrize(
    ("cuts", "end"),
    # Where it is cheaper to move KV, the messages are those of "move".
    [(cuts, end) for cuts in SPLITS for end in ENDS if end != ("cheaper", 0)],
)
def test_tokens_are_right_and_kv_is_freed_whatever_is_lost_at_any_message(
    cuts: tuple[int, ...], end: tuple[str, int]
) -> None:
    count = len(messages_of(asked(cuts, end)))
    cases = [*itertools.product(losses(cuts).items(), range(count), (False, True))]
    for (name, lose), number, is_there in cases[:: STRIDE if times() == 1 else 1]:
        try:
            play_with(asked(cuts, end), lose, number, is_there=is_there)
        except AssertionError as error:
            error.add_note(f"{name} is lost at message {number} ({is_there=})")
            raise
