"""What can be seen of a worker's instance from its inputs and effects, and from which requests it
says are its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from holding_witness import HoldingWitness, Seen

from livescale.batching.contract.live_messages import Handover, Taken
from livescale.batching.runs.run import BatchKey, EmittedTokens, SequenceSpec
from livescale.member.effects import (
    Answer,
    DropFetch,
    Effect,
    Emit,
    Execute,
    Refuse,
    Release,
    Report,
    TakeOver,
    TellPeer,
)
from livescale.member.inputs import (
    ControllerMet,
    GatewayGone,
    GatewayUnknown,
    MemberInput,
    Ordered,
    PeerLost,
    PeerSent,
    Submitted,
)
from livescale.member.member import Member
from livescale.messages.attempts import AttemptFailed, AttemptReturned, AttemptTaken, Cancel, Disown
from livescale.messages.commands import ReleaseHolding, StartHolding
from livescale.messages.events import (
    AnyEvent,
    BatchTaken,
    CapacityMeasured,
    FirstByteArrived,
    HoldingCompleted,
    HoldingDropped,
    HoldingFailed,
    InstanceReported,
    LiveStarted,
    RequestEnded,
)
from livescale.values.types import Outcome, PlanId, WorkerRef

Attempt = tuple[str, int]


def token_of(request: str, index: int) -> int:
    """The token that every instance computes at this index."""
    return 1000 * int(request[1:]) + index


@dataclass
class Stay:
    """An attempt that is the worker's own, from its coming on until it ends or leaves."""

    gateway: str
    next_index: int
    finished: int | None = None


