"""The layers that each member of a team runs: one run of layers per member, as even as can be.

A cut lies between two decoder layers only: the embedding is run with the first one, the head with
the last one. So a member's layers are counted in decoder layers here, as the bits of an integer:
bit u stands for decoder layer u + 1, the first one with the embedding, the last one with the head.
"""

from __future__ import annotations

from collections.abc import Sequence

from livescale.values.routes import Stage
from livescale.values.types import InstanceId, LayerSpan, Value

ORDERS_MAX = 8
"""Of up to so many members all orders are tried; of more the one in which they are given."""


class Loading(Value, frozen=True):
    """An instance that loads: `layers` are complete there (0 the embedding, 1…L decoder layers,
    L + 1 the head). Its parameters come from source `group` of the plan."""

    instance: InstanceId
    group: int
    layers: frozenset[int]


class TeamModel(Value, frozen=True):
    """What teams must know of a model: its L decoder `layers`, and whether its head computes with
    the embedding's weights (`is_tied`).

    Decoder layers of one model take the same time, and of a prompt the head computes one row. So
    spans with as even a number of decoder layers as can be are as even in time as can be.
    """

    layers: int
    is_tied: bool = False

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(f"a model of {self.layers} decoder layers")

    @property
    def everything(self) -> int:
        """All decoder layers, as bits."""
        return (1 << self.layers) - 1

    def bits(self, layers: frozenset[int]) -> int:
        """The decoder layers that can be run with these layers."""
        found = 0
        for layer in range(1, self.layers + 1):
            if layer in layers:
                found |= 1 << (layer - 1)
        if 0 not in layers:
            found &= ~1
        if self.layers + 1 not in layers or (self.is_tied and 0 not in layers):
            found &= ~(1 << (self.layers - 1))
        return found

    def span(self, start: int, stop: int) -> LayerSpan:
        """The layers that are run with the decoder layers of bits `start` to `stop` - 1."""
        first = 0 if start == 0 else start + 1
        return LayerSpan(first, self.layers + 2 if stop == self.layers else stop + 1)


def even_spans(members: Sequence[Loading], model: TeamModel) -> tuple[Stage, ...] | None:
    """The members in an order, each with layers that are complete there: one run of layers with a
    decoder layer at least for each of them, from the embedding to the head. None: there is no
    such order.

    The slowest member has as few decoder layers as presence allows, because a full pipeline is as
    fast as that one. Of more than `ORDERS_MAX` members only the order given is tried.
    """
    bits = [model.bits(member.layers) for member in members]
    cuts = Cutting(bits, model).cuts()
    if cuts is None:
        return None
    return tuple(
        (members[number].instance, model.span(start, stop)) for number, start, stop in cuts
    )


def run_end(bits: int, start: int) -> int:
    """Where the run of ones that begins at `start` ends (`start`, if there is none)."""
    ahead = bits >> start
    return start + (~ahead & (ahead + 1)).bit_length() - 1


Cut = tuple[int, int, int]
"""A member's number, the first bit that it runs, and the one behind the last."""


class Cutting:
    """Cuts the decoder layers into one run for each member (`members`: bits that each of them
    has)."""

    def __init__(self, members: Sequence[int], model: TeamModel) -> None:
        self._members = tuple(members)
        self._layers = model.layers
        self._everything = model.everything

    def cuts(self) -> list[Cut] | None:
        """The member with the most decoder layers has as few as can be."""
        union = 0
        for bits in self._members:
            union |= bits
        best = self._within(self._layers) if union == self._everything else None
        if best is None:
            return None
        least = -(-self._layers // len(self._members))
        too_little, enough = least - 1, _most(best)
        limit = least  # what would be even is often possible
        while enough - too_little > 1:
            found = self._within(limit)
            if found is None:
                too_little = limit
            else:
                best, enough = found, _most(found)
            limit = (too_little + enough) // 2
        return best

    def _within(self, limit: int) -> list[Cut] | None:
        """No member has more than `limit`: dynamic programming over the members that have had
        their layers; with each set of these (bits) come all places where the next one can begin."""
        count = len(self._members)
        behind: list[dict[int, int]] = [{0: 1}]
        for taken in range(count):
            reached: dict[int, int] = {}
            numbers = range(count) if count <= ORDERS_MAX else (taken,)
            for used, starts in behind[-1].items():
                for number in numbers:
                    if not used >> number & 1 and (stops := self._stops(number, starts, limit)):
                        both = used | 1 << number
                        reached[both] = reached.get(both, 0) | stops
            behind.append(reached)
        used, stop = (1 << count) - 1, self._layers
        if not behind[-1].get(used, 0) >> stop & 1:
            return None
        found: list[Cut] = []
        for before in reversed(behind[:-1]):
            cut = self._last_of(used, stop, before, limit)
            found.append(cut)
            used, stop = used ^ 1 << cut[0], cut[1]
        return found[::-1]

    def _stops(self, number: int, starts: int, limit: int) -> int:
        """Where the member can stop that begins at one of `starts`."""
        bits, found = self._members[number], 0
        starts &= bits
        while starts:
            first = (starts & -starts).bit_length() - 1
            last = run_end(starts, first) - 1
            stop = min(run_end(bits, first), last + limit)
            if stop > first:
                found |= (1 << (stop + 1)) - (1 << (first + 1))
            starts = starts >> (last + 1) << (last + 1)
        return found

    def _last_of(self, used: int, stop: int, before: dict[int, int], limit: int) -> Cut:
        """Which of these members runs what ends at `stop`, and from where: the one that leaves
        the others the part that is theirs, as nearly as can be."""
        count = used.bit_count()
        choices: list[tuple[int, int, int]] = []
        for number, bits in enumerate(self._members):
            starts = before.get(used ^ 1 << number, 0) if used >> number & 1 else 0
            start = stop - 1
            while start >= 0 and bits >> start & 1 and stop - start <= limit:
                if starts >> start & 1:
                    apart = abs(start * count - stop * (count - 1))
                    choices.append((apart, number, start))
                start -= 1
        _, number, start = min(choices)
        return number, start, stop


def _most(cuts: Sequence[Cut]) -> int:
    return max(stop - start for _, start, stop in cuts)
