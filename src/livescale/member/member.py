"""Member: every rule of a worker or a host agent, as a pure machine.

`step(now_ns, inputs) -> effects` absorbs what has come and then goes on: with the next Run of its
instance, if it has one. A host agent is a member without limits for serving. Shells carry effects
out: threads, sockets, an executor and a data plane in the real world; a clock, links and latency
models in the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from livescale.batching.contract.live_messages import LiveMessage, refusal
from livescale.batching.contract.serving import Serving
from livescale.batching.engine_serving import EngineServing
from livescale.batching.lines.stage_batcher import StageBatcher
from livescale.batching.lines.team_batcher import TeamBatcher
from livescale.batching.live.live_batcher import LiveBatcher
from livescale.batching.runs.batcher import Batcher
from livescale.batching.runs.run import Run
from livescale.member import effects, inputs
from livescale.member.attempts import HostedAttempts
from livescale.member.cores import MemberCores
from livescale.member.fence import Fence, why_refused
from livescale.member.instance import HostedInstance, ServingLimits
from livescale.member.member_holdings import MemberHoldings, ModelHolding
from livescale.member.ranks import RankWatermarks
from livescale.messages import events
from livescale.messages.attempts import Cancel, Disown
from livescale.messages.commands import (
    AmendHolding,
    ChangeDuty,
    DropHolding,
    ReleaseHolding,
    SetCores,
    StartHolding,
)
from livescale.values.routes import OVERLAP, Duty
from livescale.values.types import LayerSpan, WorkerRef

_REQUESTS = inputs.Submitted | Cancel | Disown | inputs.GatewayGone | inputs.GatewayUnknown
_ASSIGNED = inputs.ExecutorReady | inputs.FetchFailed
_OF_ARRIVALS = inputs.FirstByteCame | inputs.LayerCame | inputs.FeedEnded | inputs.ControllerMet

ADDRESS_SPACES = 8
"""A host agent's copies lie in so many times as many addresses as it has memory. Copies that come
and go leave gaps, and a copy needs one piece: with memory for it there must be a place for it."""


class Member:
    """One life of a worker, or of a host agent (without `limits`)."""

    def __init__(
        self,
        ref: WorkerRef,
        memory_bytes: int,
        limits: ServingLimits | None = None,
        *,
        address_bytes: int | None = None,
    ) -> None:
        """`memory_bytes` may be in use at once, below offset `address_bytes` (default: as many)."""
        self.ref = ref
        self._limits = limits
        self._effects: list[effects.Effect] = []
        self._emit = self._effects.append
        self._now_ns = 0
        self._fence = Fence()
        addresses, kept = address_bytes or memory_bytes, limits.resident_bytes if limits else 0
        self._holdings = MemberHoldings(memory_bytes, addresses, kept, self._emit)
        #: an executor was asked to take a model over
        self._is_assigning = False
        #: what came since, or is for a time when no Run is in flight; to be read only
        self.waiting: list[inputs.MemberInput] = []
        self.instance: HostedInstance | None = None
        self._capacity: events.CapacityMeasured | None = None
        self._attempts = HostedAttempts(ref, self._emit)
        self._ranks = RankWatermarks(self._emit)
        self.cores = MemberCores(ref, limits.own_cores if limits is not None else 1, self._emit)
        self._handlers: dict[type, Callable[[Any], object]] = {
            inputs.Ordered: self._obey,
            inputs.ControllerMet: self._met_controller,
            inputs.RunEnded: self._run_ended,
            inputs.LayersRan: lambda ran: _layers_ran(self.instance, ran),
            inputs.CoresSet: self.cores.set,
            inputs.MemoryKept: lambda n: self._holdings.keep_from_others(n.plan, n.ranges),
            inputs.Submitted: lambda n: self._attempts.submit(n.gateway, n.instance, n.spec),
            Cancel: lambda sent: self._attempts.cancel(sent.request, sent.attempt),
            Disown: lambda sent: self._attempts.disown(sent.request, sent.attempt, sent.moves),
            inputs.GatewayGone: lambda gone: self._attempts.gateway_gone(gone.gateway),
            inputs.GatewayUnknown: lambda n: self._attempts.gateway_unknown(
                n.gateway, n.request, n.attempt
            ),
            inputs.PeerSent: self._peer_sent,
            inputs.PeerLost: self._peer_lost,
        }
        #: news of a holding; of one that is gone they are late, and nothing follows from them
        self._of_holding: dict[type, Callable[[ModelHolding, Any], None]] = {
            inputs.FirstByteCame: self._first_byte,
            inputs.LayerCame: self._layer_came,
            inputs.AllCame: self._all_came,
            inputs.FetchFailed: self._fetch_failed,
            inputs.FeedEnded: self._feed_ended,
            inputs.ExecutorReady: self._executor_ready,
            inputs.RateMeasured: self._measured,
        }

    # -- the machine ----------------------------------------------------------------------------

    def step(
        self, now_ns: int, news: Sequence[inputs.MemberInput], steps_max: int = 1
    ) -> list[effects.Effect]:
        """Absorb the news in order, and go on. If Runs are in flight, the first one is of the
        earliest. A shell that can carry out several steps of a Run at once gives `steps_max`."""
        self._now_ns = now_ns
        self._holdings.begin_step()
        _foresee(self._fence, self._attempts, news)
        for one in news:
            self._absorb(one)
        if self.instance is not None:
            self.instance.go_on(now_ns, steps_max, is_awaited=bool(self.waiting))
        done, self._effects[:] = self._effects[:], []
        return done

    def _absorb(self, news: inputs.MemberInput) -> None:
        """While the executor takes a model over, which its shell does at once, all else waits; so
        does, while a Run is in flight, what might take something away from it."""
        if self._is_assigning:
            has_to_wait = not isinstance(news, _ASSIGNED)
        else:
            has_to_wait = self._is_running and _waits_for_run(news, self.instance, self.waiting)
        if has_to_wait:
            self.waiting.append(news)
            self._effects += _ended_runs(news, self.instance)
            return
        if not isinstance(news, inputs.HoldingNews):
            self._handlers[type(news)](news)
        elif (holding := self._holdings.get(news.plan)) is not None:
            self._of_holding[type(news)](holding, news)
        if self.waiting and not self._is_assigning and not self._is_running:
            waiting, self.waiting = self.waiting, []
            for later in waiting:
                self._absorb(later)

    @property
    def _is_running(self) -> bool:
        return self.instance is not None and self.instance.is_running

    def wake_ns(self) -> int | None:
        """When to call `step` again if nothing comes in before."""
        return self.instance.wake_ns() if self.instance is not None else None

    def shorten(self, steps: int) -> Run:
        """The Run in flight ends after so many of its steps. Returns what is left of it."""
        assert self.instance is not None
        return self.instance.shorten(steps)

    def expected_bytes(self, peer: WorkerRef, message: LiveMessage) -> int | None:
        """How many bytes of rows or KV a peer's message brings; None if they are not wanted. Raises
        UnexpectedMessage for a batch that cannot be."""
        instance = self.instance
        return instance.expected_bytes(peer, message) if instance is not None else None

    @property
    def holdings(self) -> tuple[ModelHolding, ...]:
        """What lies in the memory, or is on its way there. To be read only."""
        return self._holdings.all

    @property
    def reports(self) -> tuple[events.HoldingReport, ...]:
        """What a controller that knows nothing needs."""
        return self._holdings.reports

    # -- the controller: its orders, and what it is told ----------------------------------------

    def _obey(self, ordered: inputs.Ordered) -> None:
        command = ordered.command
        if not self._fence.admits(ordered.epoch):
            reason = why_refused(ordered.epoch, self._fence.current)
            self._emit(effects.RefuseOrder(command, reason))
        elif isinstance(command, StartHolding):
            self._begin(command, ordered)
        elif isinstance(command, AmendHolding):
            self._holdings.amend(command)
        elif isinstance(command, ReleaseHolding):
            self._release(command)
        elif isinstance(command, SetCores):
            self.cores.obey(command)
        elif isinstance(command, ChangeDuty):
            if self._holdings.change_duty(command) and self.instance is not None:
                self.instance.change_duty(command.duty)
        else:
            holding = self._holdings.get(command.holding.plan)
            # Nothing may be left: it failed while the order was on its way.
            if holding is not None:
                self._give_up(holding, f"dropped: {command.reason}")
            self._report(events.HoldingDropped(command.holding))

    def _begin(self, order: StartHolding, ordered: inputs.Ordered) -> None:
        is_busy = order.duty is not None and not all(h.is_spare for h in self._holdings.all)
        assert not is_busy, f"{self!r} is given {order.model} by plan {order.holding.plan}"
        refused = self._holdings.begin(order, ordered.layer_bytes, ordered.identity)
        if refused:
            self._report(events.HoldingFailed(order.holding, refused))
        elif order.duty is not None:
            self._is_assigning = True
            self._emit(effects.Assign(order.holding.plan))

    def _release(self, command: ReleaseHolding) -> None:
        """The instance ends. One rank of a copy may be a spare already."""
        holding = self._holdings.get(command.holding.plan)
        if holding is not None and holding.is_whole and not holding.is_spare:
            self._close(holding)
            self._holdings.keep(holding)

    def _give_up(self, holding: ModelHolding, reason: str) -> None:
        """One that is under way ends as a failure; of a whole model a worker keeps first layers."""
        self._forget(holding)
        if not holding.is_whole:
            self._report(events.HoldingFailed(holding.id, reason))
        elif holding.order.duty is not None:
            self._holdings.keep_first_layers(holding)

    def _forget(self, holding: ModelHolding) -> None:
        """Nothing computes with the bytes any more; then they may be overwritten."""
        self._close(holding)
        self._holdings.remove(holding)

    def _close(self, holding: ModelHolding) -> None:
        """The holding's instance ends: requests that are here wait again elsewhere."""
        if self.instance is not None and self.instance.order.holding == holding.id:
            self.instance.close(self._now_ns)
            self.instance = None
        self._is_assigning = False

    def _report(self, event: events.AnyEvent) -> None:
        self._emit(effects.Report(event))

    def _met_controller(self, _: inputs.ControllerMet) -> None:
        """Say again what the report does not tell."""
        if self._capacity is not None:
            self._report(self._capacity)
        if self.instance is not None:
            self.instance.forget_reports()
        self._attempts.met_controller()
        self.cores.met_controller()
        for trouble in self._holdings.troubles():
            self._report(trouble)

    # -- news of holdings -----------------------------------------------------------------------

    def _first_byte(self, holding: ModelHolding, _: inputs.FirstByteCame) -> None:
        if holding.order.duty is not None:
            self._report(events.FirstByteArrived(holding.id))

    def _layer_came(self, holding: ModelHolding, news: inputs.LayerCame) -> None:
        holding.take_layer(news.layer)
        if (instance := self.instance) is not None:
            self._emit(effects.Materialize(news.layer))
        self._holdings.update_reports()
        live_layers = instance.live_layers if instance is not None else 0
        self._report(events.LayerArrived(holding.id, news.layer, holding.watermark, live_layers))
        if instance is not None:
            self._ranks.has(instance, holding.watermark, holding.beyond)

    def _all_came(self, holding: ModelHolding, news: inputs.AllCame) -> None:
        holding.received_bytes = news.received_bytes
        self._is_there(holding)

    def _is_there(self, holding: ModelHolding) -> None:
        """Every layer is: the holding is whole, once its instance has been measured."""
        assert holding.watermark == holding.order.span.stop, f"{holding} is not whole"
        if self.instance is not None and self.instance.is_to_be_measured:
            self._emit(effects.Measure(holding.id.plan, self.instance.capacity.measured_tokens))
        else:
            self._complete(holding)

    def _complete(self, holding: ModelHolding) -> None:
        holding.complete()
        if self.instance is not None:
            self.instance.is_loaded = True
            # If it had work before it was loaded, what its own Runs took must do.
            self._tell_capacity(self.instance)
        self._holdings.update_reports()
        self._report(events.HoldingCompleted(holding.id, holding.received_bytes))

    def _fetch_failed(self, holding: ModelHolding, news: inputs.FetchFailed) -> None:
        self._forget(holding)
        self._report(events.HoldingFailed(holding.id, news.reason))

    def _feed_ended(self, holding: ModelHolding, news: inputs.FeedEnded) -> None:
        """The controller says which holder gives the rest."""
        trouble = events.FeedFailed(holding.id, news.upstream, news.reason, news.is_stalled)
        holding.troubles.append(trouble)
        self._report(trouble)

    # -- the executor ---------------------------------------------------------------------------

    def _executor_ready(self, holding: ModelHolding, ready: inputs.ExecutorReady) -> None:
        assert self._limits is not None, f"{self!r} has no executor"
        self._is_assigning = False
        order, duty, limits = holding.order, holding.order.duty, self._limits
        assert duty is not None, "an executor takes a model over for an instance"
        serving = _serving(ready, order.span, duty, limits)
        self.instance = HostedInstance(
            order, serving, ready, limits, attempts=self._attempts, emit=self._emit
        )
        self._ranks.tell(self.instance)
        if holding.is_woken:
            for layer in range(order.span.start, order.span.stop):
                self._emit(effects.Materialize(layer))
            self._ranks.has(self.instance, holding.watermark)
            self._is_there(holding)

    def _run_ended(self, ended: inputs.RunEnded) -> None:
        assert self.instance is not None, f"{self!r} has no instance"
        self.instance.run_ended(ended)
        if self.instance.is_loaded:
            self._tell_capacity(self.instance)

    def _measured(self, holding: ModelHolding, measured: inputs.RateMeasured) -> None:
        if self.instance is not None:
            self._tell_capacity(self.instance, measured.prefill_tokens_per_s)
        self._complete(holding)

    def _tell_capacity(self, instance: HostedInstance, rate: int | None = None) -> None:
        """Report the rate of prefills if it is owed and known: `rate`, or what Runs took."""
        capacity = instance.capacity.take(instance.serving.capabilities, rate)
        if capacity is not None:
            self._capacity = capacity
            self._report(capacity)

    # -- peers ----------------------------------------------------------------------------------

    def _peer_sent(self, sent: inputs.PeerSent) -> None:
        message, instance = sent.message, self.instance
        if isinstance(message, inputs.RankLayers):
            self._ranks.hear(message, instance)
        elif instance is not None and instance.order.rank == 0:
            instance.take_message(self._now_ns, message, sent)
        elif (answer := refusal(message)) is not None:
            self._emit(effects.TellPeer(sent.peer, answer))

    def _peer_lost(self, lost: inputs.PeerLost) -> None:
        if self.instance is not None:
            self.instance.peer_lost(lost.peer, is_refused=lost.is_refused)
        if not lost.is_refused:
            self._attempts.partner_lost(lost.peer)

    def __repr__(self) -> str:
        return f"<Member {self.ref}: {self._holdings!r}>"


