"""The Controller: `step(now_ns, events) -> commands`, pure and deterministic.

Law: every event of a step is absorbed first, then everything is decided once. Each handler only
records what happened; decisions stand in `_decide`, in a fixed order. Late news (an attempt that
is no longer under way, a worker that is gone) is counted as stale and otherwise ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from livescale.control.config import ControllerConfig
from livescale.control.fleet import Fleet, Instance
from livescale.control.pool import ParameterPool
from livescale.control.router import RequestRecord, Router
from livescale.control.scaling import ModelState, Scaling
from livescale.messages.commands import AnyCommand, Dispatch, FailRequest, WakeAt
from livescale.messages.events import (
    AnyEvent,
    CapacityMeasured,
    InstanceReported,
    LayerArrived,
    LoadCompleted,
    LoadFailed,
    LoadStarted,
    Released,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    SendEnded,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from livescale.types import InstanceId, InstanceState, Outcome, WorkerRef

# A window's tokens leave it at any time: look again this many times per window while they do.
_LOOKS_PER_WINDOW = 10


class Controller:
    """Decides about one pool. Give it every event in order; carry out every command."""

    def __init__(self, config: ControllerConfig) -> None:
        self.config = config
        self.fleet = Fleet()
        self.pool = ParameterPool()
        self.router = Router(config.dispatched_ahead_max)
        self.models = {policy.spec.name: ModelState(policy, config) for policy in config.models}
        self.scaling = Scaling(config, self.fleet, self.pool, self.router)
        self.stale_events = 0
        self._settled_at_ns: int | None = None
        self._wake_at_ns: int | None = None
        #: the latest end of any request's avoidance of a worker
        self._avoid_until_ns = 0
        self._now_ns = 0
        self._commands: list[AnyCommand] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            WorkerJoined: self._worker_joined,
            WorkerLost: self._worker_lost,
            RequestArrived: self._request_arrived,
            RequestCancelled: self._request_cancelled,
            RequestEnded: self._request_ended,
            InstanceReported: self._instance_reported,
            LoadStarted: self._load_progressed,
            LayerArrived: self._load_progressed,
            LoadCompleted: self._load_completed,
            LoadFailed: self._load_failed,
            SendEnded: self._send_ended,
            Released: self._released,
            CapacityMeasured: self._capacity_measured,
            Tick: self._ticked,
        }

    def step(self, now_ns: int, events: Sequence[AnyEvent]) -> list[AnyCommand]:
        """Absorb all events, then decide once. `now_ns` never goes back."""
        assert now_ns >= self._now_ns, f"time went back from {self._now_ns} to {now_ns}"
        self._now_ns = now_ns
        self._commands = []
        if self._settled_at_ns is None:
            self._settled_at_ns = now_ns + self.config.settle_ns
        for event in events:
            self._handlers[type(event)](event)
        self._decide()
        return self._commands

    # -- what happened: workers ---------------------------------------------------------------

    def _worker_joined(self, event: WorkerJoined) -> None:
        before = self.fleet.workers.get(event.worker.worker)
        if before is not None and event.worker <= before.ref:
            self._stale()
            return
        if before is not None:
            # The old connection's end may be seen later than the next incarnation's first word.
            self._worker_lost(WorkerLost(before.ref, f"{event.worker} took its place"))
        self.fleet.join(event.worker, event.device)
        if event.report is not None and event.report.model in self.models:
            spec = self.models[event.report.model].spec
            instance = self.fleet.adopt(event.report, event.worker, spec.layers, spec.tp_size)
            if instance is not None and instance.state is InstanceState.SERVING:
                self.pool.add(instance.model, *instance.workers)

    def _worker_lost(self, event: WorkerLost) -> None:
        if not self.fleet.is_alive(event.worker):
            self._stale()
            return
        reason = f"worker {event.worker} was lost: {event.reason}"
        number = self.fleet.workers[event.worker.worker].instance
        instance = self.fleet.instances.get(number) if number is not None else None
        if instance is not None:
            # One lost rank loses the instance, and with it what its rank 0 was asked.
            instance.empty_ranks[instance.workers.index(event.worker)] = None
            self._end_reads(instance)
            self.fleet.move(instance, WorkerLost)
            self._attempts_failed(instance.worker, reason)
        self._attempts_failed(event.worker, reason)
        self.pool.lose(event.worker)
        for key in [key for key in self.scaling.sends if key[1] == event.worker]:
            del self.scaling.sends[key]
        self.fleet.leave(event.worker)

    # -- what happened: requests --------------------------------------------------------------

    def _request_arrived(self, event: RequestArrived) -> None:
        state = self.models.get(event.model)
        if state is None or event.request in self.router.requests:
            self._stale()
            return
        record = self.router.arrive(
            event.request, event.model, event.prompt_tokens, event.output_tokens_max
        )
        record.attempt = event.attempt
        if event.worker is None:
            state.window.add(self._now_ns, event.prompt_tokens)
        else:
            self.router.place(record, event.worker)
            record.is_started = True

    def _request_cancelled(self, event: RequestCancelled) -> None:
        record = self.router.requests.get(event.request)
        if record is None:
            self._stale()
        elif record.worker is None:
            self.router.end(record)
        else:
            record.is_cancelled = True

    def _request_ended(self, event: RequestEnded) -> None:
        record = self.router.requests.get(event.request)
        if record is None or record.attempt != event.attempt or record.worker is None:
            self._stale()
        elif event.outcome is Outcome.WORKER_LOST:
            # The gateway often sees it first: until WorkerLost is here the worker still looks
            # alive, and the request must not be sent to it again.
            record.avoided = record.worker
            record.avoided_until_ns = self._now_ns + self.config.avoid_ns
            self._avoid_until_ns = max(self._avoid_until_ns, record.avoided_until_ns)
            self._attempt_failed(record, f"worker {record.worker} was lost")
        else:
            self.router.end(record)

    def _attempts_failed(self, worker: WorkerRef, reason: str) -> None:
        for record in self.router.on_worker(worker):
            self._attempt_failed(record, reason)

    def _attempt_failed(self, record: RequestRecord, reason: str) -> None:
        if record.is_cancelled:
            self.router.end(record)
        elif record.attempt >= self.config.request_attempts_max:
            self.router.end(record)
            self._commands.append(FailRequest(record.id, reason))
        else:
            self.router.retry(record)

    # -- what happened: instances -------------------------------------------------------------

    def _instance(self, number: InstanceId, attempt: int) -> Instance | None:
        """The living instance if this attempt is the one under way, else counts stale news."""
        instance = self.fleet.instances.get(number)
        if instance is None or instance.attempt != attempt:
            self._stale()
            return None
        return instance

    def _instance_reported(self, event: InstanceReported) -> None:
        # A request may have been started by an instance that is gone by now: both are looked up.
        for request, attempt in event.started:
            self.router.start(request, attempt)
        instance = self._instance(event.instance, event.attempt)
        if instance is not None:
            instance.running = event.running
            instance.queued_prefill_tokens = event.queued_prefill_tokens
            instance.kv_blocks_used = event.kv_blocks_used
            instance.kv_blocks = event.kv_blocks

    def _load_progressed(self, event: LoadStarted | LayerArrived) -> None:
        if isinstance(event, LayerArrived) and self.fleet.reported_load(event):
            return
        instance = self._instance(event.instance, event.attempt)
        if instance is not None:
            self.fleet.move(instance, type(event))
            if isinstance(event, LayerArrived):
                known = instance.watermarks.get(event.rank, 0)
                instance.watermarks[event.rank] = max(known, event.watermark)

    def _load_completed(self, event: LoadCompleted) -> None:
        if self.fleet.reported_load(event):
            return
        instance = self._instance(event.instance, event.attempt)
        if instance is None:
            return
        instance.watermarks[event.rank] = instance.layers
        instance.loaded_ranks[event.rank] = None
        if len(instance.loaded_ranks) == len(instance.workers):
            self._end_reads(instance)
            self.fleet.move(instance, LoadCompleted)
            self.pool.add(instance.model, *instance.workers)

    def _load_failed(self, event: LoadFailed) -> None:
        if self.fleet.reported_load(event):
            return
        instance = self._instance(event.instance, event.attempt)
        if instance is not None:
            instance.empty_ranks[event.rank] = None
            self._end_reads(instance)
            self.fleet.move(instance, LoadFailed)
            state = self.models[instance.model]
            state.blocked_until_ns = self._now_ns + self.config.load_retry_ns

    def _end_reads(self, instance: Instance) -> None:
        for upstream in instance.upstreams:
            self.pool.end_read(f"instance {instance.id}", upstream)

    def _send_ended(self, event: SendEnded) -> None:
        if (event.plan, event.source) not in self.scaling.sends:
            self._stale()
            return
        del self.scaling.sends[event.plan, event.source]
        self.pool.end_read(f"send {event.plan}", event.source)

    def _released(self, event: Released) -> None:
        if (event.instance, event.rank) in self.fleet.remnants:
            self.fleet.free((event.instance, event.rank))
            return
        instance = self._instance(event.instance, event.attempt)
        if instance is not None:
            instance.empty_ranks[event.rank] = None
            if len(instance.empty_ranks) == len(instance.workers):
                self.fleet.move(instance, Released)

    def _capacity_measured(self, event: CapacityMeasured) -> None:
        state = self.models.get(event.model)
        if state is None:
            self._stale()
            return
        # The configured figure wins; of several measurements the newest counts.
        if state.policy.prefill_tokens_per_s is None:
            state.prefill_tokens_per_s = event.prefill_tokens_per_s
        if state.policy.kv_blocks is None:
            state.kv_blocks = event.kv_blocks

    def _ticked(self, _event: Tick) -> None:
        """The time itself is the news: `_decide` looks at every deadline anyway."""

    def _stale(self) -> None:
        self.stale_events += 1

    # -- what to do ---------------------------------------------------------------------------

    def _decide(self) -> None:
        if len(self.fleet.workers) >= self.config.workers_expected:
            # Nobody is missing any more who could hold the ranks that were not reported.
            self.fleet.give_up_incomplete()
        if self._is_settled():
            for state in self.models.values():
                self._commands += self.scaling.decide(self._now_ns, state)
        for state in self.models.values():
            self._dispatch(state)
        self._commands += self.scaling.release_empty()
        self._ask_to_wake()

    def _is_settled(self) -> bool:
        """All expected workers have joined, or waiting for them has lasted long enough."""
        assert self._settled_at_ns is not None
        if len(self.fleet.workers) >= self.config.workers_expected:
            self._settled_at_ns = min(self._settled_at_ns, self._now_ns)
        return self._now_ns >= self._settled_at_ns

    def _dispatch(self, state: ModelState) -> None:
        serving = [
            (instance.id, instance.worker)
            for instance in self.fleet.of_model(state.spec.name)
            if instance.state is InstanceState.SERVING
        ]
        for assignment in self.router.assign(self._now_ns, state.spec.name, serving):
            record = assignment.request
            self._commands.append(
                Dispatch(record.id, record.attempt, assignment.instance, assignment.worker)
            )

    def _ask_to_wake(self) -> None:
        """WakeAt for the next deadline, unless an earlier call is already promised."""
        deadlines = []
        if not self._is_settled():
            assert self._settled_at_ns is not None
            deadlines.append(self._settled_at_ns)
        deadlines.append(self._avoid_until_ns)
        for state in self.models.values():
            deadlines.append(state.blocked_until_ns)
            deadlines.append(state.autoscaler.deadline_ns() or 0)
            if state.window.tokens:
                deadlines.append(self._now_ns + state.window.window_ns // _LOOKS_PER_WINDOW)
        future = [deadline for deadline in deadlines if deadline > self._now_ns]
        if self._wake_at_ns is not None and self._wake_at_ns <= self._now_ns:
            self._wake_at_ns = None
        if future and (self._wake_at_ns is None or min(future) < self._wake_at_ns):
            self._wake_at_ns = min(future)
            self._commands.append(WakeAt(self._wake_at_ns))

    # -- for tests and people -----------------------------------------------------------------

    def validate(self) -> None:
        """Check the whole state: fleet, queue and pool against each other."""
        self.fleet.validate()
        self.router.validate()
        for state in self.models.values():
            holders = self.pool.holders(state.spec.name)
            keepers = [
                i.worker
                for i in self.fleet.of_model(state.spec.name)
                if i.state in (InstanceState.SERVING, InstanceState.DRAINING) and not i.is_released
            ]
            assert holders == sorted(keepers), (holders, keepers)
        for _plan, source in self.scaling.sends:
            assert self.fleet.is_alive(source), f"{source} sends and is gone"

    def __repr__(self) -> str:
        waiting = sum(self.router.waiting(model) for model in self.models)
        return (
            f"<Controller {len(self.fleet.workers)} workers, {len(self.fleet.instances)} instances,"
            f" {waiting} waiting, {len(self.router.requests)} requests>"
        )
