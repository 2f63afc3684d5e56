"""What must hold in every simulated world. A broken rule raises at once; nothing is repaired.

The rules are stated from the outside, from events, commands and what workers do, so that they
share no code with what they check.
"""

from __future__ import annotations

from collections.abc import Sequence

from livescale.batching.run import Emission, Run
from livescale.control.config import ModelPolicy
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

OrderKey = tuple[object, ...]


class InvariantBroken(AssertionError):
    """A rule does not hold in a simulated world."""


def require(holds: bool, rule: str, *what: object) -> None:
    """Raise InvariantBroken with the rule and the values unless it holds."""
    if not holds:
        raise InvariantBroken(f"{rule}: {', '.join(map(repr, what))}")


class Checkers:
    """Rules about requests and workers, over all lives of the controller."""

    def __init__(self, models: Sequence[ModelPolicy]) -> None:
        self._layers = {policy.spec.name: policy.spec.layers for policy in models}
        self._tp_sizes = {policy.spec.name: policy.spec.tp_size for policy in models}
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

    def at_rest(self, worker: WorkerRef, kv_blocks_used: int) -> None:
        require(kv_blocks_used == 0, "no KV is in use when all is over", worker, kv_blocks_used)

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
        # When one rank is lost, the others are released with all that they were asked; their own
        # load may have failed meanwhile.
        is_whole = self._tp_sizes[self._model_of[order.worker]] == 1
        if is_whole or held is not None:
            require(order.instance == held, "a worker releases what it holds", order, held)
        if is_whole:
            require(not requests, "an instance with requests is not released", order, requests)


class CommandChecker:
    """Rules about one life of a controller: its commands and the events that answer them."""

    def __init__(self, models: Sequence[ModelPolicy]) -> None:
        self._tp_sizes = {policy.spec.name: policy.spec.tp_size for policy in models}
        self._alive: dict[WorkerRef, None] = {}
        #: workers of each instance by rank, as far as they have something of it, and its model
        self._ranks: dict[InstanceId, dict[int, WorkerRef]] = {}
        self._model_of: dict[InstanceId, str] = {}
        self._loaded: dict[InstanceId, dict[int, None]] = {}
        #: instances that lost a rank or failed: what is left of them is released
        self._ended: dict[InstanceId, None] = {}
        self._draining: dict[InstanceId, None] = {}
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
            self._answer(("load", event.instance, event.attempt, event.rank))
            if event.instance in self._ranks:
                self._loaded.setdefault(event.instance, {})[event.rank] = None
        elif isinstance(event, LoadFailed):
            self._answer(("load", event.instance, event.attempt, event.rank))
            self._ended[event.instance] = None
            self._forget(event.instance, event.rank)
        elif isinstance(event, Released):
            self._answer(("release", event.instance, event.attempt, event.rank))
            self._forget(event.instance, event.rank)
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
            self._model_of[report.instance] = report.model
            self._ranks.setdefault(report.instance, {})[report.rank] = event.worker
            if report.is_loaded:
                self._loaded.setdefault(report.instance, {})[report.rank] = None

    def _lost(self, worker: WorkerRef) -> None:
        self._alive.pop(worker, None)
        for instance, ranks in list(self._ranks.items()):
            if worker in ranks.values():
                # One lost rank loses the instance, and what its rank 0 was asked.
                first = ranks.get(0)
                for key in [k for k, asked in self._open.items() if asked == first]:
                    if key[0] == "request":
                        del self._open[key]
            for rank in [rank for rank, there in ranks.items() if there == worker]:
                self._ended[instance] = None
                self._forget(instance, rank)
        # The loss answers whatever the worker was asked, in the place of every answer.
        for key in [key for key, asked in self._open.items() if asked == worker]:
            del self._open[key]

    def _forget(self, instance: InstanceId, rank: int) -> None:
        """The rank's worker has nothing of the instance any more."""
        ranks = self._ranks.get(instance, {})
        ranks.pop(rank, None)
        if not ranks:
            self._ranks.pop(instance, None)
            self._loaded.pop(instance, None)

    def _answer(self, key: OrderKey) -> None:
        require(key not in self._answered, "an order is answered once", key)
        if key in self._open:
            del self._open[key]
            self._answered[key] = None

    def _check(self, command: AnyCommand) -> None:
        if isinstance(command, StartLoad):
            self._model_of[command.instance] = command.model
            self._ranks.setdefault(command.instance, {})[command.rank] = command.worker
            key: OrderKey = ("load", command.instance, command.attempt, command.rank)
            self._ask(key, command.worker)
            if isinstance(command.upstream, FromWorker):
                self._upstreams[key] = command.upstream.worker
        elif isinstance(command, StartSend):
            has_bytes = any(
                command.source in self._ranks[i].values() for i in self._holders(command.model)
            )
            has_bytes = has_bytes or self._is_receiving(command.model, command.source)
            require(has_bytes, "a source holds or receives what it sends", command)
            self._ask(("send", command.plan, command.source), command.source)
        elif isinstance(command, Release):
            self._check_release(command)
        elif isinstance(command, Dispatch):
            self._ask(("request", command.request, command.attempt), command.worker)
            holders = self._holders(self._model_of[command.instance])
            require(command.instance in holders, "complete models serve", command)
            first = self._ranks[command.instance][0]
            require(command.worker == first, "rank 0 gets the requests", command)
        elif isinstance(command, FailRequest):
            open_attempts = [key for key in self._open if key[:2] == ("request", command.request)]
            require(not open_attempts, "a request fails after its last attempt", open_attempts)

    def _check_release(self, command: Release) -> None:
        self._ask(("release", command.instance, command.attempt, command.rank), command.worker)
        model = self._model_of[command.instance]
        ranks = self._ranks[command.instance]
        if command.instance in self._ended or len(ranks) < self._tp_sizes[model]:
            return  # nobody can use what is left of it
        self._draining[command.instance] = None
        require(bool(self._holders(model)), "the last copy is kept", command)
        readers = [k for k in self._open if self._upstreams.get(k) == command.worker]
        require(not readers, "a copy that is read from is kept", command, readers)

    def _holders(self, model: str) -> list[InstanceId]:
        """Instances that are complete and not given up."""
        return [
            instance
            for instance, loaded in self._loaded.items()
            if self._model_of.get(instance) == model
            and len(loaded) == self._tp_sizes[model]
            and instance not in self._ended
            and instance not in self._draining
        ]

    def _is_receiving(self, model: str, worker: WorkerRef) -> bool:
        there = [
            instance
            for instance, ranks in self._ranks.items()
            if self._model_of[instance] == model and worker in ranks.values()
        ]
        return any(key[1] in there for key in self._open if key in self._upstreams)

    def _ask(self, key: OrderKey, worker: WorkerRef) -> None:
        require(worker in self._alive, "only living workers get orders", key, worker)
        require(key not in self._open and key not in self._answered, "orders are new", key)
        self._open[key] = worker
