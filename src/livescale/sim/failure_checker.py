"""Requests fail because their model cannot be loaded only when that is so.

So many loads of it have failed in a row, and no instance of it is there or on its way.
"""

from __future__ import annotations

from livescale.messages.commands import AnyCommand, FailRequest
from livescale.messages.events import (
    AnyEvent,
    CopyCompleted,
    LoadCompleted,
    LoadFailed,
    RequestArrived,
)
from livescale.sim.checkers import require
from livescale.sim.knowledge import Knowledge
from livescale.types import RequestId


class FailureChecker:
    """One life of a controller, which gives a model up after `failures_max` failed loads."""

    def __init__(self, knowledge: Knowledge, failures_max: int) -> None:
        self._knowledge = knowledge
        self._failures_max = failures_max
        #: per model, failed loads since one ended well
        self._failures: dict[str, int] = {}
        self._model_of: dict[RequestId, str] = {}

    def absorb(self, event: AnyEvent) -> None:
        """Before the knowledge has this event."""
        knowledge = self._knowledge
        if isinstance(event, RequestArrived):
            self._model_of[event.request] = event.model
        elif isinstance(event, LoadFailed):
            # What is left of an instance that was given up is taken back: no failure.
            if event.instance in knowledge.ranks and event.instance not in knowledge.ended:
                model = knowledge.model_of[event.instance]
                self._failures[model] = self._failures.get(model, 0) + 1
        elif isinstance(event, LoadCompleted):
            ranks = knowledge.loaded.get(event.instance, {})
            model = knowledge.model_of.get(event.instance, "")
            if len({*ranks, event.rank}) == knowledge.tp_size(model):
                self._failures.pop(model, None)
        elif isinstance(event, CopyCompleted) and knowledge.tp_size(event.model) == 1:
            self._failures.pop(event.model, None)

    def check(self, command: AnyCommand) -> None:
        """Before the knowledge has this command, and those behind it."""
        if not isinstance(command, FailRequest) or command.retry_after_ns is None:
            return
        model = self._model_of[command.request]
        failures = self._failures.get(model, 0)
        is_given_up = failures >= self._failures_max
        require(is_given_up, "a model is given up after failed loads", command, failures)
        knowledge = self._knowledge
        there = [i for i in knowledge.ranks if knowledge.model_of[i] == model]
        there = [i for i in there if i not in knowledge.ended and i not in knowledge.leaving]
        require(not there, "requests of a model with instances wait", command, there)
