"""Scale events pieced together from what a controller's steps changed: decided, planned, loaded,
used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from livescale.messages import commands
from livescale.telemetry.history.changes import (
    Change,
    Decided,
    FirstToken,
    HoldingBegun,
    HoldingEnded,
    HoldingWhole,
)
from livescale.telemetry.history.holding_history import (
    Ending,
    HoldingHistory,
    InstanceHistory,
    sender_names,
)
from livescale.telemetry.record.record import LoadPhases, ScaleLine
from livescale.values.types import InstanceId


class ScaleTracker:
    """Watches steps; scale events that are finished are handed out as ScaleLines in order of
    completion.

    A scale-up is finished when each of its instances has served a token, failed, was lost or was
    released unused; a scale-down when its instances were released, resumed or lost.
    """

    def __init__(self) -> None:
        self._open: list[_OpenEvent] = []

    def observe(self, now_ns: int, changes: Sequence[Change], done_ns: int) -> list[ScaleLine]:
        """Take in what one step changed; returns the scale events that it finished."""
        for change in changes:
            if isinstance(change, HoldingBegun):
                if change.holding.is_ordered and change.holding.instance is not None:
                    self._open[-1].loads.append(change.holding)
                    self._open[-1].awaited[change.holding.instance.number] = None
            elif isinstance(change, HoldingWhole):
                self._forget_if_used(change.holding.instance)
            elif isinstance(change, FirstToken):
                self._forget_if_used(change.instance)
            elif isinstance(change, HoldingEnded):
                self._ended(now_ns, change.holding)
            else:
                self._notice(now_ns, change, done_ns)
        finished = [event.as_line() for event in self._open if not event.awaited]
        self._open = [event for event in self._open if event.awaited]
        return finished

    def flush(self) -> list[ScaleLine]:
        """The events that never finished, with the phases known so far."""
        events, self._open = self._open, []
        return [event.as_line() for event in events]

    # -- helpers --------------------------------------------------------------------------------

    def _notice(self, now_ns: int, change: Change, done_ns: int) -> None:
        if isinstance(change, Decided):
            self._decided(now_ns, change, done_ns)
        elif isinstance(change, commands.PlanMade) and change.instances:
            plan = change.plan
            self._open[-1].line = msgspec.structs.replace(
                self._open[-1].line,
                plan=plan.plan,
                bytes_per_target=plan.bytes_per_target,
                routes=plan.routes(),
                strategy=plan.strategy,
                predicted_ns=plan.predicted_ns,
            )
        elif isinstance(change, commands.Paired):
            # "zigzag: helps instance 7, sends no parameters on"
            order = change.live_order or "waits"
            self._open[-1].pairings[change.instance] = f"{order}: {change.reason}"
        elif isinstance(change, commands.AmendHolding):
            new = f"{change.holding.member} from {' + '.join(sender_names(change.feeds))}"
            for event in self._open:
                if event.line.plan == change.holding.plan:
                    event.amendments.append(new)
        elif isinstance(change, commands.Drain):
            self._open[-1].awaited[change.instance] = None
        elif isinstance(change, commands.Resume):
            self._forget(change.instance, is_up=False)
        elif isinstance(change, commands.DropHolding):
            # A scale-up whose instance is released before its first token is finished.
            for event in self._open:
                for held in event.loads:
                    if held.id == change.holding and held.instance is not None:
                        event.awaited.pop(held.instance.number, None)

    def _decided(self, now_ns: int, change: Decided, done_ns: int) -> None:
        decision = change.decision
        line = ScaleLine(
            decision.model,
            decision.from_instances,
            decision.to_instances,
            decision.reason,
            decision.values,
            decided_ns=now_ns,
            planned_ns=done_ns,
            woken_by=change.woken_by,
            asked_ns=change.asked_ns,
            role=decision.role,
        )
        self._open.append(_OpenEvent(line))

    def _ended(self, now_ns: int, held: HoldingHistory) -> None:
        """An instance that has ended is awaited no longer."""
        instance = held.instance
        if instance is None or instance.ended_ns is None:
            return
        for event in self._open:
            if instance.number not in event.awaited:
                continue
            if held.ending is Ending.LOST:
                event.lost[instance.number] = f"worker lost: {held.reason}"
            elif held.ending is Ending.RELEASED and not event.loads:
                event.released_ns[instance.number] = now_ns
            del event.awaited[instance.number]

    def _forget_if_used(self, instance: InstanceHistory | None) -> None:
        """A live instance may serve its first token before all ranks have reported that they have
        everything: its scale-up is finished when both are known."""
        if instance is not None and instance.first_token_ns is not None and instance.is_whole:
            self._forget(instance.number, is_up=True)

    def _forget(self, instance: InstanceId, *, is_up: bool) -> None:
        """Scale-ups, or scale-downs, do not wait for the instance any more."""
        for event in self._open:
            if bool(event.loads) == is_up:
                event.awaited.pop(instance, None)


@dataclass(slots=True)
class _OpenEvent:
    """A scale event that is not finished: what was decided, and what came of it so far."""

    line: ScaleLine
    loads: list[HoldingHistory] = field(default_factory=list)
    awaited: dict[InstanceId, None] = field(default_factory=dict)
    #: how its instances work while they load, and why those that were lost were lost
    pairings: dict[InstanceId, str] = field(default_factory=dict)
    lost: dict[InstanceId, str] = field(default_factory=dict)
    released_ns: dict[InstanceId, int] = field(default_factory=dict)
    amendments: list[str] = field(default_factory=list)

    def as_line(self) -> ScaleLine:
        return msgspec.structs.replace(
            self.line,
            loads=tuple(self._phases(held) for held in self.loads),
            released_ns=self.released_ns,
            amendments=tuple(self.amendments),
        )

    def _phases(self, held: HoldingHistory) -> LoadPhases:
        assert held.instance is not None
        number = held.instance.number
        return LoadPhases(
            instance=number,
            worker=held.member,
            upstream=" + ".join(held.senders) if held.order.spare is None else "spare",
            rank=held.rank,
            first_byte_ns=held.first_byte_ns,
            first_layer_ns=held.first_layer_ns,
            loaded_ns=held.whole_ns,
            first_token_ns=held.instance.first_token_ns,
            failed=held.reason if held.ending is Ending.FAILED else self.lost.get(number),
            pairing=self.pairings.get(number, ""),
            live_ns=held.live_ns,
            first_help_ns=held.instance.first_help_ns,
        )
