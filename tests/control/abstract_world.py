"""A world without time or bytes: it answers every order with its terminal event, sometime.

It stays consistent: workers answer in order, dead ones not at all, and every order is answered
once. What is random (who is next, what goes wrong) is the caller's business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from livescale.clusters.topology import Device, Host
from livescale.control.controller import Controller
from livescale.control.state.config import ControllerConfig
from livescale.messages import commands, events
from livescale.messages.commands import AnyCommand
from livescale.messages.events import AnyEvent
from livescale.sim.checkers.commands import CommandChecker
from livescale.sim.checkers.failures import FailureChecker
from livescale.values.chunks import senders
from livescale.values.routes import Duty
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.types import (
    FromWorker,
    HoldingId,
    InstanceId,
    LayerSpan,
    Outcome,
    PlanId,
    RequestId,
    WorkerRef,
    gateway_of,
)

DEVICE = Device("abstract", "h", "l", 1000, 1000)


@dataclass(slots=True)
class AbstractHolding:
    """What a member has of an order, as it was amended last."""

    order: commands.StartHolding
    watermark: int = 0
    is_whole: bool = False
    is_spare: bool = False

    def report(self) -> events.HoldingReport:
        feeds = () if self.is_whole else self.order.feeds
        order = msgspec.structs.replace(self.order, feeds=feeds)
        return events.HoldingReport(order, self.watermark, self.is_whole, self.is_spare)


@dataclass(slots=True)
class AbstractMember:
    """A worker's or an agent's truth: what it holds and what it still has to answer, in order.

    Only workers have a duty and requests.
    """

    ref: WorkerRef
    holdings: dict[PlanId, AbstractHolding] = field(default_factory=dict)
    answers: deque[AnyEvent] = field(default_factory=deque)
    #: what it runs: dispatched here or taken over, and not ended
    requests: dict[RequestId, int] = field(default_factory=dict)
    #: what others took over from here: (attempt, by whom)
    given: dict[RequestId, tuple[int, WorkerRef]] = field(default_factory=dict)

    @property
    def duty(self) -> Duty | None:
        """What the worker does with the one holding that it has, if that is no warm spare."""
        serving = [holding for holding in self.holdings.values() if not holding.is_spare]
        return next((holding.order.duty for holding in serving), None)

    def takes_requests(self, instance: InstanceId) -> bool:
        """It has rank 0 of this instance, and runs requests of it."""
        duty = self.duty
        if duty is None or duty.instance != instance or duty.workers[0] != self.ref:
            return False
        is_whole = all(holding.is_whole for holding in self.holdings.values())
        return is_whole or duty.live_order is not None


@dataclass(slots=True)
class AbstractRequest:
    """A request's truth, as its gateway knows it."""

    arrived: events.RequestArrived
    attempt: int = 0
    #: how often the attempt was taken over
    moves: int = 0
    worker: WorkerRef | None = None


