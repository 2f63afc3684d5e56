"""The witnesses have teeth: a rule that is broken in one line is found within few stories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from member_player import Player
from test_member_agent import STORIES, play_agent
from test_member_machine import MOVES

from livescale.member.attempts import HostedAttempts
from livescale.member.instance import HostedInstance
from livescale.member.member import Member
from livescale.member.member_holdings import MemberHoldings, ModelHolding
from livescale.member.memory_map import MemoryMap
from livescale.member.presence import Presence

EXAMPLES_MAX = 300

_few = settings(
    max_examples=EXAMPLES_MAX, phases=(Phase.generate,), derandomize=True, database=None
)
#: a pair that begins to work, and then anything
_pair = st.tuples(st.just("pair"), st.integers(0, 3), st.sampled_from([0, 1]), st.just(True))
_rests = st.lists(MOVES, min_size=10, max_size=50)


@_few
@given(STORIES)
def agents(story: list) -> None:
    play_agent([("copy", 20_000, 3, 0), ("step",), ("feed", 0, 0), ("amend", 0, 1), *story])


@_few
@given(_pair, _rests)
def workers(pair: tuple, moves: list) -> None:
    Player().play([pair, *moves]).end()


def nothing(*_: object, **__: object) -> None:
    """What a rule does that was left out."""


def without_clearing(held: ModelHolding, feeds: Any) -> None:
    held.order = msgspec.structs.replace(held.order, feeds=feeds)


def starts_at_the_first_layer(held: ModelHolding) -> None:
    held.watermark = 0


def only_this_layer(held: ModelHolding, layer: int) -> None:
    held.arrived[layer] = None
    held.watermark = max(held.watermark, layer + 1)


def ends_though_disowned(
    hosted: HostedAttempts, request: str, attempt: int, moves: int | None = None
) -> bool:
    is_here = hosted._serving is not None and hosted._serving.cancel(request, attempt)
    if is_here:
        hosted._give_back(hosted._gateway_of.pop(request), request, attempt)
    return is_here


def has_what_one_rank_has(
    layers: Presence, rank: int, watermark: int, beyond: tuple[int, ...] = ()
) -> None:
    if watermark > max(layers._watermarks):
        layers._watermarks[rank] = watermark
        layers._grows(watermark)


def gives_up_in_silence(worker: Member, held: ModelHolding, reason: str) -> None:
    worker._forget(held)


def closes_in_silence(instance: HostedInstance, now_ns: int) -> None:
    instance._talk(now_ns)
    instance.serving.give_back()
    instance._attempts._gateway_of.clear()


_change_duty = HostedInstance.change_duty


def takes_roles_in_silence(instance: HostedInstance, duty: Any) -> None:
    instance.duty = msgspec.structs.replace(instance.duty, role=duty.role)
    _change_duty(instance, duty)


def repeats_nothing(hosted: HostedAttempts, gateway: str, spec: Any, *, is_decoding: bool) -> None:
    hosted._gateway_of[spec.request] = gateway


MUTATIONS: list[tuple[str, Callable[[], None], type, str, Callable[..., Any]]] = [
    ("regions overlap", agents, MemoryMap, "allocate", lambda *_: 0),
    ("what may still be written is free", agents, MemberHoldings, "keep_from_others", nothing),
    ("holdings have no size", agents, ModelHolding, "size_bytes", property(lambda held: 0)),
    ("every span starts at 0", agents, ModelHolding, "__post_init__", starts_at_the_first_layer),
    ("troubles outlive their feeds", agents, ModelHolding, "amend", without_clearing),
    ("a new controller is told no troubles", agents, Member, "_met_controller", nothing),
    ("what is dropped does not fail", agents, Member, "_give_up", gives_up_in_silence),
    ("reports stay as they were", agents, MemberHoldings, "update_reports", nothing),
    ("layers run as they come", workers, ModelHolding, "take_layer", only_this_layer),
    ("one rank is enough", workers, Presence, "has", has_what_one_rank_has),
    ("a disowned attempt is returned", workers, HostedAttempts, "disown", ends_though_disowned),
    ("a lost gateway changes nothing", workers, HostedAttempts, "gateway_gone", nothing),
    ("takings are not told", workers, HostedAttempts, "taken", repeats_nothing),
    ("the last words are missing", workers, HostedInstance, "close", closes_in_silence),
    ("new roles are not told", workers, HostedInstance, "change_duty", takes_roles_in_silence),
    ("reports are not repeated", workers, HostedInstance, "forget_reports", nothing),
]


@pytest.mark.parametrize(
    ("play", "owner", "name", "mutant"),
    [mutation[1:] for mutation in MUTATIONS],
    ids=[mutation[0] for mutation in MUTATIONS],
)
def test_a_broken_rule_is_found(
    play: Callable[[], None],
    owner: type,
    name: str,
    mutant: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    # A check of the product itself, or an error that follows, is as good as a witness.
    with pytest.raises((AssertionError, KeyError, ExceptionGroup)):
        play()
