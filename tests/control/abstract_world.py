"""A world without time or bytes: it answers every order with its terminal event, sometime.

It stays consistent: workers answer in order, dead ones not at all, and every order is answered
once. What is random (who is next, what goes wrong) is the caller's business.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from livescale.chunks import Feed, senders
from livescale.control.config import ControllerConfig
from livescale.control.controller import Controller
from livescale.messages.commands import (
    AmendLoad,
    AnyCommand,
    Dispatch,
    DropCopy,
    FailRequest,
    ModelGone,
    Release,
    Resume,
    StartCopy,
    StartLoad,
    WakeAt,
)
from livescale.messages.events import (
    AgentJoined,
    AnyEvent,
    BatchTaken,
    CopyCompleted,
    CopyDropped,
    CopyFailed,
    CopyLayerArrived,
    CopyReport,
    FeedFailed,
    InstanceReport,
    InstanceReported,
    LayerArrived,
    LiveStarted,
    LoadCompleted,
    LoadFailed,
    LoadStarted,
    ModelAdded,
    ModelChanged,
    ModelRemoved,
    Released,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from livescale.policies import ModelPolicy
from livescale.sim.checkers.commands import CommandChecker
from livescale.sim.checkers.failures import FailureChecker
from livescale.topology import Device, Host
from livescale.types import (
    FromWorker,
    InstanceId,
    Outcome,
    PlanId,
    RequestId,
    WorkerRef,
    agent_ref,
)

DEVICE = Device("abstract", "h", "l", 1000, 1000)


@dataclass(slots=True)
class AbstractWorker:
    """A worker's truth: what it holds and what it still has to answer, in order."""

    ref: WorkerRef
    load: StartLoad | None = None
    feeds: tuple[Feed, ...] = ()
    watermark: int = 0
    is_loaded: bool = False
    answers: deque[AnyEvent] = field(default_factory=deque)
    #: what it runs: dispatched here or taken over, and not ended
    requests: dict[RequestId, int] = field(default_factory=dict)
    #: what others took over from here: (attempt, by whom)
    given: dict[RequestId, tuple[int, WorkerRef]] = field(default_factory=dict)

    def takes_requests(self, instance: InstanceId) -> bool:
        """It has this instance, and runs requests of it."""
        if self.load is None or self.load.instance != instance:
            return False
        return self.is_loaded or self.load.pairing is not None


@dataclass(slots=True)
class AbstractCopy:
    """A model in a host's memory, whole or arriving."""

    order: StartCopy
    feeds: tuple[Feed, ...]
    is_complete: bool = False


@dataclass(slots=True)
class AbstractAgent:
    """A host agent's truth."""

    ref: WorkerRef
    host: Host
    copies: dict[PlanId, AbstractCopy] = field(default_factory=dict)
    answers: deque[AnyEvent] = field(default_factory=deque)


@dataclass(slots=True)
class AbstractRequest:
    """A request's truth, as its gateway knows it."""

    arrived: RequestArrived
    attempt: int = 0
    #: how often the attempt was taken over
    moves: int = 0
    worker: WorkerRef | None = None


