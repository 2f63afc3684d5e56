"""Member: every rule of a worker or a host agent, as a pure machine.

`step(now_ns, inputs) -> effects` absorbs what has come and then goes on: with the next Run of its
instance, if it has one. A host agent is a member without limits for serving. Shells carry effects
out: threads, sockets, an executor and a data plane in the real world; a clock, links and latency
models in the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from livescale.batching.live_batcher import WHILE_RUNNING
from livescale.batching.live_messages import LiveMessage, refusal
from livescale.batching.run import Run
from livescale.control.residency import ResidentLayers
from livescale.member.attempts import HostedAttempts
from livescale.member.effects import (
    AmendFetch,
    Assign,
    DropFetch,
    Effect,
    Fetch,
    KeepLayers,
    Materialize,
    Measure,
    Report,
    TellPeer,
)
from livescale.member.holding import ModelHolding
from livescale.member.inputs import (
    AllCame,
    ControllerMet,
    ExecutorReady,
    FeedEnded,
    FetchFailed,
    FirstByteCame,
    GatewayGone,
    GatewayUnknown,
    LayerCame,
    MemberInput,
    Ordered,
    PeerLost,
    PeerSent,
    RankLayers,
    RateMeasured,
    RunEnded,
    Submitted,
)
from livescale.member.memory_map import MemoryMap
from livescale.member.serving import Serving, ServingLimits
from livescale.messages import events
from livescale.messages.attempts import Cancel, Disown
from livescale.messages.commands import AmendHolding, StartHolding
from livescale.types import PlanId, WorkerRef

_REQUESTS = Submitted | Cancel | Disown | GatewayGone | GatewayUnknown

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
        """`memory_bytes` may be in use at once, at offsets below `address_bytes` (default: as
        many)."""
        self.ref = ref
        self._limits = limits
        self._memory_bytes = memory_bytes
        self._regions = MemoryMap(address_bytes or memory_bytes)
        self._effects: list[Effect] = []
        self._emit = self._effects.append
        self._now_ns = 0
        self._holdings: dict[PlanId, ModelHolding] = {}
        #: an executor was asked to take a model over
        self._is_assigning = False
        #: what came since, or is for a time when no Run is in flight; to be read only
        self.waiting: list[MemberInput] = []
        self.serving: Serving | None = None
        self._capacity: events.CapacityMeasured | None = None
        #: the rate of prefills was asked for and is not known yet
        self._owes_capacity = False
        resident_bytes = limits.resident_bytes if limits is not None else 0
        self._residents_from = max(memory_bytes - resident_bytes, 0)
        self._residents = ResidentLayers(self._residents_from, memory_bytes)
        answer_ns = limits.live.answer_ns if limits is not None else 0
        self._attempts = HostedAttempts(ref, self._emit, answer_ns)
        #: the latest message of every rank
        self._rank_layers: dict[int, RankLayers] = {}
        #: what a controller that knows nothing needs; replaced, never changed
        self.reports: tuple[events.HoldingReport, ...] = ()
        self._handlers: dict[type, Callable[[Any], object]] = {
            Ordered: self._obey,
            ControllerMet: self._met_controller,
            FirstByteCame: self._first_byte,
            LayerCame: self._layer_came,
            AllCame: self._all_came,
            FetchFailed: self._fetch_failed,
            FeedEnded: self._feed_ended,
            ExecutorReady: self._executor_ready,
            RunEnded: self._run_ended,
            RateMeasured: self._measured,
            Submitted: self._submitted,
            Cancel: lambda sent: self._attempts.cancel(sent.request, sent.attempt),
            Disown: lambda sent: self._attempts.disown(sent.request, sent.attempt),
            GatewayGone: lambda gone: self._attempts.gateway_gone(gone.gateway),
            GatewayUnknown: self._gateway_unknown,
            PeerSent: self._peer_sent,
            PeerLost: self._peer_lost,
        }

    # -- the machine ----------------------------------------------------------------------------

    def step(self, now_ns: int, inputs: Sequence[MemberInput], steps_max: int = 1) -> list[Effect]:
        """Absorb the inputs in order, and go on. If Runs are in flight, the first input is the end
        of the earliest. A shell that can carry out several steps of a Run at once gives
        `steps_max`."""
        self._now_ns = now_ns
        for news in inputs:
            self._absorb(news)
        if self.serving is not None:
            self.serving.go_on(now_ns, steps_max, is_awaited=bool(self.waiting))
        effects = self._effects[:]
        self._effects.clear()
        return effects

    def _absorb(self, news: MemberInput) -> None:
        """While the executor takes a model over, which its shell does at once, all else waits; so
        does, while a Run is in flight, what might take something away from it."""
        if self._has_to_wait(news):
            self.waiting.append(news)
            return
        self._handlers[type(news)](news)
        if self.waiting and not self._is_assigning and not self._is_running:
            waiting, self.waiting = self.waiting, []
            for later in waiting:
                self._absorb(later)

    def _has_to_wait(self, news: MemberInput) -> bool:
        if self._is_assigning:
            return not isinstance(news, ExecutorReady | FetchFailed)
        if not self._is_running or isinstance(news, RunEnded):
            return False
        content = news.message if isinstance(news, PeerSent) else news
        return bool(self.waiting) or not isinstance(content, WHILE_RUNNING | _REQUESTS)

    @property
    def _is_running(self) -> bool:
        return self.serving is not None and self.serving.is_running

    def wake_ns(self) -> int | None:
        """When to call `step` again if nothing comes in before."""
        return self.serving.wake_ns() if self.serving is not None else None

    def shorten(self, steps: int) -> Run:
        """The Run in flight ends after so many of its steps. Returns what is left of it."""
        assert self.serving is not None
        return self.serving.shorten(steps)

    def expected_bytes(self, peer: WorkerRef, message: LiveMessage) -> int | None:
        """How many bytes of rows or KV a peer's message brings; None if they are not wanted. Raises
        UnexpectedMessage for a batch that cannot be."""
        if self.serving is None:
            return None
        return self.serving.expected_bytes(peer, message)

    @property
    def holdings(self) -> tuple[ModelHolding, ...]:
        """What lies in the memory, or is on its way there. To be read only."""
        return tuple(self._holdings.values())

    # -- orders ---------------------------------------------------------------------------------

    def _obey(self, ordered: Ordered) -> None:
        command = ordered.command
        if isinstance(command, StartHolding):
            self._begin(command, ordered)
        elif isinstance(command, AmendHolding):
            self._amend(command)
        else:
            holding = self._holdings.get(command.holding.plan)
            # Nothing may be left: it failed while the order was on its way.
            if holding is not None:
                self._give_up(holding, f"dropped: {command.reason}")
            self._emit(Report(events.HoldingDropped(command.holding)))

    def _begin(self, order: StartHolding, ordered: Ordered) -> None:
        plan, size_bytes = order.holding.plan, sum(ordered.layer_bytes)
        is_busy = plan in self._holdings or (order.duty is not None and bool(self._holdings))
        assert not is_busy, f"{self!r} is given {order.model} by plan {plan}"
        free_bytes = self._memory_bytes - sum(h.size_bytes for h in self._holdings.values())
        offset_bytes = self._regions.allocate(size_bytes) if size_bytes <= free_bytes else None
        if offset_bytes is None:
            reason = f"{size_bytes} bytes do not fit: {free_bytes} are free, {self._regions!r}"
            self._emit(Report(events.HoldingFailed(order.holding, reason)))
            return
        self._holdings[plan] = ModelHolding(
            order, ordered.layer_bytes, ordered.identity, offset_bytes
        )
        resident = self._residents.find(ordered.identity)
        if order.duty is not None:
            self._residents.make_way(size_bytes)
        # First, so that bytes move while the modules are built.
        self._emit(Fetch(plan, offset_bytes, order, resident))
        if order.duty is not None:
            self._is_assigning = True
            self._emit(Assign(plan))
        self._update_reports()

    def _amend(self, command: AmendHolding) -> None:
        """Get what is missing of a holding by other feeds; nothing, if it is whole or gone."""
        holding = self._holdings.get(command.holding.plan)
        if holding is not None and not holding.is_whole:
            holding.amend(command.feeds)
            self._emit(AmendFetch(command.holding.plan, command.feeds))
            self._update_reports()

    def _give_up(self, holding: ModelHolding, reason: str) -> None:
        """One that is under way ends as a failure; of a whole model a worker keeps first layers."""
        self._forget(holding)
        if not holding.is_whole:
            self._emit(Report(events.HoldingFailed(holding.id, reason)))
        elif holding.order.duty is not None and holding.size_bytes <= self._residents_from:
            kept = self._residents.keep(holding.identity, holding.layer_bytes)
            if kept is not None:
                self._emit(KeepLayers(kept))

    def _forget(self, holding: ModelHolding) -> None:
        """Requests that are here wait again elsewhere; then the bytes may be overwritten."""
        if holding.order.duty is not None and self.serving is not None:
            self.serving.close(self._now_ns)
            self.serving = None
        self._owes_capacity = self._is_assigning = False
        del self._holdings[holding.id.plan]
        self._regions.free(holding.offset_bytes)
        self._emit(DropFetch(holding.id.plan))
        self._update_reports()

    # -- the controller -------------------------------------------------------------------------

    def _met_controller(self, _: ControllerMet) -> None:
        """Say again what the report does not tell."""
        if self._capacity is not None:
            self._emit(Report(self._capacity))
        if self.serving is not None:
            self.serving.forget_reports()
        for holding in self._holdings.values():
            for trouble in holding.troubles if not holding.is_whole else ():
                self._emit(Report(trouble))

    def _update_reports(self) -> None:
        self.reports = tuple(holding.report() for holding in self._holdings.values())

    # -- news of holdings -----------------------------------------------------------------------

    def _first_byte(self, news: FirstByteCame) -> None:
        holding = self._holdings.get(news.plan)
        if holding is not None and holding.order.duty is not None:
            self._emit(Report(events.FirstByteArrived(holding.id)))

    def _layer_came(self, news: LayerCame) -> None:
        holding = self._holdings.get(news.plan)
        if holding is None:
            return
        grown, serving = holding.take_layer(news.layer), self.serving
        for layer in grown if serving is not None else ():
            self._emit(Materialize(layer))
        self._update_reports()
        live_layers = serving.live_layers if serving is not None else 0
        arrived = events.LayerArrived(holding.id, news.layer, holding.watermark, live_layers)
        self._emit(Report(arrived))
        if serving is not None and grown:
            self._has_layers(serving, holding)

    def _has_layers(self, serving: Serving, holding: ModelHolding) -> None:
        """This rank's watermark has risen. A live instance runs what all its ranks have."""
        rank, duty = serving.order.rank, serving.duty
        serving.rank_has(rank, holding.watermark)
        if rank:
            layers = RankLayers(duty.instance, rank, holding.watermark)
            self._emit(TellPeer(duty.workers[0], layers))

    def _all_came(self, news: AllCame) -> None:
        holding = self._holdings.get(news.plan)
        if holding is None:
            return
        assert holding.watermark == holding.order.span.stop, f"{holding} is not whole"
        if self._owes_capacity and self.serving is not None and not self.serving.live.is_live:
            self._emit(Measure(news.plan))
        else:
            self._complete(holding)

    def _complete(self, holding: ModelHolding) -> None:
        holding.complete()
        if self.serving is not None:
            self.serving.is_loaded = True
            # KV blocks of a live instance are in use: what its own Runs took must do.
            self._tell_capacity()
        self._update_reports()
        self._emit(Report(events.HoldingCompleted(holding.id, holding.size_bytes)))

    def _fetch_failed(self, news: FetchFailed) -> None:
        holding = self._holdings.get(news.plan)
        if holding is not None:
            self._forget(holding)
            self._emit(Report(events.HoldingFailed(holding.id, news.reason)))

    def _feed_ended(self, news: FeedEnded) -> None:
        """The controller says which holder gives the rest."""
        holding = self._holdings.get(news.plan)
        if holding is not None:
            trouble = events.FeedFailed(holding.id, news.upstream, news.reason, news.is_stalled)
            holding.troubles.append(trouble)
            self._emit(Report(trouble))

    # -- the executor ---------------------------------------------------------------------------

    def _executor_ready(self, ready: ExecutorReady) -> None:
        holding = self._holdings.get(ready.plan)
        if holding is None:
            return
        assert self._limits is not None, f"{self!r} has no executor"
        self._is_assigning = False
        self._owes_capacity = holding.order.measure_capacity
        self.serving = Serving(
            order=holding.order,
            ready=ready,
            limits=self._limits,
            attempts=self._attempts,
            emit=self._emit,
        )
        self._other_ranks_have()

    def _run_ended(self, ended: RunEnded) -> None:
        assert self.serving is not None, f"{self!r} has no instance"
        self.serving.run_ended(ended)
        if self._owes_capacity and self.serving.is_loaded:
            self._tell_capacity()

    def _measured(self, measured: RateMeasured) -> None:
        holding = self._holdings.get(measured.plan)
        if holding is not None:
            self._tell_capacity(measured.prefill_tokens_per_s)
            self._complete(holding)

    def _tell_capacity(self, rate: int | None = None) -> None:
        """Report the rate of prefills if it is owed and known: `rate`, or what Runs took."""
        serving, limits = self.serving, self._limits
        if not self._owes_capacity or serving is None or limits is None:
            return
        rate = rate or serving.live.pace.prefill_tokens_per_s()
        if rate is None:
            return
        self._owes_capacity = False
        kv_blocks = serving.live.batcher.config.kv_blocks
        self._capacity = events.CapacityMeasured(limits.kind, serving.order.model, rate, kv_blocks)
        self._emit(Report(self._capacity))

    # -- gateways and peers ---------------------------------------------------------------------

    def _submitted(self, sent: Submitted) -> None:
        self._attempts.submit(sent.gateway, sent.instance, sent.spec)

    def _gateway_unknown(self, news: GatewayUnknown) -> None:
        self._attempts.gateway_unknown(news.gateway, news.request, news.attempt)

    def _peer_sent(self, sent: PeerSent) -> None:
        message, serving = sent.message, self.serving
        if isinstance(message, RankLayers):
            self._rank_layers[message.rank] = message
            self._other_ranks_have()
        elif serving is not None:
            serving.take_message(self._now_ns, message, sent)
        else:
            answer = refusal(message)
            if answer is not None:
                self._emit(TellPeer(sent.peer, answer))

    def _other_ranks_have(self) -> None:
        """What other ranks of the instance have. Their messages may come before its order."""
        for layers in self._rank_layers.values():
            if self.serving is not None and self.serving.duty.instance == layers.instance:
                self.serving.rank_has(layers.rank, layers.watermark)

    def _peer_lost(self, lost: PeerLost) -> None:
        if self.serving is not None:
            self.serving.peer_lost(lost.peer, is_refused=lost.is_refused)
        if not lost.is_refused:
            self._attempts.partner_lost(self._now_ns, lost.peer)

    def __repr__(self) -> str:
        held = ", ".join(h.order.model for h in self._holdings.values()) or "nothing"
        return f"<Member {self.ref} holds {held}; {self._regions!r}>"
