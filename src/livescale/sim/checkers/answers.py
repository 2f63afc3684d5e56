"""Every order ends in exactly one terminal event, or in the loss of the one who should report.

Orders are new and go to living members; attempts of a request grow, and it fails only when none is
under way.
"""

from __future__ import annotations

from livescale.messages import commands, events
from livescale.sim.checkers.failures import FailureChecker
from livescale.sim.checkers.invariants import require
from livescale.sim.checkers.knowledge import Knowledge
from livescale.values.types import HoldingId, InstanceId, Outcome, RequestId, WorkerRef, gateway_of

_Order = commands.StartHolding | commands.DropHolding
_OrderKey = tuple[type[_Order], HoldingId]


class AnswerChecker:
    """Orders of one life of a controller, and their ends. `failures` gets the lost attempts."""

    def __init__(self, knowledge: Knowledge, failures: FailureChecker, about_ns: int) -> None:
        """`about_ns`: so far apart are a worker's loss and what others give back because of it."""
        self._knowledge = knowledge
        self._failures = failures
        self._about_ns = about_ns
        self._open: dict[_OrderKey, None] = {}
        self._answered: dict[_OrderKey, None] = {}
        self._ranks: dict[tuple[InstanceId, int], None] = {}
        #: the newest attempt of each request, and who runs it if it is under way
        self._attempts: dict[RequestId, int] = {}
        #: how often the current attempt was taken over
        self._moves: dict[RequestId, int] = {}
        #: workers that were lost before they reported what they had taken over
        self._lost_takers: dict[RequestId, WorkerRef] = {}
        self.running: dict[RequestId, WorkerRef] = {}
        #: requests that are not waited for any more, and those that are over
        self._cancelled: dict[RequestId, None] = {}
        self.over: dict[RequestId, None] = {}
        #: attempts that were given back last, of which model, and when; and by model, when one was
        #: lost of several workers that its requests go through
        self._given_back: dict[RequestId, tuple[int, str, int]] = {}
        self._partners_lost: dict[str, int] = {}
        #: models of which a worker was given requests together with others, also before it was
        #: taken out of a pipeline or a team: what it had then may be on its way
        self._together: dict[WorkerRef, dict[str, None]] = {}
        self._now_ns = 0

    def absorb(self, event: events.AnyEvent, now_ns: int) -> None:
        """Before the knowledge has this event."""
        self._now_ns = now_ns
        for member in self._knowledge.lost_by(event):
            self._lost(member)
        if isinstance(event, events.RequestArrived):
            # What was over here may not be at the gateway: it begins anew.
            was_over = self.over.pop(event.request, 0) is None
            if was_over or event.attempt > self._attempts.get(event.request, -1):
                self._attempts[event.request] = event.attempt
                self._moves[event.request] = event.moves
                if event.worker is not None:
                    self.running[event.request] = event.worker
            elif self._is_given_back(event):
                self._gives_back(event.request)
        elif isinstance(event, events.RequestEnded):
            self._ended(event)
        elif isinstance(event, events.RequestCancelled):
            if event.request in self.running:
                self._cancelled[event.request] = None
            else:
                self.over[event.request] = None
        elif isinstance(event, events.GatewayLost):
            for request in [r for r in self._attempts if gateway_of(r) == event.gateway]:
                self._cancelled.pop(request, None)
                self.running.pop(request, None)
                self.over[request] = None
        elif isinstance(event, events.BatchTaken):
            self._taken(event)
        elif isinstance(event, events.HoldingCompleted | events.HoldingFailed):
            self._answer((commands.StartHolding, event.holding))
        elif isinstance(event, events.HoldingDropped):
            self._answer((commands.DropHolding, event.holding))

    def check(self, command: commands.AnyCommand) -> None:
        if isinstance(command, commands.StartHolding | commands.DropHolding):
            self._ask(command)
        elif isinstance(command, commands.Dispatch):
            attempt = self._attempts.get(command.request, 0)
            require(command.attempt > attempt, "attempts grow", command, attempt)
            is_alone = command.request not in self.running
            require(is_alone, "one attempt at a time", command)
            self._require_alive(command, command.worker)
            self._attempts[command.request] = command.attempt
            self._moves[command.request] = 0
            self.running[command.request] = command.worker
        elif isinstance(command, commands.ChangeDuty):
            if command.duty.pipelines or command.duty.team:
                model = self._model(self._knowledge.holdings[command.holding].order.model)
                self._together.setdefault(command.holding.member, {})[model] = None
        elif isinstance(command, commands.FailRequest):
            is_over = command.request not in self.running
            require(is_over, "a request fails after its last attempt", command)
            self.over[command.request] = None

    def all_answered(self) -> None:
        require(not self._open, "every order is answered", self._open)
        require(not self.running, "every attempt ends", self.running)

    # -- helpers --------------------------------------------------------------------------------

    def _is_given_back(self, event: events.RequestArrived) -> bool:
        """A gateway announces the attempt that is under way as one that no worker runs. The report
        of the worker itself may be lost."""
        is_current = event.attempt == self._attempts[event.request] and event.worker is None
        return is_current and event.request in self.running

    def _ended(self, event: events.RequestEnded) -> None:
        """Gateway and worker may both see the end: the second news is stale. So is that of a worker
        from which the attempt was taken over."""
        worker = self.running.get(event.request)
        is_current = event.attempt == self._attempts.get(event.request)
        is_lost = event.outcome is Outcome.WORKER_LOST
        is_returned = event.outcome is Outcome.RETURNED
        if worker and is_current and is_returned and event.moves > self._moves[event.request]:
            # It was taken over, which no gateway could be told.
            self._gives_back(event.request)
            return
        owners = (None, worker, self._lost_takers.get(event.request))
        if worker is None or not is_current or not (is_lost or event.worker in owners):
            return
        if event.worker not in (None, worker) and is_returned:
            return
        if is_lost:
            self._failures.lost(event.request, event.attempt)
        if is_returned:
            self._gives_back(event.request)
        else:
            self._stops(event.request)
        if event.outcome not in (Outcome.WORKER_LOST, Outcome.RETURNED):
            self.over[event.request] = None

    def _taken(self, event: events.BatchTaken) -> None:
        """Current attempts are this worker's now, wherever they were, and it ends them; but not
        those that another one has taken over since."""
        for request, attempt, moves in event.requests:
            is_current = attempt == self._attempts.get(request) and request not in self.over
            if not is_current or moves < self._moves[request]:
                continue
            self._moves[request] = moves
            if self._knowledge.is_alive(event.worker):
                self._failures.found(request, attempt)
                self.running[request] = event.worker
            else:
                self._lost_takers[request] = event.worker

    def _gives_back(self, request: RequestId) -> None:
        """What goes through several workers may have been lost with one that does not run it."""
        attempt, model = self._attempts[request], self._model(self._knowledge.requested[request])
        self._given_back[request] = (attempt, model, self._now_ns)
        self._count_lost(request)
        self._stops(request)

    def _model(self, name: str) -> str:
        """The whole model of a stage."""
        spec = self._knowledge.specs.get(name)
        return name if spec is None or spec.stage is None else spec.stage.model

    def _count_lost(self, request: RequestId) -> None:
        attempt, model, at_ns = self._given_back[request]
        lost_ns = self._partners_lost.get(model)
        if lost_ns is not None and abs(at_ns - lost_ns) <= self._about_ns:
            self._failures.lost(request, attempt)

    def _partner_lost(self, member: WorkerRef) -> None:
        models = self._together.pop(member, {})
        for held in self._knowledge.on(member):
            duty = held.order.duty
            if duty is not None and (duty.pipelines or duty.team):
                models[self._model(held.order.model)] = None
        for model in models:
            self._partners_lost[model] = self._now_ns
            for request, (_, of_model, _) in self._given_back.items():
                if of_model == model:
                    self._count_lost(request)

    def _stops(self, request: RequestId) -> None:
        """Its attempt is not under way any more."""
        del self.running[request]
        if self._cancelled.pop(request, 0) is None:
            self.over[request] = None

    def _require_alive(self, order: object, member: WorkerRef) -> None:
        require(self._knowledge.is_alive(member), "only living members get orders", order, member)

    def _ask(self, order: _Order) -> None:
        self._require_alive(order, order.holding.member)
        key = (type(order), order.holding)
        require(key not in self._open and key not in self._answered, "orders are new", order)
        self._open[key] = None
        if isinstance(order, commands.StartHolding) and order.duty is not None:
            rank = (order.duty.instance, order.rank)
            require(rank not in self._ranks, "a rank of an instance is ordered once", order)
            self._ranks[rank] = None

    def _answer(self, key: _OrderKey) -> None:
        # An earlier life may have ordered the drop, too, of what was begun in that life.
        is_own = (commands.StartHolding, key[1]) in self._answered
        require(not is_own or key not in self._answered, "an order is answered once", key)
        if key in self._open:
            del self._open[key]
            self._answered[key] = None

    def _lost(self, member: WorkerRef) -> None:
        """The loss answers whatever the member was asked, in the place of every answer.

        One lost rank loses the instance, and with it what its rank 0 was asked.
        """
        self._partner_lost(member)
        copies = [self._knowledge.ranks(h.order.model, h.copy) for h in self._knowledge.on(member)]
        firsts = [ranks[0].member for ranks in copies if 0 in ranks]
        for key in [key for key in self._open if key[1].member == member]:
            del self._open[key]
        lost = [member, *firsts]
        for request in [r for r, runs in self.running.items() if runs in lost]:
            self._failures.lost(request, self._attempts[request])
            self._stops(request)
