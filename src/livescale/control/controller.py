"""The Controller: `step(now_ns, events) -> commands`, pure and deterministic.

Law: every event of a step is absorbed first, then everything is decided once. Each handler only
records what happened; decisions stand in `_decide`, in a fixed order. Late news (an attempt that
is no longer under way, a worker that is gone) is counted as stale and otherwise ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from livescale.control.attempts import Attempts
from livescale.control.config import ControllerConfig
from livescale.control.fleet import Fleet, Instance
from livescale.control.host_copies import HostCopies
from livescale.control.loads import Loads
from livescale.control.model_state import ModelState
from livescale.control.pairing import Pairings
from livescale.control.planning import Planning
from livescale.control.pool import ParameterPool
from livescale.control.repairs import repair_loads
from livescale.control.router import Router
from livescale.control.scaling import Scaling
from livescale.messages.commands import AnyCommand, Dispatch, ModelGone, WakeAt
from livescale.messages.events import (
    AgentJoined,
    AnyEvent,
    BatchTaken,
    CapacityMeasured,
    CopyCompleted,
    CopyDropped,
    CopyFailed,
    CopyLayerArrived,
    FeedFailed,
    InstanceReport,
    InstanceReported,
    LayerArrived,
    LinkMeasured,
    LiveStarted,
    LoadCompleted,
    LoadFailed,
    LoadStarted,
    ModelAdded,
    ModelChanged,
    ModelRemoved,
    Released,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from livescale.placements import AllCopies, SpreadCopies
from livescale.plans import PlannedLoad
from livescale.types import InstanceId, InstanceState, WorkerRef

# Everybody behind a sender that stalls reports it within this time; then it is judged.
_STALL_GRACE_NS = 100_000_000


class Controller:
    """Decides about one pool. Give it every event in order; carry out every command."""

    def __init__(self, config: ControllerConfig) -> None:
        self.config = config
        self.fleet = Fleet()
        self.pool = ParameterPool(isinstance(config.placement, SpreadCopies | AllCopies))
        self.router = Router(
            config.dispatched_ahead_max, config.live_ahead_max, config.sequences_max
        )
        self.models = {
            p.spec.name: ModelState(p, config, 0, number) for number, p in enumerate(config.models)
        }
        self._models_added = len(self.models)
        #: withdrawn models that are not gone yet
        self._leaving: dict[str, None] = {}
        self.attempts = Attempts(config, self.router, self.models)
        self.loads = Loads(self.pool)
        self.planning = Planning(config, self.fleet, self.pool, self.loads)
        self.host_copies = HostCopies(
            config, self.fleet, self.pool, self.loads, self.planning, self.models
        )
        self.pairings = Pairings(config, self.fleet, self.router)
        self.scaling = Scaling(
            fleet=self.fleet,
            pool=self.pool,
            router=self.router,
            loads=self.loads,
            planning=self.planning,
            host_copies=self.host_copies,
            pairings=self.pairings,
        )
        self.stale_events = 0
        self._settled_at_ns: int | None = None
        #: loads were taken over from an earlier life, and their senders not looked at yet
        self._has_adopted = False
        self._wake_at_ns: int | None = None
        self._now_ns = 0
        self._commands: list[AnyCommand] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            WorkerJoined: self._worker_joined,
            AgentJoined: self._agent_joined,
            WorkerLost: self._worker_lost,
            RequestArrived: self._request_arrived,
            RequestCancelled: self._request_cancelled,
            RequestEnded: self._request_ended,
            BatchTaken: self._batch_taken,
            InstanceReported: self._instance_reported,
            LiveStarted: self._live_started,
            LoadStarted: self._load_progressed,
            LayerArrived: self._load_progressed,
            LoadCompleted: self._load_completed,
            LoadFailed: self._load_failed,
            FeedFailed: self._feed_failed,
            CopyLayerArrived: self._copy_layer_arrived,
            CopyCompleted: self._copy_completed,
            CopyFailed: self._copy_failed,
            CopyDropped: self._copy_dropped,
            LinkMeasured: self._link_measured,
            ModelAdded: self._model_added,
            ModelChanged: self._model_changed,
            ModelRemoved: self._model_removed,
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
        self.planning.worker_joined(event.worker, event.device)
        if event.report is not None:
            if event.report.model in self.models:
                self._adopt(event.worker, event.report)
            else:
                self.fleet.give_back(event.report, event.worker)

    def _adopt(self, worker: WorkerRef, report: InstanceReport) -> None:
        """The worker holds a rank of an instance from an earlier controller's life."""
        spec = self.models[report.model].spec
        if not report.is_loaded:
            self._has_adopted = True
            load = PlannedLoad(worker, report.feeds)
            self.loads.begin(report.plan, load, report.model, report.rank)
        instance = self.fleet.adopt(report, worker, spec.layers, spec.tp_size)
        if instance is None:
            return
        size = self.models[report.model].instance_bytes
        self.pool.begin(instance.model, instance.workers, spec.layers, size)
        for rank in range(spec.tp_size):
            for layer in range(instance.watermarks.get(rank, 0)):
                self.pool.arrived(instance.model, instance.worker, rank, layer)
        for rank in instance.loaded_ranks:
            self.pool.complete(instance.model, instance.worker, rank)

    def _agent_joined(self, event: AgentJoined) -> None:
        before = self.fleet.agents.get(event.agent.worker)
        if before is not None and event.agent <= before.ref:
            self._stale()
            return
        if before is not None:
            self._worker_lost(WorkerLost(before.ref, f"{event.agent} took its place"))
        self.fleet.agent_joins(event.agent, event.host)
        self.planning.agent_joined(event.agent, event.host)
        for name in dict.fromkeys(report.model for report in event.copies):
            reports = tuple(report for report in event.copies if report.model == name)
            self._has_adopted = True
            self.host_copies.adopt(event.agent, reports, self.models.get(name))

    def _worker_lost(self, event: WorkerLost) -> None:
        if not self.fleet.is_alive(event.worker):
            self._stale()
            return
        if event.worker.is_agent:
            self.host_copies.agent_lost(event.worker)
            del self.fleet.agents[event.worker.worker]
        else:
            self._instance_lost(event)
            self.fleet.leave(event.worker)
        self.planning.member_left(event.worker)
        self.loads.lose(event.worker)
        self.pool.lose(event.worker)

    def _instance_lost(self, event: WorkerLost) -> None:
        """One lost rank loses the instance, and with it what its rank 0 was asked."""
        reason = f"worker {event.worker} was lost: {event.reason}"
        number = self.fleet.workers[event.worker.worker].instance
        instance = self.fleet.instances.get(number) if number is not None else None
        if instance is not None:
            instance.empty_ranks[instance.workers.index(event.worker)] = None
            self.pool.lose(event.worker)
            self.fleet.move(instance, WorkerLost)
            self.attempts.worker_lost(instance.worker, reason)
        self.attempts.worker_lost(event.worker, reason)

    # -- what happened: requests --------------------------------------------------------------

    def _request_arrived(self, event: RequestArrived) -> None:
        self._count_stale(self.attempts.arrived(event, self._now_ns))

    def _request_cancelled(self, event: RequestCancelled) -> None:
        self._count_stale(self.attempts.cancelled(event))

    def _request_ended(self, event: RequestEnded) -> None:
        self._count_stale(self.attempts.ended(event, self._now_ns))

    def _batch_taken(self, event: BatchTaken) -> None:
        is_news = self.fleet.is_alive(event.worker) and self.attempts.taken(event)
        self._count_stale(is_news)

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
            instance.is_unheard = False
            self.fleet.report(instance, event)

    def _live_started(self, event: LiveStarted) -> None:
        instance = self._instance(event.instance, event.attempt)
        # Requests go to rank 0: they must not be there before it knows of the instance.
        if instance is not None and event.rank == 0:
            self.fleet.move(instance, LiveStarted)

    def _load_progressed(self, event: LoadStarted | LayerArrived) -> None:
        if isinstance(event, LayerArrived):
            reported = self.fleet.reported_load(event)
            if reported is not None:
                self.loads.progressed(*reported, self._now_ns)
                return
        instance = self._instance(event.instance, event.attempt)
        if instance is not None:
            self.fleet.move(instance, type(event))
            if instance.first_byte_ns is None and isinstance(event, LoadStarted):
                instance.first_byte_ns = self._now_ns
            if isinstance(event, LayerArrived):
                known = instance.watermarks.get(event.rank, 0)
                instance.watermarks[event.rank] = max(known, event.watermark)
                receiver = instance.workers[event.rank]
                self.loads.progressed(instance.plan, receiver, self._now_ns)
                self.pool.arrived(instance.model, instance.worker, event.rank, event.layer)

    def _load_completed(self, event: LoadCompleted) -> None:
        reported = self.fleet.reported_load(event)
        if reported is not None:
            self.loads.completed(*reported, self._now_ns)
            return
        if self._is_over_for_remnant(event):
            return
        instance = self._instance(event.instance, event.attempt)
        if instance is None:
            return
        instance.watermarks[event.rank] = instance.layers
        instance.loaded_ranks[event.rank] = None
        self.loads.completed(instance.plan, instance.workers[event.rank], self._now_ns)
        self.pool.complete(instance.model, instance.worker, event.rank)
        if len(instance.loaded_ranks) == len(instance.workers):
            self.fleet.move(instance, LoadCompleted)
            self.models[instance.model].load_failures.ended_well()

    def _is_over_for_remnant(self, event: LoadCompleted | LoadFailed) -> bool:
        """The load of a rank whose instance has ended otherwise needs no other feeds any more."""
        remnant = self.fleet.remnants.get((event.instance, event.rank))
        if remnant is None or remnant.attempt != event.attempt:
            return False
        self.loads.end_of(remnant.worker)
        return True

    def _load_failed(self, event: LoadFailed) -> None:
        reported = self.fleet.reported_load(event)
        if reported is not None:
            self.loads.end(*reported)
            return
        if self._is_over_for_remnant(event):
            return
        instance = self._instance(event.instance, event.attempt)
        if instance is not None:
            instance.empty_ranks[event.rank] = None
            # Other ranks read until they are released.
            self.loads.end(instance.plan, instance.workers[event.rank])
            self.loads.fail_readers(instance.workers[event.rank], instance.model)
            self.pool.forget(instance.model, instance.worker)
            self.fleet.move(instance, LoadFailed)
            failures = self.models[instance.model].load_failures
            failures.failed(self._now_ns, instance.plan, self.planning.last_id, event.reason)

    # -- what happened: copies and feeds ------------------------------------------------------

    def _feed_failed(self, event: FeedFailed) -> None:
        key = (event.plan, event.receiver, event.upstream)
        if event.is_stalled:
            is_news = self.loads.feed_stalled(*key, self._now_ns)
        else:
            is_news = self.loads.feed_failed(*key)
        if not is_news:
            self._stale()

    def _copy_layer_arrived(self, event: CopyLayerArrived) -> None:
        self._count_stale(self.host_copies.layer_arrived(event, self._now_ns))

    def _copy_completed(self, event: CopyCompleted) -> None:
        self._count_stale(self.host_copies.completed(event, self._now_ns))

    def _copy_failed(self, event: CopyFailed) -> None:
        self._count_stale(self.host_copies.failed(event, self._now_ns))

    def _copy_dropped(self, event: CopyDropped) -> None:
        self._count_stale(self.host_copies.dropped(event))

    def _link_measured(self, event: LinkMeasured) -> None:
        self.planning.link_measured(event.sender, event.receiver, event.bytes_per_s)

    # -- what happened: models ----------------------------------------------------------------

    def _model_added(self, event: ModelAdded) -> None:
        name = event.policy.spec.name
        if name in self.models:
            self._stale()
            return
        self._models_added += 1
        self.models[name] = ModelState(event.policy, self.config, self._now_ns, self._models_added)

    def _model_changed(self, event: ModelChanged) -> None:
        state = self.models.get(event.policy.spec.name)
        if state is None or state.is_leaving or state.spec != event.policy.spec:
            self._stale()
            return
        state.change(event.policy, self.config)
        self.scaling.look_again(event.policy.spec.name)

    def _model_removed(self, event: ModelRemoved) -> None:
        state = self.models.get(event.model)
        if state is None or state.is_leaving:
            self._stale()
            return
        state.is_leaving = True
        self._leaving[event.model] = None
        self.scaling.look_again(event.model)
        self.pool.retire(event.model)

    def _released(self, event: Released) -> None:
        remnant = self.fleet.remnants.get((event.instance, event.rank))
        if remnant is not None:
            self.loads.end_of(remnant.worker)
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
        self.scaling.look_again(event.model)

    def _ticked(self, _event: Tick) -> None:
        """The time itself is the news: `_decide` looks at every deadline anyway."""

    def _stale(self) -> None:
        self.stale_events += 1

    def _count_stale(self, was_news: bool) -> None:
        self.stale_events += not was_news

    # -- what to do ---------------------------------------------------------------------------

    def _decide(self) -> None:
        self._commands += self.attempts.take_failed()
        if len(self.fleet.workers) >= self.config.workers_expected:
            # Nobody is missing any more who could hold the ranks that were not reported.
            self.fleet.give_up_incomplete()
        if not self._is_settled():
            # Requests of an earlier life may still be announced: nobody counts as idle before.
            for state in self.models.values():
                state.has_been_idle_since(self._now_ns)
        else:
            if self._has_adopted:
                self._has_adopted = False
                self.loads.fail_dead(self.fleet.is_alive)
            self.loads.blame_stalled(self._now_ns, _STALL_GRACE_NS)
            self.loads.blame_slow(self._now_ns)
            self._commands += repair_loads(self.loads, self.pool, self.planning.topology)
            self._commands += self.host_copies.decide(self._now_ns)
            self._commands += self.scaling.decide(self._now_ns, self.config.wall_ns, self.models)
        waiting = [self.models[name] for name in self.router.models_waiting()]
        for state in sorted(waiting, key=lambda state: state.number):
            self._dispatch(state)
        self._commands += self.scaling.release_empty()
        if self._is_settled():
            self._fail_unloadable()
            self._let_go()
        self._ask_to_wake()

    def _fail_unloadable(self) -> None:
        """Requests of models that cannot be loaded do not wait for what may never come.

        Not while something of the model is or comes there, nor when the next load may be tried:
        the request that waits then is why it is tried.
        """
        for name in sorted(self.router.models_waiting()):
            state = self.models[name]
            failures, reason = state.load_failures, state.load_failures.problem
            left_ns = failures.blocked_until_ns - self._now_ns
            if reason is None or left_ns <= 0:
                continue
            if all(instance.is_released for instance in self.fleet.of_model(name)):
                self._commands += self.attempts.fail_waiting(name, reason, left_ns)

    def problem(self, model: str) -> str | None:
        """Why a model of the pool cannot be loaded, or kept in host memory, now (None: it can)."""
        problem = self.models[model].load_failures.problem
        copies = self.host_copies.failures(model)
        return problem or (copies.problem if copies is not None else None)

    def is_failing(self, model: str) -> bool:
        """The last load of a model of the pool to devices, or to host memory, failed."""
        copies = self.host_copies.failures(model)
        in_a_row = self.models[model].load_failures.in_a_row
        return bool(in_a_row or (copies is not None and copies.in_a_row))

    def failed_loads(self, model: str) -> int:
        """Loads to devices and to host memory that failed, of a model of the pool."""
        copies = self.host_copies.failures(model)
        return self.models[model].load_failures.total + (copies.total if copies is not None else 0)

    def _let_go(self) -> None:
        """Withdrawn models of which nothing is left are forgotten."""
        for name in list(self._leaving):
            is_in_use = self.router.unfinished(name) or self.fleet.has_any(name)
            if not is_in_use and not self.host_copies.has_any(name):
                del self.models[name], self._leaving[name]
                self.scaling.forget_model(name)
                self.host_copies.forget_model(name)
                self.pool.forget_model(name)
                self.fleet.forget_model(name)
                self._commands.append(ModelGone(name))

    def _is_settled(self) -> bool:
        """All expected workers have joined, or waiting for them has lasted long enough."""
        assert self._settled_at_ns is not None
        are_workers_there = len(self.fleet.workers) >= self.config.workers_expected
        if are_workers_there and len(self.fleet.agents) >= self.config.agents_expected:
            self._settled_at_ns = min(self._settled_at_ns, self._now_ns)
        return self._now_ns >= self._settled_at_ns

    def _dispatch(self, state: ModelState) -> None:
        takers = self.pairings.takers(self._now_ns, state)
        for assignment in self.router.assign(self._now_ns, state.spec.name, *takers):
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
        deadlines.append(self.attempts.avoid_until_ns)
        deadlines += [self.scaling.deadline_ns() or 0, self.host_copies.deadline_ns() or 0]
        deadlines += self.loads.blame_deadlines_ns(self._now_ns, _STALL_GRACE_NS)
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
        for load in self.loads.open.values():
            assert self.fleet.is_alive(load.receiver), f"{load.receiver} loads and is gone"

    def __repr__(self) -> str:
        waiting = sum(self.router.waiting(model) for model in self.models)
        return (
            f"<Controller {len(self.fleet.workers)} workers, {len(self.fleet.instances)} instances,"
            f" {waiting} waiting, {len(self.router.requests)} requests>"
        )
