"""Clients of a model take turns: none is passed over while others are served again and again."""

from __future__ import annotations

from collections import Counter

from livescale.messages.commands import AnyCommand, Dispatch
from livescale.messages.events import AnyEvent, BatchTaken, RequestArrived, RequestEnded
from livescale.sim.checkers.answers import AnswerChecker
from livescale.sim.checkers.failures import FailureChecker
from livescale.sim.checkers.invariants import require
from livescale.sim.checkers.knowledge import Knowledge
from livescale.values.types import Outcome, RequestId

_Pair = tuple[str, str, str]
"""A model, a client that waits for it, and one that was served meanwhile."""


class TurnChecker:
    """Turns of one life of a controller. Instances compute `places` requests at once.

    While a client has a request waiting, another one gets no more requests dispatched than a turn
    of that is worth. Excepted is who has most places of the chosen instance already, who has a
    request that keeps away from a worker or waits until it has no company, and what loading
    instances take, which may be done with the others later.
    """

    def __init__(
        self,
        knowledge: Knowledge,
        answers: AnswerChecker,
        failures: FailureChecker,
        places: int,
    ) -> None:
        self._knowledge = knowledge
        self._answers = answers
        self._failures = failures
        self._places_fair = max(1, places * 3 // 4)
        self._requests: dict[RequestId, RequestArrived] = {}
        self._clients: dict[str, None] = {}
        #: requests of which gateways alone say that a worker was lost or gave them back: they may
        #: keep away from it
        self._avoiding: dict[RequestId, None] = {}
        #: requests of the latter that were dispatched while the former waited
        self._passed: Counter[_Pair] = Counter()

    def absorb(self, event: AnyEvent) -> None:
        """After the answers have this event."""
        if isinstance(event, RequestArrived):
            self._requests[event.request] = event
            self._clients[event.client] = None
        elif isinstance(event, RequestEnded) and (
            event.outcome is Outcome.WORKER_LOST
            or (event.outcome is Outcome.RETURNED and event.worker is None)
        ):
            self._avoiding[event.request] = None
        if len(self._clients) < 2:
            return
        if isinstance(event, BatchTaken):
            for request, *_ in event.requests:
                self._served(request)
        waiting = self._waiting()
        for pair in [pair for pair in self._passed if pair[:2] not in waiting]:
            del self._passed[pair]

    def check(self, command: AnyCommand) -> None:
        """After the answers have this command."""
        if len(self._clients) < 2 or not isinstance(command, Dispatch):
            return
        served = self._requests[command.request]
        self._served(command.request)
        if not self._knowledge.is_copy(served.model, command.instance):
            return
        running = [r for r, runs in self._answers.running.items() if runs == command.worker]
        held = Counter(self._requests[r].client for r in running if r in self._requests)
        for model, client in self._waiting():
            has_place = held[client] < self._places_fair
            if model != served.model or client == served.client or not has_place:
                continue
            pair = (model, client, served.client)
            self._passed[pair] += 1
            rule = "while a client waits, another one gets one turn at most"
            require(self._passed[pair] <= served.weight, rule, command, pair, served.weight)

    # -- helpers --------------------------------------------------------------------------------

    def _served(self, request: RequestId) -> None:
        """Its client has got a turn."""
        served = self._requests.get(request)
        for pair in [p for p in self._passed if served and p[:2] == (served.model, served.client)]:
            del self._passed[pair]

    def _waiting(self) -> dict[tuple[str, str], None]:
        """Clients that have requests waiting for a model, all of which may go to any worker."""
        for request in [r for r in self._requests if r in self._answers.over]:
            del self._requests[request]
        waiting = [r for r in self._requests if r not in self._answers.running]
        keys = {r: (self._requests[r].model, self._requests[r].client) for r in waiting}
        choosy = {keys[request]: None for request in waiting if self._is_choosy(request)}
        return {key: None for key in keys.values() if key not in choosy}

    def _is_choosy(self, request: RequestId) -> bool:
        """It may not go to any worker."""
        return request in self._avoiding or self._failures.may_be_alone(request)
