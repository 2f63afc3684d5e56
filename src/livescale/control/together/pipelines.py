"""Pipelines: which instances of a model's stages requests go through together (QUART §4).

Every instance of the first stage leads one. Of a later stage either each instance is in one
pipeline, and a pipeline has one or several of them, or, where there are fewer of them than leaders,
each leader has one, which several share. An instance stays where it is as long as that is even
enough: requests have KV there.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Mapping, Sequence

import msgspec

from livescale.control.planning.pool_knowledge import OfPool, PoolKnowledge
from livescale.control.state.instance import Instance
from livescale.control.state.model_state import ModelState, PartState
from livescale.messages.commands import ChangeDuty
from livescale.messages.events import TeamBroke
from livescale.values.routes import Pipeline, Route, TeamMember
from livescale.values.types import InstanceId, InstanceState, LayerSpan, WorkerRef

_PIPELINES_MAX = 1_000_000
"""Of one life of the controller, so that a later life's numbers are higher."""


class _Apart:
    """Of two living workers that did not reach one another: how often, and until when no pipeline
    goes from one to the other. Then they may try again: there may be no other way."""

    def __init__(self) -> None:
        self.breaks = 0
        self.until_ns = 0

    def broke(self, now_ns: int, pause_ns: int, pause_ns_max: int) -> None:
        self.breaks += 1
        self.until_ns = now_ns + min(pause_ns << min(self.breaks - 1, 32), pause_ns_max)


def share_evenly(
    items: Sequence[InstanceId],
    owners: Sequence[InstanceId],
    before: Mapping[InstanceId, InstanceId],
) -> dict[InstanceId, InstanceId]:
    """An owner for each item, so that owners have as many but for one. Items stay with the owner
    that they had `before` where that is possible."""
    found = {item: before[item] for item in items if before.get(item) in owners}
    counts = dict.fromkeys(owners, 0)
    for owner in found.values():
        counts[owner] += 1
    for item in items:
        if item not in found:
            found[item] = _least(counts)
            counts[found[item]] += 1
    while max(counts.values()) - min(counts.values()) > 1:
        most = max(counts, key=lambda owner: (counts[owner], owner))
        moved = max(item for item, owner in found.items() if owner == most)
        counts[most] -= 1
        found[moved] = _least(counts)
        counts[found[moved]] += 1
    return found


def _least(counts: Mapping[InstanceId, int]) -> InstanceId:
    return min(counts, key=lambda owner: (counts[owner], owner))


