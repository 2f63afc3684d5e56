"""A worker of the simulated world: one life of it, with the production Batcher inside.

It does what a real worker process does, in virtual time: loads, serves, reports. Faults happen to
it from outside; it decides nothing.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from livescale.batching.batcher import Batcher
from livescale.batching.reports import ReportPace, load_report
from livescale.batching.run import EmittedTokens, Run, SequenceSpec
from livescale.chunks import ChunkGrid, Feed
from livescale.latency.models import AnyLatency
from livescale.latency.work import RunWork
from livescale.messages.commands import AmendLoad, Release, StartLoad
from livescale.messages.events import (
    AnyEvent,
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
from livescale.sim.checkers import Checkers
from livescale.sim.clock import COMMIT_PRIORITY, Clock
from livescale.sim.config import SimConfig
from livescale.sim.transfers import Transfers
from livescale.topology import Device
from livescale.types import (
    FinishReason,
    FromWorker,
    InstanceId,
    LayerSpan,
    ModelSpec,
    Outcome,
    PlanId,
    RequestId,
    Value,
    WorkerRef,
)

WorkerOrder = StartLoad | AmendLoad | Release
_NS_PER_S = 1_000_000_000
_STEPS_MAX = 1 << 20


class SimSubmit(Value, frozen=True):
    """Gateway to worker: run this attempt."""

    instance: InstanceId
    spec: SequenceSpec


class SimCancel(Value, frozen=True):
    """Gateway to worker: nobody reads this attempt any more."""

    request: RequestId
    attempt: int


class SimAttemptFailed(Value, frozen=True):
    """Worker to gateway: the attempt could not run."""

    request: RequestId
    attempt: int
    reason: str


class SimAttemptLost(Value, frozen=True):
    """Worker to gateway: the instance lost another rank, and the attempt with it."""

    request: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class SimTokens:
    """Worker to gateway: what a Run brought. `step_ns` are the times at which its steps ended;
    the tokens of a request are those of the last steps."""

    step_ns: list[int]
    emitted: list[EmittedTokens]


FromWorkerMessage = SimTokens | SimAttemptFailed | SimAttemptLost


@dataclass(slots=True)
class _Assignment:
    """The model that the worker has been given."""

    order: StartLoad
    spec: ModelSpec
    batcher: Batcher
    latency: AnyLatency
    feeds: tuple[Feed, ...]
    layers_there: dict[int, None] = field(default_factory=dict)
    #: what was said of feeds that have not been replaced
    troubles: list[FeedFailed] = field(default_factory=list)
    watermark: int = 0
    is_loaded: bool = False
    #: the Run in flight, and when its steps end
    run: Run | None = None
    step_ns: list[int] = field(default_factory=list)


class SimWorker:
    """One incarnation of a worker. `say` and `emit` hand messages to controller and gateway."""

    def __init__(
        self,
        ref: WorkerRef,
        device: Device,
        config: SimConfig,
        clock: Clock,
        transfers: Transfers,
        checkers: Checkers,
        say: Callable[[AnyEvent], None],
        emit: Callable[[FromWorkerMessage], None],
    ) -> None:
        self.ref = ref
        self.device = device
        self._config = config
        self._clock = clock
        self._transfers = transfers
        self._checkers = checkers
        self._say = say
        self._emit = emit
        self._assigned: _Assignment | None = None
        self._pace = ReportPace(config.report_gap_ns)
        self._capacity: CapacityMeasured | None = None
        self._is_dead = False

    # -- life -----------------------------------------------------------------------------------

    def die(self) -> None:
        """Nothing of this incarnation happens any more."""
        self._is_dead = True
        self._transfers.node_gone(self.ref)

    def report(self) -> InstanceReport | None:
        """What it tells a controller that it joins."""
        a = self._assigned
        if a is None:
            return None
        order = a.order
        return InstanceReport(
            *(order.instance, order.model, order.attempt, a.watermark, a.is_loaded, order.rank),
            *(order.plan, () if a.is_loaded else a.feeds),
        )

    def joined(self) -> None:
        """A controller that may know nothing was met: say again what only reports tell."""
        self._pace.forget()
        if self._capacity is not None:
            self._say(self._capacity)
        a = self._assigned
        if a is not None and a.is_loaded:
            self._report_load(a)
        elif a is not None:
            for trouble in a.troubles:
                self._say(trouble)

    def come_to_rest(self) -> None:
        """The world is over: nothing of its requests is left."""
        if self._assigned is not None:
            batcher = self._assigned.batcher
            batcher.validate()
            self._checkers.at_rest(self.ref, batcher.pool.used)

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
        batcher = Batcher(self._config.batcher(spec, self.device), LayerSpan(0, spec.layers))
        latency = self._config.latency_of(order.model)
        a = self._assigned = _Assignment(order, spec, batcher, latency, order.feeds)
        has_senders = any(isinstance(feed.upstream, FromWorker) for feed in order.feeds)
        if has_senders and self._config.group_setup_ns:
            self._clock.after(self._config.group_setup_ns, partial(self._receive, a))
        else:
            self._receive(a)

    def _receive(self, a: _Assignment) -> None:
        """Ask for the parameters, unless the order was taken back meanwhile."""
        if self._is_dead or self._assigned is not a:
            return
        order = a.order
        grid = ChunkGrid(a.spec.layer_bytes, order.chunk_bytes)
        key = (self.ref, order.model, order.rank)
        self._transfers.receive(order.plan, key, grid, a.feeds, self)

    def _amend(self, order: AmendLoad) -> None:
        a = self._assigned
        if a is not None and a.order.plan == order.plan and not a.is_loaded:
            a.feeds = order.feeds
            a.troubles = []
            self._transfers.amend(order.plan, self.ref, order.feeds)

    def _release(self, order: Release) -> None:
        a = self._assigned
        held = a.order.instance if a is not None else None
        requests = a.batcher.requests() if a is not None else ()
        self._checkers.released(order, held, requests)
        if a is not None and not a.is_loaded:
            self._say(LoadFailed(order.instance, order.attempt, "released", order.rank))
        self._clear()
        # Only when another rank was lost: the attempts are under way elsewhere by now.
        for request, attempt in requests:
            self._emit(SimAttemptLost(request, attempt))
            self._say(RequestEnded(request, attempt, Outcome.WORKER_LOST))
        self._say(Released(order.instance, order.attempt, order.rank))

    def _clear(self) -> None:
        self._assigned = None
        self._pace.forget()
        self._transfers.node_gone(self.ref)

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
        self._say(LayerArrived(order.instance, order.attempt, a.watermark, order.rank, layer))

    def load_completed(self, plan: PlanId) -> None:
        a = self._loading(plan)
        order = a.order
        if order.measure_capacity:
            self._measure(a)
        a.watermark = a.spec.layers
        a.is_loaded = True
        self._say(LoadCompleted(order.instance, order.attempt, a.spec.size_bytes, order.rank))
        self._report_load(a)

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
            assigned.batcher.pool.blocks,
        )
        self._say(self._capacity)

    # -- requests of the gateway ----------------------------------------------------------------

    def submit(self, message: SimSubmit) -> None:
        """Queue an attempt on the instance, or say why not."""
        a, spec = self._assigned, message.spec
        try:
            if a is None or a.order.instance != message.instance:
                raise ValueError(f"instance {message.instance} is not on {self!r}")
            self._end_stretch(a)
            a.batcher.add(spec)
        except ValueError as error:
            self._emit(SimAttemptFailed(spec.request, spec.attempt, str(error)))
            self._say(RequestEnded(spec.request, spec.attempt, Outcome.FAILED))
        else:
            self._continue()

    def cancel(self, message: SimCancel) -> None:
        """Free the attempt's KV at once."""
        a = self._assigned
        if a is not None:
            self._end_stretch(a)
        if a is not None and a.batcher.cancel(message.request, message.attempt):
            self._say(RequestEnded(message.request, message.attempt, Outcome.CANCELLED))
            self._continue()

    # -- serving --------------------------------------------------------------------------------

    def _continue(self) -> None:
        """Start the next Run unless one is in flight, and report what changed."""
        a = self._assigned
        if a is None or a.run is not None or not a.is_loaded:
            return
        run = a.batcher.next_run(self._steps_max())
        self._report_load(a)
        if run is not None:
            self._checkers.runs(self.ref, run, a.watermark)
            self._start(a, run)

    def _steps_max(self) -> int:
        # Faults may come at any time, and what a worker said last decides what they destroy.
        is_quiet = self._clock.now_ns >= self._config.faults.until_ns
        return _STEPS_MAX if self._config.coalesces and is_quiet else 1

    def _start(self, a: _Assignment, run: Run) -> None:
        """Let the Run take its time. A stretch ends where progress is worth a report."""
        now_ns = self._clock.now_ns
        work = run.work
        first_ns = a.latency.run_ns(work)
        a.step_ns = [now_ns + first_ns]
        if run.steps > 1:
            due_ns = self._pace.progress_due_ns
            steps = min(run.steps, max(due_ns - now_ns, 0) // max(first_ns, 1) + 2)
            times = a.latency.decode_ns(work.decodes, work.decode_context_tokens, steps)
            a.step_ns = list(itertools.accumulate(times, initial=now_ns))[1:]
            last = min(bisect.bisect_left(a.step_ns, due_ns) + 1, steps)
            del a.step_ns[last:]
            run = a.batcher.shorten(run, last)
        a.run = run
        self._clock.at(a.step_ns[-1], partial(self._commit, a, run), COMMIT_PRIORITY)

    def _end_stretch(self, a: _Assignment) -> None:
        """Something comes in: the Run in flight ends with the step that is under way."""
        if a.run is None or a.run.steps == 1:
            return
        over = bisect.bisect_right(a.step_ns, self._clock.now_ns)
        if over + 1 < a.run.steps:
            a.run = a.batcher.shorten(a.run, over + 1)
            del a.step_ns[over + 1 :]
            self._clock.at(a.step_ns[-1], partial(self._commit, a, a.run), COMMIT_PRIORITY)

    def _commit(self, assigned: _Assignment, run: Run) -> None:
        if self._is_dead or self._assigned is not assigned or assigned.run is not run:
            return
        assigned.run = None
        # The token at a position is the position: whoever computes it again gets the same.
        ends = [s.first_position + len(s.token_ids) for s in run.segments if s.samples]
        token_ids = [range(end, end + run.steps) for end in ends]
        emitted = assigned.batcher.commit_steps(run, token_ids)
        if emitted:
            self._emit(SimTokens(assigned.step_ns, emitted))
        for e in emitted:
            if e.finish_reason is FinishReason.LENGTH:
                tokens = e.index + len(e.token_ids)
                self._say(RequestEnded(e.request, e.attempt, Outcome.FINISHED, tokens))
        self._continue()

    def _report_load(self, assigned: _Assignment) -> None:
        report = load_report(assigned.order.instance, assigned.order.attempt, assigned.batcher)
        if self._pace.is_due(self._clock.now_ns, report):
            self._say(report)

    def __repr__(self) -> str:
        holds = self._assigned.order.model if self._assigned else "nothing"
        return f"<SimWorker {self.ref} holds {holds}>"
