"""What a worker does with its device: holds at most one instance and runs it.

Everything here happens on one thread, the worker's main thread. Other threads (sockets, transfers)
hand in work with `post`; results leave through an Reporter. An instance is three verbs:
`live.next_run()` -> `executor.run(run, rows)` -> `live.commit(run, token_ids)`. With a pairing it
takes requests and runs layers as they arrive; who helps whom is agreed in `live_partners.py`.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from functools import partial

from livescale.batching.batcher import Batcher, BatcherConfig
from livescale.batching.live_batcher import LiveBatcher
from livescale.batching.reports import REPORT_GAP_NS, ReportPace
from livescale.batching.run import Run
from livescale.engine.errors import ModelError
from livescale.engine.run_result import InstanceExecutor
from livescale.messages.commands import AmendLoad, Release, StartLoad
from livescale.messages.events import (
    BatchTaken,
    CapacityMeasured,
    FeedFailed,
    InstanceReport,
    LayerArrived,
    LiveStarted,
    LoadCompleted,
    LoadFailed,
    LoadStarted,
    Released,
)
from livescale.runtime.arrival import ArrivalOrder, ModelArrival
from livescale.runtime.boot import WorkerBoot
from livescale.runtime.examination import held_copy
from livescale.runtime.given_model import GivenModel
from livescale.runtime.heartbeat import WorkPulse
from livescale.runtime.hosted_attempts import HostedAttempts, Reporter
from livescale.runtime.live_partners import HandedBatch, LivePartners
from livescale.runtime.residents import ArenaResidents
from livescale.runtime.wire import (
    Examine,
    Examined,
    HeldCopy,
    Order,
)
from livescale.transfer.arena import Arena
from livescale.transfer.data_plane import DataPlane
from livescale.types import Manifest, WorkerRef

# Long enough that a Run's fixed cost does not count, short enough to be over in a moment.
_MEASURED_TOKENS = 256


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
        self._residents = ArenaResidents(arena, boot.resident_bytes)
        self._data_plane = data_plane
        self._reporter = reporter
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        #: asked by those who answer for the main thread
        self.pulse = WorkPulse(boot.lost_after_ms, boot.stuck_after_ms, self.post)
        self._assigned: GivenModel | None = None
        #: what the gateways ask for; to be used on the main thread only
        self.attempts = HostedAttempts(boot.worker, reporter, boot.live.answer_ns)
        self._partners = LivePartners(
            data_plane=data_plane,
            executor=executor,
            attempts=self.attempts,
            patience_s=boot.live.answer_ns / 1e9,
            post=self.post,
            tell_handed=self._handed,
        )
        #: nothing could be run when it was last tried
        self._is_idle = True
        self._pace = ReportPace(REPORT_GAP_NS)
        #: when progress that was not worth a report is
        self._report_due_ns: int | None = None
        #: read by the socket thread when a controller asks anew; replaced, never changed
        self.report: InstanceReport | None = None
        self.capacity: CapacityMeasured | None = None

    # -- from other threads ---------------------------------------------------------------------

    def post(self, work: Callable[[], object]) -> None:
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
            self._is_idle = True
            if assigned is not None and assigned.takes_requests:
                with self.pulse.piece():
                    self._work(assigned)
        self._partners.close()

    def _take_in(self) -> bool:
        """Do everything that waits; sleep while there is nothing to run. False to stop."""
        try:
            work = self._inbox.get(self._is_idle, self._patience_s())
            while True:
                if work is None:
                    return False
                with self.pulse.piece():
                    work()
                work = self._inbox.get_nowait()
        except queue.Empty:
            return True

    def _patience_s(self) -> float | None:
        """How long it may sleep before a partner's answer is late, or a report due."""
        if self._assigned is None:
            return None
        times_ns = (self._assigned.live.deadline_ns(), self._report_due_ns)
        first_ns = min((at_ns for at_ns in times_ns if at_ns is not None), default=None)
        return None if first_ns is None else max(0, first_ns - time.monotonic_ns()) / 1e9

    def _work(self, assigned: GivenModel) -> None:
        """One Run, if there is one; partners hear what it means for them as soon as it begins."""
        self._partners.talk()
        run = assigned.live.next_run()
        if run is not None:
            self._is_idle = False
            self._partners.talk()
            self._execute(assigned, run)
        self._report_load(assigned)

    def _execute(self, assigned: GivenModel, run: Run) -> None:
        live = assigned.live
        key = live.key_of(run)
        begin_ns = time.monotonic_ns()
        result = self._executor.run(run, self._partners.take_rows(key, run))
        elapsed_ns = time.monotonic_ns() - begin_ns
        emissions = live.commit(run, result.token_ids)
        live.ran(run, elapsed_ns)
        if key is not None:
            self._partners.keep_rows(key, result.hidden)
            assigned.ran_live(run)
        self.attempts.emitted(emissions, result.logprobs)
        if assigned.owes_capacity and assigned.is_loaded:
            self._tell_capacity(assigned, live.prefill_tokens_per_s())

    # -- orders of the controller (main thread) -------------------------------------------------

    def load(self, order: Order) -> None:
        """Receive or read the model's layers; ends in LoadCompleted or LoadFailed."""
        command, manifest = order.command, order.manifest
        assert isinstance(command, StartLoad)
        assert manifest is not None
        assert self._assigned is None, f"{self!r} is given {command.model}"
        try:
            self._arena.check_fits(manifest)
        except ValueError as error:
            self._fail_load(command, str(error))
            return
        arrival = self._arrival(command, manifest)
        try:
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
        batcher, pairing = Batcher(config, manifest.span), command.pairing
        live = LiveBatcher(batcher, command.instance, self._boot.live, pairing)
        self.attempts.open(command.instance, live)
        self._partners.open(live, manifest, pairing.source if pairing is not None else None)
        self._assigned = GivenModel(command, manifest, arrival, live, command.feeds)
        self._assigned.owes_capacity = command.measure_capacity
        self._update_report()
        if pairing is not None:
            started = LiveStarted(command.instance, command.attempt, command.rank)
            self._reporter.to_controller(started)

    def _arrival(self, command: StartLoad, manifest: Manifest) -> ModelArrival:
        # A model's plan may be tried again: an instance is given to a worker once.
        order = ArrivalOrder(
            plan=command.plan,
            attempt=command.attempt,
            manifest=manifest,
            chunk_bytes=command.chunk_bytes,
            storage_bytes_per_s=self._boot.storage_bytes_per_s,
            present_layers=self._residents.restore(manifest),
        )
        memory = self._arena.view(0, manifest.size_bytes)
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
        assigned.live.layers_arrived(assigned.watermark)
        self._update_report()
        self._reporter.to_controller(
            LayerArrived(
                command.instance,
                command.attempt,
                assigned.watermark,
                command.rank,
                layer,
                assigned.live_layers,
            )
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
        if assigned.owes_capacity:
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

    def _measure(self, assigned: GivenModel) -> None:
        if assigned.order.pairing is not None:
            # Its KV blocks are in use: what its own Runs took must do, if there was one.
            self._tell_capacity(assigned, assigned.live.prefill_tokens_per_s())
            return
        tokens = min(_MEASURED_TOKENS, self._boot.run_tokens_max)
        rate = self._executor.prefill_tokens_per_s(assigned.manifest.span, tokens)
        self._tell_capacity(assigned, rate)

    def _tell_capacity(self, assigned: GivenModel, rate: int | None) -> None:
        if rate is None:
            return
        assigned.owes_capacity = False
        self.capacity = CapacityMeasured(
            kind=self._boot.device.kind,
            model=assigned.manifest.model,
            prefill_tokens_per_s=rate,
            kv_blocks=self._executor.kv_blocks,
        )
        self._reporter.to_controller(self.capacity)

    def release(self, order: Order) -> None:
        """Forget the model; ends in Released. A load under way ends in LoadFailed first, and the
        requests that a live one has go back.

        There may be nothing to forget: the load failed while the order was on its way.
        """
        command = order.command
        assert isinstance(command, Release)
        assigned = self._assigned
        if assigned is not None and assigned.instance == command.instance:
            was_loaded = assigned.is_loaded
            self._clear()
            if was_loaded:
                self._residents.keep(assigned.manifest)
            else:
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
        """Nobody writes into the arena or reads from it when this returns; requests that are here
        wait again elsewhere."""
        assert self._assigned is not None
        self._partners.talk()
        self.attempts.close()
        self._partners.close_instance()
        self._assigned.arrival.stop()
        self._executor.release()
        self._assigned = None
        self._pace.forget()
        self._update_report()

    # -- partners of a live pair (main thread) --------------------------------------------------

    def peer_lost(self, peer: WorkerRef) -> None:
        """The worker is gone."""
        self._partners.lost(peer)

    def _handed(self, news: HandedBatch) -> None:
        """The requests of a batch are this worker's: both who read its tokens and the controller
        hear of it before any of them."""
        assigned, taken = self._assigned, news.taken
        assert assigned is not None
        assigned.handovers += 1
        wanted = []
        for spec, gateway in zip(taken.requests, news.gateways, strict=True):
            if gateway:
                wanted.append(spec)
                repeated_ids = spec.generated_ids if taken.decoding else ()
                self.attempts.taken(
                    spec.request, spec.attempt, gateway, repeated_ids, moves=spec.moves
                )
            else:
                assigned.live.cancel(spec.request, spec.attempt)
        self._reporter.to_controller(
            BatchTaken(
                instance=assigned.instance,
                attempt=assigned.attempt,
                worker=self._boot.worker,
                target=taken.key.target,
                requests=tuple((spec.request, spec.attempt) for spec in wanted),
                next_layer=news.next_layer,
                tokens=sum(len(s.prompt_ids) + len(s.generated_ids) for s in taken.requests),
                row_bytes=news.row_bytes,
                pull_ns=taken.pull_ns,
                moves=tuple(spec.moves for spec in wanted),
            )
        )

    # -- reports --------------------------------------------------------------------------------

    def _update_report(self) -> None:
        self.report = self._assigned.report() if self._assigned is not None else None

    def _report_load(self, assigned: GivenModel) -> None:
        """Tell the controller when the load changed."""
        now_ns = time.monotonic_ns()
        report = assigned.load_report(self._partners.received_bytes)
        is_due = self._pace.is_due(now_ns, report)
        if is_due:
            self._reporter.to_controller(report)
        # The end of a reservation looks like progress, and may be the last thing that happens.
        has_more = not is_due and now_ns < self._pace.progress_due_ns
        self._report_due_ns = self._pace.progress_due_ns if has_more else None

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
