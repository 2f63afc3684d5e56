"""Teams: loading instances of one plan that serve together (λScale §4.2, Algorithm 2, §4.3).

A team can serve as soon as each of its members has one run of layers complete, and these runs
follow one another over the whole model. With a binomial plan of b blocks and k sources the blocks
of all targets together are the model after ⌈b / k⌉ steps, and some targets have it in one run
each then (for N ≤ 24, k ≤ 4, k ≤ N - k, k ≤ b ≤ 32 without exception: only the newest few blocks
of a sub-group's part are scattered). λScale's own pipelines are there some steps later, but
share the model evenly, while spans of an early team are as uneven as what its members have.

A layer counts with its last block. Where blocks end inside layers teams are a step or two later.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence, Set
from typing import TypeVar

from livescale.control.together.team_spans import (
    ORDERS_MAX,
    Loading,
    TeamModel,
    even_spans,
    run_end,
)
from livescale.values.routes import Stage
from livescale.values.types import InstanceId

T = TypeVar("T")

EXACT_MAX = 12
"""Of up to so many instances `cover` finds the fewest, of more what it finds in a few turns."""
_TURNS_MAX = 100
"""For each number of members."""
_NO_END = 1 << 62


Apart = tuple[InstanceId, InstanceId]
"""Two instances that are in no team together, in any order: they do not reach one another."""

TeamStrategy = Callable[[Sequence[Loading], TeamModel, Set[Apart]], list[tuple[Stage, ...]]]
"""From instances that are free, in the plan's order, to the teams that they can form now. An
instance is in one of them at most."""


def pairs(
    free: Sequence[Loading], model: TeamModel, apart: Set[Apart] = frozenset()
) -> list[tuple[Stage, ...]]:
    """λScale's Algorithm 2: of those that it puts together the ones that can serve now.

    What has formed a team can be left out of `free` without changing the others.
    """
    groups: dict[int, list[Loading]] = {}
    for one in free:
        groups.setdefault(one.group, []).append(one)

    def may_join(members: Sequence[Loading], other: Loading) -> bool:
        return not any(_is_apart(one.instance, other.instance, apart) for one in members)

    found = []
    for members in pipelines([groups[number] for number in sorted(groups)], may_join):
        if len(members) > ORDERS_MAX:
            members.sort(key=lambda one: _middle(model.bits(one.layers)))
        stages = even_spans(members, model) if len(members) > 1 else None
        if stages is not None:
            found.append(stages)
    return found


def cover(
    free: Sequence[Loading], model: TeamModel, apart: Set[Apart] = frozenset()
) -> list[tuple[Stage, ...]]:
    """Team after team of the fewest instances that can serve now."""
    rest = {number: model.bits(one.layers) for number, one in enumerate(free)}
    conflicts = [_conflicts(one, free, apart) for one in free]
    found = []
    while way := _fewest(rest, model, conflicts):
        stages = even_spans([free[number] for number in way], model)
        assert stages is not None, f"{way} have the model in one run each"
        found.append(stages)
        for number in way:
            del rest[number]
    return found


TEAM_STRATEGIES: dict[str, TeamStrategy] = {"pairs": pairs, "cover": cover}


def form_teams(
    strategy: str,
    free: Sequence[Loading],
    model: TeamModel,
    apart: Set[Apart] = frozenset(),
) -> list[tuple[Stage, ...]]:
    """New teams: of each the instances and the layers that they run, in order.

    `free` are the instances of the plan that load and are in no team yet, in its order. One with
    everything serves alone and joins no team. No team has two members that are `apart`. A team
    that was formed stays until it ends: its members have KV of its requests.
    """
    some = [one for one in free if model.bits(one.layers) != model.everything]
    return TEAM_STRATEGIES[strategy](some, model, apart)


def pipelines(
    groups: Sequence[Sequence[T]],
    may_join: Callable[[Sequence[T], T], bool] = lambda members, node: True,
) -> list[list[T]]:
    """λScale's Algorithm 2: which nodes of the sub-groups work together. One of each group that
    has one left; if one group only has any left, all that are left.

    Numbers count the nodes that are not assigned yet: with n_i^t of the whole group, as it is
    printed, nodes are in two pipelines when groups are unequal. A group's node is the first that
    `may_join` those of the groups before. One that is alone so counts with those that are left, of
    which as many as may work together.
    """
    left = [list(group) for group in groups if group]
    found: list[list[T]] = []
    alone: list[T] = []
    while len(left) > 1:
        members: list[T] = []
        for group in left:
            _join(members, group, may_join)
        if len(members) > 1:
            found.append(members)
        else:
            alone += members
        left = [group for group in left if group]
    rest = [*alone, *itertools.chain(*left)]
    while rest:
        members = []
        while _join(members, rest, may_join):
            pass
        found.append(members)
    return found


# -- helpers, in the order used -------------------------------------------------------------------


def _join(members: list[T], group: list[T], may_join: Callable[[Sequence[T], T], bool]) -> bool:
    """The first of the group that may join the members does so, if there is one."""
    place = next((n for n, node in enumerate(group) if may_join(members, node)), None)
    if place is not None:
        members.append(group.pop(place))
    return place is not None


def _is_apart(one: InstanceId, other: InstanceId, apart: Set[Apart]) -> bool:
    return (one, other) in apart or (other, one) in apart


def _conflicts(one: Loading, free: Sequence[Loading], apart: Set[Apart]) -> int:
    """The numbers of those that cannot be in a team with this one, as bits."""
    if not apart:
        return 0
    numbers = enumerate(other.instance for other in free)
    return sum(1 << n for n, other in numbers if _is_apart(one.instance, other, apart))


def _middle(bits: int) -> float:
    """Who has the last layers comes behind who has the first: the order that is tried where there
    are too many for all."""
    places = [place for place in range(bits.bit_length()) if bits >> place & 1]
    return sum(places) / len(places) if places else 0.0


def _fewest(bits: dict[int, int], model: TeamModel, conflicts: Sequence[int]) -> list[int] | None:
    """The fewest members that have the model in one run each, in the order of these runs (None:
    there are none, or none was found of more than EXACT_MAX). No two of them are in `conflicts`,
    by number, as bits."""
    union = 0
    for one in bits.values():
        union |= one
    least = _hops(bits, model.layers) if union == model.everything else None
    if least is None:
        return None
    search = _Search(bits, model.layers, conflicts)
    for limit in range(least, len(bits) + 1):
        if way := search.way_of(limit):
            return way
    return None


def _hops(bits: dict[int, int], layers: int) -> int | None:
    """Runs from the first layer to the last, if a member may have several: no team has fewer."""
    place = hops = 0
    while place < layers:
        stop = max(run_end(one, place) for one in bits.values())
        if stop == place:
            return None
        place, hops = stop, hops + 1
    return hops


class _Search:
    """Ways from the first decoder layer to the last over members, each used once: depth first,
    who comes furthest first.

    To go as far as a member can is never worse than to stop before: who could go on from there
    can go on from behind it.
    """

    def __init__(self, bits: dict[int, int], layers: int, conflicts: Sequence[int]) -> None:
        self._bits, self._layers, self._conflicts = bits, layers, conflicts
        self._limit = 0
        #: members used (as bits) -> the furthest place from where these leave no way
        self._in_vain: dict[int, int] = {}
        self._turns = 0

    def way_of(self, limit: int) -> list[int] | None:
        """Of so many members at most."""
        self._limit = limit
        self._in_vain.clear()
        self._turns = _TURNS_MAX if len(self._bits) > EXACT_MAX else _NO_END
        return self._on([], 0, 0)

    def _on(self, way: list[int], used: int, place: int) -> list[int] | None:
        if place == self._layers:
            return way
        if len(way) == self._limit or place <= self._in_vain.get(used, -1):
            return None
        for stop, number in self._next(used, place):
            if not self._turns:
                return None
            self._turns -= 1
            if found := self._on([*way, number], used | 1 << number, stop):
                return found
        self._in_vain[used] = place
        return None

    def _next(self, used: int, place: int) -> list[tuple[int, int]]:
        """Where each member that is not used yet comes from here."""
        found = [
            (run_end(one, place), number)
            for number, one in self._bits.items()
            if one >> place & 1 and not used >> number & 1 and not used & self._conflicts[number]
        ]
        return sorted(found, key=lambda one: (-one[0], one[1]))
