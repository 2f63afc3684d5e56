"""A world without time or bytes: it answers every order with its terminal event, sometime.

It stays consistent: workers answer in order, dead ones not at all, and every order is answered
once. What is random (who is next, what goes wrong) is the caller's business.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from livescale.control.config import ControllerConfig
from livescale.control.controller import Controller
from livescale.messages.commands import (
    AnyCommand,
    Dispatch,
    FailRequest,
    Release,
    Resume,
    StartLoad,
    StartSend,
    WakeAt,
)
from livescale.messages.events import (
    AnyEvent,
    InstanceReport,
    InstanceReported,
    LayerArrived,
    LoadCompleted,
    LoadFailed,
    LoadStarted,
    Released,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    SendEnded,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from livescale.sim.checkers import CommandChecker
from livescale.topology import Device
from livescale.types import Outcome, RequestId, WorkerRef

DEVICE = Device("abstract", "h", "l", 1000, 1000)


@dataclass(slots=True)
class AbstractWorker:
    """A worker's truth: what it holds and what it still has to answer, in order."""

    ref: WorkerRef
    load: StartLoad | None = None
    watermark: int = 0
    is_loaded: bool = False
    answers: deque[AnyEvent] = field(default_factory=deque)
    #: dispatched here and not ended
    requests: dict[RequestId, int] = field(default_factory=dict)


@dataclass(slots=True)
class AbstractRequest:
    """A request's truth, as its gateway knows it."""

    arrived: RequestArrived
    attempt: int = 0
    worker: WorkerRef | None = None


