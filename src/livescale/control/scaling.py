"""Growing and shrinking models: which workers, in which order, and who gives way.

Policies suggest numbers; here they become plans, loads, drains and releases. Several models share
the workers: when these run short, priority decides, then need. The ParameterPool has the last
word on every copy.
"""

from __future__ import annotations

from collections.abc import Mapping

from livescale.control.config import ControllerConfig
from livescale.control.fleet import Fleet
from livescale.control.host_copies import HostCopies
from livescale.control.instance import Instance
from livescale.control.loads import Loads
from livescale.control.model_state import ModelState
from livescale.control.pairing import Pairings
from livescale.control.planning import Planning
from livescale.control.pool import ParameterPool
from livescale.control.router import Router
from livescale.control.spares import Spares
from livescale.control.starts import Starts
from livescale.control.wishes import Wish, Wishes
from livescale.messages.commands import (
    AnyCommand,
    Drain,
    ReleaseHolding,
    Resume,
)
from livescale.plans import ScalePlan
from livescale.types import (
    InstanceState,
    Part,
)


class Scaling:
    """Carries out the autoscalers' wishes on fleet and pool, as commands."""

    def __init__(
        self,
        config: ControllerConfig,
        fleet: Fleet,
        pool: ParameterPool,
        router: Router,
        loads: Loads,
        planning: Planning,
        host_copies: HostCopies,
        spares: Spares,
        pairings: Pairings,
        wishes: Wishes,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._pool = pool
        self._router = router
        self._loads = loads
        self._planning = planning
        self._host_copies = host_copies
        self._spares = spares
        self._starts = Starts(config, fleet, pool, loads, planning, spares, pairings)
        self._pairings = pairings
        self._wishes = wishes
        #: of fleet and pool, and how many workers there were, when nothing was to be loaded ahead
        self._nothing_ahead = (-1, -1, -1)
        #: workers that growing models would take and that no model gives up, by the last decision
        self.lacking_workers = 0

    def decide(
        self, now_ns: int, wall_zero_ns: int, states: Mapping[str, ModelState]
    ) -> list[AnyCommand]:
        """Compare the models' loads with their capacities and order what follows.
        `wall_zero_ns` is the wall clock at time 0."""
        wishes = self._wishes.look(now_ns, wall_zero_ns, states)
        commands: list[AnyCommand] = []
        for wish in wishes:
            if wish.wanted < wish.capacity:
                commands += self._shrink(wish)
        growing = [wish for wish in wishes if wish.wanted > wish.capacity]
        growing.sort(key=lambda w: (-w.state.policy.priority, -w.need_permille, w.state.spec.name))
        claimed = lacking = 0
        for wish in growing:
            reached, grown = self._grow(now_ns, wish, claimed)
            commands += grown
            if reached < wish.wanted and now_ns >= wish.state.load_failures.blocked_until_ns:
                missing = wish.state.spec.tp_size * (wish.wanted - reached)
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
        resumed = draining[:count]
        reached, plan = wish.capacity + len(resumed), None
        woken: list[AnyCommand] = []
        if count > len(resumed) and now_ns >= state.load_failures.blocked_until_ns:
            spares = self._spares.to_wake(state, count - len(resumed))
            for spare in spares:
                woken += self._starts.wake(state, spare)
            reached += len(spares)
            plan = self._plan(state, count - len(resumed) - len(spares))
            reached += len(plan.instances) if plan is not None else 0
        if reached == wish.capacity:
            return reached, []
        commands: list[AnyCommand] = [wish.notice(wish.capacity, reached, wish.reason)]
        for instance in resumed:
            commands.append(Resume(instance.id))
            self._fleet.move(instance, Resume)
        commands += woken
        if plan is not None:
            offsets, drops = self._spares.give_way(plan.instances, state)
            commands += drops
            commands += self._starts.load(now_ns, state, plan, offsets)
            commands += self._host_copies.fill_caches(state, plan.instances)
        return reached, commands

    def _load_ahead(
        self, now_ns: int, wall_ns: int, states: Mapping[str, ModelState]
    ) -> list[AnyCommand]:
        """Workers that hold nothing get parameters before they are needed: as instances, which
        serve if there is a need by then, and else go and leave warm spares."""
        stand = self._fleet.version, self._pool.version, len(self._fleet.workers)
        if not self._config.spares_ahead or self._loads.open or stand == self._nothing_ahead:
            return []
        state = self._spares.to_load_ahead(wall_ns, states.values())
        wish = self._wishes.of(state.part) if state is not None else None
        plan = None
        if state is not None:
            missing = state.limits(wall_ns)[1] - len(self._pool.holders(state.spec.name))
            empty = self._spares.empty(state)
            count = min(missing, len(empty) // state.spec.tp_size)
            plan = self._planning.plan_instances(state, count, tuple(empty), None)
        if state is None or wish is None or plan is None:
            self._nothing_ahead = stand
            return []
        capacity = self._fleet.tally(state.part).capacity
        notice = wish.notice(capacity, capacity + len(plan.instances), "spares_ahead")
        offsets = dict.fromkeys((worker for ranks in plan.instances for worker in ranks), 0)
        return [notice, *self._starts.load(now_ns, state, plan, offsets)]

    def _plan(self, state: ModelState, count: int) -> ScalePlan | None:
        """A plan for at most `count` instances, if there is any."""
        if count < 1:
            return None
        spare = self._spares.targets_for(state, count * state.spec.tp_size)
        count = min(count, len(spare) // state.spec.tp_size)
        if count < 1:
            return None
        targets = self._host_copies.preferred_targets(state, spare, count)
        return self._planning.plan_instances(state, count, tuple(spare), targets)

    # -- shrinking ----------------------------------------------------------------------------

    def _shrink(self, wish: Wish) -> list[AnyCommand]:
        """One instance is drained, if one can be."""
        if not self._drainable(wish.part):
            return []
        return [wish.notice(wish.capacity, wish.wanted, wish.reason), self._drain(wish.part)]

    def _drainable(self, part: Part) -> int:
        """How many instances of the part can be drained now. Members of live pairs stay until the
        load is over, and while others load, the last one that serves."""
        unpaired = len(self._pairings.unpaired(part))
        serving = len(self._fleet.serving(part))
        if self._fleet.tally(part).capacity > serving:
            return min(unpaired, max(serving - 1, 0))
        return unpaired

    def _drain(self, part: Part) -> Drain:
        """The serving instance with the least work goes, the youngest of equals."""
        unpaired = self._pairings.unpaired(part)
        chosen = min(unpaired, key=lambda i: (len(self._router.on_worker(i.worker)), -i.id))
        self._fleet.move(chosen, Drain)
        return Drain(chosen.id)

    def _make_room(self, wish: Wish, missing: int, claimed: int) -> list[AnyCommand]:
        """Drain instances of others for a model that lacks so many workers.

        Of models with more instances than their load needs now, and of those that it outranks
        (down to their least number, and one): the lowest priority first, then who can spare most.
        No instance gives way if that does not make up a whole instance.
        """
        found = self._found(wish) - claimed
        wishes = self._wishes.known()
        others = [w for w in wishes if w is not wish and w.wanted <= w.capacity]
        others += [w for w in wishes if w.wanted > w.capacity and self._outranks(wish, w)]
        others.sort(key=lambda w: (w.state.policy.priority, -w.spare_instances, w.state.spec.name))
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
        least = max(other.suggestion.at_most, other.least)
        if self._outranks(wish, other):
            least = min(least, max(other.least, 1))
        return max(min(self._drainable(other.part), capacity - least), 0)

    @staticmethod
    def _outranks(wish: Wish, other: Wish) -> bool:
        """It has the higher priority; or the same, and nothing at all where the other has some."""
        own, its = wish.state.policy.priority, other.state.policy.priority
        return own > its or (own == its and not wish.capacity and other.capacity > 1)

    def _give_way(self, other: Wish, wish: Wish) -> list[AnyCommand]:
        """One instance of the other model is drained."""
        capacity = self._fleet.tally(other.part).capacity
        notice = other.notice(capacity, capacity - 1, f"makes room for {wish.state.spec.name}")
        return [notice, self._drain(other.part)]

    def _claim(self, wish: Wish, missing: int, claimed: int) -> int:
        """Workers that are spare or on their way back and that the model will take: as many as
        make whole instances. Models that come later leave them."""
        size = wish.state.spec.tp_size
        return min(missing, max(self._found(wish) - claimed, 0) // size * size)

    def _found(self, wish: Wish) -> int:
        """Workers that it can have, and those that come free without anything else."""
        spare = self._spares.workers_for(wish.state)
        leaving = sum(len(i.workers) for i in self._fleet.instances.values() if self._leaves(i))
        return spare + leaving + self._pool.remainders()

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
