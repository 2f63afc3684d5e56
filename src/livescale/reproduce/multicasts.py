"""Multicasts to measure: small clusters, plans of the production planner on them, and the same
plans carried out by the simulator's transfers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from livescale.chunks import ChunkGrid, Feed
from livescale.control.multicast.planner import make_plan
from livescale.control.multicast.request import PlanRequest, Source
from livescale.member import inputs
from livescale.plans import ScalePlan
from livescale.sim.clock import Clock
from livescale.sim.links.transfers import Transfers
from livescale.topology import Device, LinkUse, Topology
from livescale.types import FromStorage, WorkerRef

GBIT_BYTES = 125_000_000
NS_PER_S = 1_000_000_000
MIB = 1 << 20
_MODEL = "m"
_PLAN = 1
_WAIT_NS = 600 * NS_PER_S
"""No receiver gives up waiting for a sender or for bytes: nothing is lost in these worlds."""


def device(rate: int, host: str, leaf: str = "leaf", group: str = "") -> Device:
    """A device whose NIC has `rate` bytes per second each way, with room for any model."""
    return Device("device", host, leaf, 1 << 40, 1 << 40, rate, rate, group)


def single_nodes(rates: Sequence[int]) -> Topology:
    """Hosts of one device each under one leaf, with these NIC rates (bytes per second)."""
    devices = {WorkerRef(i): device(rate, f"host-{i}") for i, rate in enumerate(rates)}
    return Topology(devices)


def grouped_nodes(nodes: int, per_node: int, rate: int, group_rate: int) -> Topology:
    """Hosts of `per_node` devices that are joined by a scale-up group; device i of every host
    hangs on leaf i (rail-optimized)."""
    devices = {
        WorkerRef(node * per_node + i): device(rate, f"host-{node}", f"leaf-{i}", f"group-{node}")
        for node in range(nodes)
        for i in range(per_node)
    }
    return Topology(devices, group_bytes_per_s=group_rate)


def even_layers(size_bytes: int, layers: int) -> tuple[int, ...]:
    """A model that is only a size, in layers as even as can be."""
    edges = [size_bytes * i // layers for i in range(layers + 1)]
    return tuple(b - a for a, b in itertools.pairwise(edges))


def plan_of(
    topology: Topology,
    layer_bytes: Sequence[int],
    sources: Sequence[int],
    targets: Sequence[int],
    strategy: str,
    chunk_bytes: int = MIB,
    busy: Sequence[LinkUse] = (),
) -> ScalePlan:
    """The planner's plan from these workers (by number; none: from storage) to those."""
    asked = PlanRequest(
        plan=_PLAN,
        model=_MODEL,
        layer_bytes=tuple(layer_bytes),
        chunk_bytes=chunk_bytes,
        instances=len(targets),
        sources=tuple(Source((WorkerRef(number),)) for number in sources),
        targets=tuple((WorkerRef(number),) for number in targets),
        busy=tuple(busy),
    )
    return make_plan(asked, topology, strategy)


def predicted_s(plan: ScalePlan) -> float:
    """When the planner expects the last receiver to be complete."""
    assert plan.predicted_ns is not None, "all rates of these clusters are known"
    return plan.predicted_ns / NS_PER_S


class _Receiver:
    """Is called when its layers arrive."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.layer_ns: dict[int, int] = {}

    def put(self, news: inputs.MemberInput) -> None:
        is_well = not isinstance(news, inputs.FetchFailed | inputs.FeedEnded)
        assert is_well, f"{news} in a world without faults"
        if isinstance(news, inputs.LayerCame):
            self.layer_ns[news.layer] = self._clock.now_ns


def carry_out(
    plan: ScalePlan, topology: Topology, layer_bytes: Sequence[int]
) -> dict[WorkerRef, tuple[int, ...]]:
    """Simulate the transfers of a plan on quiet links: when each layer (that has bytes) is
    complete at each receiver, in nanoseconds from the plan's start."""
    clock = Clock()
    grid = ChunkGrid(layer_bytes, plan.chunk_bytes)
    topology = Topology(
        dict(topology.devices),
        dict(topology.agents),
        dict(topology.leaves),
        topology.group_bytes_per_s,
        topology.remote_storage_bytes_per_s,
    )
    transfers = Transfers(clock, topology, _WAIT_NS, _WAIT_NS)
    receivers = {load.receiver: _Receiver(clock) for load in plan.loads}
    for source in _sources_of(plan):
        feed = Feed(FromStorage(), grid.all())
        transfers.receive(_PLAN, (source, _MODEL, 0), grid, (feed,), _Receiver(clock).put)
    _run(clock)
    start_ns = clock.now_ns
    for load in plan.loads:
        key = (load.receiver, _MODEL, 0)
        transfers.receive(_PLAN, key, grid, load.feeds, receivers[load.receiver].put)
    _run(clock)
    return {
        ref: tuple(its.layer_ns[layer] - start_ns for layer in sorted(its.layer_ns))
        for ref, its in receivers.items()
    }


def simulated_s(plan: ScalePlan, topology: Topology, layer_bytes: Sequence[int]) -> float:
    """When the last receiver is complete in the simulator."""
    arrivals = carry_out(plan, topology, layer_bytes)
    return max(max(times) for times in arrivals.values()) / NS_PER_S


def _sources_of(plan: ScalePlan) -> list[WorkerRef]:
    receivers = {load.receiver for load in plan.loads}
    senders = {
        feed.upstream.worker: None
        for load in plan.loads
        for feed in load.feeds
        if not isinstance(feed.upstream, FromStorage)
    }
    return [sender for sender in senders if sender not in receivers]


def _run(clock: Clock) -> None:
    while clock.run_next():
        pass
