"""From a wish for copies to a plan: who can send, what the links are used for, which ids.

The bridge between what the controller knows (fleet, pool, loads, topology) and the planner, which
knows only values.
"""

from __future__ import annotations

import msgspec

from livescale.clusters.topology import Device, Host, Leaf, LinkUse, Topology
from livescale.control.config import ControllerConfig
from livescale.control.fleet import Fleet
from livescale.control.holdings import Copy
from livescale.control.loads import Loads
from livescale.control.model_state import ModelState
from livescale.control.multicast.fabric import Fabric
from livescale.control.multicast.planner import PlanError, make_plan
from livescale.control.multicast.request import PlanRequest, Source
from livescale.control.pool import ParameterPool
from livescale.messages.events import LinkMeasured
from livescale.placements import CacheCopies
from livescale.plans import ScalePlan
from livescale.types import FromWorker, WorkerRef

_IDS_PER_EPOCH = 1_000_000


class Planning:
    """Knows the cluster's shape and makes plans. Orders nothing."""

    def __init__(
        self, config: ControllerConfig, fleet: Fleet, pool: ParameterPool, loads: Loads
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._pool = pool
        self._loads = loads
        self._last_id = config.epoch * _IDS_PER_EPOCH
        leaves: dict[str, Leaf] = {leaf.name: leaf for leaf in config.leaves}
        self.topology = Topology(
            leaves=leaves,
            group_bytes_per_s=config.group_bytes_per_s,
            remote_storage_bytes_per_s=config.remote_storage_bytes_per_s,
        )
        #: by model: what stood when its next load was predicted, and how long that should take
        self._load_ns: dict[str, tuple[tuple[int, tuple[bool, ...]], int | None]] = {}
        #: the best probe between two members of a scale-up group
        self._measured_inside: int | None = None

    # -- the cluster's shape ------------------------------------------------------------------

    def worker_joined(self, worker: WorkerRef, device: Device) -> None:
        uplink = self._for_parameters(device.uplink_bytes_per_s)
        if uplink != device.uplink_bytes_per_s:
            device = msgspec.structs.replace(device, uplink_bytes_per_s=uplink)
        self.topology.devices[worker] = device

    def agent_joined(self, agent: WorkerRef, host: Host) -> None:
        uplink = self._for_parameters(host.uplink_bytes_per_s)
        if uplink != host.uplink_bytes_per_s:
            host = msgspec.structs.replace(host, uplink_bytes_per_s=uplink)
        self.topology.agents[agent] = self._with_memory_rate(host)

    def _for_parameters(self, uplink_bytes_per_s: int | None) -> int | None:
        """What parameters get of a limited uplink."""
        if uplink_bytes_per_s is None:
            return None
        return max(1, uplink_bytes_per_s * self._config.parameter_share_percent // 100)

    def _with_memory_rate(self, host: Host) -> Host:
        """What was measured inside a host holds for the host's own memory, too."""
        rate = self._measured_inside
        if rate is None or not self._config.assumes_group_rate or not host.has_device_links:
            return host
        return msgspec.structs.replace(host, device_bytes_per_s=rate)

    def member_left(self, ref: WorkerRef) -> None:
        self.topology.devices.pop(ref, None)
        self.topology.agents.pop(ref, None)

    def link_measured(self, event: LinkMeasured, _now_ns: int) -> bool:
        """Rates that are not configured are what was measured; the best probe counts, because other
        traffic can only slow one down. Members of one scale-up group meet without their NICs."""
        topology, bytes_per_s = self.topology, event.bytes_per_s
        sender, receiver = event.sender, event.receiver
        if not (self._is_known(sender) and self._is_known(receiver)):
            return True
        group = topology.group_of(sender)
        if group and group == topology.group_of(receiver):
            self._measured_between(bytes_per_s)
            return True
        for ref, name in ((sender, "uplink_bytes_per_s"), (receiver, "downlink_bytes_per_s")):
            if ref.is_agent:
                host = topology.agents[ref]
                if getattr(self._fleet.agents[ref.worker].host, name) is None:
                    best = max(bytes_per_s, getattr(host, name) or 0)
                    topology.agents[ref] = msgspec.structs.replace(host, **{name: best})
            elif getattr(self._fleet.workers[ref.worker].device, name) is None:
                device = topology.devices[ref]
                best = max(bytes_per_s, getattr(device, name) or 0)
                topology.devices[ref] = msgspec.structs.replace(device, **{name: best})
        return True

    def _is_known(self, ref: WorkerRef) -> bool:
        return ref in self.topology.devices or ref in self.topology.agents

    def _measured_between(self, bytes_per_s: int) -> None:
        """Two members of a group, which is one host's where the rate is assumed."""
        self._measured_inside = max(bytes_per_s, self._measured_inside or 0)
        if self._config.assumes_group_rate or self._config.group_bytes_per_s is None:
            self.topology.group_bytes_per_s = self._measured_inside
        for agent, host in self.topology.agents.items():
            self.topology.agents[agent] = self._with_memory_rate(host)

    def link_bytes_per_s(self, sender: WorkerRef, receiver: WorkerRef) -> int | None:
        """What the slowest link on the way carries when nothing else uses it; None: not known."""
        fabric = Fabric(self.topology)
        path = fabric.path(FromWorker(sender), receiver)
        rates = [rate for rate in (fabric.rates[link] for link in path) if rate is not None]
        return min(rates, default=None)

    # -- plans --------------------------------------------------------------------------------

    @property
    def last_id(self) -> int:
        """The newest id of an instance or a plan."""
        return self._last_id

    def next_id(self) -> int:
        """An id for an instance or a plan, never used before."""
        self._last_id += 1
        return self._last_id

    def plan_instances(
        self,
        state: ModelState,
        count: int,
        spare: tuple[WorkerRef, ...],
        targets: tuple[tuple[WorkerRef, ...], ...] | None,
    ) -> ScalePlan | None:
        """`count` new instances on some of the workers `spare` (or on `targets`). None if there is
        no way."""
        request = self._request_of_instances(state, self.next_id(), count, spare, targets)
        return self._plan(request, self._config.multicast)

    def load_ns(self, state: ModelState) -> int | None:
        """How long one more load to an instance should take now: as planned, and as much more or
        less as the last one took. Without a worker for it, what was predicted last. None: not
        known.

        Predictions are kept until an instance moves, or other copies are there or whole.
        """
        model = state.spec.name
        copies = tuple(copy.is_complete for copy in self._pool.copies(model))
        stand = self._fleet.version, copies
        known = self._load_ns.get(model)
        if known is None or known[0] != stand:
            spare = self._targets(state)
            request = self._request_of_instances(state, self._last_id, 1, spare, None)
            plan = self._plan(request, self._config.multicast)
            predicted_ns = plan.predicted_ns if plan is not None else known and known[1]
            known = self._load_ns[model] = stand, predicted_ns
        if known[1] is None:
            return None
        return max(known[1] + state.load_error_ns, 0)

    def forget_model(self, model: str) -> None:
        """The model leaves the pool."""
        self._load_ns.pop(model, None)

    def _targets(self, state: ModelState) -> tuple[WorkerRef, ...]:
        """Workers that an instance may come to: those that hold nothing, and where these are too
        few, those with warm spares."""
        idle = [record.ref for record in self._fleet.idle(state.spec.size_bytes)]
        empty = [worker for worker in idle if not self._pool.on(worker)]
        return tuple(empty if len(empty) >= state.spec.tp_size else idle)

    def _request_of_instances(
        self,
        state: ModelState,
        number: int,
        count: int,
        spare: tuple[WorkerRef, ...],
        targets: tuple[tuple[WorkerRef, ...], ...] | None,
    ) -> PlanRequest:
        return msgspec.structs.replace(
            self._request(state, number, count, self.sources(state), spare, targets),
            is_live=self._config.live_order != "stop-the-world",
            # Files of which the last load failed are not read again while there is a copy.
            has_storage=not (state.load_failures.in_a_row and self.has_copy(state)),
        )

    def plan_copy(self, state: ModelState, agent: WorkerRef, rank: int) -> ScalePlan | None:
        """One rank of a copy in the memory of the agent's host: from wherever it is in memory,
        else from storage. A cache keeps what its host's own devices read, so that storage is read
        once; other systems without multicast know storage only. None if there is no way."""
        copies = [self._source(copy) for copy in self._pool.copies(state.spec.name)]
        if isinstance(self._config.placement, CacheCopies):
            copies = [s for s in copies if self._is_of_host(s.workers[rank], agent)]
        elif self._config.multicast in ("host", "storage"):
            copies = []
        sources = tuple(
            Source((source.workers[rank],), source.is_loading, source.readers)
            for source in copies
            if source.workers[rank] != agent
        )
        request = msgspec.structs.replace(
            self._request(state, self.next_id(), 1, sources, (), ((agent,),)), tp_size=1
        )
        return self._plan(request, "auto")

    def _is_of_host(self, worker: WorkerRef, agent: WorkerRef) -> bool:
        topology = self.topology
        return not worker.is_agent and topology.host_of(worker) == topology.host_of(agent)

    def sources(self, state: ModelState) -> tuple[Source, ...]:
        """All copies, complete or arriving; the planner chooses among them. Warm spares on workers
        of no instance come first: their links are idle. Systems without multicast know less: there
        host memory feeds devices, or nothing does."""
        found = [c for c in self._pool.copies(state.spec.name) if not self._breaks_up(c)]
        idle = self._pool.idle_spares(state.spec.name)
        found.sort(key=lambda copy: copy not in idle)
        copies = [self._source(copy) for copy in found]
        if self._config.multicast in ("host", "storage"):
            is_host = self._config.multicast == "host"
            return tuple(s for s in copies if is_host and s.is_host_copy)
        return tuple(copies)

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
        return any(not source.is_loading for source in self.sources(state))

    def _source(self, copy: Copy) -> Source:
        readers = max(self._pool.readers(member) for member in copy.members)
        if copy.is_on_host:
            # All ranks leave it by one NIC, each as if others were reading, too.
            readers += len(copy.members) - 1
        return Source(copy.members, not copy.is_complete, readers)

    def _request(
        self,
        state: ModelState,
        number: int,
        count: int,
        sources: tuple[Source, ...],
        spare: tuple[WorkerRef, ...],
        targets: tuple[tuple[WorkerRef, ...], ...] | None,
    ) -> PlanRequest:
        return PlanRequest(
            plan=number,
            model=state.spec.name,
            layer_bytes=state.spec.layer_bytes,
            chunk_bytes=self._config.chunk_bytes,
            instances=count,
            sources=sources,
            spare=spare,
            targets=targets,
            tp_size=state.spec.tp_size,
            busy=self._serving_links(),
            taken=self._loads.links(),
            is_cache_local=isinstance(self._config.placement, CacheCopies),
        )

    def _serving_links(self) -> tuple[LinkUse, ...]:
        """Link directions that rows and KV cross: from instances that work live to those they
        help."""
        fabric = Fabric(self.topology)
        for target in self._fleet.instances.values():
            for source in self._fleet.sources_of(target) if target.is_loading else ():
                fabric.path(FromWorker(target.worker), source.worker)
        return tuple(fabric.links)

    def _plan(self, request: PlanRequest, strategy: str) -> ScalePlan | None:
        try:
            return make_plan(request, self.topology, strategy)
        except PlanError:
            return None
