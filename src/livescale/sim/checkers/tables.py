"""Instances change state only along the table, and each move for a cause.

The table is written down here again, so that a change of the controller's must be made twice. The
fleet is looked at after each step: from the state before there must be a way to the state after
that uses only what this step's events and commands say of the instance.
"""

from __future__ import annotations

from collections.abc import Sequence

from livescale.control.state.fleet import Fleet
from livescale.messages import commands, events
from livescale.sim.checkers.invariants import require
from livescale.sim.checkers.knowledge import PROGRESS
from livescale.values.types import HoldingId, InstanceId, InstanceState, Value, WorkerRef

_Cause = type[Value]

#: state before (None: the instance is new), cause, state after
_MOVES: tuple[tuple[InstanceState | None, _Cause, InstanceState], ...] = (
    (None, commands.StartHolding, InstanceState.STARTING),
    (None, events.HoldingReport, InstanceState.LOADING),
    (None, events.HoldingReport, InstanceState.LIVE),
    (None, events.HoldingReport, InstanceState.SERVING),
    (InstanceState.STARTING, events.FirstByteArrived, InstanceState.LOADING),
    (InstanceState.STARTING, events.LayerArrived, InstanceState.LOADING),
    (InstanceState.STARTING, events.LiveStarted, InstanceState.LIVE),
    (InstanceState.STARTING, events.HoldingCompleted, InstanceState.SERVING),
    (InstanceState.STARTING, events.HoldingFailed, InstanceState.STOPPED),
    (InstanceState.STARTING, events.WorkerLost, InstanceState.LOST),
    (InstanceState.LOADING, events.LiveStarted, InstanceState.LIVE),
    (InstanceState.LOADING, events.HoldingCompleted, InstanceState.SERVING),
    (InstanceState.LOADING, events.HoldingFailed, InstanceState.STOPPED),
    (InstanceState.LOADING, events.WorkerLost, InstanceState.LOST),
    (InstanceState.LIVE, events.HoldingCompleted, InstanceState.SERVING),
    (InstanceState.LIVE, events.HoldingFailed, InstanceState.STOPPED),
    (InstanceState.LIVE, events.WorkerLost, InstanceState.LOST),
    (InstanceState.SERVING, commands.Drain, InstanceState.DRAINING),
    (InstanceState.SERVING, events.HoldingFailed, InstanceState.STOPPED),
    (InstanceState.SERVING, events.WorkerLost, InstanceState.LOST),
    (InstanceState.DRAINING, commands.Resume, InstanceState.SERVING),
    (InstanceState.DRAINING, commands.ReleaseHolding, InstanceState.STOPPED),
    (InstanceState.DRAINING, events.HoldingDropped, InstanceState.STOPPED),
    (InstanceState.DRAINING, events.HoldingFailed, InstanceState.STOPPED),
    (InstanceState.DRAINING, events.WorkerLost, InstanceState.LOST),
)
_ARRIVES = events.FirstByteArrived | events.LiveStarted | events.HoldingCompleted
_GOES = events.HoldingFailed | events.HoldingDropped | commands.ReleaseHolding
_ENDS = {InstanceState.STOPPED: None, InstanceState.LOST: None}


class TableChecker:
    """Looks at one life's fleet whenever it has changed."""

    def __init__(self) -> None:
        self._version = -1
        self._states: dict[InstanceId, InstanceState] = {}
        self._workers: dict[InstanceId, tuple[WorkerRef, ...]] = {}
        #: whose ranks these are, as they were ordered or reported
        self._instance_of: dict[HoldingId, InstanceId] = {}
        self._over: dict[InstanceId, None] = {}

    def observe(
        self,
        fleet: Fleet,
        received: Sequence[events.AnyEvent],
        ordered: Sequence[commands.AnyCommand],
    ) -> None:
        """Check one step."""
        telling = [event for event in received if not isinstance(event, PROGRESS)]
        causes = self._causes(telling, ordered)
        if fleet.version == self._version:
            return
        self._version = fleet.version
        for number, instance in fleet.instances.items():
            require(number not in self._over, "an instance ends once", instance)
            before = self._states.get(number)
            after = self._reachable(before, causes.get(number, {}))
            require(instance.state in after, "states change along the table", instance, before)
            self._states[number] = instance.state
            self._workers[number] = instance.workers
        for number in [number for number in self._states if number not in fleet.instances]:
            self._workers.pop(number)
            before = self._states.pop(number)
            after = self._reachable(before, causes.get(number, {}))
            require(any(end in after for end in _ENDS), "instances end for a cause", number, before)
            self._over[number] = None

    # -- helpers --------------------------------------------------------------------------------

    def _causes(
        self, received: Sequence[events.AnyEvent], ordered: Sequence[commands.AnyCommand]
    ) -> dict[InstanceId, dict[_Cause, None]]:
        """What this step reports or orders of each instance."""
        causes: dict[InstanceId, dict[_Cause, None]] = {}
        for news in (*received, *ordered):
            orders = [news] if isinstance(news, commands.StartHolding) else []
            if isinstance(news, commands.Drain | commands.Resume):
                causes.setdefault(news.instance, {})[type(news)] = None
            elif isinstance(news, _ARRIVES | _GOES) and news.holding in self._instance_of:
                causes.setdefault(self._instance_of[news.holding], {})[type(news)] = None
            elif isinstance(news, events.WorkerLost | events.WorkerJoined):
                # A next incarnation is news of the loss of the one before.
                for number, workers in self._workers.items():
                    if any(worker.worker == news.worker.worker for worker in workers):
                        causes.setdefault(number, {})[events.WorkerLost] = None
            if isinstance(news, events.WorkerJoined):
                orders = [report.order for report in news.holdings]
            for order in orders:
                if order.duty is not None:
                    self._instance_of[order.holding] = order.duty.instance
                    cause = commands.StartHolding if news is order else events.HoldingReport
                    causes.setdefault(order.duty.instance, {})[cause] = None
        return causes

    @staticmethod
    def _reachable(
        before: InstanceState | None, causes: dict[_Cause, None]
    ) -> dict[InstanceState | None, None]:
        """States to which these causes can have led."""
        found = {before: None}
        ahead = [before]
        while ahead:
            state = ahead.pop()
            for move_from, cause, after in _MOVES:
                if move_from is state and cause in causes and after not in found:
                    found[after] = None
                    ahead.append(after)
        return found
