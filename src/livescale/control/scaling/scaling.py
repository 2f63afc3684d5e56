"""Growing and shrinking models: which workers, in which order, and who gives way.

Policies suggest numbers; here they become plans, loads, drains and releases. Several models share
the workers: when these run short, priority decides, then need. The ParameterPool has the last
word on every copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from livescale.control.planning.copy_worth import CopyWorth
from livescale.control.planning.host_copies import HostCopies
from livescale.control.planning.planning import Planning
from livescale.control.planning.pool_knowledge import OfPool, PoolKnowledge
from livescale.control.planning.spares import Spares
from livescale.control.planning.spares_ahead import SparesAhead
from livescale.control.planning.stage_hosts import StageHosts
from livescale.control.scaling.mutations import Mutations
from livescale.control.scaling.starts import Starts
from livescale.control.scaling.team_plans import TeamPlans
from livescale.control.scaling.wishes import Wish, Wishes
from livescale.control.state.instance import Instance
from livescale.control.state.model_state import ModelState, PartState
from livescale.control.together.pairing import Pairings
from livescale.control.together.roles import Roles
from livescale.messages.commands import (
    AnyCommand,
    Drain,
    ReleaseHolding,
    Resume,
)
from livescale.messages.scale_plan import ScalePlan
from livescale.values.types import (
    InstanceState,
    Part,
    WorkerRef,
)


class Scaling(OfPool):
    """Carries out the autoscalers' wishes on fleet and pool, as commands."""

    def __init__(
        self,
        known: PoolKnowledge,
        planning: Planning,
        host_copies: HostCopies,
        pairings: Pairings,
        roles: Roles,
        wishes: Wishes,
    ) -> None:
        super().__init__(known)
        self._planning = planning
        self._host_copies = host_copies
        self._pairings = pairings
        self._wishes = wishes
        self._worth = CopyWorth(known.models, known.pool)
        self._spares = Spares(known, planning, self._worth)
        self._ahead = SparesAhead(known, self._spares, self._worth)
        self._starts = Starts(known, planning, self._spares, pairings)
        self._stage_hosts = StageHosts(known, planning, self._spares)
        self._mutations = Mutations(known, roles, pairings, self._spares)
        self._team_plans = TeamPlans(known, planning, pairings)
        #: of fleet, pool and limits, and how many workers there were, when nothing was to be loaded
        #: ahead
        self._nothing_ahead = (-1, -1, -1, -1)
        #: workers that growing models would take and that no model gives up, by the last decision
        self.lacking_workers = 0

    def decide(
        self, now_ns: int, wall_zero_ns: int, states: Mapping[str, ModelState]
    ) -> list[AnyCommand]:
        """Compare the models' loads with their capacities and order what follows.
        `wall_zero_ns` is the wall clock at time 0."""
        self._worth.begin(now_ns)
        wishes, notices = self._mutations.decide(self._wishes.look(now_ns, wall_zero_ns, states))
        commands: list[AnyCommand] = [*notices, *self._wishes.lines.order_cores()]
        for wish in wishes:
            if wish.wanted < wish.capacity:
                commands += self._shrink(wish)
        growing = [wish for wish in wishes if wish.wanted > wish.capacity]
        # First models that need an instance, then those that can use workers that are there.
        growing.sort(
            key=lambda w: (
                w.needed == w.capacity,
                -w.priority,
                -w.need_permille,
                w.state.spec.name,
            )
        )
        more = [(wish.state.model, wish.wanted - wish.capacity) for wish in growing]
        self._stage_hosts.begin(now_ns, states, more)
        claimed = lacking = 0
        for wish in growing:
            reached, grown = self._grow(now_ns, wish, claimed)
            commands += grown
            if reached < wish.needed and now_ns >= wish.state.model.load_failures.blocked_until_ns:
                missing = wish.state.spec.tp_size * (wish.needed - reached)
                commands += self._make_room(wish, missing, claimed)
                found = self._claim(wish, missing, claimed)
                claimed += found
                lacking += missing - found
        self.lacking_workers = lacking
        return commands + self._load_ahead(now_ns, wall_zero_ns + now_ns, states)

    def release_empty(self, now_ns: int) -> list[AnyCommand]:
        """Give back the workers of drained instances. Their copies stay as warm spares; one that is
        not kept goes when nothing reads it."""
        commands: list[AnyCommand] = []
        for number in sorted(self._fleet.draining):
            instance = self._fleet.draining[number]
            if self._is_busy(instance):
                continue
            if self._spares.keeps(instance):
                self._fleet.move(instance, ReleaseHolding)
                commands += self._pool.release(instance.copy, now_ns)
            elif self._pool.can_drop(instance.copy):
                commands += self._pool.drop(instance.copy, "drained")
        return commands + self._spares.drop_unwanted()

    # -- growing ------------------------------------------------------------------------------

    def _grow(self, now_ns: int, wish: Wish, claimed: int) -> tuple[int, list[AnyCommand]]:
        """Resume draining instances first, then wake warm spares of the model, then load new ones,
        as far as there are workers that no model claims that comes first.

        Returns how many instances it has now, and what to do.
        """
        state = wish.state
        instances = self._fleet.of_part(state.part)
        draining = [instance for instance in instances if self._fleet.can_resume(instance)]
        count = wish.wanted - wish.capacity
        if claimed:
            count = min(count, max(self._found(wish) - claimed, 0) // state.spec.tp_size)
        if wish.needed == wish.capacity:
            count = min(count, self._free_for(now_ns, wish) // state.spec.tp_size)
        resumed = draining[:count]
        reached, plan = wish.capacity + len(resumed), None
        reasons: dict[WorkerRef, str] = {}
        woken: list[AnyCommand] = []
        if count > len(resumed) and now_ns >= state.model.load_failures.blocked_until_ns:
            spares = self._spares.to_wake(state.model, count - len(resumed))
            for spare in spares:
                woken += self._starts.wake(now_ns, state, spare)
            reached += len(spares)
            plan, reasons = self._plan(state, min(wish.needed - reached, count))
            reached += len(plan.instances) if plan is not None else 0
        if reached == wish.capacity:
            return reached, []
        commands: list[AnyCommand] = [wish.notice(wish.capacity, reached, wish.reason)]
        for instance in resumed:
            commands.append(Resume(instance.id))
            self._fleet.move(instance, Resume)
        commands += woken
        if plan is not None:
            offsets, drops = self._spares.give_way(plan.instances, state.model)
            commands += drops
            commands += self._starts.load(now_ns, state, plan, offsets, reasons)
            commands += self._host_copies.fill_caches(state.model, plan.instances)
        return reached, commands

    def _free_for(self, now_ns: int, wish: Wish) -> int:
        """Workers of no instance that other models would leave if all needed at once what they
        needed lately."""
        idle = len(self._fleet.idle(0))
        for state in self._states.values():
            if state is not wish.state.model:
                has = sum(self._fleet.tally(part).capacity for part in state.keys)
                idle -= max(state.lately.at(now_ns) - has, 0) * state.spec.tp_size
        return max(idle, 0)

    def _load_ahead(
        self, now_ns: int, wall_ns: int, states: Mapping[str, ModelState]
    ) -> list[AnyCommand]:
        """Parameters come to workers before they are needed there."""
        versions = self._fleet.version, self._pool.version, self._wishes.limits_version
        stand = (*versions, len(self._fleet.workers))
        if not self._config.spares_ahead or self._loads.open or stand == self._nothing_ahead:
            return []
        # Stages that scale with others have a total, and take what they need of all workers.
        alone = [state for state in states.values() if state.line_policy is None]
        ahead = self._ahead.choose(wall_ns, alone)
        wish = self._wishes.by_part.get(ahead.state.entry.part) if ahead is not None else None
        plan = None
        if ahead is not None:
            plan = self._planning.plan_instances(
                ahead.state, ahead.count, tuple(sorted(ahead.workers)), None
            )
        if ahead is None or wish is None or plan is None:
            self._nothing_ahead = stand
            return []
        capacity = self._fleet.tally(wish.part).capacity
        notice = wish.notice(capacity, capacity + len(plan.instances), "spares_ahead")
        offsets, drops = self._spares.give_way(plan.instances, ahead.state)
        return [notice, *drops, *self._starts.load(now_ns, wish.state, plan, offsets)]

    def _plan(self, part: PartState, count: int) -> tuple[ScalePlan | None, dict[WorkerRef, str]]:
        """A plan for at most `count` instances, if there is any, and why stages' come where."""
        state = part.model
        if count < 1:
            return None, {}
        spare = self._spares.targets_for(state, count * state.spec.tp_size)
        count = min(count, len(spare) // state.spec.tp_size)
        if count < 1:
            return None, {}
        chosen = self._stage_hosts.targets(state, count)
        if chosen is None:
            targets = self._host_copies.preferred_targets(state, spare, count)
            return self._team_plans.plan(part, count, tuple(spare), targets), {}
        targets = tuple((worker,) for worker in chosen)
        return self._team_plans.plan(part, count, tuple(spare), targets), chosen

    # -- shrinking ----------------------------------------------------------------------------

    def _shrink(self, wish: Wish) -> list[AnyCommand]:
        """As many instances are drained as can be."""
        count = min(self._drainable(wish.state), wish.capacity - wish.wanted)
        if count < 1:
            return []
        notice = wish.notice(wish.capacity, wish.capacity - count, wish.reason)
        return [notice, *(self._drain(self._pairings.unpaired(wish.part)) for _ in range(count))]

    def _drainable(self, state: PartState) -> int:
        """How many instances of the part can be drained now. Members of live pairs stay until the
        load is over, and while others load, the last one of the model that serves."""
        unpaired = len(self._pairings.unpaired(state.part))
        keys = state.model.keys
        serving = sum(len(self._fleet.serving(part)) for part in keys)
        if sum(self._fleet.tally(part).capacity for part in keys) > serving:
            return min(unpaired, max(serving - 1, 0))
        return unpaired

    def _drain(self, instances: Sequence[Instance]) -> Drain:
        """Of these the instance with the least work goes, the youngest of equals; before, one that
        has not got the cores which make up for it."""
        cores, router = self._fleet.cores, self._router
        chosen = min(
            instances,
            key=lambda i: (cores.now(i.worker), len(router.on_worker(i.worker)), -i.id),
        )
        self._fleet.move(chosen, Drain)
        return Drain(chosen.id)

    def _make_room(self, wish: Wish, missing: int, claimed: int) -> list[AnyCommand]:
        """Drain instances of others for a model that lacks so many workers.

        Of models with more instances than their load needs now, and of those that it outranks
        (down to their least number, and one): the lowest priority first, then who can spare most.
        No instance gives way if that does not make up a whole instance.
        """
        found = self._found(wish) - claimed
        # Parts of one model give each other instances, not workers (`Mutations`).
        wishes = [w for w in self._wishes.by_part.values() if w.part.model != wish.part.model]
        others = [w for w in wishes if w.wanted <= w.capacity]
        others += [w for w in wishes if w.wanted > w.capacity and self._outranks(wish, w)]
        others.sort(key=lambda w: (w.priority, -w.spare_instances, w.state.spec.name))
        leaving: list[Wish] = []
        for other in others:
            for _ in range(self._may_give(other, wish)):
                if found < missing:
                    found += other.state.spec.tp_size
                    leaving.append(other)
        if found < wish.state.spec.tp_size:
            return []
        return [command for other in leaving for command in self._give_way(other, wish)]

    def _may_give(self, other: Wish, wish: Wish) -> int:
        """How many of its instances the other model can do without, for this one."""
        capacity = self._fleet.tally(other.part).capacity
        least = other.kept
        if self._outranks(wish, other):
            least = min(least, max(other.least, 1))
        fitting = len(self._fitting(other.part, wish))
        return max(min(self._drainable(other.state), fitting, capacity - least), 0)

    def _fitting(self, part: Part, wish: Wish) -> list[Instance]:
        """Instances that could be drained, and on whose workers the model has a place then."""
        return self._spares.fitting(self._pairings.unpaired(part), wish.state.model)

    @staticmethod
    def _outranks(wish: Wish, other: Wish) -> bool:
        """It has the higher priority; or the same, and nothing at all where the other has some."""
        own, its = wish.priority, other.priority
        return own > its or (own == its and not wish.capacity and other.capacity > 1)

    def _give_way(self, other: Wish, wish: Wish) -> list[AnyCommand]:
        """One instance of the other model is drained, unless another part of that model gave the
        last one that may go."""
        fitting = self._fitting(other.part, wish)
        if not fitting or not self._drainable(other.state):
            return []
        capacity = self._fleet.tally(other.part).capacity
        notice = other.notice(capacity, capacity - 1, f"makes room for {wish.state.spec.name}")
        return [notice, self._drain(fitting)]

    def _claim(self, wish: Wish, missing: int, claimed: int) -> int:
        """Workers that are spare or on their way back and that the model will take: as many as
        make whole instances. Models that come later leave them."""
        size = wish.state.spec.tp_size
        return min(missing, max(self._found(wish) - claimed, 0) // size * size)

    def _found(self, wish: Wish) -> int:
        """Workers that it can have, and those that come free without anything else."""
        model = wish.state.model
        spare = self._spares.workers_for(model) + self._spares.workers_later(model)
        leaving = self._spares.fitting(filter(self._leaves, self._fleet.draining.values()), model)
        return spare + sum(len(i.workers) for i in leaving) + self._pool.remainders()

    # -- helpers ------------------------------------------------------------------------------

    def _leaves(self, instance: Instance) -> bool:
        """Its workers come free without anything else: it is no last copy that stays for good."""
        if instance.state is not InstanceState.DRAINING or instance.is_released:
            return False
        if self._fleet.is_leaving(instance.workers):
            return False
        return not self._pool.is_last(instance.copy) or self._host_copies.has_any(instance.model)

    def _is_busy(self, instance: Instance) -> bool:
        """Requests are there. Those of an earlier controller's life may not be announced yet:
        what the instance itself reports counts too."""
        is_working = instance.running > 0 or instance.queued_prefill_tokens > 0
        is_working = is_working or instance.is_unreported
        return is_working or bool(self._router.on_worker(instance.worker))
