"""Instances change state only along the table, and each move for a cause.

The table is written down here again, so that a change of the controller's must be made twice. The
fleet is looked at after each step: from the state before there must be a way to the state after
that uses only what this step's events and commands say of the instance.
"""

from __future__ import annotations

from collections.abc import Sequence

from livescale.control.fleet import Fleet
from livescale.messages.commands import AnyCommand, Drain, Resume, StartHolding
from livescale.messages.events import (
    AnyEvent,
    FirstByteArrived,
    HoldingCompleted,
    HoldingDropped,
    HoldingFailed,
    LiveStarted,
    WorkerJoined,
    WorkerLost,
)
from livescale.sim.checkers.invariants import require
from livescale.types import HoldingId, InstanceId, InstanceState, Value, WorkerRef

_Cause = type[Value]

#: state before, cause, state after
_MOVES: tuple[tuple[InstanceState, _Cause, InstanceState], ...] = (
    (InstanceState.STARTING, FirstByteArrived, InstanceState.LOADING),
    (InstanceState.STARTING, LiveStarted, InstanceState.LIVE),
    (InstanceState.STARTING, HoldingFailed, InstanceState.STOPPED),
    (InstanceState.STARTING, WorkerLost, InstanceState.LOST),
    (InstanceState.LOADING, LiveStarted, InstanceState.LIVE),
    (InstanceState.LOADING, HoldingCompleted, InstanceState.SERVING),
    (InstanceState.LOADING, HoldingFailed, InstanceState.STOPPED),
    (InstanceState.LOADING, WorkerLost, InstanceState.LOST),
    (InstanceState.LIVE, HoldingCompleted, InstanceState.SERVING),
    (InstanceState.LIVE, HoldingFailed, InstanceState.STOPPED),
    (InstanceState.LIVE, WorkerLost, InstanceState.LOST),
    (InstanceState.SERVING, Drain, InstanceState.DRAINING),
    (InstanceState.SERVING, WorkerLost, InstanceState.LOST),
    (InstanceState.DRAINING, Resume, InstanceState.SERVING),
    (InstanceState.DRAINING, HoldingDropped, InstanceState.STOPPED),
    (InstanceState.DRAINING, WorkerLost, InstanceState.LOST),
)
_OF_A_HOLDING = FirstByteArrived | LiveStarted | HoldingCompleted | HoldingFailed | HoldingDropped
_ENDS = {InstanceState.STOPPED: None, InstanceState.LOST: None}


class TableChecker:
    """Looks at one life's fleet whenever it says that it changed."""

    def __init__(self) -> None:
        self._version = -1
        self._states: dict[InstanceId, InstanceState] = {}
        self._workers: dict[InstanceId, tuple[WorkerRef, ...]] = {}
        #: whose ranks these are, as they were ordered or reported
        self._instance_of: dict[HoldingId, InstanceId] = {}
        #: instances of which a worker told that it has something of them
        self._reported: dict[InstanceId, None] = {}
        self._over: dict[InstanceId, None] = {}

    def observe(
        self, fleet: Fleet, events: Sequence[AnyEvent], commands: Sequence[AnyCommand]
    ) -> None:
        """Check one step."""
        for event in events:
            if isinstance(event, WorkerJoined):
                for report in event.holdings:
                    self._reported |= self._note(report.order)
        ordered: dict[InstanceId, None] = {}
        for command in commands:
            if isinstance(command, StartHolding):
                ordered |= self._note(command)
        if fleet.version == self._version:
            return
        self._version = fleet.version
        causes = self._causes(events, commands)
        for number, instance in fleet.instances.items():
            require(number not in self._over, "an instance ends once", instance)
            before = self._states.get(number)
            begins = [before] if before is not None else self._begins(number, ordered)
            after = self._reachable(begins, causes.get(number, {}))
            require(instance.state in after, "states change along the table", instance, before)
            self._states[number] = instance.state
            self._workers[number] = instance.workers
        for number in [number for number in self._states if number not in fleet.instances]:
            self._workers.pop(number)
            before = self._states.pop(number)
            after = self._reachable([before], causes.get(number, {}))
            require(any(end in after for end in _ENDS), "instances end for a cause", number, before)
            self._over[number] = None

    # -- helpers --------------------------------------------------------------------------------

    def _note(self, order: StartHolding) -> dict[InstanceId, None]:
        """Whose rank it is."""
        if order.duty is None:
            return {}
        self._instance_of[order.holding] = order.duty.instance
        return {order.duty.instance: None}

    def _causes(
        self, events: Sequence[AnyEvent], commands: Sequence[AnyCommand]
    ) -> dict[InstanceId, dict[_Cause, None]]:
        """What this step says of each instance."""
        causes: dict[InstanceId, dict[_Cause, None]] = {}
        for said in (*events, *commands):
            if isinstance(said, Drain | Resume):
                causes.setdefault(said.instance, {})[type(said)] = None
            elif isinstance(said, _OF_A_HOLDING) and said.holding in self._instance_of:
                causes.setdefault(self._instance_of[said.holding], {})[type(said)] = None
            elif isinstance(said, WorkerLost | WorkerJoined):
                # A next incarnation is news of the loss of the one before.
                for number, workers in self._workers.items():
                    if any(worker.worker == said.worker.worker for worker in workers):
                        causes.setdefault(number, {})[WorkerLost] = None
        return causes

    def _begins(self, number: InstanceId, ordered: dict[InstanceId, None]) -> list[InstanceState]:
        """States in which an instance may appear."""
        if number in self._reported:
            return [InstanceState.LOADING, InstanceState.LIVE, InstanceState.SERVING]
        require(number in ordered, "instances begin with an order or a report", number)
        return [InstanceState.STARTING]

    @staticmethod
    def _reachable(
        begins: list[InstanceState], causes: dict[_Cause, None]
    ) -> dict[InstanceState, None]:
        """States to which these causes can have led."""
        found = dict.fromkeys(begins)
        ahead = list(begins)
        while ahead:
            state = ahead.pop()
            for before, cause, after in _MOVES:
                if before is state and cause in causes and after not in found:
                    found[after] = None
                    ahead.append(after)
        return found
