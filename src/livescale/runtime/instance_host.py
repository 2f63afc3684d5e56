"""What a worker does with its device: holds at most one instance and runs it.

Everything here happens on one thread, the worker's main thread. Other threads (sockets, transfers)
hand in work with `post`; results leave through an Reporter. An instance is three verbs:
`batcher.next_run()` -> `executor.run(run)` -> `batcher.commit(run, token_ids)`.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from livescale.batching.batcher import Batcher, BatcherConfig
from livescale.batching.reports import REPORT_GAP_NS, ReportPace, load_report
from livescale.batching.run import Emission, SequenceSpec
from livescale.chunks import Feed
from livescale.engine.errors import ModelError
from livescale.engine.run_result import InstanceExecutor
from livescale.messages.commands import AmendLoad, Release, StartLoad
from livescale.messages.events import (
    CapacityMeasured,
    FeedFailed,
    InstanceReport,
    LayerArrived,
    LoadCompleted,
    LoadFailed,
    LoadStarted,
    Released,
    RequestEnded,
)
from livescale.runtime.arrival import ArrivalOrder, ModelArrival
from livescale.runtime.boot import WorkerBoot
from livescale.runtime.examination import held_copy
from livescale.runtime.wire import (
    AttemptFailed,
    Examine,
    Examined,
    HeldCopy,
    Order,
    Submit,
    Token,
    Tokens,
    WorkerEvent,
)
from livescale.transfer.arena import Arena
from livescale.transfer.data_plane import DataPlane
from livescale.types import (
    InstanceId,
    Manifest,
    Outcome,
    RequestId,
    TokenLogprobs,
    WorkerRef,
)

# Long enough that a Run's fixed cost does not count, short enough to be over in a moment.
_MEASURED_TOKENS = 256


class Reporter(Protocol):
    """Where an instance's words go. Both calls may come from any thread and never block."""

    def to_controller(self, event: WorkerEvent | Examined) -> None: ...

    def to_gateway(self, gateway: str, message: Tokens | AttemptFailed) -> None: ...


@dataclass(slots=True)
class _Assignment:
    """The model that this worker has been given.

    Layers arrive in any order; those of the watermark are materialized.
    """

    order: StartLoad
    manifest: Manifest
    arrival: ModelArrival
    batcher: Batcher
    feeds: tuple[Feed, ...]
    #: what was said of feeds that have not been replaced: a new controller must hear it, too
    troubles: list[FeedFailed] = field(default_factory=list)
    arrived: dict[int, None] = field(default_factory=dict)
    watermark: int = 0
    is_loaded: bool = False

    @property
    def instance(self) -> InstanceId:
        return self.order.instance

    @property
    def attempt(self) -> int:
        return self.order.attempt


