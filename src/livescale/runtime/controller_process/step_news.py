"""What is new in a controller's steps, in words for people: one line per event.

Looks at what changed and at the controller's status; decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from livescale.common.settings import size_text
from livescale.control.reports.status import ModelSummary
from livescale.messages.commands import ModelGone
from livescale.messages.events import ModelAdded, ModelRemoved, TeamBroke
from livescale.runtime.wire.news import LoadProgress, News
from livescale.telemetry.history import changes
from livescale.telemetry.history.holding_history import Ending, HoldingHistory
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.types import Role, WorkerRef

# Loads that go on failing are news again only after this time.
_REPEAT_NS = 300_000_000_000


class StepNews:
    """Everything that one life of a controller tells people. Times are of one monotonic clock."""

    def __init__(self) -> None:
        #: loads that are under way
        self._loads: dict[HoldingHistory, None] = {}
        #: models whose loads fail: when that was logged last, and whether they were given up then
        self._failing: dict[str, tuple[int, bool]] = {}
        #: per model, failed loads that were looked at
        self._failures: dict[str, int] = {}
        self._told: list[tuple[str, int]] = []
        #: workers and agents whose node leaves in order
        self._leaving: set[WorkerRef] = set()

    def leave(self, members: Iterable[WorkerRef]) -> None:
        """The end of these is in order: their node may go."""
        self._leaving.update(members)

    def observe(
        self, now_ns: int, changed: Sequence[changes.Change], models: Mapping[str, ModelSummary]
    ) -> tuple[News, ...]:
        """The news of one step: what it changed, and the status of all models after it."""
        found = [self._of_change(now_ns, change, models) for change in changed]
        found += [self._recovered(model, models) for model in list(self._failing)]
        return tuple(news for news in found if news is not None)

    def progress(self, now_ns: int) -> tuple[LoadProgress, ...] | None:
        """Loads under way; None if none has got on since the last call."""
        arrived = [(str(load.member), load.arrived_bytes) for load in self._loads]
        if arrived == self._told:
            return None
        self._told = arrived
        return tuple(
            LoadProgress(
                model=load.model,
                receiver=str(load.member),
                arrived_bytes=load.arrived_bytes,
                size_bytes=load.size_bytes,
                elapsed_ns=now_ns - load.begun_ns,
            )
            for load in self._loads
        )

    # -- helpers, in the order used -------------------------------------------------------------

    def _of_change(
        self, now_ns: int, change: changes.Change, models: Mapping[str, ModelSummary]
    ) -> News | None:
        if isinstance(change, changes.HoldingBegun):
            return self._ordered(change.holding)
        if isinstance(change, changes.HoldingWhole):
            return self._completed(now_ns, change.holding)
        if isinstance(change, changes.HoldingEnded):
            return self._ended(now_ns, change.holding, models.get(change.holding.model))
        if isinstance(change, changes.MemberJoined):
            again = " in its place" if change.member.incarnation else ""
            return News(f"{changes.member_name(change.member)} has joined{again}")
        if isinstance(change, changes.MemberGone):
            if change.member in self._leaving:
                self._leaving.remove(change.member)
                return News(f"{changes.member_name(change.member)} has left")
            loads = [held.model for held in change.holdings if held.whole_ns is None]
            was = f" while loading {', '.join(loads)}" if loads else ""
            text = f"{changes.member_name(change.member)} is lost{was}: {change.reason}"
            return News(text, is_problem=True)
        if isinstance(change, changes.Decided):
            decision = change.decision
            numbers = f"{decision.from_instances} -> {decision.to_instances} instances"
            role = "" if decision.role is Role.UNIFIED else f" {decision.role}"
            return News(f"model {decision.model}{role}: {numbers} ({decision.reason})")
        if isinstance(change, TeamBroke):
            where = "" if change.between is None else " between {} and {}".format(*change.between)
            text = f"team {change.team} of instance {change.instance} broke{where}"
            return News(text, is_problem=True)
        if isinstance(change, ModelAdded):
            policy = change.policy
            size = size_text(policy.spec.size_bytes)
            return News(f"model {policy.spec.name}: published, {size}, {_limits_text(policy)}")
        if isinstance(change, ModelRemoved):
            return News(f"model {change.model}: withdrawn; the gateway rejects new requests")
        if isinstance(change, ModelGone):
            self._failures.pop(change.model, None)
            return News(f"model {change.model}: removed from all workers")
        return None

    def _ordered(self, load: HoldingHistory) -> News | None:
        if not load.is_ordered:
            return None
        self._loads[load] = None
        if load.model in self._failing:
            return None  # one of many trials
        size, senders = size_text(load.size_bytes), ", ".join(load.senders)
        return News(f"{_named(load)} receives {size} from {senders}")

    def _completed(self, now_ns: int, load: HoldingHistory) -> News | None:
        if load not in self._loads:
            return None
        del self._loads[load]
        elapsed_ns = max(now_ns - load.begun_ns, 1)
        rate = size_text(load.size_bytes * 1_000_000_000 / elapsed_ns)
        there = "is complete" if load.instance is None else "is loaded"
        return News(
            f"{_named(load)} {there}:"
            f" {size_text(load.size_bytes)} in {elapsed_ns / 1e9:.3g} s ({rate}/s)"
        )

    def _ended(self, now_ns: int, load: HoldingHistory, model: ModelSummary | None) -> News | None:
        was_loading = load in self._loads
        self._loads.pop(load, None)
        if not was_loading or load.ending is not Ending.FAILED or model is None:
            return None
        if model.failed_loads == self._failures.get(load.model, 0):
            return None  # it was taken back
        self._failures[load.model] = model.failed_loads
        before = self._failing.get(load.model)
        is_given_up = model.problem is not None
        if before is not None and before[1] == is_given_up and now_ns < before[0] + _REPEAT_NS:
            return None
        self._failing[load.model] = (now_ns, is_given_up)
        if is_given_up:
            text = f"model {load.model}: cannot be loaded now, and is retried: {load.reason}"
        else:
            text = f"{_named(load)} failed and is retried: {load.reason}"
        return News(text, is_problem=True)

    def _recovered(self, model: str, models: Mapping[str, ModelSummary]) -> News | None:
        status = models.get(model)
        if status is not None and status.is_failing:
            return None
        del self._failing[model]
        return News(f"model {model}: loads succeed again") if status is not None else None


def _limits_text(policy: ModelPolicy) -> str:
    limits = f"{policy.instances_min} to {policy.instances_max} instances"
    roles = [f"{r.role} {r.instances_min} to {r.instances_max}" for r in policy.roles]
    return f"{limits} ({', '.join(roles)})" if roles else limits


def _named(load: HoldingHistory) -> str:
    what = "copy" if load.instance is None else f"instance {load.instance.number}"
    return f"model {load.model}: {what} on {load.member}"
