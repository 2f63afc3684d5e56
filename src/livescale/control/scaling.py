"""Growing and shrinking one model: which workers, along which chains, and who goes first.

Policies suggest a number; here it becomes plans, loads, drains and releases. The ParameterPool
has the last word on every copy.
"""

from __future__ import annotations

from livescale.control.autoscaler import Autoscaler, TokenWindow
from livescale.control.config import ControllerConfig, ModelPolicy
from livescale.control.fleet import Fleet, Instance
from livescale.control.multicast.chain import plan_chains, predict_chain_ns
from livescale.control.policy import BoundsPolicy, LoadSnapshot
from livescale.control.pool import ParameterPool
from livescale.control.router import Router
from livescale.messages.commands import (
    AnyCommand,
    Drain,
    PlanMade,
    Release,
    Resume,
    ScaleDecided,
    StartLoad,
    StartSend,
)
from livescale.types import (
    Chain,
    FromStorage,
    FromWorker,
    InstanceState,
    PlanId,
    Role,
    ScalePlan,
    Upstream,
    WorkerRef,
)

_IDS_PER_EPOCH = 1_000_000
# Only for predictions: the transfer's real chunk size is the world's business.
_CHUNK_BYTES = 1 << 20


class ModelState:
    """What the controller keeps per model besides its instances and queue."""

    def __init__(self, policy: ModelPolicy, config: ControllerConfig) -> None:
        self.policy = policy
        self.spec = policy.spec
        self.window = TokenWindow(config.bounds.load_window_ns)
        self.autoscaler = Autoscaler(config.bounds, policy.instances_min, policy.instances_max)
        self.prefill_tokens_per_s = policy.prefill_tokens_per_s
        self.kv_blocks = policy.kv_blocks
        #: no load is ordered before this time (after a failed one)
        self.blocked_until_ns = 0