class AbstractWorld:
    """Controller, workers, host agents and requests; `waiting` are events for the next step."""

    def __init__(
        self,
        config: ControllerConfig,
        memory_bytes: int = 1000,
        is_late: bool = False,
        arena_bytes: int = 1000,
    ) -> None:
        """With `is_late`, orders to drop arrive after members have reported the rest."""
        self.device = msgspec.structs.replace(DEVICE, arena_bytes=arena_bytes)
        self.config = config
        self.memory_bytes = memory_bytes
        self.is_late = is_late
        #: what is served; those of them that were withdrawn
        self.policies = {policy.spec.name: policy for policy in config.models}
        self.leaving: dict[str, None] = {}
        self.now_ns = 0
        self.wake_ns: int | None = None
        #: workers and agents
        self.members: dict[int, AbstractMember] = {}
        self.incarnations: dict[int, int] = {}
        self.requests: dict[RequestId, AbstractRequest] = {}
        self.waiting: list[AnyEvent] = []
        #: words of members and gateways that nobody waits for any more
        self.old_news: list[AnyEvent] = []
        #: old news that is repeated in the next step: the checker must not count it twice
        self.repeats: list[AnyEvent] = []
        self.has_gateway = True
        self.controller = Controller(config)
        # Loads fail here whenever the caller wants it.
        self.failures = FailureChecker(config, lambda model, since_ns: True)
        self.checker = self._new_checker()

    def _new_checker(self) -> CommandChecker:
        return CommandChecker(self.config, self.failures)

    @property
    def workers(self) -> dict[int, AbstractMember]:
        return {number: m for number, m in self.members.items() if not m.ref.is_agent}

    def _living(self, ref: WorkerRef) -> AbstractMember | None:
        """The member, unless this life of it is over."""
        member = self.members.get(ref.worker)
        return member if member is not None and member.ref == ref else None

    # -- what may happen ------------------------------------------------------------------------

    def join(self, number: int) -> None:
        """A worker or a host agent comes, as its next incarnation, with empty memory."""
        ref = WorkerRef(number, self.incarnations.get(number, -1) + 1)
        self.incarnations[number] = ref.incarnation
        self.members[number] = AbstractMember(ref)
        self._announce(self.members[number])

    def _announce(self, member: AbstractMember) -> None:
        held = tuple(holding.report() for holding in member.holdings.values())
        if member.ref.is_agent:
            host = Host(f"h{member.ref.worker}", "l", self.memory_bytes)
            self.waiting.append(events.AgentJoined(member.ref, host, held))
        else:
            self.waiting.append(events.WorkerJoined(member.ref, self.device, held))

    def add_model(self, policy: ModelPolicy) -> None:
        self.policies[policy.spec.name] = policy
        self.waiting.append(events.ModelAdded(policy))

    def change_model(self, policy: ModelPolicy) -> None:
        """It has other limits from now on."""
        self.policies[policy.spec.name] = policy
        self.waiting.append(events.ModelChanged(policy))

    def remove_model(self, name: str) -> None:
        """No new requests come; the controller ends with ModelGone."""
        self.leaving[name] = None
        self.waiting.append(events.ModelRemoved(name))

    def lose(self, number: int, gateway_first: bool) -> None:
        """A member dies. Its gateway sees that too, before or after the controller."""
        member = self.members.pop(number)
        words: list[AnyEvent] = [events.WorkerLost(member.ref, "abstract")]
        for request, attempt in member.requests.items():
            self.requests[request].worker = None
            word = events.RequestEnded(request, attempt, Outcome.WORKER_LOST)
            if self.has_gateway:
                words.insert(0 if gateway_first else len(words), word)
        self.waiting += words
        self.old_news += member.answers
        for other in self.members.values():
            self._returns_what_was_given(other, member.ref)

    def _returns_what_was_given(self, giver: AbstractMember, lost: WorkerRef) -> None:
        """The controller may not have heard who took it over, nor how it ended there."""
        for request, (attempt, taker) in giver.given.items():
            if taker == lost:
                back = events.RequestEnded(request, attempt, Outcome.RETURNED, worker=giver.ref)
                giver.answers.append(back)

    def arrive(self, request: RequestId, model: str, tokens: int) -> None:
        event = events.RequestArrived(request, model, tokens, 5)
        self.requests[request] = AbstractRequest(event)
        if self.has_gateway:
            self.waiting.append(event)

    def cancel(self, request: RequestId) -> None:
        """The client goes away; a worker that runs it says so."""
        record = self.requests.pop(request)
        if self.has_gateway:
            self.waiting.append(events.RequestCancelled(request))
        if record.worker is not None:
            worker = self.members[record.worker.worker]
            del worker.requests[request]
            outcome = Outcome.CANCELLED
            ended = events.RequestEnded(request, record.attempt, outcome, worker=worker.ref)
            worker.answers.append(ended)
            self._report(worker)

    def lose_gateway(self, gateway: str, is_told: bool) -> None:
        """All that its clients asked for is over. A worker that it had sent an attempt reports its
        end, if `is_told`; else it had sent none."""
        for request in [request for request in self.requests if gateway_of(request) == gateway]:
            record = self.requests.pop(request)
            if record.worker is None:
                continue
            worker = self.members[record.worker.worker]
            del worker.requests[request]
            if is_told:
                outcome, attempt = Outcome.CANCELLED, record.attempt
                worker.answers.append(
                    events.RequestEnded(request, attempt, outcome, worker=worker.ref)
                )
            self._report(worker)
        if self.has_gateway:
            self.waiting.append(events.GatewayLost(gateway))

    def finish(self, request: RequestId, outcome: Outcome) -> None:
        """The worker that runs the request ends it."""
        record = self.requests.pop(request)
        assert record.worker is not None
        worker = self.members[record.worker.worker]
        del worker.requests[request]
        ended = events.RequestEnded(request, record.attempt, outcome, 5, worker.ref)
        worker.answers.append(ended)
        self._report(worker)

    def live_pairs(self) -> list[tuple[int, int]]:
        """(target, source) of workers where the source may take something over."""
        found = []
        for number, worker in self.workers.items():
            if not worker.requests or worker.duty is None:
                continue
            takers = (taker.partner for taker in worker.duty.drains_to)
            for partner in (*worker.duty.gives_to, *takers):
                source = self._living(partner.worker)
                if source is not None and source.takes_requests(partner.instance):
                    found.append((number, partner.worker.worker))
        return found

    def take(self, target: int, source: int, count: int) -> None:
        """The source takes a batch over. The gateway knows at once, the controller sometime."""
        giver, taker = self.members[target], self.members[source]
        assert giver.duty is not None
        assert taker.duty is not None
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
            events.BatchTaken(
                instance=taker.duty.instance,
                worker=taker.ref,
                target=giver.duty.instance,
                requests=tuple((*pair, self.requests[pair[0]].moves) for pair in requests),
                next_layer=1,
                tokens=10,
                row_bytes=100,
                pull_ns=5,
            )
        )
        self._report(taker)
        self._report(giver)

    def _give_back(self, worker: AbstractMember, is_announced: bool) -> None:
        """All that it runs must run elsewhere. The gateway may say so, too."""
        for request, attempt in worker.requests.items():
            self._returned(worker, request, attempt, is_announced)
        worker.requests = {}

    def _returned(
        self, worker: AbstractMember, request: RequestId, attempt: int, is_announced: bool
    ) -> None:
        record = self.requests[request]
        record.worker = None
        ended = events.RequestEnded(request, attempt, Outcome.RETURNED, worker=worker.ref)
        worker.answers.append(ended)
        if is_announced and self.has_gateway:
            self.waiting.append(msgspec.structs.replace(record.arrived, attempt=attempt))

    def answer(self, number: int) -> None:
        """The member's next word reaches the controller."""
        member = self.members[number]
        event = member.answers.popleft()
        if isinstance(event, events.LayerArrived | events.HoldingCompleted):
            holding = member.holdings.get(event.holding.plan)
            if holding is not None and isinstance(event, events.LayerArrived):
                holding.watermark = event.watermark
            elif holding is not None:
                holding.is_whole = True
        self.waiting.append(event)
        self.old_news.append(event)

    def arriving(self) -> list[HoldingId]:
        """Everything that is not whole yet."""
        return [
            holding.order.holding
            for member in self.members.values()
            for holding in member.holdings.values()
            if not holding.is_whole
        ]

    def _holding(self, holding: HoldingId) -> AbstractHolding | None:
        member = self._living(holding.member)
        return member.holdings.get(holding.plan) if member is not None else None

    def open_feeds(self) -> list[tuple[HoldingId, WorkerRef]]:
        """(holding, upstream) of everything that comes from a member."""
        found = []
        for number in self.arriving():
            holding = self._holding(number)
            assert holding is not None
            found += [(number, up.worker) for up in senders(holding.order.feeds)]
        return found

    def break_feed(self, index: int, is_stalled: bool) -> None:
        """A receiver says that nothing (more) comes from one of its upstreams."""
        holding, upstream = self.open_feeds()[index]
        self.waiting.append(events.FeedFailed(holding, upstream, "abstract", is_stalled))

    def fail(self, holding: HoldingId, is_announced: bool = False) -> None:
        """It goes wrong: what was still to be reported of it is replaced."""
        member = self.members[holding.member.worker]
        assert not member.holdings.pop(holding.plan).is_whole
        self._forget_words(member, holding)
        self._give_back(member, is_announced)
        member.answers.append(events.HoldingFailed(holding, "abstract"))

    def _forget_words(self, member: AbstractMember, holding: HoldingId) -> None:
        others = [word for word in member.answers if getattr(word, "holding", None) != holding]
        member.answers = deque(others)

    def repeat_old_news(self, index: int) -> None:
        """Something about a holding, an instance or a request that is no more comes once again."""
        event = self.old_news[index]
        if isinstance(event, events.RequestEnded) or not self._is_there(event):
            self.repeats.append(event)

    def _is_there(self, event: AnyEvent) -> bool:
        """What the event is about is there, or the controller may expect news of it."""
        holding: HoldingId | None = getattr(event, "holding", None)
        if holding is None:
            instance = getattr(event, "instance", None)
            duties = [w.duty.instance for w in self.workers.values() if w.duty is not None]
            return instance in duties or instance in self.controller.fleet.instances
        is_expected = self.controller.pool.find(holding) is not None
        return self._holding(holding) is not None or (is_expected and not holding.member.is_agent)

    def restart(self) -> None:
        """The controller dies; the next one hears what the members hold, at once."""
        epoch = self.config.epoch + 1
        models = tuple(self.policies.values())
        self.config = msgspec.structs.replace(self.config, epoch=epoch, models=models)
        self.controller = Controller(self.config)
        self.checker = self._new_checker()
        self.wake_ns = None
        self.waiting = [events.ModelRemoved(name) for name in self.leaving]
        for member in self.members.values():
            self._announce(member)
            # As real workers do: whatever serves, loaded or live, reports its load again.
            if member.duty is not None and member.takes_requests(member.duty.instance):
                self._report(member)
                self.waiting.append(member.answers.pop())
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
            self.waiting.append(again)

    # -- steps ----------------------------------------------------------------------------------

    def step(self, gap_ns: int) -> None:
        """Time passes, at most to the next wake-up; the controller hears what waits and acts."""
        if self.wake_ns is not None and self.now_ns + gap_ns >= self.wake_ns:
            self.now_ns = max(self.now_ns, self.wake_ns)
            self.wake_ns = None
            self.waiting.append(events.Tick())
        else:
            self.now_ns += gap_ns
        heard, self.waiting = self.waiting, []
        repeats, self.repeats = self.repeats, []
        ordered = self.controller.step(self.now_ns, [*heard, *repeats])
        self.controller.validate()
        self.checker.observe(self.now_ns, heard, ordered)
        for command in ordered:
            self._carry_out(command)
        self._check_limits(ordered)

    def _check_limits(self, ordered: Sequence[AnyCommand]) -> None:
        """Of models that got instances. Others may have more than a lowered limit for a while."""
        fleet = self.controller.fleet
        grown = [c.model for c in ordered if isinstance(c, commands.StartHolding) and c.duty]
        resumed = [c.instance for c in ordered if isinstance(c, commands.Resume)]
        grown += [fleet.instances[number].model for number in resumed]
        for policy in (self.policies[name] for name in dict.fromkeys(grown)):
            instances = fleet.of_part(self.controller.models[policy.spec.name].entry.part)
            count = sum(1 for i in instances if i.is_capacity)
            # A restarted controller may have adopted more, but it never asks for more.
            is_adopted = any(i.story[0].startswith("adopted") for i in instances if i.story)
            assert count <= policy.instances_max or is_adopted, instances

    def _carry_out(self, command: AnyCommand) -> None:
        if isinstance(command, commands.StartHolding):
            self._start(command)
        elif isinstance(command, commands.AmendHolding):
            self._amend(command)
        elif isinstance(command, commands.ReleaseHolding):
            self._release(command)
        elif isinstance(command, commands.ChangeDuty):
            self._change_duty(command)
        elif isinstance(command, commands.DropHolding):
            self._drop(command)
        elif isinstance(command, commands.ModelGone):
            self._model_gone(command.model)
        elif isinstance(command, commands.Dispatch):
            self._dispatch(command)
        elif isinstance(command, commands.FailRequest):
            # Its last attempt may have ended well while the news of it was lost.
            record = self.requests.pop(command.request, None)
            if record is not None:
                self._disown(record)
        elif isinstance(command, commands.WakeAt):
            assert command.at_ns > self.now_ns
            earlier = self.wake_ns is None or command.at_ns < self.wake_ns
            self.wake_ns = command.at_ns if earlier else self.wake_ns

    def _start(self, order: commands.StartHolding) -> None:
        member, holding = self._living(order.holding.member), order.holding
        if member is None:
            return
        if order.spare is not None:
            self._wake(member, order)
            return
        held = [(other.order.model, other.order.rank) for other in member.holdings.values()]
        assert (order.model, order.rank) not in held, f"{order} comes a second time"
        is_free = all(other.is_spare for other in member.holdings.values())
        assert is_free or member.ref.is_agent, f"{member} is given {order}"
        member.holdings[holding.plan] = AbstractHolding(order)
        if member.ref.is_agent:
            models = [other.order.model for other in member.holdings.values()]
            sizes = [self.policies[model].spec.size_bytes for model in models]
            assert sum(sizes) <= self.memory_bytes, "host memory is overdrawn"
        else:
            assert order.duty is not None
            if order.duty.live_order is not None:
                member.answers.append(events.LiveStarted(holding))
            member.answers.append(events.FirstByteArrived(holding))
        layers = self.policies[order.model].spec.layers
        assert order.span == LayerSpan(0, layers)
        member.answers += [events.LayerArrived(holding, n, n + 1) for n in range(layers)]
        member.answers.append(events.HoldingCompleted(holding, 1))

    def _wake(self, member: AbstractMember, order: commands.StartHolding) -> None:
        """The bytes of a warm spare are this order's: only the end of it is reported."""
        assert order.spare is not None
        spare = member.holdings.pop(order.spare)
        same = spare.order.model, spare.order.rank, spare.order.span
        assert same == (order.model, order.rank, order.span)
        assert (spare.is_spare, order.feeds) == (True, ())
        member.holdings[order.holding.plan] = AbstractHolding(order, spare.watermark)
        member.answers.append(events.HoldingCompleted(order.holding, 0))

    def _release(self, order: commands.ReleaseHolding) -> None:
        """The worker keeps the bytes. Nothing is answered."""
        holding, member = self._holding(order.holding), self._living(order.holding.member)
        if holding is None or member is None or holding.is_spare:
            return
        assert holding.is_whole, order
        batches = [w.requests for w in member.answers if isinstance(w, events.BatchTaken)]
        taken = [request for batch in batches for request, _, _ in batch]
        # One rank may be a spare already: then an earlier life found nothing to do here.
        assert all(r in taken for r in member.requests), f"{order}, {member.requests}"
        self._give_back(member, is_announced=False)
        holding.is_spare = True

    def _amend(self, order: commands.AmendHolding) -> None:
        assert all(feed.upstream != FromWorker(order.holding.member) for feed in order.feeds)
        holding = self._holding(order.holding)
        if holding is not None:
            holding.order = msgspec.structs.replace(holding.order, feeds=order.feeds)

    def _change_duty(self, order: commands.ChangeDuty) -> None:
        holding = self._holding(order.holding)
        if holding is not None:
            own = holding.order.duty
            assert own is not None
            alone = msgspec.structs.replace(own, gives_to=())
            # What is here when it loses its partner may all have been pulled before.
            assert holding.is_whole or order.duty == alone, f"{order} while it loads"
            holding.order = msgspec.structs.replace(holding.order, duty=order.duty)

    def _drop(self, order: commands.DropHolding) -> None:
        member = self._living(order.holding.member)
        if member is None:
            return
        holding = member.holdings.pop(order.holding.plan, None)
        if order.reason == "drained":
            assert holding is not None, order
            # The controller may not have received that this worker has taken them over.
            batches = [w.requests for w in member.answers if isinstance(w, events.BatchTaken)]
            taken = [request for batch in batches for request, *_ in batch]
            assert all(r in taken for r in member.requests), f"{order}, {member.requests}"
        self._give_back(member, is_announced=False)
        if holding is not None and not holding.is_whole and not self.is_late:
            self._forget_words(member, order.holding)
            member.answers.append(events.HoldingFailed(order.holding, "dropped"))
        member.answers.append(events.HoldingDropped(order.holding))

    def _model_gone(self, name: str) -> None:
        """Nothing of it is left anywhere."""
        assert name in self.leaving
        for member in self.members.values():
            assert all(holding.order.model != name for holding in member.holdings.values())
        if self.has_gateway:
            assert all(r.arrived.model != name for r in self.requests.values())
        del self.leaving[name], self.policies[name]

    def _dispatch(self, order: commands.Dispatch) -> None:
        record, worker = self.requests.get(order.request), self._living(order.worker)
        if record is None:
            ended = events.RequestEnded(order.request, order.attempt, Outcome.CANCELLED)
            self.waiting.append(ended)
            return
        assert order.attempt > record.attempt
        self._disown(record)
        record.attempt, record.moves = order.attempt, 0
        if worker is None:
            lost = events.RequestEnded(order.request, order.attempt, Outcome.WORKER_LOST)
            self.waiting.append(lost)
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
            worker = self.members[record.worker.worker]
            del worker.requests[record.arrived.request]
            record.worker = None
            self._report(worker)

    def _report(self, worker: AbstractMember) -> None:
        assert worker.duty is not None
        started, instance = tuple(worker.requests.items()), worker.duty.instance
        load = events.InstanceReported(instance, started, len(started), 0, 0, 100, 0)
        worker.answers.append(load)