class Pipelines(OfPool):
    """Forms and ends them. Reads the fleet and changes duties."""

    def __init__(self, known: PoolKnowledge) -> None:
        super().__init__(known)
        self._number = known.config.epoch * _PIPELINES_MAX
        self._version = -1
        #: when it decided last
        self._decided_ns = 0
        #: pipelines whose leaders have lost a member that may be there, or a way between two
        self._broken: dict[int, None] = {}
        #: living workers that did not reach one another
        self._apart: dict[frozenset[WorkerRef], _Apart] = {}

    def broke(self, event: TeamBroke, now_ns: int) -> bool:
        """A leader gave requests back that went through a member which it does not reach. False if
        the pipeline is not known."""
        instance = self._fleet.instances.get(event.instance)
        known = instance.duty.pipelines if instance is not None else ()
        if all(pipeline.number != event.team for pipeline in known):
            return False
        self._broken[event.team] = None
        if event.between is not None:
            apart = self._apart.setdefault(frozenset(event.between), _Apart())
            apart.broke(now_ns, self._config.load_retry_ns, self._config.load_retry_ns_max)
        return True

    def decide(self, now_ns: int) -> list[ChangeDuty]:
        """Changes of what instances of stages are in."""
        is_over = any(self._decided_ns < apart.until_ns <= now_ns for apart in self._apart.values())
        if self._version == self._fleet.version and not self._broken and not is_over:
            return []
        self._version = self._fleet.version
        self._decided_ns = now_ns
        is_alive = self._fleet.is_alive
        self._apart = {p: apart for p, apart in self._apart.items() if all(map(is_alive, p))}
        models: dict[str, list[ModelState]] = {}
        for state in self._states.values():
            if state.spec.stage is not None:
                models.setdefault(state.spec.stage.model, []).append(state)
        orders = []
        for name in sorted(models):
            orders += self._decide(sorted(models[name], key=_number_of))
        self._broken = {}
        return orders

    def deadline_ns(self) -> int | None:
        """When workers that did not reach one another may next try again."""
        later = (a.until_ns for a in self._apart.values() if a.until_ns > self._decided_ns)
        return min(later, default=None)

    def routes(self, state: PartState, routes: list[Route]) -> list[Route]:
        """To instances that lead pipelines, whose members have each something to do. Models without
        stages have the routes that they have, and later stages none."""
        stage = state.spec.stage
        if stage is None:  # asked in every decision
            return routes
        found = []
        for route in routes:
            pipeline = _led(self._fleet.instances[route.first.instance])
            if pipeline is not None:
                members = len(pipeline.members)
                found.append(msgspec.structs.replace(route, members=members))
        return found

    # -- helpers, in the order used -------------------------------------------------------------

    def _decide(self, states: Sequence[ModelState]) -> list[ChangeDuty]:
        """Of one model, whose stages these are."""
        there = [self._fleet.of_part(state.entry.part) for state in states]
        serving = [[one for one in of if one.state is InstanceState.SERVING] for of in there]
        stage = states[0].spec.stage
        is_whole = stage is not None and len(states) == stage.count
        pipelines: list[Pipeline] = []
        if is_whole and all(serving):
            pipelines = self._pipelines(serving, [_span_of(state) for state in states])
        of_instance: dict[InstanceId, tuple[Pipeline, ...]] = {}
        for pipeline in pipelines:
            for member in pipeline.members:
                number = member.partner.instance
                of_instance[number] = (*of_instance.get(number, ()), pipeline)
        orders = []
        for instance in itertools.chain.from_iterable(there):
            own = of_instance.get(instance.id, ())
            if own != instance.duty.pipelines:
                duty = msgspec.structs.replace(instance.duty, pipelines=own)
                orders.append(instance.change(duty))
        return orders

    def _pipelines(
        self, serving: Sequence[Sequence[Instance]], spans: Sequence[LayerSpan]
    ) -> list[Pipeline]:
        """One for each leader that reaches an instance of each later stage."""
        leaders = serving[0]
        before = {leader.id: led for leader in leaders if (led := _led(leader)) is not None}
        later = [_members(leaders, stage, before) for stage in serving[1:]]
        of_leader = {
            leader.id: self._reached([[leader], *(of[leader.id] for of in later)])
            for leader in leaders
        }
        readers = collections.Counter(
            i.id for stages in of_leader.values() for stage in stages[1:] for i in stage
        )
        found = []
        for leader in leaders:
            stages = of_leader[leader.id]
            if not all(stages):
                continue
            shares = max((readers[i.id] for stage in stages[1:] for i in stage), default=1)
            ways = tuple(
                tuple(TeamMember(i.partner, span) for i in stage)
                for stage, span in zip(stages, spans, strict=True)
            )
            found.append(self._numbered(ways, shares, before.get(leader.id)))
        return found

    def _numbered(
        self,
        stages: tuple[tuple[TeamMember, ...], ...],
        shares: int,
        before: Pipeline | None,
    ) -> Pipeline:
        """With other members a pipeline goes on. If it broke and has the same ones, it is a new
        one: else its leader would not be told of what it has lost again."""
        if before is not None and before.shares == shares:
            number = before.number
            if number not in self._broken or before.stages != stages:
                return Pipeline(number, stages, shares)
        self._number += 1
        return Pipeline(self._number, stages, shares)

    def _reached(self, stages: Sequence[Sequence[Instance]]) -> list[list[Instance]]:
        """Without one of any two that are apart: where more are left, else of the later stage."""
        left = [list(stage) for stage in stages]
        pairs = itertools.combinations(enumerate(stages), 2) if self._apart else ()
        for (number, stage), (later_number, later_stage) in pairs:
            earlier, later = left[number], left[later_number]
            for one, other in itertools.product(stage, later_stage):
                if one in earlier and other in later and self._is_apart(one, other):
                    if len(earlier) > len(later):
                        earlier.remove(one)
                    else:
                        later.remove(other)
        return left

    def _is_apart(self, one: Instance, other: Instance) -> bool:
        apart = self._apart.get(frozenset((one.worker, other.worker)))
        return apart is not None and self._decided_ns < apart.until_ns


def _members(
    leaders: Sequence[Instance], stage: Sequence[Instance], before: Mapping[InstanceId, Pipeline]
) -> dict[InstanceId, list[Instance]]:
    """By leader, its instances of a later stage."""
    own = {i.id: i for i in stage}
    pairs = [
        (leader, member.partner.instance)
        for leader, pipeline in before.items()
        for member in pipeline.members
        if member.partner.instance in own
    ]
    ids = [leader.id for leader in leaders]
    if len(stage) >= len(leaders):
        shared = share_evenly([*own], ids, {member: leader for leader, member in pairs})
        return {leader: [own[i] for i in own if shared[i] == leader] for leader in ids}
    shared = share_evenly(ids, [*own], dict(pairs))
    return {leader: [own[shared[leader]]] for leader in ids}


def _led(instance: Instance) -> Pipeline | None:
    """The pipeline that it leads."""
    own = (p for p in instance.duty.pipelines if p.leader.instance == instance.id)
    return next(own, None)


def _number_of(state: ModelState) -> int:
    assert state.spec.stage is not None
    return state.spec.stage.number


def _span_of(state: ModelState) -> LayerSpan:
    assert state.spec.stage is not None
    return state.spec.stage.span(state.spec.layers)
