"""A member of the simulated world: the production Member, and a shell that lives in virtual time.

Effects are carried out over the clock, links and latency models; nothing is decided here. As on a
real member's thread, inputs wait while a Run is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from livescale.batching.live_messages import Handover, Pull
from livescale.chunks import ChunkGrid, Feed
from livescale.member import effects, inputs
from livescale.member.member import ADDRESS_SPACES
from livescale.member.serving import Serving, ServingLimits
from livescale.messages.attempts import AttemptTaken
from livescale.messages.commands import DropHolding, StartHolding
from livescale.messages.events import HoldingFailed, HoldingReport, RequestEnded
from livescale.sim.checkers.invariants import require
from livescale.sim.checkers.serving_view import ServingView
from livescale.sim.executor import SimExecutor
from livescale.sim.member_world import MemberWorld
from livescale.sim.worker_messages import SimSubmit, SimTokens, ToWorkerMessage
from livescale.types import FromWorker, InstanceId, ModelSpec, PlanId, RequestId, WorkerRef

GATEWAY = "gateway"
"""The name of the one gateway of a simulated world."""

_NS_PER_S = 1_000_000_000
_STEPS_MAX = 1 << 20


@dataclass(slots=True)
class _Arrival:
    """A holding as the simulated transfers know it."""

    order: StartHolding
    key: tuple[WorkerRef, str, int]
    feeds: tuple[Feed, ...]
    spec: ModelSpec
    is_asked_for: bool = False


class SimMember:
    """One life of a worker or an agent."""

    def __init__(self, around: MemberWorld) -> None:
        self.ref = around.ref
        self.device, self.host = around.device, around.host
        self._around = around
        self._config = around.config
        self._clock = around.clock
        if around.device is not None:
            limits = ServingLimits(
                kind=around.device.kind,
                live=around.config.live,
                resident_bytes=around.config.resident_bytes,
                report_gap_ns=around.config.report_gap_ns,
            )
            self.member = around.make_member(self.ref, around.device.arena_bytes, limits)
            self._executor: SimExecutor | None = SimExecutor(
                config=around.config,
                device=around.device,
                clock=around.clock,
                shorten=self.member.shorten,
                ended=self._run_ended,
            )
        else:
            assert around.host is not None
            size_bytes = around.host.memory_bytes
            address_bytes = ADDRESS_SPACES * size_bytes
            self.member = around.make_member(self.ref, size_bytes, address_bytes=address_bytes)
            self._executor = None
        self._inbox: list[inputs.MemberInput] = []
        #: how far the member's clock is ahead of the world's
        self._ahead_ns = 0
        self._is_stepping = self._is_dead = False
        self._arrivals: dict[PlanId, _Arrival] = {}
        self._alarm: tuple[int, int] | None = None
        #: the instance that the checkers know
        self._shown: Serving | None = None
        #: attempts that came from other instances
        self._taken: dict[tuple[RequestId, int], None] = {}
        self._carry: dict[type, Callable[[Any], None]] = {
            effects.Report: self._report,
            effects.Answer: self._answer,
            effects.Emit: self._emit,
            effects.TellPeer: self._tell,
            effects.Refuse: self._refuse,
            effects.Reach: _nothing,
            effects.Fetch: self._fetch,
            effects.AmendFetch: self._amend,
            effects.DropFetch: self._drop,
            effects.KeepLayers: _nothing,
            effects.Assign: self._assign,
            effects.Materialize: self._materialize,
            effects.Measure: self._measure,
            effects.Execute: self._execute,
            effects.TakeOver: self._took_over,
            effects.WriteKv: self._wrote_kv,
            effects.ForgetRows: _nothing,
        }

    # -- life -----------------------------------------------------------------------------------

    def die(self) -> None:
        """Nothing of this incarnation happens any more."""
        self._is_dead = True
        self._inbox.clear()
        self._set_alarm(None)
        if self._executor is not None:
            self._executor.stop()
        self._around.live_checker.leaves(self.ref)
        self._around.transfers.node_gone(self.ref)
        self._arrivals.clear()
        self._show_memory()

    @property
    def reports(self) -> tuple[HoldingReport, ...]:
        """What it tells a controller that it joins."""
        return self.member.reports

    def come_to_rest(self) -> None:
        """The world is over: nothing of its requests is left."""
        serving = self.member.serving
        if serving is not None:
            serving.live.validate()
            self._around.checkers.at_rest(self.ref, serving.live.batcher.pool.used)

    # -- what comes in --------------------------------------------------------------------------

    def take_order(self, order: inputs.MemberOrder) -> None:
        """An order of the controller."""
        ordered = inputs.Ordered(order)
        if isinstance(order, StartHolding):
            ordered = inputs.Ordered(order, self._config.spec(order.model).layer_bytes, order.model)
            if order.duty is not None:
                self._around.checkers.assigned(self.ref, bool(self.member.holdings), order)
        elif isinstance(order, DropHolding) and self.device is not None:
            self._check_drop(order)
        self.put(ordered)

    def _check_drop(self, order: DropHolding) -> None:
        serving = self.member.serving
        asked: list[tuple[RequestId, int]] = []
        if serving is not None and serving.is_loaded:
            asked = [known for known in serving.live.requests() if known not in self._taken]
        held = serving.order.holding if serving is not None else None
        self._around.checkers.dropped(order, held, asked)

    def take_request(self, message: ToWorkerMessage) -> None:
        """A message of the gateway about an attempt."""
        if isinstance(message, SimSubmit):
            self.put(inputs.Submitted(GATEWAY, message.instance, message.spec))
        else:
            self.put(message)

    def hear(self, peer: WorkerRef, told: effects.TellPeer) -> None:
        """A message of another worker, with what came along."""
        self.put(inputs.PeerSent(peer, told.message, told.gateways, told.size_bytes))

    def peer_lost(self, peer: WorkerRef) -> None:
        """Another worker died."""
        self.put(inputs.PeerLost(peer))

    def jump_ahead(self, jump_ns: int) -> None:
        """The member's clock jumps."""
        self._ahead_ns += jump_ns
        if not self._is_dead and not self._is_stepping:
            self._set_alarm(self._wake_ns())

    def put(self, news: inputs.MemberInput) -> None:
        """Now, or when the Run in flight is over."""
        if self._is_dead:
            return
        self._inbox.append(news)
        if not self.is_idle:
            self.executor.end_stretch()
        elif not self._is_stepping:
            self._step()

    @property
    def is_idle(self) -> bool:
        """No Run is in flight."""
        return self._executor is None or self._executor.is_idle

    def __repr__(self) -> str:
        return f"<SimMember {self.member!r}>"

    # -- the machine ----------------------------------------------------------------------------

    def _step(self) -> None:
        self._is_stepping = True
        while self._inbox and (self.is_idle or isinstance(self._inbox[0], inputs.RunEnded)):
            news, self._inbox = self._inbox, []
            self._carry_out(self.member.step(self._now_ns, news, self._steps_max()))
        self._is_stepping = False
        self._set_alarm(self._wake_ns())
        if self.device is not None:
            self._show_instance()

    def _show_instance(self) -> None:
        """The checker of live pairs looks at the instance."""
        serving, checker = self.member.serving, self._around.live_checker
        if serving is not self._shown:
            if self._shown is not None:
                checker.leaves(self.ref)
            if serving is not None and serving.order.rank == 0:
                checker.joins(self.ref, ServingView(self, serving))
            self._shown = serving
        checker.looks(self.ref, self._clock.now_ns)

    def _carry_out(self, todo: Sequence[effects.Effect]) -> None:
        for effect in todo:
            self._carry[type(effect)](effect)

    @property
    def _now_ns(self) -> int:
        """By the member's clock."""
        return self._clock.now_ns + self._ahead_ns

    def _wake_ns(self) -> int | None:
        """By the world's clock."""
        wake_ns = self.member.wake_ns()
        return None if wake_ns is None else wake_ns - self._ahead_ns

    def _steps_max(self) -> int:
        # Faults may come at any time, and what a worker said last decides what they destroy.
        is_quiet = self._clock.now_ns >= self._config.faults.until_ns
        return _STEPS_MAX if self._config.coalesces and is_quiet else 1

    def _set_alarm(self, at_ns: int | None) -> None:
        if self._alarm is not None:
            if self._alarm[0] == at_ns:
                return
            self._clock.cancel(self._alarm[1])
        self._alarm = None
        if at_ns is not None:
            self._alarm = at_ns, self._clock.at(max(at_ns, self._clock.now_ns), self._wake)

    def _wake(self) -> None:
        self._alarm = None
        if self.is_idle:
            self._carry_out(self.member.step(self._now_ns, (), self._steps_max()))
            self._step()

    # -- effects: messages ----------------------------------------------------------------------

    def _report(self, effect: effects.Report) -> None:
        event = effect.event
        if isinstance(event, HoldingFailed):
            self._around.checkers.failed(event.holding)
        elif isinstance(event, RequestEnded):
            self._taken.pop((event.request, event.attempt), None)
        self._around.report(event)

    def _answer(self, effect: effects.Answer) -> None:
        answer = effect.answer
        if isinstance(answer, AttemptTaken):
            self._taken[answer.request, answer.attempt] = None
        self._around.emit(answer)

    def _emit(self, effect: effects.Emit) -> None:
        step_ns = self.executor.step_ns
        if effect.is_repeated:
            step_ns = [self._clock.now_ns] * max(len(e.token_ids) for e in effect.emitted)
        self._around.emit(SimTokens(step_ns, list(effect.emitted)))

    def _tell(self, effect: effects.TellPeer) -> None:
        message, checker = effect.message, self._around.live_checker
        if isinstance(message, Handover):
            checker.hands(message)
        elif isinstance(message, Pull) and message.without_rows:
            checker.pulls_without_rows(message.batch.target)
        self._around.tell(effect)

    def _refuse(self, effect: effects.Refuse) -> None:
        require(False, "members send what they agreed on", self.ref, effect)

    def _took_over(self, effect: effects.TakeOver) -> None:
        instance, _ = self._working
        self._around.live_checker.handed(instance, effect.message)

    def _wrote_kv(self, effect: effects.WriteKv) -> None:
        (instance, _), message = self._working, effect.message
        self._around.live_checker.kv_came(instance, message.batch, message.layer)

    @property
    def _working(self) -> tuple[InstanceId, StartHolding]:
        """The instance that an effect is about, and its order: a worker has one at a time."""
        (arrival,) = self._arrivals.values()
        assert arrival.order.duty is not None
        return arrival.order.duty.instance, arrival.order

    # -- effects: holdings ----------------------------------------------------------------------

    def _fetch(self, effect: effects.Fetch) -> None:
        order = effect.order
        key = (self.ref, order.model, order.rank)
        spec = self._config.spec(order.model)
        arrival = self._arrivals[effect.plan] = _Arrival(order, key, order.feeds, spec)
        self._show_memory()
        if self.host is not None and self._around.refusals.refuses(self.ref, order.model):
            self._inbox.insert(0, inputs.FetchFailed(effect.plan, "there is no memory"))
            return
        resident = effect.resident
        present = range(resident.layers if resident is not None else 0)
        receive = partial(self._receive, arrival, present)
        has_senders = any(isinstance(feed.upstream, FromWorker) for feed in order.feeds)
        if self.device is not None and has_senders and self._config.group_setup_ns:
            self._clock.after(self._config.group_setup_ns, receive)
        else:
            receive()

    def _receive(self, arrival: _Arrival, present: range) -> None:
        """Ask for the parameters, unless the order was taken back meanwhile."""
        plan = arrival.order.holding.plan
        if self._arrivals.get(plan) is arrival:
            arrival.is_asked_for = True
            grid = ChunkGrid(arrival.spec.layer_bytes, arrival.order.chunk_bytes)
            key, feeds = arrival.key, arrival.feeds
            self._around.transfers.receive(plan, key, grid, feeds, self.put, present)

    def _amend(self, effect: effects.AmendFetch) -> None:
        arrival = self._arrivals[effect.plan]
        arrival.feeds = effect.feeds
        if arrival.is_asked_for:
            self._around.transfers.amend(effect.plan, self.ref, effect.feeds)

    def _drop(self, effect: effects.DropFetch) -> None:
        arrival = self._arrivals.pop(effect.plan)
        self._around.transfers.drop(arrival.key)
        self._show_memory()

    def _show_memory(self) -> None:
        """The checkers look at what lies in host memory."""
        if self.host is not None:
            held = [arrival.key[1:] for arrival in self._arrivals.values()]
            size = sum(arrival.spec.size_bytes for arrival in self._arrivals.values())
            self._around.checkers.holds(self.ref, self.host.memory_bytes, size, held)

    # -- effects: the executor ------------------------------------------------------------------

    @property
    def executor(self) -> SimExecutor:
        assert self._executor is not None, f"{self!r} has no device"
        return self._executor

    def _assign(self, effect: effects.Assign) -> None:
        spec = self._arrivals[effect.plan].spec
        if self._around.refusals.refuses(self.ref, spec.name):
            self._inbox.insert(0, inputs.FetchFailed(effect.plan, "the executor refuses"))
        else:
            self._inbox.insert(0, self.executor.assign(effect.plan, spec))

    def _materialize(self, effect: effects.Materialize) -> None:
        instance, order = self._working
        self._around.live_checker.has_layers(instance, order.rank, effect.layer + 1)

    def _measure(self, effect: effects.Measure) -> None:
        rate = self.executor.prefill_tokens_per_s()
        self._inbox.insert(0, inputs.RateMeasured(effect.plan, rate))

    def _execute(self, effect: effects.Execute) -> None:
        (instance, order), is_live = self._working, effect.batch is not None
        self._around.live_checker.runs(instance, order.model, effect.run, is_live=is_live)
        self.executor.start(effect, effect.report_due_ns - self._ahead_ns)

    def _run_ended(self, ended: inputs.RunEnded) -> None:
        self._inbox.insert(0, ended)
        self._step()


def _nothing(_: object) -> None:
    """Effects that mean nothing where bytes have no values."""
