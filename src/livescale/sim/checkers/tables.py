"""Instances change state only along the table, and each move for a cause.

The table is written down here again, so that a change of the controller's must be made twice. The
fleet is looked at after each step: from the state before there must be a way to the state after
that uses only what this step's events and commands say of the instance.
"""

from __future__ import annotations

from collections.abc import Sequence

from livescale.control.fleet import Fleet
from livescale.messages.commands import AnyCommand, Drain, Resume, StartLoad
from livescale.messages.events import (
    AnyEvent,
    LayerArrived,
    LiveStarted,
    LoadCompleted,
    LoadFailed,
    LoadStarted,
    Released,
    WorkerJoined,
    WorkerLost,
)
from livescale.sim.checkers.invariants import require
from livescale.types import InstanceId, InstanceState, Value, WorkerRef

_Cause = type[Value]

#: state before, cause, state after
_MOVES: tuple[tuple[InstanceState, _Cause, InstanceState], ...] = (
    (InstanceState.STARTING, LoadStarted, InstanceState.LOADING),
    (InstanceState.STARTING, LiveStarted, InstanceState.LIVE),
    (InstanceState.STARTING, LoadFailed, InstanceState.STOPPED),
    (InstanceState.STARTING, WorkerLost, InstanceState.LOST),
    (InstanceState.LOADING, LiveStarted, InstanceState.LIVE),
    (InstanceState.LOADING, LoadCompleted, InstanceState.SERVING),
    (InstanceState.LOADING, LoadFailed, InstanceState.STOPPED),
    (InstanceState.LOADING, WorkerLost, InstanceState.LOST),
    (InstanceState.LIVE, LoadCompleted, InstanceState.SERVING),
    (InstanceState.LIVE, LoadFailed, InstanceState.STOPPED),
    (InstanceState.LIVE, WorkerLost, InstanceState.LOST),
    (InstanceState.SERVING, Drain, InstanceState.DRAINING),
    (InstanceState.SERVING, WorkerLost, InstanceState.LOST),
    (InstanceState.DRAINING, Resume, InstanceState.SERVING),
    (InstanceState.DRAINING, Released, InstanceState.STOPPED),
    (InstanceState.DRAINING, WorkerLost, InstanceState.LOST),
)
_OF_AN_INSTANCE = LoadStarted | LiveStarted | LayerArrived | LoadCompleted | LoadFailed | Released
_ENDS = {InstanceState.STOPPED: None, InstanceState.LOST: None}


class TableChecker:
    """Looks at one life's fleet whenever it says that it changed."""

    def __init__(self) -> None:
        self._version = -1
        self._states: dict[InstanceId, InstanceState] = {}
        self._workers: dict[InstanceId, tuple[WorkerRef, ...]] = {}
        #: instances of which a worker told that it has something of them
        self._reported: dict[InstanceId, None] = {}
        self._over: dict[InstanceId, None] = {}

    def observe(
        self, fleet: Fleet, events: Sequence[AnyEvent], commands: Sequence[AnyCommand]
    ) -> None:
        """Check one step."""
        for event in events:
            if isinstance(event, WorkerJoined) and event.report is not None:
                self._reported[event.report.instance] = None
        if fleet.version == self._version:
            return
        self._version = fleet.version
        causes = self._causes(events, commands)
        for number, instance in fleet.instances.items():
            require(number not in self._over, "an instance ends once", instance)
            before = self._states.get(number)
            begins = [before] if before is not None else self._begins(number, commands)
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

    def _causes(
        self, events: Sequence[AnyEvent], commands: Sequence[AnyCommand]
    ) -> dict[InstanceId, dict[_Cause, None]]:
        """What this step says of each instance."""
        causes: dict[InstanceId, dict[_Cause, None]] = {}
        for said in (*events, *commands):
            if isinstance(said, _OF_AN_INSTANCE | Drain | Resume):
                causes.setdefault(said.instance, {})[type(said)] = None
            elif isinstance(said, WorkerLost | WorkerJoined):
                # A next incarnation is news of the loss of the one before.
                for number, workers in self._workers.items():
                    if any(worker.worker == said.worker.worker for worker in workers):
                        causes.setdefault(number, {})[WorkerLost] = None
        return causes

    def _begins(self, number: InstanceId, commands: Sequence[AnyCommand]) -> list[InstanceState]:
        """States in which an instance may appear."""
        if number in self._reported:
            return [InstanceState.LOADING, InstanceState.LIVE, InstanceState.SERVING]
        starts = [c for c in commands if isinstance(c, StartLoad) and c.instance == number]
        require(bool(starts), "instances begin with an order or a report", number)
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
