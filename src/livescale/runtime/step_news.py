"""What is new in a controller's steps, in words for people: one line per event.

Looks at events, commands and the controller; decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from livescale.control.controller import Controller
from livescale.messages.commands import (
    AnyCommand,
    ModelGone,
    ScaleDecided,
    StartCopy,
    StartLoad,
)
from livescale.messages.events import (
    AgentJoined,
    AnyEvent,
    CopyCompleted,
    CopyFailed,
    LoadCompleted,
    LoadFailed,
    ModelAdded,
    ModelRemoved,
    WorkerJoined,
    WorkerLost,
)
from livescale.runtime.news import LoadProgress, News
from livescale.settings import size_text
from livescale.types import InstanceId, PlanId, WorkerRef

# Loads that go on failing are news again only after this time.
_REPEAT_NS = 300_000_000_000

_Place = tuple[PlanId, WorkerRef]


@dataclass(frozen=True, slots=True)
class _Ordered:
    """A load that was ordered: what for, where its bytes come from, and when."""

    model: str
    instance: InstanceId | None
    size_bytes: int
    ordered_ns: int

    def named(self, receiver: WorkerRef) -> str:
        what = "copy" if self.instance is None else f"instance {self.instance}"
        return f"model {self.model}: {what} on {receiver}"


class StepNews:
    """Everything that one life of a controller tells people. `now_ns` reads a monotonic clock."""

    def __init__(
        self, controller: Controller, now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._controller = controller
        self._now_ns = now_ns
        self._loads: dict[_Place, _Ordered] = {}
        self._place_of: dict[tuple[InstanceId, int], _Place] = {}
        #: models whose loads fail: when that was said last, and whether they were given up then
        self._failing: dict[str, tuple[int, bool]] = {}
        #: per model, failed loads that were looked at
        self._failures: dict[str, int] = {}
        self._told: tuple[LoadProgress, ...] = ()

    def observe(
        self, events: Sequence[AnyEvent], commands: Sequence[AnyCommand]
    ) -> tuple[News, ...]:
        """The news of one step. To be called when the controller has made it."""
        found: list[News | None] = [self._of_event(event) for event in events]
        found += [self._of_command(command) for command in commands]
        found += [self._recovered(model) for model in list(self._failing)]
        return tuple(news for news in found if news is not None)

    def progress(self) -> tuple[LoadProgress, ...] | None:
        """Loads under way; None if none has got on since the last call."""
        loads = tuple(
            LoadProgress(
                model=load.model,
                receiver=str(place[1]),
                arrived_bytes=self._arrived_bytes(load.model, place[1]),
                size_bytes=load.size_bytes,
                elapsed_ns=self._now_ns() - load.ordered_ns,
            )
            for place, load in self._loads.items()
        )
        before = [(load.receiver, load.arrived_bytes) for load in self._told]
        if [(load.receiver, load.arrived_bytes) for load in loads] == before:
            return None
        self._told = loads
        return loads

    # -- events ---------------------------------------------------------------------------------

    def _of_event(self, event: AnyEvent) -> News | None:
        if isinstance(event, WorkerJoined | AgentJoined):
            return self._joined(event)
        if isinstance(event, WorkerLost):
            return self._lost(event)
        if isinstance(event, LoadCompleted):
            return self._completed(self._place_of.pop((event.instance, event.rank), None))
        if isinstance(event, CopyCompleted):
            return self._completed((event.plan, event.agent))
        if isinstance(event, LoadFailed):
            place = self._place_of.pop((event.instance, event.rank), None)
            return self._failed(place, event.reason)
        if isinstance(event, CopyFailed):
            return self._failed((event.plan, event.agent), event.reason)
        if isinstance(event, ModelAdded):
            return _published(event)
        if isinstance(event, ModelRemoved):
            return News(f"model {event.model}: withdrawn, it takes no new requests")
        return None

    def _joined(self, event: WorkerJoined | AgentJoined) -> News:
        ref = event.worker if isinstance(event, WorkerJoined) else event.agent
        # The end of its predecessor may come later, and is no news then.
        for place in [p for p in self._loads if p[1].worker == ref.worker and p[1] < ref]:
            del self._loads[place]
        again = " in its place" if ref.incarnation else ""
        return News(f"{_named(ref)} has joined{again}")

    def _lost(self, event: WorkerLost) -> News:
        of_lost = [place for place in self._loads if place[1] == event.worker]
        held = [self._loads.pop(place).model for place in of_lost]
        self._place_of = {key: p for key, p in self._place_of.items() if p[1] != event.worker}
        was = f" while it loaded {', '.join(held)}" if held else ""
        return News(f"{_named(event.worker)} is lost{was}: {event.reason}", is_problem=True)

    def _completed(self, place: _Place | None) -> News | None:
        load = self._loads.pop(place, None) if place is not None else None
        if load is None or place is None:
            return None
        elapsed_ns = max(self._now_ns() - load.ordered_ns, 1)
        rate = size_text(load.size_bytes * 1_000_000_000 / elapsed_ns)
        there = "is complete" if load.instance is None else "is loaded"
        return News(
            f"{load.named(place[1])} {there}:"
            f" {size_text(load.size_bytes)} in {elapsed_ns / 1e9:.3g} s ({rate}/s)"
        )

    def _failed(self, place: _Place | None, reason: str) -> News | None:
        load = self._loads.pop(place, None) if place is not None else None
        if load is None or place is None or load.model not in self._controller.models:
            return None
        failures = self._controller.failed_loads(load.model)
        if failures == self._failures.get(load.model, 0):
            return None  # it was taken back
        self._failures[load.model] = failures
        problem = self._controller.problem(load.model)
        before = self._failing.get(load.model)
        is_given_up = problem is not None
        now_ns = self._now_ns()
        if before is not None and before[1] == is_given_up and now_ns < before[0] + _REPEAT_NS:
            return None
        self._failing[load.model] = (now_ns, is_given_up)
        if is_given_up:
            text = f"model {load.model}: cannot be loaded now, and is tried again: {reason}"
        else:
            text = f"{load.named(place[1])} failed, and is tried again: {reason}"
        return News(text, is_problem=True)

    def _recovered(self, model: str) -> News | None:
        state = self._controller.models.get(model)
        if state is not None and self._controller.is_failing(model):
            return None
        del self._failing[model]
        return News(f"model {model}: loads again") if state is not None else None

    # -- commands -------------------------------------------------------------------------------

    def _of_command(self, command: AnyCommand) -> News | None:
        if isinstance(command, ScaleDecided):
            numbers = f"{command.from_instances} -> {command.to_instances} instances"
            return News(f"model {command.model}: {numbers} ({command.reason})")
        if isinstance(command, StartLoad):
            place = (command.plan, command.worker)
            self._place_of[command.instance, command.rank] = place
            return self._ordered(place, command.model, command.instance, _senders(command))
        if isinstance(command, StartCopy):
            place = (command.plan, command.agent)
            return self._ordered(place, command.model, None, _senders(command))
        if isinstance(command, ModelGone):
            self._failures.pop(command.model, None)
            return News(f"model {command.model}: gone, nothing of it is left")
        return None

    def _ordered(
        self, place: _Place, model: str, instance: InstanceId | None, senders: str
    ) -> News | None:
        size_bytes = self._controller.models[model].spec.size_bytes
        load = self._loads[place] = _Ordered(model, instance, size_bytes, self._now_ns())
        if model in self._failing:
            return None  # one of many trials
        return News(f"{load.named(place[1])} gets {size_text(size_bytes)} from {senders}")

    def _arrived_bytes(self, model: str, receiver: WorkerRef) -> int:
        """Whole layers only."""
        state = self._controller.models.get(model)
        if state is None:
            return 0
        for copy in self._controller.pool.copies(model):
            if receiver in copy.workers:
                bits = copy.presence[copy.workers.index(receiver)]
                sizes = enumerate(state.spec.layer_bytes)
                return sum(size for layer, size in sizes if bits >> layer & 1)
        return 0


# -- helpers, in the order used -------------------------------------------------------------------


def _named(member: WorkerRef) -> str:
    return f"host agent {member}" if member.is_agent else f"worker {member}"


def _published(event: ModelAdded) -> News:
    policy = event.policy
    return News(
        f"model {policy.spec.name}: published, {size_text(policy.spec.size_bytes)},"
        f" {policy.instances_min} to {policy.instances_max} instances"
    )


def _senders(command: StartLoad | StartCopy) -> str:
    """Who sends, each once."""
    return ", ".join(dict.fromkeys(str(feed.upstream) for feed in command.feeds))
