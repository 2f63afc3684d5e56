"""What must hold in every simulated world. A broken rule raises at once; nothing is repaired.

The rules are stated from the outside, from events, commands and what workers do, so that they
share no code with what they check.
"""

from __future__ import annotations

from collections.abc import Sequence

from livescale.batching.run import Emission, Run
from livescale.messages.commands import (
    AnyCommand,
    Dispatch,
    FailRequest,
    Release,
    StartLoad,
    StartSend,
)
from livescale.messages.events import (
    AnyEvent,
    LoadCompleted,
    LoadFailed,
    Released,
    RequestArrived,
    RequestEnded,
    SendEnded,
    WorkerJoined,
    WorkerLost,
)
from livescale.types import FromWorker, InstanceId, Outcome, RequestId, WorkerRef

OrderKey = tuple[str, object, object]


class InvariantBroken(AssertionError):
    """A rule does not hold in a simulated world."""


def require(holds: bool, rule: str, *what: object) -> None:
    """Raise InvariantBroken with the rule and the values unless it holds."""
    if not holds:
        raise InvariantBroken(f"{rule}: {', '.join(map(repr, what))}")


class Checkers:
    """Rules about requests and workers, over all lives of the controller."""

    def __init__(self, layers: dict[str, int]) -> None:
        self._layers = layers
        self._model_of: dict[WorkerRef, str] = {}
        #: outcome per request (None: not over)
        self._outcomes: dict[RequestId, Outcome | None] = {}

    # -- requests -------------------------------------------------------------------------------

    def arrived(self, request: RequestId) -> None:
        require(request not in self._outcomes, "request ids are unique", request)
        self._outcomes[request] = None

    def dispatched(self, order: Dispatch, attempt: int, worker: WorkerRef | None) -> None:
        require(order.attempt > attempt, "attempts grow", order, attempt, worker)

    def token(self, emission: Emission, accepted: int, prompt_tokens: int) -> None:
        require(emission.index == accepted, "each index comes once, in order", emission, accepted)
        expected = prompt_tokens + emission.index
        require(emission.token_id == expected, "a retry goes on with the same tokens", emission)

    def ended(self, request: RequestId, outcome: Outcome, tokens: int, wanted: int) -> None:
        require(self._outcomes.get(request, outcome) is None, "a request ends once", request)
        self._outcomes[request] = outcome
        if outcome is Outcome.FINISHED:
            require(tokens == wanted, "a finished request has all its tokens", request, tokens)

    def all_ended(self) -> None:
        waiting = [request for request, outcome in self._outcomes.items() if outcome is None]
        require(not waiting, "every request ends", waiting)

    # -- workers --------------------------------------------------------------------------------

    def assigned(self, worker: WorkerRef, is_taken: bool, order: StartLoad) -> None:
        require(not is_taken, "a worker belongs to one instance", worker, order)
        require(order.worker == worker, "orders reach their worker", worker, order)
        self._model_of[worker] = order.model

    def runs(self, worker: WorkerRef, run: Run, watermark: int) -> None:
        layers = self._layers[self._model_of[worker]]
        require(watermark == layers, "only complete models serve", worker, run, watermark)

    def released(
        self,
        order: Release,
        held: InstanceId | None,
        requests: Sequence[tuple[RequestId, int]],
    ) -> None:
        require(order.instance == held, "a worker releases what it holds", order, held)
        require(not requests, "an instance with requests is not released", order, requests)


