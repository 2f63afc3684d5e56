"""A sender, a receiver or the link between them is lost at each message of a hand-over: tokens are
right, and KV is freed everywhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import test_decode_giver
import test_kv_holders
from live_worlds import LiveWorld

from effort import examples, mostly_long
from livescale.batching.contract.live_messages import LiveMessage
from livescale.values.types import WorkerRef

DELAY_NS = 5
"""Of every message."""
LATE_NS = (0, DELAY_NS, DELAY_NS + 1)
"""The loss comes as the message is sent, as it arrives, and just after that."""


def of_roles(kv_ahead: bool) -> LiveWorld:
    """Two prefill and two decode instances, which have the model."""
    world, giving, _ = test_decode_giver.roles(2, 2, delays=(DELAY_NS,), kv_ahead=kv_ahead)
    for number in range(4):
        prompt_ids = range(number, number + 20)
        ask = partial(world.request, f"r{number}", giving[number % 2], prompt_ids, 4)
        world.at(number * 7, ask)
    return world


def of_live_pair() -> LiveWorld:
    """A prefill instance that loads, one that it helps, and two decode instances."""
    world, (target,), (source,), _ = test_kv_holders.world_of(
        1, 1, 2, layer_gap_ns=600, layers=4, delays=(DELAY_NS,)
    )
    for number in range(6):
        at = source if number < 3 else target
        prompt_ids = range(20 * number, 20 * number + 20)
        world.at(number * 7, partial(world.request, f"r{number}", at, prompt_ids, 4))
    return world


SCENES: dict[str, Callable[[], LiveWorld]] = {
    "roles, KV ahead": partial(of_roles, True),
    "roles, KV behind": partial(of_roles, False),
    "live pair": of_live_pair,
}
KINDS = {
    "roles, KV ahead": {"Offer", "Pull", "Promised", "KvLayer", "Gone", "Handover", "Taken"},
    "roles, KV behind": {"Offer", "Pull", "KvLayer", "Gone", "Handover", "Taken", "Settled"},
    "live pair": {"Offer", "Pull", "KvLayer", "Gone", "Handover", "Taken", "Settled"},
}
CASES = [(scene, fault) for scene in SCENES for fault in ("sender", "receiver", "link")]


@pytest.mark.parametrize(("scene", "fault"), mostly_long(CASES, [*CASES[:3], *CASES[6:]]))
def test_a_loss_at_each_message_costs_no_token(scene: str, fault: str) -> None:
    """In `make test` at the first message of each kind, and as it arrives."""
    kinds = messages_of(SCENES[scene]())
    assert {*kinds} >= KINDS[scene]
    is_whole = examples(2) == 2
    hit = range(len(kinds)) if is_whole else [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    for number in hit:
        for late_ns in LATE_NS if is_whole else (DELAY_NS,):
            play(SCENES[scene](), number, fault, late_ns)


def messages_of(world: LiveWorld) -> list[str]:
    """The kind of each message where nothing is lost, in order."""
    kinds: list[str] = []
    world.listen = lambda sender, receiver, message: kinds.append(type(message).__name__)
    test_decode_giver.end(world)
    return kinds


def play(world: LiveWorld, number: int, fault: str, late_ns: int) -> None:
    """The loss comes with the message of this number: until then all is as without it."""
    sent = 0

    def listen(sender: WorkerRef, receiver: WorkerRef, message: LiveMessage) -> None:
        nonlocal sent
        sent += 1
        if sent == number + 1:
            loss = {
                "sender": partial(world.lose, sender),
                "receiver": partial(world.lose, receiver),
                "link": partial(world.cut, sender, receiver),
            }[fault]
            world.at(world.now_ns + late_ns, loss)

    world.listen = listen
    test_decode_giver.end(world)
    assert sent > number, "the message was sent"
