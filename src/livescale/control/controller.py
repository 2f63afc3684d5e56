"""The Controller: `step(now_ns, events) -> commands`, pure and deterministic.

Law: every event of a step is absorbed first, then everything is decided once. Each handler only
records what happened; decisions stand in `_decide`, in a fixed order. Late news (an attempt that
is no longer under way, a worker that is gone) is counted as stale and otherwise ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from livescale.control.cluster.membership import Membership
from livescale.control.planning.guests import Guests
from livescale.control.planning.host_copies import HostCopies
from livescale.control.planning.planning import Planning
from livescale.control.planning.pool_knowledge import PoolKnowledge
from livescale.control.planning.repairs import repair_loads
from livescale.control.reports.holding_news import HoldingNews
from livescale.control.reports.status import ControllerStatus, status_of
from livescale.control.requests.attempts import Attempts
from livescale.control.scaling.leaving import Leaving
from livescale.control.scaling.scaling import Scaling
from livescale.control.scaling.wishes import Wishes
from livescale.control.scaling.withdrawals import Withdrawals
from livescale.control.state.config import ControllerConfig
from livescale.control.state.model_state import ModelState, PartState
from livescale.control.together.drains import Drains
from livescale.control.together.pairing import Pairings
from livescale.control.together.pipelines import Pipelines
from livescale.control.together.roles import Roles
from livescale.control.together.team_duties import Teams
from livescale.messages import events
from livescale.messages.commands import AnyCommand, Dispatch, WakeAt
from livescale.messages.events import AnyEvent
from livescale.values.stages import stage_name
from livescale.values.types import InstanceState, WorkerRef

# Everybody behind a sender that stalls reports it within this time; then it is judged.
_AT_ONCE_GAP_NS = 1_000_000
_STALL_GRACE_NS = 100_000_000


class Controller:
    """Decides about one pool. Give it every event in order; carry out every command."""

    def __init__(self, config: ControllerConfig) -> None:
        known = PoolKnowledge.at_start(config)
        self.config = config
        self.models = known.models
        self.fleet = known.fleet
        self.pool = known.pool
        self.router = known.router
        self.loads = known.loads
        self._models_added = len(self.models)
        self.attempts = Attempts(config, self.router, self.models, self.fleet)
        self.planning = Planning(known)
        self.host_copies = HostCopies(known, self.planning)
        self.guests = Guests(known, self.planning, self.host_copies)
        self.pairings = Pairings(known, self.planning)
        self.leaving = Leaving(known, self.planning, self.pairings)
        self.drains = Drains(known, self.planning, self.pairings)
        self.roles = Roles(known, self.pairings)
        self.teams = Teams(known, self.planning)
        self.pipelines = Pipelines(known)
        self.wishes = Wishes(known, self.planning)
        self.withdrawals = Withdrawals(known, self.planning, self.wishes, self.host_copies)
        self.scaling = Scaling(
            known, self.planning, self.host_copies, self.pairings, self.roles, self.wishes
        )
        self._membership = Membership(known, self.planning, self.attempts)
        self._holding_news = HoldingNews(
            known, self.planning, self.host_copies, self.guests, self.teams
        )
        self.stale_events = 0
        self._wake_at_ns: int | None = None
        #: when it was, or will be, woken at once
        self._at_once_ns = -_AT_ONCE_GAP_NS
        self._now_ns = 0
        self._commands: list[AnyCommand] = []
        self._handlers = self._handler_by_event()

    def step(self, now_ns: int, received: Sequence[AnyEvent]) -> list[AnyCommand]:
        """Absorb all events, then decide once. `now_ns` never goes back."""
        assert now_ns >= self._now_ns, f"time went back from {self._now_ns} to {now_ns}"
        self._now_ns = now_ns
        self._commands = []
        for event in received:
            is_news = self._handlers[type(event)](event, now_ns)
            self.stale_events += not is_news
        self._decide()
        return self._commands

    def lacking_workers(self) -> int:
        """Workers that would get an instance at once if they were there."""
        return self.scaling.lacking_workers

    def busy_workers(self) -> tuple[WorkerRef, ...]:
        """Those that an instance is on."""
        instances = sorted(self.fleet.instances.items())
        return tuple(worker for _, instance in instances for worker in instance.workers)

    def status(self) -> ControllerStatus:
        """What others may know of its state."""
        free = self.leaving.free()
        return status_of(self.fleet, self.pool, self.models, self.host_copies, self.wishes, free)

    # -- what happened ------------------------------------------------------------------------

    def _handler_by_event(self) -> dict[type, Callable[[Any, int], bool]]:
        """What records an event at a time; the answer is False for late news."""
        news, of = self._holding_news, self._holding_news.of
        return {
            events.WorkerJoined: self._membership.worker_joined,
            events.AgentJoined: self._membership.agent_joined,
            events.WorkerLost: self._membership.lost,
            events.MembersLeave: self.leaving.members_leave,
            events.RequestArrived: self.attempts.arrived,
            events.RequestCancelled: self.attempts.cancelled,
            events.GatewayLost: self.attempts.gateway_lost,
            events.RequestEnded: self.attempts.ended,
            events.BatchTaken: self._batch_taken,
            events.KvTaken: news.kv_taken,
            events.TeamBroke: lambda e, ns: self.pipelines.broke(e, ns) or self.teams.broke(e, ns),
            events.InstanceReported: news.reported,
            events.LiveStarted: of(news.live_started),
            # For the run record. Nothing follows: its part changed with the order.
            events.RoleChanged: of(lambda _holding, _event, _now_ns: True),
            events.CoresChanged: self.wishes.lines.cores_changed,
            events.FirstByteArrived: of(news.first_byte_arrived),
            events.LayerArrived: of(news.layer_arrived),
            events.HoldingCompleted: of(news.completed),
            events.HoldingFailed: of(news.failed),
            events.HoldingDropped: of(news.dropped),
            events.FeedFailed: self.loads.feed_failed,
            events.LinkMeasured: self.planning.cluster.link_measured,
            events.ModelAdded: self._model_added,
            events.ModelChanged: self._model_changed,
            events.ModelRemoved: self.withdrawals.model_removed,
            events.CapacityMeasured: self._capacity_measured,
            # The time itself is the news: `_decide` looks at every deadline anyway.
            events.Tick: lambda _event, _now_ns: True,
        }

    def _batch_taken(self, event: events.BatchTaken, _now_ns: int) -> bool:
        if not self.fleet.is_alive(event.worker):
            return self.attempts.taken_by_lost(event)
        instance = self.fleet.instances.get(event.instance)
        return self.attempts.taken(event, instance.part if instance is not None else None)

    def _model_added(self, event: events.ModelAdded, now_ns: int) -> bool:
        name = event.policy.spec.name
        if name in self.models:
            return False
        self._models_added += 1
        self.models[name] = ModelState(event.policy, self.config, now_ns, self._models_added)
        return True

    def _model_changed(self, event: events.ModelChanged, _now_ns: int) -> bool:
        state = self.models.get(event.policy.spec.name)
        if state is None or state.is_leaving or state.spec != event.policy.spec:
            return False
        if bool(event.policy.roles) != state.has_roles:
            return False  # instances cannot be told apart later
        state.change(event.policy, self.config)
        self.wishes.look_again(state)
        return True

    def _capacity_measured(self, event: events.CapacityMeasured, _now_ns: int) -> bool:
        state = self.models.get(event.model)
        if state is None:
            return False
        state.measured(event.prefill_tokens_per_s, event.kv_blocks)
        self.wishes.look_again(state)
        return True

    # -- what to do ---------------------------------------------------------------------------

    def _decide(self) -> None:
        self._commands += self.attempts.take_failed()
        is_settled = self._membership.settle(self._now_ns)
        # First, so that what is left makes room for what is ordered next.
        self._commands += self.pool.drop_remainders()
        self._commands += self._membership.take_releases()
        if not is_settled:
            # Requests of an earlier life may still be announced: no model counts as idle before.
            for state in self.models.values():
                state.has_been_idle_since(self._now_ns)
        else:
            self.loads.blame_stalled(self._now_ns, _STALL_GRACE_NS)
            self.loads.blame_slow(self._now_ns)
            topology = self.planning.topology
            self._commands += repair_loads(self.loads, self.pool, topology, self._now_ns)
            self._commands += self.host_copies.decide(self._now_ns)
            self._commands += self.guests.decide(self._now_ns)
            self._commands += self.pairings.decide()
            self._commands += self.teams.decide()
            self._commands += self.leaving.decide()
            self._commands += self.scaling.decide(self._now_ns, self.config.wall_ns, self.models)
            self._commands += self.pipelines.decide(self._now_ns)
        waiting = [self.models[part.model] for part in self.router.parts_waiting()]
        for model in sorted(waiting, key=lambda model: model.number):
            self._dispatch(model.entry)
        self._commands += self.scaling.release_empty(self._now_ns)
        if is_settled:
            self._commands += self.drains.decide()
            self._commands += self.roles.decide()
        if is_settled:
            self._fail_unloadable()
            self._commands += self.withdrawals.let_go()
        self._ask_to_wake(at_once=is_settled and self.wishes.may_be_met_now())

    def _fail_unloadable(self) -> None:
        """Requests of models that cannot be loaded do not wait for what may never come.

        Not while an instance is or comes there, be it one of an earlier life of which some ranks
        have not come back yet, or a copy in memory of which no load has failed, nor when the next
        load may be tried: the request that waits then is why it is tried.
        """
        for part in sorted(self.router.parts_waiting()):
            for state in self._gone_through(self.models[part.model]):
                if self._is_unloadable(state):
                    reason = state.load_failures.problem or ""
                    left_ns = state.load_failures.blocked_until_ns - self._now_ns
                    self._commands += self.attempts.fail_waiting(part, reason, left_ns)
                    break

    def _gone_through(self, model: ModelState) -> list[ModelState]:
        """What the model's waiting requests need: it, or all stages of which it is the first."""
        stage = model.spec.stage
        if stage is None:
            return [model]
        names = (stage_name(stage.model, number) for number in range(stage.count))
        return [self.models[name] for name in names if name in self.models]

    def _is_unloadable(self, state: ModelState) -> bool:
        failures = state.load_failures
        if failures.problem is None or failures.blocked_until_ns <= self._now_ns:
            return False
        has_copy = not failures.is_of_copies and self.planning.has_copy(state)
        instances = self.fleet.of_parts(state.keys)
        is_there = any(not instance.is_released for instance in instances)
        comes = is_there or any(copy.model == state.name for copy in self.pool.incomplete())
        return not (has_copy or comes or self.pool.spares(state.name))

    def _dispatch(self, state: PartState) -> None:
        routes = self.teams.routes(state, self.roles.routes(self._now_ns, state))
        routes = self.pipelines.routes(state, routes)
        waking = self.fleet.waking(state.part)
        for assignment in self.router.assign(self._now_ns, state.part, routes, waking):
            record = assignment.request
            self._commands.append(
                Dispatch(record.id, record.attempt, assignment.instance, assignment.worker)
            )

    def _ask_to_wake(self, *, at_once: bool) -> None:
        """WakeAt for the next deadline, unless an earlier call is already promised."""
        if at_once and self._at_once_ns <= self._now_ns:
            # Not again and again: what is given and taken back must not stop the clock.
            self._at_once_ns = max(self._now_ns + 1, self._at_once_ns + _AT_ONCE_GAP_NS)
        deadlines = [
            self._at_once_ns,
            self._membership.settled_at_ns or 0,
            self.fleet.hopeless_from_ns() or 0,
            self.attempts.deadline_ns(self._now_ns) or 0,
            self.pipelines.deadline_ns() or 0,
        ]
        asked = (self.wishes.deadline_ns, self.host_copies.deadline_ns, self.guests.deadline_ns)
        deadlines += [deadline_ns() or 0 for deadline_ns in asked]
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
            copies = self.pool.copies(state.spec.name)
            holders = [c.holder for c in copies if c.is_loaded and not c.is_on_host]
            keepers = [
                i.worker
                for i in self.fleet.of_parts(state.keys)
                if i.state in (InstanceState.SERVING, InstanceState.DRAINING) and not i.is_released
            ]
            assert holders == sorted(keepers), (holders, keepers)
        for load in self.loads.open.values():
            assert self.fleet.is_alive(load.receiver), f"{load.receiver} loads and is gone"

    def __repr__(self) -> str:
        waiting = sum(self.router.waiting(state.entry.part) for state in self.models.values())
        return (
            f"<Controller {len(self.fleet.workers)} workers, {len(self.fleet.instances)} instances,"
            f" {waiting} waiting, {len(self.router.requests)} requests>"
        )