class AbstractWorld:
    """Controller, workers, host agents and requests; `events` wait for the next step."""

    def __init__(self, config: ControllerConfig, memory_bytes: int = 1000) -> None:
        self.config = config
        self.memory_bytes = memory_bytes
        #: what is served; those of them that were withdrawn
        self.policies = {policy.spec.name: policy for policy in config.models}
        self.leaving: dict[str, None] = {}
        self.now_ns = 0
        self.wake_ns: int | None = None
        self.workers: dict[int, AbstractWorker] = {}
        self.agents: dict[int, AbstractAgent] = {}
        self.incarnations: dict[int, int] = {}
        self.requests: dict[RequestId, AbstractRequest] = {}
        self.events: list[AnyEvent] = []
        #: words of workers and gateways that nobody waits for any more
        self.old_news: list[AnyEvent] = []
        #: old news that is said again in the next step: the checker must not count it twice
        self.repeats: list[AnyEvent] = []
        self.has_gateway = True
        self.controller = Controller(config)
        # Loads fail here whenever the caller wants it.
        self.failures = FailureChecker(config, lambda model, since_ns: True)
        self.checker = self._new_checker()

    def _new_checker(self) -> CommandChecker:
        return CommandChecker(self.config, self.failures)

    # -- what may happen ------------------------------------------------------------------------

    def join(self, number: int) -> None:
        """A worker comes, as its next incarnation."""
        ref = WorkerRef(number, self.incarnations.get(number, -1) + 1)
        self.incarnations[number] = ref.incarnation
        self.workers[number] = AbstractWorker(ref)
        self.events.append(WorkerJoined(ref, DEVICE))

    def join_agent(self, number: int) -> None:
        """A host agent comes, as its next incarnation, with empty memory."""
        place = agent_ref(number).worker
        ref = WorkerRef(place, self.incarnations.get(place, -1) + 1)
        self.incarnations[place] = ref.incarnation
        host = Host(f"h{number}", "l", self.memory_bytes)
        self.agents[number] = AbstractAgent(ref, host)
        self.events.append(AgentJoined(ref, host))

    def lose_agent(self, number: int) -> None:
        agent = self.agents.pop(number)
        self.events.append(WorkerLost(agent.ref, "abstract"))
        self.old_news += agent.answers

    def add_model(self, policy: ModelPolicy) -> None:
        self.policies[policy.spec.name] = policy
        self.events.append(ModelAdded(policy))

    def change_model(self, policy: ModelPolicy) -> None:
        """It has other limits from now on."""
        self.policies[policy.spec.name] = policy
        self.events.append(ModelChanged(policy))

    def remove_model(self, name: str) -> None:
        """No new requests come; the controller ends with ModelGone."""
        self.leaving[name] = None
        self.events.append(ModelRemoved(name))

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
        for other in self.workers.values():
            self._returns_what_was_given(other, worker.ref)

    def _returns_what_was_given(self, giver: AbstractWorker, lost: WorkerRef) -> None:
        """The controller may not have heard who took it over, nor how it ended there."""
        for request, (attempt, taker) in giver.given.items():
            if taker == lost:
                back = RequestEnded(request, attempt, Outcome.RETURNED, worker=giver.ref)
                giver.answers.append(back)

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
            ended = RequestEnded(request, record.attempt, Outcome.CANCELLED, worker=worker.ref)
            worker.answers.append(ended)
            self._report(worker)

    def finish(self, request: RequestId, outcome: Outcome) -> None:
        """The worker that runs the request ends it."""
        record = self.requests.pop(request)
        assert record.worker is not None
        worker = self.workers[record.worker.worker]
        del worker.requests[request]
        worker.answers.append(RequestEnded(request, record.attempt, outcome, 5, worker.ref))
        self._report(worker)

    def live_pairs(self) -> list[tuple[int, int]]:
        """(target, source) of workers where the source may take something over."""
        found = []
        for number, worker in self.workers.items():
            pairing = worker.load.pairing if worker.load is not None else None
            if not worker.requests or pairing is None or pairing.source is None:
                continue
            source = self.workers.get(pairing.source.worker)
            if source is None or source.ref != pairing.source:
                continue
            if source.takes_requests(pairing.source_instance):
                found.append((number, pairing.source.worker))
        return found

    def take(self, target: int, source: int, count: int) -> None:
        """The source takes a batch over. The gateway knows at once, the controller sometime."""
        giver, taker = self.workers[target], self.workers[source]
        assert giver.load is not None
        assert taker.load is not None
        requests = tuple(giver.requests.items())[:count]
        if not requests:
            return
        for request, attempt in requests:
            del giver.requests[request]
            giver.given[request] = (attempt, taker.ref)
            taker.requests[request] = attempt
            self.requests[request].worker = taker.ref
            self.requests[request].moves += 1
        taker.answers.append(
            BatchTaken(
                instance=taker.load.instance,
                attempt=taker.load.attempt,
                worker=taker.ref,
                target=giver.load.instance,
                requests=requests,
                next_layer=1,
                tokens=10,
                row_bytes=100,
                pull_ns=5,
                moves=tuple(self.requests[request].moves for request, _ in requests),
            )
        )
        self._report(taker)
        self._report(giver)

    def _give_back(self, worker: AbstractWorker, is_announced: bool) -> None:
        """All that it runs must run elsewhere. The gateway may say so, too."""
        for request, attempt in worker.requests.items():
            self._returned(worker, request, attempt, is_announced)
        worker.requests = {}

    def _returned(
        self, worker: AbstractWorker, request: RequestId, attempt: int, is_announced: bool
    ) -> None:
        record = self.requests[request]
        record.worker = None
        worker.answers.append(RequestEnded(request, attempt, Outcome.RETURNED, worker=worker.ref))
        if is_announced and self.has_gateway:
            self.events.append(msgspec.structs.replace(record.arrived, attempt=attempt))

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

    def answer_agent(self, number: int) -> None:
        """The agent's next word reaches the controller."""
        event = self.agents[number].answers.popleft()
        if isinstance(event, CopyCompleted):
            self.agents[number].copies[event.plan].is_complete = True
        self.events.append(event)
        self.old_news.append(event)

    def open_feeds(self) -> list[tuple[PlanId, WorkerRef, WorkerRef]]:
        """(plan, receiver, upstream) of everything that comes from a member."""
        found = []
        for worker in self.workers.values():
            if worker.load is not None and not worker.is_loaded:
                ups = senders(worker.feeds)
                found += [(worker.load.plan, worker.ref, up.worker) for up in ups]
        for agent in self.agents.values():
            for plan, copy in agent.copies.items():
                ups = senders(copy.feeds) if not copy.is_complete else []
                found += [(plan, agent.ref, up.worker) for up in ups]
        return found

    def break_feed(self, index: int, is_stalled: bool) -> None:
        """A receiver says that nothing (more) comes from one of its upstreams."""
        feed = self.open_feeds()[index]
        self.events.append(FeedFailed(*feed, "abstract", is_stalled))

    def fail_copy(self, number: int, plan: PlanId) -> None:
        """A copy goes wrong: what was still to be said of it is replaced."""
        agent = self.agents[number]
        order = agent.copies.pop(plan).order
        self._forget_words(agent, plan)
        agent.answers.append(CopyFailed(order.model, agent.ref, plan, "abstract"))

    def _forget_words(self, agent: AbstractAgent, plan: PlanId) -> None:
        about = (CopyLayerArrived, CopyCompleted)
        agent.answers = deque(
            a for a in agent.answers if not (isinstance(a, about) and a.plan == plan)
        )

    def fail_load(self, number: int, is_announced: bool = False) -> None:
        """The worker's load goes wrong: what it had still to say of it is replaced."""
        worker = self.workers[number]
        assert worker.load is not None
        assert not worker.is_loaded
        about_load = (LiveStarted, LoadStarted, LayerArrived, LoadCompleted)
        worker.answers = deque(a for a in worker.answers if not isinstance(a, about_load))
        self._give_back(worker, is_announced)
        worker.answers.append(LoadFailed(worker.load.instance, worker.load.attempt, "abstract"))
        self._empty(worker)

    def repeat_old_news(self, index: int) -> None:
        """Something about an instance or a worker that is no more is said once again."""
        event = self.old_news[index]
        if isinstance(event, CopyLayerArrived | CopyCompleted | CopyFailed | CopyDropped):
            if all(event.plan not in agent.copies for agent in self.agents.values()):
                self.repeats.append(event)
            return
        instance = getattr(event, "instance", None)
        alive = [w.load.instance for w in self.workers.values() if w.load is not None]
        is_known = instance in self.controller.fleet.instances
        if isinstance(event, RequestEnded) or (instance not in alive and not is_known):
            self.repeats.append(event)

    def restart(self) -> None:
        """The controller dies; the next one hears what the workers hold, at once."""
        epoch = self.config.epoch + 1
        models = tuple(self.policies.values())
        self.config = msgspec.structs.replace(self.config, epoch=epoch, models=models)
        self.controller = Controller(self.config)
        self.checker = self._new_checker()
        self.wake_ns = None
        self.events = [ModelRemoved(name) for name in self.leaving]
        for worker in self.workers.values():
            report = None
            if worker.load is not None:
                load = worker.load
                report = InstanceReport(
                    *(load.instance, load.model, load.attempt, worker.watermark),
                    worker.is_loaded,
                    plan=load.plan,
                    feeds=() if worker.is_loaded else worker.feeds,
                    pairing=None if worker.is_loaded else load.pairing,
                )
            self.events.append(WorkerJoined(worker.ref, DEVICE, report))
            # As real workers do: whatever serves, loaded or live, reports its load again.
            if worker.load is not None and worker.takes_requests(worker.load.instance):
                self._report(worker)
                self.events.append(worker.answers.pop())
        for agent in self.agents.values():
            reports = tuple(
                CopyReport(
                    *(copy.order.model, plan, copy.is_complete),
                    feeds=() if copy.is_complete else copy.feeds,
                )
                for plan, copy in agent.copies.items()
            )
            self.events.append(AgentJoined(agent.ref, agent.host, reports))
        self.has_gateway = False

    def connect_gateway(self) -> None:
        """The gateway finds the new controller and announces what is not over."""
        self.has_gateway = True
        for record in self.requests.values():
            again = msgspec.structs.replace(
                record.arrived,
                attempt=record.attempt,
                worker=record.worker,
                moves=record.moves,
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
        self.checker.observe(self.now_ns, events, commands)
        for command in commands:
            self._carry_out(command)
        grown = [c.instance for c in commands if isinstance(c, StartLoad | Resume)]
        self._check_limits([self.controller.fleet.instances[number].model for number in grown])

    def _check_limits(self, models: list[str]) -> None:
        """Of models that got instances. Others may have more than a lowered limit for a while."""
        for policy in (self.policies[name] for name in dict.fromkeys(models)):
            instances = self.controller.fleet.of_model(policy.spec.name)
            count = sum(1 for i in instances if i.is_capacity)
            # A restarted controller may have adopted more, but it never asks for more.
            is_adopted = any(i.story[0].startswith("adopted") for i in instances if i.story)
            assert count <= policy.instances_max or is_adopted, instances

    def _carry_out(self, command: AnyCommand) -> None:
        if isinstance(command, StartLoad):
            self._load(command)
        elif isinstance(command, AmendLoad):
            self._amend(command)
        elif isinstance(command, StartCopy):
            self._start_copy(command)
        elif isinstance(command, DropCopy):
            self._drop_copy(command)
        elif isinstance(command, ModelGone):
            self._model_gone(command.model)
        elif isinstance(command, Release):
            self._release(command)
        elif isinstance(command, Dispatch):
            self._dispatch(command)
        elif isinstance(command, FailRequest):
            # Its last attempt may have ended well while the news of it was lost.
            record = self.requests.pop(command.request, None)
            if record is not None:
                self._disown(record)
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
        worker.feeds = order.feeds
        worker.watermark = 0
        if order.pairing is not None:
            worker.answers.append(LiveStarted(order.instance, order.attempt))
        worker.answers.append(LoadStarted(order.instance, order.attempt))
        for watermark in range(1, self.policies[order.model].spec.layers + 1):
            arrived = LayerArrived(order.instance, order.attempt, watermark, layer=watermark - 1)
            worker.answers.append(arrived)
        worker.answers.append(LoadCompleted(order.instance, order.attempt, 1))

    def _amend(self, order: AmendLoad) -> None:
        assert all(feed.upstream != FromWorker(order.receiver) for feed in order.feeds)
        for worker in self.workers.values():
            load = worker.load
            is_meant = load is not None and load.plan == order.plan
            if is_meant and worker.ref == order.receiver:
                worker.feeds = order.feeds
        for agent in self.agents.values():
            if agent.ref == order.receiver and order.plan in agent.copies:
                agent.copies[order.plan].feeds = order.feeds

    def _agent(self, ref: WorkerRef) -> AbstractAgent | None:
        return next((agent for agent in self.agents.values() if agent.ref == ref), None)

    def _start_copy(self, order: StartCopy) -> None:
        agent = self._agent(order.agent)
        if agent is None:
            return
        held = [copy.order.model for copy in agent.copies.values()]
        assert order.model not in held, f"{order} comes a second time"
        agent.copies[order.plan] = AbstractCopy(order, order.feeds)
        sizes = [self.policies[c.order.model].spec.size_bytes for c in agent.copies.values()]
        assert sum(sizes) <= agent.host.memory_bytes, "host memory is overdrawn"
        for layer in range(self.policies[order.model].spec.layers):
            arrived = CopyLayerArrived(order.model, agent.ref, order.plan, layer)
            agent.answers.append(arrived)
        agent.answers.append(CopyCompleted(order.model, agent.ref, order.plan, 1))

    def _drop_copy(self, order: DropCopy) -> None:
        agent = self._agent(order.agent)
        if agent is None:
            return
        copy = agent.copies.pop(order.plan, None)
        if copy is not None and not copy.is_complete:
            self._forget_words(agent, order.plan)
            agent.answers.append(CopyFailed(order.model, agent.ref, order.plan, "dropped"))
        agent.answers.append(CopyDropped(order.model, agent.ref, order.plan))

    def _model_gone(self, name: str) -> None:
        """Nothing of it is left anywhere."""
        assert name in self.leaving
        assert all(w.load is None or w.load.model != name for w in self.workers.values())
        for agent in self.agents.values():
            assert all(copy.order.model != name for copy in agent.copies.values())
        if self.has_gateway:
            assert all(r.arrived.model != name for r in self.requests.values())
        del self.leaving[name], self.policies[name]

    def _release(self, order: Release) -> None:
        worker = self.workers.get(order.worker.worker)
        if worker is None or worker.ref != order.worker:
            return
        assert worker.load is not None, order
        assert worker.load.instance == order.instance
        # The controller may not have received that this worker has taken them over.
        batches = [word.requests for word in worker.answers if isinstance(word, BatchTaken)]
        taken = [request for batch in batches for request, _ in batch]
        assert all(request in taken for request in worker.requests), f"{order}, {worker.requests}"
        self._give_back(worker, is_announced=False)
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
        self._disown(record)
        record.attempt, record.moves = order.attempt, 0
        if worker is None or worker.ref != order.worker:
            lost = RequestEnded(order.request, order.attempt, Outcome.WORKER_LOST)
            self.events.append(lost)
            return
        if not worker.takes_requests(order.instance):
            # A live instance whose end the controller has not heard of.
            self._returned(worker, order.request, order.attempt, is_announced=False)
            return
        record.worker = order.worker
        worker.requests[order.request] = order.attempt
        self._report(worker)

    def _disown(self, record: AbstractRequest) -> None:
        """Who took the attempt over unheard by the controller forgets it."""
        if record.worker is not None:
            worker = self.workers[record.worker.worker]
            del worker.requests[record.arrived.request]
            record.worker = None
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