class InstanceHost:
    """The worker's device, arena and KV pool, and the instance that uses them (or none)."""

    def __init__(
        self,
        boot: WorkerBoot,
        arena: Arena,
        executor: InstanceExecutor,
        data_plane: DataPlane,
        reporter: Reporter,
    ) -> None:
        self._boot = boot
        self._arena = arena
        self._executor = executor
        self._data_plane = data_plane
        self._reporter = reporter
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._assigned: _Assignment | None = None
        #: which gateway asked for which request
        self._gateway_of: dict[RequestId, str] = {}
        self._pace = ReportPace(REPORT_GAP_NS)
        #: read by the socket thread when a controller asks anew; replaced, never changed
        self.report: InstanceReport | None = None
        self.capacity: CapacityMeasured | None = None

    # -- from other threads ---------------------------------------------------------------------

    def post(self, work: Callable[[], None]) -> None:
        """Let the main thread do this between two Runs."""
        self._inbox.put(work)

    def stop(self) -> None:
        """End `run` after the Run in flight."""
        self._inbox.put(None)

    # -- the main loop --------------------------------------------------------------------------

    def run(self) -> None:
        """Work until `stop`. An error of the executor ends the worker: its state is unknown."""
        while self._take_in():
            assigned = self._assigned
            if assigned is None or not assigned.is_loaded:
                continue
            run = assigned.batcher.next_run()
            if run is not None:
                result = self._executor.run(run)
                emissions = assigned.batcher.commit(run, result.token_ids)
                self._send_tokens(emissions, result.logprobs)
            self._report_load()

    def _take_in(self) -> bool:
        """Do everything that waits; sleep while there is nothing to run. False to stop."""
        assigned = self._assigned
        is_busy = assigned is not None and assigned.is_loaded and assigned.batcher.has_work
        try:
            work = self._inbox.get(block=not is_busy)
            while True:
                if work is None:
                    return False
                work()
                work = self._inbox.get_nowait()
        except queue.Empty:
            return True

    # -- orders of the controller (main thread) -------------------------------------------------

    def load(self, order: Order) -> None:
        """Receive or read the model's layers; ends in LoadCompleted or LoadFailed."""
        command, manifest = order.command, order.manifest
        assert isinstance(command, StartLoad)
        assert manifest is not None
        assert self._assigned is None, f"{self!r} is given {command.model}"
        arrival = self._arrival(command, manifest)
        try:
            self._arena.check_fits(manifest)
            # First, so that bytes flow while the modules are built.
            arrival.start(command.feeds, order.directory)
            self._executor.assign(manifest, self._arena.view(0, manifest.size_bytes))
        except (ModelError, ValueError) as error:
            arrival.stop()
            self._executor.release()
            self._fail_load(command, str(error))
            return
        config = BatcherConfig(
            kv_blocks=self._executor.kv_blocks,
            block_tokens=self._boot.block_tokens,
            run_tokens_max=self._boot.run_tokens_max,
            sequences_max=self._boot.sequences_max,
            oldest_prompt_percent=self._boot.oldest_prompt_percent,
            growth_tokens=self._boot.growth_tokens,
        )
        batcher = Batcher(config, manifest.span)
        self._assigned = _Assignment(command, manifest, arrival, batcher, command.feeds)
        self._update_report()

    def _arrival(self, command: StartLoad, manifest: Manifest) -> ModelArrival:
        # A model's plan may be tried again: an instance is given to a worker once.
        order = ArrivalOrder(
            plan=command.plan,
            attempt=command.attempt,
            manifest=manifest,
            chunk_bytes=command.chunk_bytes,
            storage_bytes_per_s=self._boot.storage_bytes_per_s,
        )
        memory = self._arena.view(0, min(manifest.size_bytes, self._arena.size_bytes))
        return ModelArrival(order, memory, self._data_plane, _Receiving(self, command))

    def amend(self, order: Order) -> None:
        """Get what is missing of a load by other feeds; nothing, if it is over."""
        command = order.command
        assert isinstance(command, AmendLoad)
        assigned = self._assigned
        if assigned is None or assigned.is_loaded or assigned.order.plan != command.plan:
            return
        assigned.feeds = command.feeds
        assigned.troubles = []
        assigned.arrival.amend(command.feeds, order.directory)
        self._update_report()

    def _is_current(self, command: StartLoad) -> bool:
        return self._assigned is not None and self._assigned.order == command

    def layer_arrived(self, command: StartLoad, layer: int) -> None:
        """A layer is complete and verified in the arena: give all below the watermark to their
        modules."""
        if not self._is_current(command):
            return
        assigned = self._assigned
        assert assigned is not None
        assigned.arrived[layer] = None
        while assigned.watermark in assigned.arrived:
            self._executor.materialize(assigned.watermark)
            assigned.watermark += 1
        self._update_report()
        self._reporter.to_controller(
            LayerArrived(command.instance, command.attempt, assigned.watermark, command.rank, layer)
        )

    def feed_failed(
        self, command: StartLoad, upstream: WorkerRef, reason: str, is_stalled: bool
    ) -> None:
        """Nothing more comes from this one: the controller says who gives the rest."""
        if self._is_current(command):
            assert self._assigned is not None
            trouble = FeedFailed(command.plan, self._boot.worker, upstream, reason, is_stalled)
            self._assigned.troubles.append(trouble)
            self._reporter.to_controller(trouble)

    def load_started(self, command: StartLoad) -> None:
        """The first byte is in the arena."""
        if self._is_current(command):
            self._reporter.to_controller(
                LoadStarted(command.instance, command.attempt, command.rank)
            )

    def load_completed(self, command: StartLoad, received_bytes: int) -> None:
        """All layers are there: measure if asked, then serve."""
        if not self._is_current(command):
            return
        assigned = self._assigned
        assert assigned is not None
        assert assigned.watermark == len(assigned.manifest.layers)
        if command.measure_capacity:
            self._measure(assigned)
        assigned.is_loaded = True
        self._update_report()
        self._reporter.to_controller(
            LoadCompleted(command.instance, command.attempt, received_bytes, command.rank)
        )

    def load_failed(self, command: StartLoad, reason: str) -> None:
        """Drop what arrived: nobody writes into the arena for this load any more."""
        if self._is_current(command):
            self._clear()
            self._fail_load(command, reason)

    def _fail_load(self, command: StartLoad, reason: str) -> None:
        self._reporter.to_controller(
            LoadFailed(command.instance, command.attempt, reason, command.rank)
        )

    def _measure(self, assigned: _Assignment) -> None:
        tokens = min(_MEASURED_TOKENS, self._boot.run_tokens_max)
        self.capacity = CapacityMeasured(
            kind=self._boot.device.kind,
            model=assigned.manifest.model,
            prefill_tokens_per_s=self._executor.prefill_tokens_per_s(
                assigned.manifest.span, tokens
            ),
            kv_blocks=self._executor.kv_blocks,
        )
        self._reporter.to_controller(self.capacity)

    def release(self, order: Order) -> None:
        """Forget the model; ends in Released. A load under way ends in LoadFailed first.

        There may be nothing to forget: the load failed while the order was on its way.
        """
        command = order.command
        assert isinstance(command, Release)
        assigned = self._assigned
        if assigned is not None and assigned.instance == command.instance:
            assert not assigned.batcher.has_work, f"{self!r} is released with requests"
            was_loaded = assigned.is_loaded
            self._clear()
            if not was_loaded:
                self._fail_load(assigned.order, "released")
        self._reporter.to_controller(Released(command.instance, command.attempt, command.rank))

    def examine(self, asked: Examine) -> None:
        """Say what the arena holds, byte for byte."""
        a = self._assigned
        copies: tuple[HeldCopy, ...] = ()
        if a is not None:
            arena = self._arena.view(0, a.manifest.size_bytes)
            copies = (held_copy(a.manifest, arena, a.arrived, a.order.rank),)
        self._reporter.to_controller(Examined(asked.call, self._boot.worker, copies))

    def _clear(self) -> None:
        """Nobody writes into the arena or reads from it when this returns."""
        assert self._assigned is not None
        self._assigned.arrival.stop()
        self._executor.release()
        self._assigned = None
        self._pace.forget()
        self._update_report()

    # -- requests of the gateways (main thread) -------------------------------------------------

    def submit(self, gateway: str, message: Submit) -> None:
        """Queue an attempt on the instance, or say why not."""
        assigned = self._assigned
        spec = SequenceSpec(
            message.request,
            message.attempt,
            message.prompt_ids,
            message.sampling,
            message.generated_ids,
        )
        try:
            if assigned is None or assigned.instance != message.instance:
                raise ValueError(f"instance {message.instance} is not on {self!r}")
            assigned.batcher.add(spec)
        except ValueError as error:
            failed = AttemptFailed(message.request, message.attempt, str(error))
            self._reporter.to_gateway(gateway, failed)
            self._reporter.to_controller(
                RequestEnded(message.request, message.attempt, Outcome.FAILED)
            )
        else:
            self._gateway_of[message.request] = gateway

    def cancel(self, request: RequestId, attempt: int) -> None:
        """Free the attempt's KV at once."""
        assigned = self._assigned
        if assigned is not None and assigned.batcher.cancel(request, attempt):
            self._gateway_of.pop(request, None)
            self._reporter.to_controller(RequestEnded(request, attempt, Outcome.CANCELLED))

    def gateway_gone(self, gateway: str) -> None:
        """Nobody reads what this gateway asked for."""
        if self._assigned is None:
            return
        for request, attempt in self._assigned.batcher.requests():
            if self._gateway_of.get(request) == gateway:
                self.cancel(request, attempt)

    def _send_tokens(
        self, emissions: list[Emission], logprobs: Mapping[RequestId, TokenLogprobs]
    ) -> None:
        by_gateway: dict[str, list[Token]] = {}
        for e in emissions:
            gateway = self._gateway_of[e.request]
            token = Token(
                *(e.request, e.attempt, e.index, e.token_id, e.finish_reason),
                logprobs.get(e.request),
            )
            by_gateway.setdefault(gateway, []).append(token)
        for gateway, tokens in by_gateway.items():
            self._reporter.to_gateway(gateway, Tokens(tuple(tokens)))
        for e in emissions:
            if e.finish_reason is not None:
                del self._gateway_of[e.request]
                self._reporter.to_controller(
                    RequestEnded(e.request, e.attempt, Outcome.FINISHED, e.index + 1)
                )

    # -- reports --------------------------------------------------------------------------------

    def _update_report(self) -> None:
        a = self._assigned
        self.report = None
        if a is not None:
            self.report = InstanceReport(
                instance=a.instance,
                model=a.manifest.model,
                attempt=a.attempt,
                watermark=a.watermark,
                is_loaded=a.is_loaded,
                rank=a.order.rank,
                plan=a.order.plan,
                feeds=a.feeds,
            )

    def _report_load(self) -> None:
        """Tell the controller when the load changed."""
        assigned = self._assigned
        assert assigned is not None
        report = load_report(assigned.instance, assigned.attempt, assigned.batcher)
        if self._pace.is_due(time.monotonic_ns(), report):
            self._reporter.to_controller(report)

    def report_again(self) -> None:
        """A new controller knows nothing: the next report goes out even if nothing changed."""
        self._pace.forget()
        if self._assigned is not None and not self._assigned.is_loaded:
            for trouble in self._assigned.troubles:
                self._reporter.to_controller(trouble)

    def __repr__(self) -> str:
        holds = self._assigned.order.model if self._assigned else "nothing"
        return f"<InstanceHost {self._boot.worker} holds {holds}>"


class _Receiving:
    """ArrivalListener: hands every piece of news to the main thread, in order."""

    def __init__(self, host: InstanceHost, command: StartLoad) -> None:
        self._host = host
        self._command = command

    def first_byte(self) -> None:
        self._host.post(partial(self._host.load_started, self._command))

    def layer_arrived(self, layer: int) -> None:
        self._host.post(partial(self._host.layer_arrived, self._command, layer))

    def completed(self, received_bytes: int) -> None:
        self._host.post(partial(self._host.load_completed, self._command, received_bytes))

    def failed(self, reason: str) -> None:
        self._host.post(partial(self._host.load_failed, self._command, reason))

    def feed_failed(self, upstream: WorkerRef, reason: str, is_stalled: bool) -> None:
        self._host.post(
            partial(self._host.feed_failed, self._command, upstream, reason, is_stalled)
        )
