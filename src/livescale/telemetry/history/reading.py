"""A whole record, followed once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from livescale.messages.events import CapacityMeasured
from livescale.telemetry.history.changes import (
    Change,
    HoldingBegun,
    MemberGone,
    MemberJoined,
    SpareBegun,
    member_name,
)
from livescale.telemetry.history.follower import Follower
from livescale.telemetry.history.holding_history import HoldingHistory, InstanceHistory
from livescale.telemetry.record.record import AnyLine, RequestLine, RunLine, StepLine
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.types import InstanceId

CONTROLLER = "controller"


@dataclass(slots=True)
class Loss:
    """A worker, host agent or controller that was lost, and its replacement.

    `held` are the models that were on it, loading ones included; `requests` those that it had been
    given and not ended. `back_ns` is when the next incarnation was there (None: never). A
    controller was lost some time between `at_ns`, the last line of its life, and `back_ns`.
    """

    at_ns: int
    member: str
    reason: str
    held: tuple[str, ...] = ()
    requests: int = 0
    back_ns: int | None = None


@dataclass(slots=True)
class Departure:
    """A worker or host agent that left in order. `held` are the models of which it had a copy,
    `back_ns` is when its next incarnation was there (None: never)."""

    at_ns: int
    member: str
    held: tuple[str, ...] = ()
    back_ns: int | None = None


@dataclass(slots=True)
class Absence:
    """A worker that was lost, or `has_left`, is not there until its successor joins (None: to the
    end)."""

    from_ns: int
    has_left: bool
    until_ns: int | None = None


@dataclass(slots=True)
class History:
    """What became of one start of a pool. Times are the record's.

    `instances`, `copies` (host copies, one entry per rank) and `spares` (what workers hold for no
    instance, likewise) are in order of their beginning, `losses` and `departures` in their own.
    `policies` has every model that was ever served, `workers` the numbers of all that appeared,
    `absences` when these were not there. A gateway is no member: a record does not have its end.
    `is_cut`: the record begins with a further part.
    """

    instances: list[InstanceHistory] = field(default_factory=list)
    copies: list[HoldingHistory] = field(default_factory=list)
    spares: list[HoldingHistory] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    departures: list[Departure] = field(default_factory=list)
    requests: list[RequestLine] = field(default_factory=list)
    measured: list[CapacityMeasured] = field(default_factory=list)
    policies: dict[str, ModelPolicy] = field(default_factory=dict)
    workers: dict[int, None] = field(default_factory=dict)
    absences: dict[int, list[Absence]] = field(default_factory=dict)
    is_cut: bool = False
    started_ns: int = 0
    end_ns: int = 0

    @property
    def prefill_tokens_per_s(self) -> dict[str, int | None]:
        """What one instance of each model can compute: as configured, else as measured last; None
        where neither is known."""
        measured = {event.model: event.prefill_tokens_per_s for event in self.measured}
        configured = {m: policy.prefill_tokens_per_s for m, policy in self.policies.items()}
        return {m: rate or measured.get(m) for m, rate in configured.items()}

    @property
    def by_number(self) -> dict[InstanceId, InstanceHistory]:
        """Instances by id: the last of one that came back when its worker had counted as lost."""
        return {instance.number: instance for instance in self.instances}

    @property
    def holdings(self) -> list[HoldingHistory]:
        """What workers held, rank by rank."""
        return [held for instance in self.instances for held in instance.holdings]


def read_history(lines: Iterable[AnyLine]) -> History:
    """The history of one start of a pool. What a record that begins in the middle lacks is
    missing."""
    reader = _Reader()
    for line in lines:
        if isinstance(line, RunLine):
            reader.begin(line)
        elif isinstance(line, StepLine):
            reader.step(line)
        elif isinstance(line, RequestLine):
            reader.history.requests.append(line)
            # Its end may have come while there was no controller.
            reader.follower.running.pop(line.request, None)
    return reader.history


# -- helpers --------------------------------------------------------------------------------------


class _Reader:
    """Collects what a Follower reports."""

    def __init__(self) -> None:
        self.follower = Follower()
        self.history = History(policies=self.follower.policies)
        #: members, by number, whose successor has not joined yet
        self._away: dict[int, Loss | Departure] = {}
        self._controller_away: Loss | None = None
        self._last_ns: int | None = None

    def begin(self, line: RunLine) -> None:
        history = self.history
        if self._last_ns is None:
            history.is_cut = line.is_continued
        elif not line.is_continued:
            self._controller_away = Loss(self._last_ns, CONTROLLER, "a further life of it began")
            history.losses.append(self._controller_away)
        self.follower.begin(line.config)

    def step(self, line: StepLine) -> None:
        history = self.history
        if self._controller_away is not None:
            self._controller_away.back_ns, self._controller_away = line.now_ns, None
        if self._last_ns is None:
            history.started_ns = line.now_ns
        history.end_ns, self._last_ns = line.now_ns, line.done_ns
        for change in self.follower.step(line.now_ns, line.events, line.commands):
            self._note(line.now_ns, change)

    def _note(self, now_ns: int, change: Change) -> None:
        history = self.history
        if isinstance(change, HoldingBegun):
            held = change.holding
            if held.instance is None:
                (history.copies if held.member.is_agent else history.spares).append(held)
            else:
                if held.instance.holdings[0] is held:
                    history.instances.append(held.instance)
                history.workers[held.member.worker] = None
        elif isinstance(change, SpareBegun):
            history.spares.append(change.holding)
        elif isinstance(change, MemberJoined):
            self._joined(now_ns, change)
        elif isinstance(change, MemberGone):
            self._gone(now_ns, change)
        elif isinstance(change, CapacityMeasured):
            history.measured.append(change)

    def _joined(self, now_ns: int, change: MemberJoined) -> None:
        """Workers whose joining is not on record were there."""
        number = change.member.worker
        if not change.member.is_agent:
            self.history.workers[number] = None
        away = self._away.pop(number, None)
        if away is None:
            return
        away.back_ns = now_ns
        if not change.member.is_agent:
            self.history.absences[number][-1].until_ns = now_ns

    def _gone(self, now_ns: int, change: MemberGone) -> None:
        history, member = self.history, change.member
        held = tuple(dict.fromkeys(held.model for held in change.holdings))
        if change.has_left:
            departure = Departure(now_ns, member_name(member), held)
            history.departures.append(departure)
            self._away[member.worker] = departure
        else:
            loss = Loss(now_ns, member_name(member), change.reason, held, change.requests)
            history.losses.append(loss)
            self._away[member.worker] = loss
        if not member.is_agent:
            absence = Absence(now_ns, change.has_left)
            history.absences.setdefault(member.worker, []).append(absence)
