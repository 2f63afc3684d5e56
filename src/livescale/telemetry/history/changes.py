"""What a step changed, as `Follower` reports it."""

from __future__ import annotations

from dataclasses import dataclass

from livescale.messages.commands import AnyCommand, ScaleDecided
from livescale.messages.events import AnyEvent
from livescale.telemetry.history.holding_history import HoldingHistory, InstanceHistory
from livescale.values.types import RequestId, WorkerRef


@dataclass(frozen=True, slots=True)
class MemberJoined:
    """A worker or host agent is there."""

    member: WorkerRef


@dataclass(frozen=True, slots=True)
class MemberGone:
    """A worker or host agent is gone, or another incarnation took its place, with what it held and
    so many dispatched requests. It `has_left` if it was to leave and had no part in an instance nor
    a request any more; else it was lost."""

    member: WorkerRef
    reason: str
    holdings: tuple[HoldingHistory, ...]
    requests: int
    has_left: bool


@dataclass(frozen=True, slots=True)
class _OfHolding:
    holding: HoldingHistory


class HoldingBegun(_OfHolding):
    """A holding was ordered, or reported for the first time."""


class HoldingWhole(_OfHolding):
    """Every layer of a holding is there."""


class HoldingEnded(_OfHolding):
    """Nothing of a holding is left: `ending` and `reason` are known."""


class SpareBegun(_OfHolding):
    """A released worker keeps its parameters as a warm spare, or reported one for the first
    time. What they were before has ended."""


class SpareEnded(_OfHolding):
    """A warm spare was dropped, went with its member, or became another holding."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """An instance has emitted its first token."""

    instance: InstanceHistory


@dataclass(frozen=True, slots=True)
class Decided:
    """A scaling decision. The request `woken_by`, which arrived at `asked_ns`, was the first to
    wait for a model that had no instance."""

    decision: ScaleDecided
    woken_by: RequestId | None = None
    asked_ns: int | None = None


Change = (
    MemberJoined
    | MemberGone
    | HoldingBegun
    | HoldingWhole
    | HoldingEnded
    | SpareBegun
    | SpareEnded
    | FirstToken
    | Decided
    | AnyEvent
    | AnyCommand
)
"""Messages that are not about members, holdings and requests are changes as they are."""


def member_name(member: WorkerRef) -> str:
    """ "worker w1.0", "host agent h0.2"."""
    return f"{'host agent' if member.is_agent else 'worker'} {member}"