def _serving(
    ready: inputs.ExecutorReady, span: LayerSpan, duty: Duty, limits: ServingLimits
) -> Serving:
    """Decides the Runs of the instance."""
    if limits.is_engine:
        overlaps = duty.live_order == OVERLAP
        return EngineServing(duty.instance, ready.limits, span, overlaps=overlaps)
    batcher, live = Batcher(ready.limits, span), limits.live
    if ready.stage is not None:
        return StageBatcher(batcher, duty.instance, ready.stage, live)
    return TeamBatcher(LiveBatcher(batcher, duty.instance, live, duty.live_order, duty.gives_to))


def _foresee(fence: Fence, attempts: HostedAttempts, news: Sequence[inputs.MemberInput]) -> None:
    """Before orders that wait: what was reported to a new life of the controller stays so. And
    before Runs that end: whose tokens nobody reads."""
    for one in news:
        if isinstance(one, inputs.ControllerMet):
            fence.meet(one.epoch)
        elif isinstance(one, inputs.GatewayUnknown):
            attempts.cut_off(one.gateway, one.request, one.attempt)
        elif isinstance(one, inputs.GatewayGone):
            attempts.cut_off_all(one.gateway)


def _layers_ran(instance: HostedInstance | None, ran: inputs.LayersRan) -> None:
    assert instance is not None, "Runs are those of an instance"
    instance.serving.layers_ran(ran.stop)


