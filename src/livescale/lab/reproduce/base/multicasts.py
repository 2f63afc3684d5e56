"""Multicasts to measure: small clusters, plans of the production planner on them, and the same
plans carried out by the simulator's transfers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from livescale.clusters.topology import Device, Topology
from livescale.control.multicast.planner import make_plan
from livescale.control.multicast.request import PlanRequest, Source
from livescale.member import inputs
from livescale.messages.scale_plan import ScalePlan
from livescale.sim.base.clock import Clock
from livescale.sim.links.transfers import Transfers, TransferTimes
from livescale.values.chunks import ChunkGrid, Feed
from livescale.values.types import FromStorage, WorkerRef
from livescale.values.units import NS_PER_S

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


@dataclass(frozen=True)
class Multicast:
    """A model (bytes of its layers) that goes from these workers (by number; none: from storage) to
    those: the planner's plan, and the same plan carried out by the simulator on quiet links."""

    topology: Topology
    layers: Sequence[int]
    sources: Sequence[int]
    targets: Sequence[int]
    strategy: str = "chain"

    @cached_property
    def plan(self) -> ScalePlan:
        asked = PlanRequest(
            plan=_PLAN,
            model=_MODEL,
            layer_bytes=tuple(self.layers),
            chunk_bytes=MIB,
            instances=len(self.targets),
            sources=tuple(Source((WorkerRef(number),)) for number in self.sources),
            targets=tuple((WorkerRef(number),) for number in self.targets),
        )
        return make_plan(asked, self.topology, self.strategy)

    @property
    def predicted_ns(self) -> int:
        """When the planner expects the last receiver to be complete."""
        assert self.plan.predicted_ns is not None, "all rates of these clusters are known"
        return self.plan.predicted_ns

    @property
    def predicted_s(self) -> float:
        return self.predicted_ns / NS_PER_S

    @cached_property
    def arrivals_ns(self) -> dict[WorkerRef, list[int]]:
        """When each layer (that has bytes) is complete at each receiver, from the plan's start on,
        in the simulator."""
        clock, plan = Clock(), self.plan
        grid = ChunkGrid(self.layers, plan.chunk_bytes)
        transfers = Transfers(clock, self.topology, TransferTimes(_WAIT_NS, _WAIT_NS))

        def receive(member: WorkerRef, feeds: Sequence[Feed]) -> dict[int, int]:
            """When each layer arrives: to be read when the clock has run."""
            layer_ns: dict[int, int] = {}

            def put(news: inputs.MemberInput) -> None:
                is_well = not isinstance(news, inputs.FetchFailed | inputs.FeedEnded)
                assert is_well, f"{news} in a world without faults"
                if isinstance(news, inputs.LayerCame):
                    layer_ns[news.layer] = clock.now_ns

            transfers.receive(_PLAN, (member, _MODEL, 0), grid, tuple(feeds), put)
            return layer_ns

        for sender in _sources_of(plan):
            receive(sender, [Feed(FromStorage(), grid.all())])
        _run(clock)
        start_ns = clock.now_ns
        found = {load.receiver: receive(load.receiver, load.feeds) for load in plan.loads}
        _run(clock)
        return {
            member: [layer_ns[layer] - start_ns for layer in sorted(layer_ns)]
            for member, layer_ns in found.items()
        }

    @property
    def simulated_s(self) -> float:
        """When the last receiver is complete in the simulator."""
        return max(map(max, self.arrivals_ns.values())) / NS_PER_S


# -- helpers, in the order used -------------------------------------------------------------------


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