class ServingWitness(HoldingWitness):
    """Judges a worker: attempts end once, tokens come in order, Runs use what is there."""

    def __init__(self, member: Member, memory_bytes: int) -> None:
        super().__init__(member.ref, memory_bytes, memory_bytes)
        self._member = member
        self.stays: dict[Attempt, Stay] = {}
        #: attempts that partners have taken over from here
        self._given: dict[Attempt, WorkerRef] = {}
        self._handed: dict[tuple[WorkerRef, BatchKey], list[Attempt]] = {}
        #: plans of instances that have run, or taken over, something
        self._had_work: set[PlanId | None] = set()
        self._opened: set[int | None] = set()
        self._gone: set[int | None] = set()
        #: rates that may still be reported, and reports of the load that must come
        self._rates = 0
        self._owed_load: int | None = None
        #: what the inputs of this step allow or demand
        self._submitted: dict[Attempt, Submitted] = {}
        self._specs: dict[Attempt, SequenceSpec] = {}
        self._cancelled: dict[Attempt, None] = {}
        self._unread: dict[Attempt, None] = {}
        self._leaving: dict[Attempt, None] = {}
        self._taken_by: dict[Attempt, WorkerRef] = {}
        self._gateways_gone: set[str] = set()
        self._lost: set[WorkerRef] = set()
        self._is_dropped = False
        self._is_released = False
        self._has_executed = False
        self._returned: Counter[Attempt] = Counter()

    # -- inputs -----------------------------------------------------------------------------------

    def absorb(self, inputs: Sequence[MemberInput]) -> None:
        for table in (
            self._submitted,
            self._specs,
            self._cancelled,
            self._unread,
            self._leaving,
            self._taken_by,
            self._gateways_gone,
            self._lost,
            self._returned,
        ):
            table.clear()
        self._is_dropped = self._has_executed = self._is_released = False
        self._owed_load = None
        super().absorb(inputs)

    def take(self, news: MemberInput) -> None:
        super().take(news)
        if isinstance(news, Submitted):
            key = news.spec.request, news.spec.attempt
            self._submitted[key] = news
            self._specs[key] = news.spec
            if self._serves() == news.instance:
                self.stays[key] = Stay(news.gateway, len(news.spec.generated_ids))
                self._leave_older(news.spec)
        elif isinstance(news, Cancel):
            self._cancelled[news.request, news.attempt] = None
        elif isinstance(news, Disown):
            self._leaving[news.request, news.attempt] = None
        elif isinstance(news, GatewayUnknown | GatewayGone) and self._serves() is None:
            return  # its attempts have gone with the instance
        elif isinstance(news, GatewayUnknown):
            stay = self.stays.get((news.request, news.attempt))
            if stay is not None and stay.gateway == news.gateway:
                self._unread[news.request, news.attempt] = None
        elif isinstance(news, GatewayGone):
            self._gateways_gone.add(news.gateway)
            self._unread |= {k: None for k, s in self.stays.items() if s.gateway == news.gateway}
        elif isinstance(news, PeerLost) and not news.is_refused:
            self._lost.add(news.peer)
        elif isinstance(news, PeerSent) and isinstance(news.message, Handover):
            for spec in news.message.requests:
                self._specs[spec.request, spec.attempt] = spec
                self._leave_older(spec)
        elif isinstance(news, PeerSent) and isinstance(news.message, Taken):
            for attempt in self._handed.get((news.peer, news.message.batch), ()):
                self._leaving[attempt] = None
                self._taken_by[attempt] = news.peer
        elif isinstance(news, ControllerMet):
            self._rates += 1
            if self._serves() is not None:
                self._owed_load = self._serves()
        elif isinstance(news, Ordered) and isinstance(news.command, ReleaseHolding):
            self._is_released = True
        elif isinstance(news, Ordered) and isinstance(news.command, StartHolding):
            self._rates += news.command.measure_capacity

    def _leave_older(self, spec: SequenceSpec) -> None:
        for request, attempt in self.stays:
            if request == spec.request and attempt < spec.attempt:
                self._leaving[request, attempt] = None

    def _serves(self) -> int | None:
        """The instance that takes requests at this place among the inputs."""
        for seen in self.seen.values():
            duty = seen.order.duty
            is_open = seen.is_ready and not seen.is_spare
            if is_open and duty is not None and seen.order.rank == 0:
                return duty.instance
        return None

    # -- effects ----------------------------------------------------------------------------------

    def watch(self, effect: Effect) -> None:
        super().watch(effect)
        assert not self._has_executed or isinstance(effect, Execute), f"{effect} after a Run"
        if isinstance(effect, Answer):
            self._answered(effect)
        elif isinstance(effect, Emit):
            for emitted in effect.emitted:
                self._emitted(effect, emitted)
        elif isinstance(effect, TellPeer) and isinstance(effect.message, Handover):
            attempts = [(s.request, s.attempt) for s in effect.message.requests]
            self._handed[effect.peer, effect.message.batch] = attempts
        elif isinstance(effect, DropFetch | Release):
            self._is_dropped = True
        elif isinstance(effect, Execute | TakeOver):
            self._had_work.add(self._assigned)
            if isinstance(effect, Execute):
                self._executes(effect)
        elif isinstance(effect, Refuse):
            raise AssertionError(f"members send what they agreed on: {effect}")

    def _measures(self, seen: Seen) -> None:
        super()._measures(seen)
        if not seen.is_measured:
            # Those of this very step came behind the last layer: they run after it is measured. And
            # those that a partner took in this step are its own.
            older = self.stays.keys() - self._submitted.keys() - self._taken_by.keys()
            assert not older, "what is measured writes over the KV of these"
            assert seen.order.holding.plan not in self._had_work

    def _answered(self, effect: Answer) -> None:
        answer = effect.answer
        key = answer.request, answer.attempt
        if isinstance(answer, AttemptTaken):
            spec = self._specs[key]
            assert answer.moves == spec.moves
            self._given.pop(key, None)
            self.stays[key] = Stay(effect.gateway, len(spec.generated_ids))
        elif isinstance(answer, AttemptReturned):
            self._returned[key] += 1
            assert key not in self._unread, "nobody reads it"
            if key in self.stays:
                assert effect.gateway == self.stays[key].gateway
        else:
            assert isinstance(answer, AttemptFailed)
            assert key in self._submitted

    def _emitted(self, effect: Emit, emitted: EmittedTokens) -> None:
        key = emitted.request, emitted.attempt
        stay = self.stays[key]
        assert stay.gateway == effect.gateway
        count = len(emitted.token_ids)
        expected = range(emitted.index, emitted.index + count)
        assert list(emitted.token_ids) == [token_of(emitted.request, i) for i in expected]
        if effect.is_repeated:
            assert (emitted.index, count) == (0, stay.next_index)
            return
        assert emitted.index == stay.next_index, "each token once, in order"
        assert stay.finished is None
        stay.next_index += count
        if emitted.finish_reason is not None:
            stay.finished = stay.next_index

    def _executes(self, effect: Execute) -> None:
        self._has_executed = True
        (seen,) = (seen for seen in self.seen.values() if not seen.is_spare)
        run = effect.run
        layers = {*range(run.span.start, run.span.stop)}
        assert layers <= seen.materialized, "layers that are not there"
        for segment in run.segments:
            key = segment.request, segment.attempt
            assert key not in self._given, f"{key} is another worker's"
            assert effect.run.batch is not None or key in self.stays

    def reported(self, effect: Report) -> None:
        event = effect.event
        super().reported(effect)
        instance = self._instance_of(event)
        if isinstance(event, RequestEnded):
            self._request_ended(event)
        elif isinstance(event, CapacityMeasured):
            self._rates -= 1
            assert self._rates >= 0
        elif isinstance(event, HoldingDropped):
            self._gone.add(instance)
        elif instance is not None:
            assert instance not in self._gone, f"{event} after the instance's last message"
        if isinstance(event, HoldingFailed):
            self._gone.add(instance)
        elif isinstance(event, HoldingCompleted | LiveStarted):
            self._opened.add(instance)
        elif isinstance(event, InstanceReported | BatchTaken):
            assert event.instance in self._opened, f"{event} before its instance serves"
            if isinstance(event, InstanceReported) and event.instance == self._owed_load:
                self._owed_load = None
        elif isinstance(event, FirstByteArrived):
            assert event.holding.plan not in self.ended

    def _instance_of(self, event: AnyEvent) -> int | None:
        """The instance that the event names, or whose rank its holding is."""
        holding = getattr(event, "holding", None)
        if holding is None:
            return getattr(event, "instance", None)
        duty = self._started[holding.plan].order.duty
        assert duty is not None
        return duty.instance

    def _request_ended(self, event: RequestEnded) -> None:
        key, outcome = (event.request, event.attempt), event.outcome
        assert event.worker == self.ref
        stay = self.stays.pop(key, None)
        if stay is None and key in self._given:
            assert outcome is Outcome.RETURNED, "only a partner's loss ends what it took over"
            assert self._given.pop(key) in self._lost
        elif stay is None:
            assert key in self._submitted, f"{event} of an attempt that is not here"
            assert outcome is Outcome.RETURNED
        elif outcome is Outcome.RETURNED:
            is_unread = key in self._unread or stay.gateway in self._gateways_gone
            is_lost = self._taken_by.get(key) in self._lost
            is_closing = self._is_released or bool(set(self.present) - set(self.seen))
            is_draining = any(s.order.duty and s.order.duty.drains_to for s in self.seen.values())
            is_needed = is_unread or is_lost or is_closing or is_draining
            assert is_needed, f"{event} without need"
            assert is_unread or self._returned[key], "its gateway is told first"
        elif outcome is Outcome.CANCELLED:
            assert key in self._cancelled
        elif outcome is Outcome.FINISHED:
            assert stay is not None
            assert stay.finished == event.output_tokens
        elif outcome is Outcome.FAILED:
            assert key in self._submitted
        if self._is_dropped:
            is_late = stay is None or (key in self._submitted)
            assert is_late, f"{event} after its instance's bytes were dropped"

    # -- after a step -----------------------------------------------------------------------------

    def check_serving(self) -> None:
        """What is open is what the member says is its own."""
        instance = self._member.instance
        own = set(instance.serving.requests()) if instance is not None else set()
        for key in [key for key in self.stays if key not in own]:
            newer = (*own, *self._cancelled, *self._leaving)
            is_older = any(r == key[0] and a > key[1] for r, a in newer)
            assert key in self._leaving or is_older, f"{key} has gone without a message"
            assert self.stays.pop(key).finished is None
            if key in self._taken_by:
                self._given[key] = self._taken_by[key]
        assert own == set(self.stays), f"{own - set(self.stays)} came without a message"
        for key in (*self._cancelled, *self._unread):
            assert key not in own or key in self._specs, f"{key} is not wanted"
        if instance is not None and instance.duty.instance == self._owed_load:
            assert not instance.is_loaded, "the load is reported again"
            assert instance.serving.capabilities.whole_model_only, "the load is reported again"