def _ended_runs(news: inputs.MemberInput, instance: HostedInstance | None) -> list[effects.Effect]:
    """If a Run in flight waits for layers that do not come any more."""
    if isinstance(news, inputs.FetchFailed):
        plan = news.plan
    elif isinstance(news, inputs.Ordered) and isinstance(news.command, DropHolding):
        plan = news.command.holding.plan
    else:
        return []
    if instance is None or not (instance.is_running and instance.runs_await_layers):
        return []
    return [effects.GiveRunUp()] if plan == instance.order.holding.plan else []


def _brings_layers(news: inputs.MemberInput) -> bool:
    """A Run that waits inside for layers would wait for ever without it: it is absorbed, whatever
    else waits. A life of the controller has to be told of feeds that ended."""
    if isinstance(news, inputs.Ordered):
        return isinstance(news.command, AmendHolding)
    return isinstance(news, _OF_ARRIVALS)


def _waits_for_run(
    news: inputs.MemberInput,
    instance: HostedInstance | None,
    waiting: Sequence[inputs.MemberInput],
) -> bool:
    """It is to be absorbed after the Run in flight, from which it may take something."""
    if isinstance(news, inputs.RunEnded | inputs.LayersRan | inputs.CoresSet | inputs.MemoryKept):
        return False
    if instance is not None and instance.runs_await_layers and _brings_layers(news):
        return False
    if isinstance(news, inputs.PeerSent) and instance is not None:
        may_come = instance.may_come(news.peer, news.message)
    elif isinstance(news, inputs.Ordered) and instance is not None:
        may_come = instance.may_obey(news.command)
    else:
        may_come = isinstance(news, _REQUESTS)
    return bool(waiting) or not may_come