class CommandChecker:
    """Rules about one life of a controller: its commands and the events that answer them."""

    def __init__(self) -> None:
        self._alive: dict[WorkerRef, None] = {}
        self._holders: dict[str, dict[WorkerRef, None]] = {}
        #: instance -> (model, worker)
        self._instances: dict[InstanceId, tuple[str, WorkerRef]] = {}
        #: unanswered orders and the worker that must answer
        self._open: dict[OrderKey, WorkerRef] = {}
        self._answered: dict[OrderKey, None] = {}
        #: whom an instance receives from, while its load is open
        self._upstreams: dict[OrderKey, WorkerRef] = {}

    def observe(self, events: Sequence[AnyEvent], commands: Sequence[AnyCommand]) -> None:
        """Check one step."""
        for event in events:
            self._absorb(event)
        for command in commands:
            self._check(command)

    def all_answered(self) -> None:
        require(not self._open, "every order is answered", self._open)

    # -- helpers --------------------------------------------------------------------------------

    def _absorb(self, event: AnyEvent) -> None:
        if isinstance(event, WorkerJoined):
            self._joined(event)
        elif isinstance(event, WorkerLost):
            self._lost(event.worker)
        elif isinstance(event, RequestArrived):
            if event.worker is not None:
                self._open["request", event.request, event.attempt] = event.worker
        elif isinstance(event, RequestEnded):
            # Gateway and worker may both see the end: the second news is stale.
            self._open.pop(("request", event.request, event.attempt), None)
        elif isinstance(event, LoadCompleted):
            self._answer(("load", event.instance, event.attempt))
            if event.instance in self._instances:
                model, worker = self._instances[event.instance]
                self._holders.setdefault(model, {})[worker] = None
        elif isinstance(event, LoadFailed):
            self._answer(("load", event.instance, event.attempt))
        elif isinstance(event, Released):
            self._answer(("release", event.instance, event.attempt))
        elif isinstance(event, SendEnded):
            self._answer(("send", event.plan, event.source))

    def _joined(self, event: WorkerJoined) -> None:
        number = event.worker.worker
        others = [worker for worker in self._alive if worker.worker == number]
        if any(other >= event.worker for other in others):
            return  # late news of an incarnation that was followed by another
        for old in others:
            self._lost(old)
        self._alive[event.worker] = None
        report = event.report
        if report is not None:
            self._instances[report.instance] = (report.model, event.worker)
            if report.is_loaded:
                self._holders.setdefault(report.model, {})[event.worker] = None

    def _lost(self, worker: WorkerRef) -> None:
        self._alive.pop(worker, None)
        for holders in self._holders.values():
            holders.pop(worker, None)
        for number in [n for n, (_, w) in self._instances.items() if w == worker]:
            del self._instances[number]
        # The loss answers whatever the worker was asked, in the place of every answer.
        for key in [key for key, asked in self._open.items() if asked == worker]:
            del self._open[key]

    def _answer(self, key: OrderKey) -> None:
        require(key not in self._answered, "an order is answered once", key)
        if key in self._open:
            del self._open[key]
            self._answered[key] = None

    def _check(self, command: AnyCommand) -> None:
        if isinstance(command, StartLoad):
            self._instances[command.instance] = (command.model, command.worker)
            key = ("load", command.instance, command.attempt)
            self._ask(key, command.worker)
            if isinstance(command.upstream, FromWorker):
                self._upstreams[key] = command.upstream.worker
        elif isinstance(command, StartSend):
            has_bytes = command.source in self._holders.get(command.model, {})
            has_bytes = has_bytes or self._is_receiving(command.model, command.source)
            require(has_bytes, "a source holds or receives what it sends", command)
            self._ask(("send", command.plan, command.source), command.source)
        elif isinstance(command, Release):
            self._ask(("release", command.instance, command.attempt), command.worker)
            model, worker = self._instances[command.instance]
            del self._holders[model][worker]
            require(bool(self._holders[model]), "the last copy is kept", command)
            readers = [k for k in self._open if self._upstreams.get(k) == command.worker]
            require(not readers, "a copy that is read from is kept", command, readers)
        elif isinstance(command, Dispatch):
            self._ask(("request", command.request, command.attempt), command.worker)
            model, worker = self._instances[command.instance]
            require(worker in self._holders.get(model, {}), "complete models serve", command)
        elif isinstance(command, FailRequest):
            open_attempts = [key for key in self._open if key[:2] == ("request", command.request)]
            require(not open_attempts, "a request fails after its last attempt", open_attempts)

    def _is_receiving(self, model: str, worker: WorkerRef) -> bool:
        there = [number for number, held in self._instances.items() if held == (model, worker)]
        return any(key[1] in there for key in self._open if key in self._upstreams)

    def _ask(self, key: OrderKey, worker: WorkerRef) -> None:
        require(worker in self._alive, "only living workers get orders", key, worker)
        require(key not in self._open and key not in self._answered, "orders are new", key)
        self._open[key] = worker
