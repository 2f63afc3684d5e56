"""Controllers fail requests only when nothing else is left.

A model is given up after failed loads, which fail only while its files are wrong or members refuse,
and while nothing of it is there; a single request after as many lost attempts as it may have, or
when its model is gone.
"""

from __future__ import annotations

from collections.abc import Callable

from livescale.control.config import ControllerConfig
from livescale.messages.commands import AnyCommand, FailRequest, ModelGone, Release, StartLoad
from livescale.messages.events import (
    AnyEvent,
    CopyCompleted,
    LoadCompleted,
    LoadFailed,
    RequestArrived,
)
from livescale.sim.checkers.invariants import require
from livescale.sim.checkers.knowledge import Knowledge
from livescale.types import InstanceId, RequestId


class FailureChecker:
    """All lives of the controller of one world. `begin_life` comes before the rest."""

    def __init__(
        self, config: ControllerConfig, may_loads_fail: Callable[[str, int], bool]
    ) -> None:
        """`may_loads_fail(model, since_ns)`: at some time since then there was a reason."""
        self._config = config
        self._may_loads_fail = may_loads_fail
        #: attempts of each request that were lost with their worker
        self._lost: dict[RequestId, dict[int, None]] = {}
        self._failed: dict[RequestId, None] = {}
        self._gone: dict[str, None] = {}
        #: when the loads of each instance were ordered: virtual time, and place among all news
        self._ordered: dict[InstanceId, tuple[int, int]] = {}
        self._released: dict[InstanceId, None] = {}
        self._news = 0

    def begin_life(self, knowledge: Knowledge) -> None:
        """A new controller, which knows nothing."""
        self._knowledge = knowledge
        #: per model, failed loads since one ended well, and the place of the last one
        self._failures: dict[str, int] = {}
        self._last_failure: dict[str, int] = {}
        self._model_of: dict[RequestId, str] = {}

    # -- attempts -------------------------------------------------------------------------------

    def lost(self, request: RequestId, attempt: int) -> None:
        """The attempt was lost with its worker."""
        self._lost.setdefault(request, {})[attempt] = None

    def found(self, request: RequestId, attempt: int) -> None:
        """Another worker has taken the attempt over before its worker was lost."""
        self._lost.get(request, {}).pop(attempt, None)

    def has_failed(self, request: RequestId) -> bool:
        """A controller has failed the request, and nothing else was left."""
        return request in self._failed

    def requests_of(self, model: str) -> list[RequestId]:
        """The model's requests that arrived in this life."""
        return [request for request, of in self._model_of.items() if of == model]

    # -- events and commands --------------------------------------------------------------------

    def absorb(self, event: AnyEvent) -> None:
        """Before the knowledge has this event."""
        self._news += 1
        knowledge = self._knowledge
        if isinstance(event, RequestArrived):
            self._model_of[event.request] = event.model
        elif isinstance(event, LoadFailed):
            # What is left of an instance that was given up is taken back: no failure.
            is_over = event.instance in knowledge.ended or event.instance in self._released
            if event.instance in knowledge.ranks and not is_over:
                self._load_failed(event)
        elif isinstance(event, LoadCompleted):
            ranks = knowledge.loaded.get(event.instance, {})
            model = knowledge.model_of.get(event.instance, "")
            if len({*ranks, event.rank}) == knowledge.tp_size(model):
                self._failures.pop(model, None)
        elif isinstance(event, CopyCompleted) and knowledge.tp_size(event.model) == 1:
            self._failures.pop(event.model, None)

    def check(self, now_ns: int, command: AnyCommand) -> None:
        """Before the knowledge has this command, and those behind it."""
        self._news += 1
        if isinstance(command, StartLoad):
            self._ordered.setdefault(command.instance, (now_ns, self._news))
        elif isinstance(command, Release):
            self._released[command.instance] = None
        elif isinstance(command, ModelGone):
            self._gone[command.model] = None
        elif isinstance(command, FailRequest):
            if command.retry_after_ns is not None:
                self._check_given_up(command)
            elif self._model_of[command.request] not in self._gone:
                lost = list(self._lost.get(command.request, ()))
                is_due = len(lost) >= self._config.request_attempts_max
                require(is_due, "a request fails after its last attempt is lost", command, lost)
            self._failed[command.request] = None

    # -- helpers --------------------------------------------------------------------------------

    def _load_failed(self, event: LoadFailed) -> None:
        """Loads that were under way together count as one."""
        model = self._knowledge.model_of[event.instance]
        ordered_ns, ordered = self._ordered.get(event.instance, (0, 0))
        is_due = self._may_loads_fail(model, ordered_ns)
        require(is_due, "loads fail for a reason", event, model)
        if ordered >= self._last_failure.get(model, 0):
            self._failures[model] = self._failures.get(model, 0) + 1
            self._last_failure[model] = self._news

    def _check_given_up(self, command: FailRequest) -> None:
        model, knowledge = self._model_of[command.request], self._knowledge
        failures = self._failures.get(model, 0)
        is_given_up = failures >= self._config.load_failures_max
        require(is_given_up, "a model is given up after failed loads", command, failures)
        there = [i for i in knowledge.ranks if knowledge.model_of[i] == model]
        there = [i for i in there if i not in knowledge.ended and i not in knowledge.leaving]
        require(not there, "requests of a model with instances wait", command, there)
        has_copy = knowledge.has_whole_host_copy(model)
        require(not has_copy, "requests of a model with a host copy wait", command)
