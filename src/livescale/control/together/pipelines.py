"""Pipelines: which instances of a model's stages requests go through together (QUART §4).

Every instance of the first stage leads one. Of a later stage either each instance is in one
pipeline, and a pipeline has one or several of them, or, where there are fewer of them than leaders,
each leader has one, which several share. An instance stays where it is as long as that is even
enough: requests have KV there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from livescale.control.planning.pool_knowledge import PoolKnowledge
from livescale.control.state.instance import Instance
from livescale.control.state.model_state import ModelState, PartState
from livescale.messages.commands import ChangeDuty
from livescale.messages.events import TeamBroke
from livescale.values.routes import Pipeline, Route, TeamMember
from livescale.values.types import InstanceId, InstanceState, LayerSpan, WorkerRef

_PIPELINES_MAX = 1_000_000
"""Of one life of the controller, so that a later life's numbers are higher."""


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


class Pipelines:
    """Forms and ends them. Reads the fleet and changes duties."""

    def __init__(self, known: PoolKnowledge) -> None:
        self._states = known.models
        self._fleet = known.fleet
        self._number = known.config.epoch * _PIPELINES_MAX
        self._version = -1
        #: pipelines whose leaders have lost a member that may be there
        self._broken: dict[int, None] = {}
        #: living workers that did not reach one another
        self._apart: dict[frozenset[WorkerRef], None] = {}

    def broke(self, event: TeamBroke) -> bool:
        """A leader gave requests back that went through a member which it does not reach. False if
        the pipeline is not known."""
        instance = self._fleet.instances.get(event.instance)
        known = instance.duty.pipelines if instance is not None else ()
        if all(pipeline.number != event.team for pipeline in known):
            return False
        if event.between is None:
            self._broken[event.team] = None
        else:
            self._apart[frozenset(event.between)] = None
            self._version = -1
        return True

    def decide(self) -> list[ChangeDuty]:
        """Changes of what instances of stages are in."""
        if self._version == self._fleet.version and not self._broken:
            return []
        self._version = self._fleet.version
        is_alive = self._fleet.is_alive
        self._apart = {pair: None for pair in self._apart if all(map(is_alive, sorted(pair)))}
        models: dict[str, list[ModelState]] = {}
        for state in self._states.values():
            if state.spec.stage is not None:
                models.setdefault(state.spec.stage.model, []).append(state)
        orders = []
        for name in sorted(models):
            orders += self._decide(sorted(models[name], key=_number_of))
        self._broken = {}
        return orders

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
        members = [self._members(leaders, stage, before) for stage in serving[1:]]
        readers = [
            {i.id: sum(i in own for own in of.values()) for i in stage}
            for of, stage in zip(members, serving[1:], strict=True)
        ]
        found = []
        for leader in leaders:
            stages = [[leader], *(of[leader.id] for of in members)]
            if not all(stages):
                continue
            later = zip(readers, stages[1:], strict=True)
            shares = max((read[i.id] for read, own in later for i in own), default=1)
            known = before.get(leader.id)
            is_kept = known is not None and known.shares == shares
            if is_kept and known is not None and known.number not in self._broken:
                number = known.number
            else:
                self._number += 1
                number = self._number
            ways = tuple(
                tuple(TeamMember(i.partner, span) for i in stage)
                for stage, span in zip(stages, spans, strict=True)
            )
            found.append(Pipeline(number, ways, shares))
        return found

    def _members(
        self,
        leaders: Sequence[Instance],
        stage: Sequence[Instance],
        before: Mapping[InstanceId, Pipeline],
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
            found = {leader: [own[i] for i in own if shared[i] == leader] for leader in ids}
        else:
            shared = share_evenly(ids, [*own], dict(pairs))
            found = {leader: [own[shared[leader]]] for leader in ids}
        return {leader.id: self._reached(leader, found[leader.id]) for leader in leaders}

    def _reached(self, leader: Instance, members: Iterable[Instance]) -> list[Instance]:
        return [
            member
            for member in members
            if frozenset((leader.worker, member.worker)) not in self._apart
        ]


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