class AbstractWorld:
    """Controller, workers and requests; `events` wait for the next step."""

    def __init__(self, config: ControllerConfig) -> None:
        self.config = config
        self.layers = {p.spec.name: p.spec.layers for p in config.models}
        self.now_ns = 0
        self.wake_ns: int | None = None
        self.workers: dict[int, AbstractWorker] = {}
        self.incarnations: dict[int, int] = {}
        self.requests: dict[RequestId, AbstractRequest] = {}
        self.events: list[AnyEvent] = []
        #: words of workers and gateways that nobody waits for any more
        self.old_news: list[AnyEvent] = []
        #: old news that is said again in the next step: the checker must not count it twice
        self.repeats: list[AnyEvent] = []
        self.has_gateway = True
        self.controller = Controller(config)
        self.checker = CommandChecker(self.config.models)

    # -- what may happen ------------------------------------------------------------------------

    def join(self, number: int) -> None:
        """A worker comes, as its next incarnation."""
        ref = WorkerRef(number, self.incarnations.get(number, -1) + 1)
        self.incarnations[number] = ref.incarnation
        self.workers[number] = AbstractWorker(ref)
        self.events.append(WorkerJoined(ref, DEVICE))

    def lose(self, number: int, gateway_first: bool) -> None:
        """A worker dies. Its gateway sees that too, before or after the controller."""
        worker = self.workers.pop(number)
        words: list[AnyEvent] = [WorkerLost(worker.ref, "abstract")]
        for request, attempt in worker.requests.items():
            self.requests[request].worker = None
            word = RequestEnded(request, attempt, Outcome.WORKER_LOST)
            if self.has_gateway:
                words.insert(0 if gateway_first else len(words), word)
        self.events += words
        self.old_news += worker.answers

    def arrive(self, request: RequestId, model: str, tokens: int) -> None:
        event = RequestArrived(request, model, tokens, 5)
        self.requests[request] = AbstractRequest(event)
        if self.has_gateway:
            self.events.append(event)

    def cancel(self, request: RequestId) -> None:
        """The client goes away; a worker that runs it says so."""
        record = self.requests.pop(request)
        if self.has_gateway:
            self.events.append(RequestCancelled(request))
        if record.worker is not None:
            worker = self.workers[record.worker.worker]
            del worker.requests[request]
            worker.answers.append(RequestEnded(request, record.attempt, Outcome.CANCELLED))

    def finish(self, request: RequestId, outcome: Outcome) -> None:
        """The worker that runs the request ends it."""
        record = self.requests.pop(request)
        assert record.worker is not None
        worker = self.workers[record.worker.worker]
        del worker.requests[request]
        worker.answers.append(RequestEnded(request, record.attempt, outcome, 5))
        self._report(worker)

    def answer(self, number: int) -> None:
        """The worker's next word reaches the controller."""
        worker = self.workers[number]
        event = worker.answers.popleft()
        if isinstance(event, LayerArrived):
            worker.watermark = event.watermark
        elif isinstance(event, LoadCompleted):
            worker.is_loaded = True
        self.events.append(event)
        self.old_news.append(event)

    def fail_load(self, number: int) -> None:
        """The worker's load goes wrong: what it had still to say of it is replaced."""
        worker = self.workers[number]
        assert worker.load is not None
        assert not worker.is_loaded
        about_load = (LoadStarted, LayerArrived, LoadCompleted)
        worker.answers = deque(a for a in worker.answers if not isinstance(a, about_load))
        worker.answers.append(LoadFailed(worker.load.instance, worker.load.attempt, "abstract"))
        self._empty(worker)

    def repeat_old_news(self, index: int) -> None:
        """Something about an instance or a worker that is no more is said once again."""
        event = self.old_news[index]
        instance = getattr(event, "instance", None)
        alive = [w.load.instance for w in self.workers.values() if w.load is not None]
        is_known = instance in self.controller.fleet.instances
        if isinstance(event, RequestEnded) or (instance not in alive and not is_known):
            self.repeats.append(event)

    def restart(self) -> None:
        """The controller dies; the next one hears what the workers hold, at once."""
        epoch = self.controller.config.epoch + 1
        self.controller = Controller(msgspec.structs.replace(self.config, epoch=epoch))
        self.checker = CommandChecker(self.config.models)
        self.wake_ns = None
        self.events = []
        for worker in self.workers.values():
            report = None
            if worker.load is not None:
                load = worker.load
                report = InstanceReport(
                    load.instance, load.model, load.attempt, worker.watermark, worker.is_loaded
                )
            self.events.append(WorkerJoined(worker.ref, DEVICE, report))
            if worker.is_loaded:
                self._report(worker)
                self.events.append(worker.answers.pop())
        self.has_gateway = False

    def connect_gateway(self) -> None:
        """The gateway finds the new controller and announces what is not over."""
        self.has_gateway = True
        for record in self.requests.values():
            again = msgspec.structs.replace(
                record.arrived, attempt=record.attempt, worker=record.worker
            )
            self.events.append(again)

    # -- steps ----------------------------------------------------------------------------------

    def step(self, gap_ns: int) -> None:
        """Time passes, at most to the next wake-up; the controller hears what waits and acts."""
        if self.wake_ns is not None and self.now_ns + gap_ns >= self.wake_ns:
            self.now_ns = max(self.now_ns, self.wake_ns)
            self.wake_ns = None
            self.events.append(Tick())
        else:
            self.now_ns += gap_ns
        events, self.events = self.events, []
        repeats, self.repeats = self.repeats, []
        commands = self.controller.step(self.now_ns, [*events, *repeats])
        self.controller.validate()
        self.checker.observe(events, commands)
        for command in commands:
            self._carry_out(command)
        if any(isinstance(command, StartLoad | Resume) for command in commands):
            self._check_limits()

    def _check_limits(self) -> None:
        for policy in self.config.models:
            instances = self.controller.fleet.of_model(policy.spec.name)
            count = sum(1 for i in instances if i.is_capacity)
            # A restarted controller may have adopted more, but it never asks for more.
            is_adopted = any(i.story[0].startswith("adopted") for i in instances if i.story)
            assert count <= policy.instances_max or is_adopted, instances

    def _carry_out(self, command: AnyCommand) -> None:
        if isinstance(command, StartLoad):
            self._load(command)
        elif isinstance(command, StartSend):
            worker = self.workers.get(command.source.worker)
            if worker is not None and worker.ref == command.source:
                is_here = worker.load is not None and worker.load.model == command.model
                error = None if is_here else "not here any more"
                worker.answers.append(SendEnded(command.plan, command.source, 1, error))
        elif isinstance(command, Release):
            self._release(command)
        elif isinstance(command, Dispatch):
            self._dispatch(command)
        elif isinstance(command, FailRequest):
            # Its last attempt may have ended well while the news of it was lost.
            self.requests.pop(command.request, None)
        elif isinstance(command, WakeAt):
            assert command.at_ns > self.now_ns
            earlier = self.wake_ns is None or command.at_ns < self.wake_ns
            self.wake_ns = command.at_ns if earlier else self.wake_ns

    def _load(self, order: StartLoad) -> None:
        worker = self.workers.get(order.worker.worker)
        if worker is None or worker.ref != order.worker:
            return
        assert worker.load is None, f"{worker} is given {order}"
        worker.load = order
        worker.watermark = 0
        worker.answers.append(LoadStarted(order.instance, order.attempt))
        for watermark in range(1, self.layers[order.model] + 1):
            worker.answers.append(LayerArrived(order.instance, order.attempt, watermark))
        worker.answers.append(LoadCompleted(order.instance, order.attempt, 1))

    def _release(self, order: Release) -> None:
        worker = self.workers.get(order.worker.worker)
        if worker is None or worker.ref != order.worker:
            return
        assert worker.load is not None, order
        assert worker.load.instance == order.instance
        assert not worker.requests, f"{order} with {worker.requests}"
        worker.answers.append(Released(order.instance, order.attempt))
        self._empty(worker)

    def _dispatch(self, order: Dispatch) -> None:
        record = self.requests.get(order.request)
        worker = self.workers.get(order.worker.worker)
        if record is None:
            ended = RequestEnded(order.request, order.attempt, Outcome.CANCELLED)
            self.events.append(ended)
            return
        assert order.attempt > record.attempt
        record.attempt = order.attempt
        if worker is None or worker.ref != order.worker:
            lost = RequestEnded(order.request, order.attempt, Outcome.WORKER_LOST)
            self.events.append(lost)
            return
        assert worker.is_loaded
        record.worker = order.worker
        worker.requests[order.request] = order.attempt
        self._report(worker)

    def _report(self, worker: AbstractWorker) -> None:
        assert worker.load is not None
        started = tuple(worker.requests.items())
        worker.answers.append(
            InstanceReported(
                worker.load.instance, worker.load.attempt, started, len(started), 0, 0, 100, 0
            )
        )

    def _empty(self, worker: AbstractWorker) -> None:
        worker.load = None
        worker.is_loaded = False
        worker.watermark = 0