class Scaling:
    """Carries out the autoscaler's wish on fleet and pool, as commands."""

    def __init__(
        self, config: ControllerConfig, fleet: Fleet, pool: ParameterPool, router: Router
    ) -> None:
        self._policy = BoundsPolicy(config.bounds)
        self._fleet = fleet
        self._pool = pool
        self._router = router
        self._last_id = config.epoch * _IDS_PER_EPOCH
        #: sends under way: (plan, source)
        self.sends: dict[tuple[PlanId, WorkerRef], None] = {}

    def decide(self, now_ns: int, state: ModelState) -> list[AnyCommand]:
        """Compare load with capacity and order what follows."""
        state.window.forget_old(now_ns)
        instances = self._fleet.of_model(state.spec.name)
        capacity = sum(1 for i in instances if i.is_capacity)
        suggestion = self._policy.suggest(self._snapshot(state, instances, capacity))
        wanted, reason = state.autoscaler.wanted(now_ns, capacity, suggestion)
        notice = ScaleDecided(
            state.spec.name, Role.UNIFIED, capacity, wanted, reason, suggestion.values
        )
        if wanted > capacity:
            return self._grow(now_ns, state, instances, notice)
        if wanted < capacity:
            return self._shrink(instances, notice)
        return []

    def release_empty(self) -> list[AnyCommand]:
        """Give back the workers of drained instances whose copy nobody reads, and those that an
        ended instance left behind."""
        commands: list[AnyCommand] = []
        for (number, rank), remnant in self._fleet.remnants.items():
            if not remnant.is_released:
                remnant.is_released = True
                commands.append(Release(number, remnant.attempt, remnant.worker, rank))
        for number in sorted(self._fleet.instances):
            instance = self._fleet.instances[number]
            if instance.state is not InstanceState.DRAINING or instance.is_released:
                continue
            if not self._is_busy(instance) and self._pool.can_drop(instance.model, instance.worker):
                self._pool.drop(instance.model, instance.worker)
                instance.is_released = True
                commands += [
                    Release(instance.id, instance.attempt, worker, rank)
                    for rank, worker in enumerate(instance.workers)
                ]
        return commands

    # -- helpers, in the order used -----------------------------------------------------------

    def _is_busy(self, instance: Instance) -> bool:
        """Requests are there. Those of an earlier controller's life may not be announced yet:
        what the instance itself reports counts too."""
        is_working = instance.running > 0 or instance.queued_prefill_tokens > 0
        return is_working or bool(self._router.on_worker(instance.worker))

    def _snapshot(
        self, state: ModelState, instances: list[Instance], capacity: int
    ) -> LoadSnapshot:
        on_instances = sum(instance.queued_prefill_tokens for instance in instances)
        return LoadSnapshot(
            instances=capacity,
            window_tokens=state.window.tokens,
            window_ns=state.window.window_ns,
            queued_prefill_tokens=self._router.waiting_tokens(state.spec.name) + on_instances,
            kv_blocks_used=sum(instance.kv_blocks_used for instance in instances),
            prefill_tokens_per_s=state.prefill_tokens_per_s,
            kv_blocks=state.kv_blocks,
        )

    def _grow(
        self, now_ns: int, state: ModelState, instances: list[Instance], notice: ScaleDecided
    ) -> list[AnyCommand]:
        """Wake draining instances first, then load new ones, as far as there are workers."""
        count = notice.to_instances - notice.from_instances
        draining = [i for i in instances if i.state is InstanceState.DRAINING and not i.is_released]
        resumed = draining[:count]
        targets = self._targets(now_ns, state, count - len(resumed))
        reached = notice.from_instances + len(resumed) + len(targets)
        if reached == notice.from_instances:
            return []
        commands: list[AnyCommand] = [
            ScaleDecided(
                notice.model,
                notice.role,
                notice.from_instances,
                reached,
                notice.reason,
                notice.values,
            )
        ]
        for instance in resumed:
            commands.append(Resume(instance.id, instance.attempt))
            self._fleet.move(instance, Resume)
        return commands + (self._load(state, targets) if targets else [])

    def _targets(self, now_ns: int, state: ModelState, count: int) -> list[tuple[WorkerRef, ...]]:
        """Workers of each instance to load now, by rank.

        Without a copy in memory one instance reads storage first.
        """
        if count < 1 or now_ns < state.blocked_until_ns:
            return []
        size = state.spec.tp_size
        spare = [record.ref for record in self._fleet.spare(state.spec.size_bytes)]
        groups = [tuple(spare[i : i + size]) for i in range(0, len(spare) - size + 1, size)][:count]
        if self._pool.holders(state.spec.name):
            return groups
        is_on_its_way = any(i.is_loading for i in self._fleet.of_model(state.spec.name))
        return [] if is_on_its_way else groups[:1]

    def _load(self, state: ModelState, targets: list[tuple[WorkerRef, ...]]) -> list[AnyCommand]:
        """Plan the transfer; order every target to receive, then every source to send."""
        plan = self._plan(state, targets)
        hops = [hop for chain in plan.chains for hop in chain.hops()]
        upstream_of: dict[WorkerRef, Upstream] = {t: FromWorker(s) for s, t in hops}
        upstream_of.update({target: FromStorage() for target in plan.from_storage})
        forward_to = {s: t for chain in plan.chains for s, t in chain.hops()[1:]}
        starts: list[StartLoad] = []
        instances = []
        for workers in targets:
            instance = self._new_instance(state, workers, upstream_of)
            instances.append(instance.id)
            starts += [
                self._start_load(state, instance, rank, plan.plan, upstream_of, forward_to)
                for rank in range(len(workers))
            ]
        sends = []
        for chain in plan.chains:
            self.sends[plan.plan, chain.source] = None
            self._pool.begin_read(f"send {plan.plan}", chain.source)
            sends.append(StartSend(plan.plan, chain.source, chain.targets[0], state.spec.name))
        return [PlanMade(plan, tuple(instances)), *starts, *sends]

    def _plan(self, state: ModelState, targets: list[tuple[WorkerRef, ...]]) -> ScalePlan:
        devices = {r.ref: r.device for r in self._fleet.workers.values()}
        sources = self._sources(state)
        chains: tuple[Chain, ...] = ()
        predicted_ns = None
        if sources:
            chains = plan_chains(sources, targets, devices)
            predictions = [
                predict_chain_ns(chain, state.spec.size_bytes, _CHUNK_BYTES, devices)
                for chain in chains
            ]
            predicted_ns = max((p for p in predictions if p is not None), default=None)
        return ScalePlan(
            plan=self._next_id(),
            model=state.spec.name,
            chains=chains,
            from_storage=() if chains else tuple(w for workers in targets for w in workers),
            bytes_per_target=state.spec.size_bytes,
            predicted_ns=predicted_ns,
        )

    def _sources(self, state: ModelState) -> list[tuple[WorkerRef, ...]]:
        """Who sends: idle holders; else the tails of chains under way, which pass on what they
        receive; only then a holder that sends already, whose uplink both would share."""
        instances = self._fleet.of_model(state.spec.name)
        leaders = self._pool.holders(state.spec.name)
        holders = [i.workers for i in instances if i.worker in leaders]
        loading = [i.workers for i in instances if i.is_loading and i.upstreams]
        idle = [workers for workers in holders if self._is_idle(workers)]
        tails = [workers for workers in loading if self._is_idle(workers)]
        return sorted(idle or tails or holders[:1]) if holders else []

    def _is_idle(self, workers: tuple[WorkerRef, ...]) -> bool:
        return not any(self._pool.readers(worker) for worker in workers)

    def _new_instance(
        self,
        state: ModelState,
        workers: tuple[WorkerRef, ...],
        upstream_of: dict[WorkerRef, Upstream],
    ) -> Instance:
        instance = Instance(self._next_id(), state.spec.name, workers, state.spec.layers)
        upstreams = [upstream_of[worker] for worker in workers]
        instance.upstreams = tuple(u.worker for u in upstreams if isinstance(u, FromWorker))
        for upstream in instance.upstreams:
            self._pool.begin_read(f"instance {instance.id}", upstream)
        self._fleet.place(instance)
        return instance

    def _start_load(
        self,
        state: ModelState,
        instance: Instance,
        rank: int,
        plan: PlanId,
        upstream_of: dict[WorkerRef, Upstream],
        forward_to: dict[WorkerRef, WorkerRef],
    ) -> StartLoad:
        worker = instance.workers[rank]
        is_measured = state.prefill_tokens_per_s is not None and state.kv_blocks is not None
        return StartLoad(
            instance=instance.id,
            attempt=instance.attempt,
            worker=worker,
            model=state.spec.name,
            plan=plan,
            upstream=upstream_of[worker],
            forward_to=forward_to.get(worker),
            measure_capacity=not is_measured,
            rank=rank,
        )

    def _shrink(self, instances: list[Instance], notice: ScaleDecided) -> list[AnyCommand]:
        """Drain the serving instance with the least work, the youngest of equals."""
        serving = [i for i in instances if i.state is InstanceState.SERVING]
        if len(serving) < 2:
            return []
        chosen = min(serving, key=lambda i: (len(self._router.on_worker(i.worker)), -i.id))
        self._fleet.move(chosen, Drain)
        return [notice, Drain(chosen.id, chosen.attempt)]

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id
