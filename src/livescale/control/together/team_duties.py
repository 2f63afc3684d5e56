"""Which loading instances are a team, from when until when, and what requests see of that.

A team serves while its members load (λScale §4.3, §4.4). It begins when the layers of its members
are the model, and ends when each of them has everything, one of them is gone, or its leader reports
that it broke. Its leader takes requests for all; the others get none of their own meanwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from livescale.control.planning.planning import Planning
from livescale.control.planning.pool_knowledge import OfPool, PoolKnowledge
from livescale.control.state.instance import Instance
from livescale.control.state.model_state import ModelState, PartState
from livescale.control.together.team_spans import Loading, TeamModel
from livescale.control.together.teams import Apart, form_teams
from livescale.messages.commands import ChangeDuty
from livescale.messages.events import TeamBroke
from livescale.values.chunks import Feed
from livescale.values.routes import Hop, Route, Team, TeamMember
from livescale.values.types import (
    FromWorker,
    InstanceId,
    InstanceState,
    Part,
    PlanId,
    Role,
    WorkerRef,
)

_S_PS = 1_000_000_000_000
_TEAMS_MAX = 1_000_000
"""Of one life of the controller, so that a later life's numbers are higher."""


class Teams(OfPool):
    """Forms and ends teams. Reads the fleet and changes duties."""

    def __init__(self, known: PoolKnowledge, planning: Planning) -> None:
        super().__init__(known)
        self._strategy = known.config.teams
        self._planning = planning
        self._number = known.config.epoch * _TEAMS_MAX
        #: parts of which layers have come since that was last looked at
        self._grown: dict[Part, None] = {}
        self._version = -1
        #: teams that broke, until they are ended
        self._broken: dict[int, None] = {}
        #: living workers that did not reach one another in a team, both ways
        self._apart: dict[WorkerRef, dict[WorkerRef, None]] = {}

    def layer_came(self, instance: Instance) -> None:
        """One of its ranks has one more layer."""
        if self._strategy is not None:
            self._grown[instance.part] = None

    def broke(self, event: TeamBroke, _now_ns: int) -> bool:
        """A leader gave the requests of its team back. Others are formed when the next layer
        comes: a team that breaks at once does so no more often than layers come."""
        workers = event.between or ()
        if workers and all(self._fleet.is_alive(worker) for worker in workers):
            one, other = workers
            self._apart.setdefault(one, {})[other] = None
            self._apart.setdefault(other, {})[one] = None
        instance = self._fleet.instances.get(event.instance)
        team = instance.duty.team if instance is not None else None
        if team is None or team.number != event.team:
            return False
        self._broken[event.team] = None
        return True

    def decide(self) -> list[ChangeDuty]:
        """Teams that are over end, and others begin."""
        is_changed = self._version != self._fleet.version
        if self._strategy is None or not (is_changed or self._grown or self._broken):
            return []
        self._version = self._fleet.version
        grown, self._grown = self._grown, {}
        if is_changed:
            self._forget_lost()
        orders = self._end() if is_changed or self._broken else []
        self._broken = {}
        for part in sorted(grown):
            orders += self._form(part)
        return orders

    def routes(self, state: PartState, routes: Sequence[Route]) -> list[Route]:
        """Without those to members of teams; to each team by way of its leader. An instance that
        was in a team takes no further requests before all its layers are there."""
        if self._strategy is None:  # asked in every decision: nothing is looked up in vain
            return list(routes)
        instances = self._fleet.of_part(state.part)
        teams = {i.id: i.duty.team for i in instances if i.duty.team is not None}
        idle = [i for i in instances if i.state is InstanceState.LIVE and _is_idle(i)]
        if not teams and not idle:
            return list(routes)
        others = {**dict.fromkeys(teams), **dict.fromkeys(i.id for i in idle)}
        found = [route for route in routes if route.first.instance not in others]
        for instance in instances:
            team = instance.duty.team
            is_ready = instance.state in (InstanceState.LIVE, InstanceState.SERVING)
            if team is not None and team.leader.instance == instance.id and is_ready:
                hops = tuple(Hop((m.partner,), m.span) for m in team.members)
                found.append(Route(hops, cost_permille=1000 // len(team.members)))
        return found

    # -- helpers, in the order used -------------------------------------------------------------

    def _forget_lost(self) -> None:
        """Only living workers are kept apart: one that comes anew may reach all."""
        for worker in [w for w in self._apart if not self._fleet.is_alive(w)]:
            for other in self._apart.pop(worker):
                if other in self._apart:
                    del self._apart[other][worker]

    def _end(self) -> list[ChangeDuty]:
        """Duties without a team, for what is left of those that are over."""
        orders = []
        instances = [i for _, i in sorted(self._fleet.instances.items()) if not i.is_released]
        for instance in [i for i in instances if i.duty.team is not None]:
            team = instance.duty.team
            assert team is not None
            members = [self._fleet.instances.get(m.partner.instance) for m in team.members]
            if team.number in self._broken or _is_over(team, members):
                orders.append(instance.change(msgspec.structs.replace(instance.duty, team=None)))
        return orders

    def _form(self, part: Part) -> list[ChangeDuty]:
        """New teams of the part's instances that load by the same plan."""
        assert self._strategy is not None
        state = self._states.get(part.model)
        if state is None or part.role is not Role.UNIFIED:
            return []
        plans: dict[PlanId, list[Instance]] = {}
        there = [i for i in self._fleet.of_part(part) if i.copy.is_there and not i.is_released]
        for instance in there:
            is_free = instance.is_loading and instance.duty.team is None
            is_free = is_free and not self._fleet.is_engine(instance.worker)
            if is_free and not instance.is_unreported:
                plans.setdefault(_plan(instance), []).append(instance)
        orders = []
        for plan, instances in plans.items():
            # Of all: what joins two of a sub-group may be an instance that has its team.
            receivers = {
                i.id: (i.workers, upstreams_of(h.order.feeds for h in i.copy.ranks.values()))
                for i in there
                if _plan(i) == plan
            }
            groups = sub_groups(receivers)
            loading = [Loading(i.id, groups[i.id], frozenset(i.copy.layers())) for i in instances]
            by_id = {instance.id: instance for instance in instances}
            apart = self._pairs_apart(instances)
            model = TeamModel(state.spec.layers - 2, state.spec.is_tied)
            for stages in form_teams(self._strategy, loading, model, apart):
                self._number += 1
                members = tuple(TeamMember(by_id[i].partner, span) for i, span in stages)
                kv_token_ps = self._kv_token_ps(state, members)
                rate = state.prefill_tokens_per_s or 0
                team = Team(self._number, members, kv_token_ps, rate)
                orders += [_joined(by_id[i], team) for i, _ in stages]
        return orders

    def _pairs_apart(self, instances: Sequence[Instance]) -> frozenset[Apart]:
        if not self._apart:
            return frozenset()
        pairs = itertools.combinations(instances, 2)
        return frozenset(
            (one.id, other.id)
            for one, other in pairs
            if other.worker in self._apart.get(one.worker, {})
        )

    def _kv_token_ps(self, state: ModelState, members: Sequence[TeamMember]) -> int:
        """Of the slowest way between two of them; 0 if one is not known."""
        workers = [member.partner.worker for member in members]
        ways = [(a, b) for a in workers for b in workers if a != b]
        rates = [self._planning.cluster.link_bytes_per_s(*way) for way in ways]
        known = [rate for rate in rates if rate is not None]
        if len(known) < len(rates):
            return 0
        return state.spec.kv_bytes_per_token * _S_PS // max(min(known), 1)


def _joined(instance: Instance, team: Team) -> ChangeDuty:
    """In a team the instance works for that alone."""
    duty = msgspec.structs.replace(instance.duty, team=team, gives_to=(), live_order=None)
    return instance.change(duty)


def _plan(instance: Instance) -> PlanId:
    """By which it was loaded."""
    return instance.copy.ranks[0].id.plan


def _is_idle(instance: Instance) -> bool:
    """It does nothing before all its layers are there."""
    return instance.duty.live_order is None and instance.duty.team is None


def _is_over(team: Team, members: Sequence[Instance | None]) -> bool:
    """One is gone, or was told so, or all have every layer."""
    there = [m for m in members if m is not None and m.duty.team == team and not m.is_released]
    return len(there) < len(members) or all(not member.is_loading for member in there)


def sub_groups(
    receivers: Mapping[InstanceId, tuple[Sequence[WorkerRef], Sequence[WorkerRef]]],
) -> dict[InstanceId, int]:
    """Instances that get their parameters from one another are one sub-group: each plan has as
    many as it has sources. Of each its workers, and those that send to these. Numbered in the
    order of their first instances."""
    of_worker = {worker: i for i, (workers, _) in receivers.items() for worker in workers}
    group = {i: number for number, i in enumerate(receivers)}
    for instance, (_, upstreams) in receivers.items():
        for upstream in upstreams:
            other = of_worker.get(upstream)
            if other is not None and group[other] != group[instance]:
                joined, left = sorted((group[other], group[instance]))
                group = {i: joined if n == left else n for i, n in group.items()}
    numbers = {n: place for place, n in enumerate(dict.fromkeys(group.values()))}
    return {i: numbers[n] for i, n in group.items()}


def upstreams_of(feeds: Iterable[Sequence[Feed]]) -> list[WorkerRef]:
    """The workers that send along these feeds."""
    found = [feed.upstream for of in feeds for feed in of]
    return [upstream.worker for upstream in found if isinstance(upstream, FromWorker)]
