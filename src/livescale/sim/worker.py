"""A worker of the simulated world: one life of it, with the production LiveBatcher inside.

It does what a real worker process does, in virtual time: loads, serves, reports. Faults happen to
it from outside; it decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from livescale.batching.live_messages import refusal
from livescale.chunks import ChunkGrid, Feed
from livescale.control.residency import ResidentLayers
from livescale.latency.work import RunWork
from livescale.messages.commands import AmendLoad, Release, StartLoad
from livescale.messages.events import (
    CapacityMeasured,
    FeedFailed,
    InstanceReport,
    LayerArrived,
    LiveStarted,
    LoadCompleted,
    LoadFailed,
    LoadStarted,
    Released,
    RequestEnded,
)
from livescale.sim.serving import SimServing
from livescale.sim.surroundings import SimSurroundings
from livescale.sim.transfers import Transfers
from livescale.sim.worker_messages import (
    PeerMessage,
    RankLayers,
    SimAttemptFailed,
    SimAttemptReturned,
    SimDisown,
    SimSubmit,
    ToWorkerMessage,
)
from livescale.types import (
    FromWorker,
    ModelSpec,
    Outcome,
    PlanId,
    RequestId,
    WorkerRef,
)

WorkerOrder = StartLoad | AmendLoad | Release
_NS_PER_S = 1_000_000_000


@dataclass(slots=True)
class _Assignment:
    """The model that the worker has been given."""

    order: StartLoad
    spec: ModelSpec
    serving: SimServing
    feeds: tuple[Feed, ...]
    layers_there: dict[int, None] = field(default_factory=dict)
    #: what was said of feeds that have not been replaced
    troubles: list[FeedFailed] = field(default_factory=list)
    watermark: int = 0
    #: of a live instance, by rank, as far as rank 0 knows
    watermarks: list[int] = field(default_factory=list)
    is_loaded: bool = False
    #: its release was ordered
    is_leaving: bool = False


class SimWorker:
    """One incarnation of a worker. `tell_first` takes a message to rank 0 of an instance."""

    def __init__(
        self,
        around: SimSurroundings,
        transfers: Transfers,
        tell_first: Callable[[RankLayers], None],
    ) -> None:
        self.ref = around.ref
        self.device = around.device
        self._around = around
        self._config = around.config
        self._checkers = around.checkers
        self._transfers = transfers
        self._tell_first = tell_first
        self._say = around.say
        self._emit = around.emit
        self._assigned: _Assignment | None = None
        self._capacity: CapacityMeasured | None = None
        arena_bytes = self.device.arena_bytes
        self._residents = ResidentLayers(arena_bytes - self._config.resident_bytes, arena_bytes)
        self._is_dead = False

    # -- life -----------------------------------------------------------------------------------

    def die(self) -> None:
        """Nothing of this incarnation happens any more."""
        self._is_dead = True
        if self._assigned is not None:
            self._assigned.serving.leave()
        self._transfers.node_gone(self.ref)

    def report(self) -> InstanceReport | None:
        """What it tells a controller that it joins."""
        a = self._assigned
        if a is None:
            return None
        order = a.order
        return InstanceReport(
            instance=order.instance,
            model=order.model,
            attempt=order.attempt,
            watermark=a.watermark,
            is_loaded=a.is_loaded,
            rank=order.rank,
            plan=order.plan,
            feeds=() if a.is_loaded else a.feeds,
            pairing=order.pairing,
        )

    def joined(self) -> None:
        """A controller that may know nothing was met: say again what only reports tell."""
        if self._capacity is not None:
            self._say(self._capacity)
        a = self._assigned
        if a is None:
            return
        a.serving.forget_reports()
        if a.is_loaded or a.serving.live.is_live:
            a.serving.report_load()
        if not a.is_loaded:
            for trouble in a.troubles:
                self._say(trouble)

    def come_to_rest(self) -> None:
        """The world is over: nothing of its requests is left."""
        if self._assigned is not None:
            live = self._assigned.serving.live
            live.validate()
            self._checkers.at_rest(self.ref, live.batcher.pool.used)

    # -- orders of the controller ---------------------------------------------------------------

    def take_order(self, order: WorkerOrder) -> None:
        if isinstance(order, StartLoad):
            self._load(order)
        elif isinstance(order, AmendLoad):
            self._amend(order)
        else:
            self._release(order)

    def _load(self, order: StartLoad) -> None:
        self._checkers.assigned(self.ref, self._assigned is not None, order)
        spec = self._config.spec(order.model)
        serving = SimServing(self._around, order)
        a = self._assigned = _Assignment(order, spec, serving, order.feeds)
        a.watermarks = [0] * spec.tp_size
        if serving.live.is_live and order.rank == 0:
            self._say(LiveStarted(order.instance, order.attempt, order.rank))
            serving.go_on()
        has_senders = any(isinstance(feed.upstream, FromWorker) for feed in order.feeds)
        if has_senders and self._config.group_setup_ns:
            self._around.clock.after(self._config.group_setup_ns, partial(self._receive, a))
        else:
            self._receive(a)

    def _receive(self, a: _Assignment) -> None:
        """Ask for the parameters, unless the order was taken back meanwhile."""
        if self._is_dead or self._assigned is not a:
            return
        order = a.order
        grid = ChunkGrid(a.spec.layer_bytes, order.chunk_bytes)
        key = (self.ref, order.model, order.rank)
        kept = self._residents.find(order.model)
        present = range(kept.layers if kept is not None else 0)
        self._residents.make_way(a.spec.size_bytes)
        self._transfers.receive(order.plan, key, grid, a.feeds, self, present)

    def _amend(self, order: AmendLoad) -> None:
        a = self._assigned
        if a is not None and a.order.plan == order.plan and not a.is_loaded:
            a.feeds = order.feeds
            a.troubles = []
            self._transfers.amend(order.plan, self.ref, order.feeds)

    def _release(self, order: Release) -> None:
        a = self._assigned
        if a is None:
            self._checkers.released(order, None, ())
            self._say(Released(order.instance, order.attempt, order.rank))
        else:
            a.is_leaving = True
            a.serving.release(partial(self._give_up, order, a))

    def _give_up(
        self, order: Release, a: _Assignment, requests: list[tuple[RequestId, int]]
    ) -> None:
        """The instance goes. `requests` were under way on it."""
        is_live = a.order.pairing is not None and not a.is_loaded
        asked = requests if not is_live else ()
        own = [known for known in asked if not a.serving.has_taken(*known)]
        self._checkers.released(order, a.order.instance, own)
        if not a.is_loaded:
            self._say(LoadFailed(order.instance, order.attempt, "released", order.rank))
        elif a.spec.size_bytes + self._config.resident_bytes <= self.device.arena_bytes:
            self._residents.keep(a.order.model, a.spec.layer_bytes)
        self._assigned = None
        self._transfers.node_gone(self.ref)
        self._return(requests)
        self._say(Released(order.instance, order.attempt, order.rank))

    def _return(self, attempts: list[tuple[RequestId, int]]) -> None:
        """These must run elsewhere."""
        for request, attempt in attempts:
            self._emit(SimAttemptReturned(request, attempt))
            self._say(RequestEnded(request, attempt, Outcome.RETURNED, worker=self.ref))

    def _loading(self, plan: PlanId) -> _Assignment:
        a = self._assigned
        assert a is not None, f"{self!r} gets news of plan {plan}"
        assert a.order.plan == plan, f"{self!r} gets news of plan {plan}, not {a.order.plan}"
        return a

    # -- news of the transfers ------------------------------------------------------------------

    def load_started(self, plan: PlanId) -> None:
        order = self._loading(plan).order
        self._say(LoadStarted(order.instance, order.attempt, order.rank))

    def layer_arrived(self, plan: PlanId, layer: int) -> None:
        a = self._loading(plan)
        a.layers_there[layer] = None
        while a.watermark in a.layers_there:
            a.watermark += 1
        order = a.order
        self._say(
            LayerArrived(
                instance=order.instance,
                attempt=order.attempt,
                watermark=a.watermark,
                rank=order.rank,
                layer=layer,
                live_layers=a.serving.live_layers,
            )
        )
        if a.serving.live.is_live:
            self._has_layers(a)

    def load_completed(self, plan: PlanId) -> None:
        a = self._loading(plan)
        order = a.order
        if order.measure_capacity:
            self._measure(a)
        a.watermark = a.spec.layers
        a.is_loaded = True
        self._say(LoadCompleted(order.instance, order.attempt, a.spec.size_bytes, order.rank))
        self._has_layers(a)
        a.serving.report_load()

    def load_failed(self, plan: PlanId, reason: str) -> None:
        a = self._loading(plan)
        if not a.is_leaving:
            a.serving.release(partial(self._end_failed, a, reason))

    def _end_failed(
        self, a: _Assignment, reason: str, requests: list[tuple[RequestId, int]]
    ) -> None:
        """The worker is empty again."""
        order = a.order
        self._assigned = None
        self._checkers.load_failed(self.ref, order.instance)
        self._return(requests)
        self._say(LoadFailed(order.instance, order.attempt, reason, order.rank))

    def _has_layers(self, a: _Assignment) -> None:
        """This rank's watermark may have risen. A live instance runs what all ranks have."""
        order = a.order
        self._around.live_checker.has_layers(order.instance, order.rank, a.watermark)
        if not a.serving.live.is_live:
            if a.is_loaded:
                a.serving.layers_there(a.watermark)
        elif order.rank == 0:
            self._rank_has(a, 0, a.watermark)
        else:
            self._tell_first(RankLayers(order.instance, order.rank, a.watermark))

    def _rank_has(self, a: _Assignment, rank: int, watermark: int) -> None:
        a.watermarks[rank] = max(a.watermarks[rank], watermark)
        a.serving.layers_there(min(a.watermarks))

    def feed_failed(self, plan: PlanId, upstream: WorkerRef, reason: str, is_stalled: bool) -> None:
        trouble = FeedFailed(plan, self.ref, upstream, reason, is_stalled)
        self._loading(plan).troubles.append(trouble)
        self._say(trouble)

    def _measure(self, assigned: _Assignment) -> None:
        """The capacity that a long prompt would show."""
        tokens = self._config.run_tokens_max
        run_ns = self._config.latency_of(assigned.spec.name).run_ns(RunWork(((tokens, 0),)))
        self._capacity = CapacityMeasured(
            self.device.kind,
            assigned.spec.name,
            max(tokens * _NS_PER_S // max(run_ns, 1), 1),
            assigned.serving.live.batcher.pool.blocks,
        )
        self._say(self._capacity)

    # -- news of gateway and other workers ------------------------------------------------------

    def take_request(self, message: ToWorkerMessage) -> None:
        """Queue an attempt on the instance, or say why not; forget an attempt."""
        a = self._assigned
        if isinstance(message, SimSubmit) and (a is None or a.order.instance != message.instance):
            spec, reason = message.spec, f"instance {message.instance} is not on {self!r}"
            self._emit(SimAttemptFailed(spec.request, spec.attempt, reason))
            self._say(RequestEnded(spec.request, spec.attempt, Outcome.FAILED, worker=self.ref))
        elif a is not None and not self._is_dead:
            a.serving.take_request(message)

    def hear(self, peer: WorkerRef, message: PeerMessage, size_bytes: int) -> None:
        """A message of another worker, with what came along."""
        a = self._assigned
        if isinstance(message, RankLayers):
            if a is not None and a.order.instance == message.instance:
                self._rank_has(a, message.rank, message.watermark)
        elif a is not None:
            a.serving.hear(peer, message, size_bytes)
        else:
            answer = refusal(message)
            if answer is not None:
                self._around.tell(peer, answer, 0)

    def gateway_gone(self) -> None:
        """The gateway has given up the connection: what it asked for is not read."""
        a = self._assigned
        for request, attempt in a.serving.live.requests() if a is not None else ():
            self.gateway_unknown(request, attempt)

    def gateway_unknown(self, request: RequestId, attempt: int) -> None:
        """Nobody can be told of the attempt: only the controller knows where it goes on."""
        if self._assigned is not None:
            self._assigned.serving.take_request(SimDisown(request, attempt))
        self._say(RequestEnded(request, attempt, Outcome.RETURNED, worker=self.ref))

    def peer_lost(self, peer: WorkerRef) -> None:
        """Another worker died. What it took over from here, and may not have told anybody, must
        run elsewhere."""
        then = partial(self._return_given, peer)
        if self._assigned is not None:
            self._assigned.serving.peer_lost(peer, then)
        else:
            then()

    def _return_given(self, peer: WorkerRef) -> None:
        self._return(list(self._around.given.pop(peer, ())))

    def __repr__(self) -> str:
        holds = self._assigned.order.model if self._assigned else "nothing"
        return f"<SimWorker {self.ref} holds {holds}>"
