"""From a wish for copies to a plan: who can send, what the links are used for, which ids.

The bridge between what the controller knows (fleet, pool, loads, topology) and the planner, which
knows only values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from livescale.clusters.topology import LinkUse, Topology
from livescale.control.multicast.fabric import Fabric
from livescale.control.multicast.placing import kinds_of_spare
from livescale.control.multicast.planner import HOST_ONLY, PlanError, make_plan
from livescale.control.multicast.request import PlanRequest, Source
from livescale.control.planning.known_cluster import KnownCluster
from livescale.control.planning.pool_knowledge import OfPool, PoolKnowledge
from livescale.control.state.holdings import Copy
from livescale.control.state.model_state import ModelState
from livescale.messages.scale_plan import ScalePlan
from livescale.values.copy_strategies import CacheCopies, KeyStageCopies
from livescale.values.types import IDS_PER_EPOCH, FromWorker, WorkerRef


class _Predicted(NamedTuple):
    """How long a model's next load should take: how things stood when that was looked at last, and
    what the planner was asked (None: what it answers depends on more)."""

    stand: tuple[object, ...]
    asked: tuple[object, ...] | None
    load_ns: int | None


class Planning(OfPool):
    """Makes plans for the cluster as it is known. Orders nothing."""

    def __init__(self, known: PoolKnowledge) -> None:
        super().__init__(known)
        #: the newest id of an instance or a plan
        self.last_id = known.config.epoch * IDS_PER_EPOCH
        #: the shape of what plans are made for
        self.cluster = KnownCluster(known.config, known.fleet)
        self._predicted: dict[str, _Predicted] = {}

    @property
    def topology(self) -> Topology:
        return self.cluster.topology

    # -- plans --------------------------------------------------------------------------------

    def next_id(self) -> int:
        """An id for an instance or a plan, never used before."""
        self.last_id += 1
        return self.last_id

    def plan_instances(
        self,
        state: ModelState,
        count: int,
        spare: tuple[WorkerRef, ...],
        targets: tuple[tuple[WorkerRef, ...], ...] | None,
        strategy: str | None = None,
    ) -> ScalePlan | None:
        """`count` new instances on some of the workers `spare` (or on `targets`), by the configured
        strategy or this one. None if there is no way."""
        request = self._request_of_instances(state, count, spare, targets)
        return self._made(request, strategy or self._config.multicast)

    def load_ns(self, state: ModelState) -> int | None:
        """How long one more load to an instance should take now: as planned, and as much more or
        less as the last one took. Without a worker for it, what was predicted last. None: not
        known.

        Predictions are kept until an instance moves, or other copies are there or whole.
        """
        model = state.spec.name
        stand = self._fleet.version, tuple(c.is_complete for c in self._pool.copies(model))
        known = self._predicted.get(model)
        if known is None or known.stand != stand:
            known = self._predicted[model] = self._predict(state, stand, known)
        if known.load_ns is None:
            return None
        return max(known.load_ns + state.load_error_ns, 0)

    def _predict(
        self, state: ModelState, stand: tuple[object, ...], last: _Predicted | None
    ) -> _Predicted:
        """Most that moves in the pool changes nothing for this model: then it is as predicted
        last."""
        spare = self._targets(state)
        request = self._request_of_instances(state, 1, spare, None)
        kinds = kinds_of_spare(request, self.topology, self.cluster.kind)
        asked: tuple[object, ...] | None = None
        if kinds is not None:
            what = msgspec.structs.replace(request, spare=())
            asked = self.cluster.version, what, kinds
        if last is not None and asked is not None and asked == last.asked:
            return last._replace(stand=stand)
        plan = self._plan(request, self._config.multicast)
        load_ns = plan.predicted_ns if plan is not None else last and last.load_ns
        return _Predicted(stand, asked, load_ns)

    def forget_model(self, model: str) -> None:
        """The model leaves the pool."""
        self._predicted.pop(model, None)

    def _targets(self, state: ModelState) -> tuple[WorkerRef, ...]:
        """Workers that an instance may come to: those that hold nothing, and where these are too
        few, those with warm spares."""
        records = self._fleet.idle(state.spec.size_bytes, engines=not state.is_divided)
        idle = [record.ref for record in records]
        empty = [worker for worker in idle if not self._pool.holds_any(worker)]
        return tuple(empty if len(empty) >= state.spec.tp_size else idle)

    def _request_of_instances(
        self,
        state: ModelState,
        count: int,
        spare: tuple[WorkerRef, ...],
        targets: tuple[tuple[WorkerRef, ...], ...] | None,
    ) -> PlanRequest:
        # Engines pass nothing.
        workers = [worker for ranks in targets for worker in ranks] if targets else spare
        has_partners = not all(map(self._fleet.is_engine, workers)) if workers else True
        return msgspec.structs.replace(
            self._request(state, count, self.sources(state), spare, targets),
            is_live=self._config.live_order != "stop-the-world",
            in_teams=has_partners and self._config.teams is not None,
            # Files of which the last load failed are not read again while there is a copy.
            has_storage=not (state.load_failures.in_a_row and self.has_copy(state)),
        )

    def plan_guests(self, state: ModelState, agents: Sequence[WorkerRef]) -> ScalePlan | None:
        """Copies of a model of one rank in the memory of guests, all by one plan, from wherever it
        is in memory, other guests' included, else from storage. None if there is no way."""
        targets = tuple((agent,) for agent in agents)
        sources = tuple(self._source(copy) for copy in self._in_unit(state))
        request = self._request(state, len(targets), sources, (), targets)
        return self._made(msgspec.structs.replace(request, is_cache_local=False), "auto")

    def plan_copy(self, state: ModelState, agent: WorkerRef, rank: int) -> ScalePlan | None:
        """One rank of a copy in the memory of the agent's host: from wherever it is in memory,
        else from storage. What is kept of what the host's own devices read comes from there, so
        that storage is read once; other systems without multicast know storage only. None if there
        is no way."""
        copies = [self._source(copy) for copy in self._in_unit(state)]
        own = [s for s in copies if self._is_of_host(s.workers[rank], agent)]
        keeps_own = isinstance(self._config.placement, CacheCopies | KeyStageCopies)
        if self._is_cache_local() or (keeps_own and own):
            copies = own
        elif self._config.multicast in (*HOST_ONLY, "storage"):
            copies = []
        sources = tuple(
            Source((source.workers[rank],), source.is_loading, source.readers)
            for source in copies
            if source.workers[rank] != agent
        )
        request = self._request(state, 1, sources, (), ((agent,),))
        return self._made(msgspec.structs.replace(request, tp_size=1), "auto")

    def _is_cache_local(self) -> bool:
        """Host memory is for the host's own devices: always in a cache, and for key stages where
        there is no multicast."""
        placement = self._config.placement
        if isinstance(placement, KeyStageCopies):
            return self._config.multicast in HOST_ONLY
        return isinstance(placement, CacheCopies)

    def _is_of_host(self, worker: WorkerRef, agent: WorkerRef) -> bool:
        topology = self.topology
        return not worker.is_agent and topology.host_of(worker) == topology.host_of(agent)

    def sources(self, state: ModelState) -> tuple[Source, ...]:
        """All copies, complete or arriving; the planner chooses among them. Warm spares on workers
        of no instance come first: their links are idle. Systems without multicast know less: there
        host memory feeds devices, or nothing does."""
        found = self._readable(state)
        idle = self._pool.idle_spares(state.spec.name)
        if idle:
            found.sort(key=lambda copy: copy not in idle)
        return tuple(self._source(copy) for copy in found)

    def _readable(self, state: ModelState) -> list[Copy]:
        """Copies that instances may be loaded from, in the order of their holders."""
        if self._config.multicast == "storage":
            return []
        found = self._in_unit(state)
        if self._config.multicast in HOST_ONLY:
            return [copy for copy in found if copy.is_on_host]
        return [c for c in found if not self._breaks_up(c)] if self._fleet.leaving else found

    def _in_unit(self, state: ModelState) -> list[Copy]:
        """Copies that are whole, or arrive in the unit that plans are made in now."""
        found = self._pool.copies(state.spec.name)
        unit = self._loads.chunk_bytes_of(state.spec.name)
        if unit is None:
            return found
        return [
            copy
            for copy in found
            if all(h.is_whole or h.order.chunk_bytes == unit for h in copy.ranks.values())
        ]

    def _breaks_up(self, copy: Copy) -> bool:
        """A spare of several ranks, one of whose workers leaves: it cannot be used again, and goes
        where a new instance takes another of its workers."""
        is_several = copy.is_spare and len(copy.members) > 1
        return is_several and self._fleet.is_leaving(copy.members)

    def hosts_with_copy(self, model: str) -> dict[str, None]:
        """The names of hosts whose memory has the model, and whose devices can read it there."""
        agents = (copy.holder for copy in self._pool.host_copies(model))
        hosts = (self.topology.agents[agent] for agent in agents if agent in self.topology.agents)
        return {host.name: None for host in hosts if host.has_device_links}

    def has_copy(self, state: ModelState) -> bool:
        """There is a complete copy that instances can be loaded from."""
        return any(copy.is_complete for copy in self._readable(state))

    def can_load(self, state: ModelState) -> Callable[[WorkerRef], bool]:
        """Tells of a worker whether a plan can bring the model there now: from a copy, or else from
        the files, which not all workers read. Copies in host memory are read when they are whole,
        and caches by their own host's devices."""
        topology, is_host_only = self.topology, self._config.multicast in HOST_ONLY
        is_there = self.has_copy(state) if is_host_only else bool(self._readable(state))
        if not is_there:
            return topology.reads_files
        if not (is_host_only and self._is_cache_local()):
            return lambda worker: True
        complete = (copy.holder for copy in self._readable(state) if copy.is_complete)
        hosts = dict.fromkeys(map(topology.host_of, complete))
        return lambda worker: topology.host_of(worker) in hosts or topology.reads_files(worker)

    def _source(self, copy: Copy) -> Source:
        readers = max(self._pool.reads.count(member) for member in copy.members)
        if copy.is_on_host:
            # All ranks leave it by one NIC, each as if others were reading, too.
            readers += len(copy.members) - 1
        return Source(copy.members, not copy.is_complete, readers)

    def _request(
        self,
        state: ModelState,
        count: int,
        sources: tuple[Source, ...],
        spare: tuple[WorkerRef, ...],
        targets: tuple[tuple[WorkerRef, ...], ...] | None,
    ) -> PlanRequest:
        # What fits all members; but as long as anything of the model is on its way, the unit of
        # that: chunks are passed on as they are numbered.
        under_way = self._loads.chunk_bytes_of(state.spec.name)
        return PlanRequest(
            plan=0,
            model=state.spec.name,
            layer_bytes=state.spec.layer_bytes,
            chunk_bytes=under_way or self.cluster.chunk_bytes,
            instances=count,
            sources=sources,
            spare=spare,
            targets=targets,
            tp_size=state.spec.tp_size,
            busy=self._serving_links(),
            taken=self._loads.links(),
            is_cache_local=self._is_cache_local(),
        )

    def _serving_links(self) -> tuple[LinkUse, ...]:
        """Link directions that rows and KV cross: from instances that work live to those they
        help, and from prefill instances to those where their requests decode."""
        fabric = Fabric(self.topology)
        for sender in self._fleet.instances.values():
            partners = self._fleet.sources_of(sender) if sender.is_loading else ()
            for partner in (*partners, *sender.duty.decodes_at):
                # Either may be gone: an instance of several ranks drains without its first one.
                if {sender.worker, partner.worker} <= self.topology.devices.keys():
                    fabric.path(FromWorker(sender.worker), partner.worker)
        return tuple(fabric.links)

    def _made(self, request: PlanRequest, strategy: str) -> ScalePlan | None:
        """The number is given with a plan alone: where there is no way it is asked for again and
        again."""
        plan = self._plan(msgspec.structs.replace(request, plan=self.last_id + 1), strategy)
        if plan is not None:
            self.last_id = plan.plan
        return plan

    def _plan(self, request: PlanRequest, strategy: str) -> ScalePlan | None:
        """A plan that does not avoid serving traffic tells what meets that all the same."""
        serving = request.busy
        if not self._config.avoids_serving:
            request = msgspec.structs.replace(request, busy=())
        try:
            plan = make_plan(request, self.topology, strategy)
        except PlanError:
            return None
        return plan if request.busy == serving else plan.beside(serving)
