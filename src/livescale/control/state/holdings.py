"""Holdings: which bytes lie on which member, and the copies of a model that they make up.

Rule: a holding changes state only through `Holding.move`; a pair that is not in `TRANSITIONS`
raises.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from livescale.messages.commands import DropHolding, ReleaseHolding, StartHolding
from livescale.messages.events import (
    FirstByteArrived,
    HoldingCompleted,
    HoldingDropped,
    HoldingFailed,
    LayerArrived,
    WorkerLost,
)
from livescale.values.types import HoldingId, InstanceId, Value, WorkerRef


class HoldingState(enum.StrEnum):
    """The life of a holding. A SPARE is whole and serves no instance; one that is WAKING was made
    of a spare, and its worker takes the model over. LEAVING begins with the order to drop the
    bytes."""

    ORDERED = "ordered"
    ARRIVING = "arriving"
    WHOLE = "whole"
    SPARE = "spare"
    WAKING = "waking"
    LEAVING = "leaving"
    GONE = "gone"


TRANSITIONS: dict[HoldingState, dict[type[Value], HoldingState]] = {
    HoldingState.ORDERED: {
        FirstByteArrived: HoldingState.ARRIVING,
        LayerArrived: HoldingState.ARRIVING,
        HoldingCompleted: HoldingState.WHOLE,
        HoldingFailed: HoldingState.GONE,
        DropHolding: HoldingState.LEAVING,
        WorkerLost: HoldingState.GONE,
    },
    HoldingState.ARRIVING: {
        # A holding adopted as ARRIVING may report its first byte only now.
        FirstByteArrived: HoldingState.ARRIVING,
        LayerArrived: HoldingState.ARRIVING,
        HoldingCompleted: HoldingState.WHOLE,
        HoldingFailed: HoldingState.GONE,
        DropHolding: HoldingState.LEAVING,
        WorkerLost: HoldingState.GONE,
    },
    HoldingState.WHOLE: {
        ReleaseHolding: HoldingState.SPARE,
        # It was all there, and does not compute.
        HoldingFailed: HoldingState.GONE,
        DropHolding: HoldingState.LEAVING,
        WorkerLost: HoldingState.GONE,
    },
    HoldingState.SPARE: {
        # The ranks of one copy may have been released in different lives of the controller.
        ReleaseHolding: HoldingState.SPARE,
        # It failed before its release was obeyed.
        HoldingFailed: HoldingState.GONE,
        # The bytes are a new holding's.
        StartHolding: HoldingState.GONE,
        DropHolding: HoldingState.LEAVING,
        WorkerLost: HoldingState.GONE,
    },
    HoldingState.WAKING: {
        HoldingCompleted: HoldingState.WHOLE,
        HoldingFailed: HoldingState.GONE,
        DropHolding: HoldingState.LEAVING,
        WorkerLost: HoldingState.GONE,
    },
    # What was reported before the order to drop arrived is late; only the last answer counts.
    HoldingState.LEAVING: {
        FirstByteArrived: HoldingState.LEAVING,
        LayerArrived: HoldingState.LEAVING,
        HoldingCompleted: HoldingState.LEAVING,
        HoldingFailed: HoldingState.LEAVING,
        HoldingDropped: HoldingState.GONE,
        WorkerLost: HoldingState.GONE,
    },
    HoldingState.GONE: {},
}


_HAS_ALL = (HoldingState.WHOLE, HoldingState.SPARE, HoldingState.WAKING)


class InvalidMove(Exception):
    """A holding was asked for a move that its state does not allow."""


@dataclass(slots=True, eq=False)
class Holding:
    """Some layers of one rank of a model on one member. `watermark` is the end of the prefix of
    its span that is there; layers `beyond` are there, too."""

    order: StartHolding
    watermark: int = 0
    state: HoldingState = HoldingState.ORDERED
    beyond: dict[int, None] = field(default_factory=dict)

    @property
    def id(self) -> HoldingId:
        return self.order.holding

    @property
    def member(self) -> WorkerRef:
        return self.order.holding.member

    @property
    def is_whole(self) -> bool:
        """Every layer of its span is there, and stays."""
        return self.state in _HAS_ALL

    def layer_came(self, layer: int, watermark: int) -> None:
        """The layer is there, and so is the prefix up to the watermark."""
        self.watermark = max(self.watermark, watermark)
        self.beyond[layer] = None
        self.beyond = {n: None for n in self.beyond if n >= self.watermark}

    def has(self, layer: int) -> bool:
        """The layer is there."""
        return layer < self.watermark or layer in self.beyond

    def move(self, cause: type[Value]) -> None:
        """Apply the table. Raises InvalidMove."""
        target = TRANSITIONS[self.state].get(cause)
        if target is None:
            raise InvalidMove(f"{self!r} cannot take {cause.__name__}")
        self.state = target
        if target is HoldingState.WHOLE:
            self.watermark = self.order.span.stop

    def __repr__(self) -> str:
        return f"<Holding {self.id} of {self.order.model}, {self.state.name}>"


@dataclass(slots=True, eq=False)
class Copy:
    """The holdings of all ranks of a model: those of an instance, or those in the memory of one
    host (no instance; then every rank's member is the host's agent).

    `members` stand in the order of their ranks; `ranks` has the holdings that are there. A copy
    that `is_given_up` was ordered away, or can never be whole: nothing is read from there, and
    what is left of the copy goes.
    """

    model: str
    members: tuple[WorkerRef, ...]
    size_bytes: int
    instance: InstanceId | None
    ranks: dict[int, Holding] = field(default_factory=dict)
    is_given_up: bool = False
    used_ns: int = 0

    @property
    def key(self) -> InstanceId | WorkerRef:
        """Names the copy among those of its model."""
        return self.members[0] if self.instance is None else self.instance

    @property
    def holder(self) -> WorkerRef:
        """The worker of rank 0, or the agent."""
        return self.members[0]

    @property
    def is_on_host(self) -> bool:
        return self.instance is None

    @property
    def is_there(self) -> bool:
        """Every rank is ordered or there."""
        return len(self.ranks) == len(self.members) and not self.is_given_up

    @property
    def is_complete(self) -> bool:
        """Every layer of every rank is there."""
        return self.is_there and all(holding.state in _HAS_ALL for holding in self.ranks.values())

    @property
    def is_loaded(self) -> bool:
        """Every rank has all its layers, and (an instance's) has taken the model over."""
        return self.is_there and all(h.state is HoldingState.WHOLE for h in self.ranks.values())

    @property
    def is_spare(self) -> bool:
        """Some rank is a warm spare: the copy is no instance's, or not any more."""
        return any(h.state is HoldingState.SPARE for h in self.ranks.values())

    @property
    def is_waking(self) -> bool:
        """Some rank was a warm spare, and its worker has not taken the model over yet."""
        return any(h.state is HoldingState.WAKING for h in self.ranks.values())

    @property
    def watermark(self) -> int:
        """The end of the prefix of layers that all ranks have."""
        if len(self.ranks) < len(self.members):
            return 0
        return min(holding.watermark for holding in self.ranks.values())

    def layers(self) -> list[int]:
        """The layers that all ranks have."""
        if len(self.ranks) < len(self.members):
            return []
        ranks = list(self.ranks.values())
        span = ranks[0].order.span
        return [n for n in range(span.start, span.stop) if all(h.has(n) for h in ranks)]

    def release(self) -> list[ReleaseHolding]:
        """The instance ends and the bytes stay: orders for every rank that is not a spare yet."""
        serving = [h for h in self.ranks.values() if h.state is not HoldingState.SPARE]
        for holding in serving:
            holding.move(ReleaseHolding)
        return [ReleaseHolding(holding.id) for holding in serving]

    def drop(self, reason: str) -> list[DropHolding]:
        """The copy goes: orders for what was not ordered away before."""
        self.is_given_up = True
        staying = [h for h in self.ranks.values() if h.state is not HoldingState.LEAVING]
        for holding in staying:
            holding.move(DropHolding)
        return [DropHolding(holding.id, reason) for holding in staying]

    def __repr__(self) -> str:
        whole = sum(holding.is_whole for holding in self.ranks.values())
        state = ", given up" if self.is_given_up else ""
        return f"<Copy of {self.model} on {self.holder}, {whole}/{len(self.members)} ranks{state}>"
