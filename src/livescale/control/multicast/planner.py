"""The way into planning: a request and the topology in, a ScalePlan out."""

from __future__ import annotations

from livescale.chunks import ChunkGrid, Feed, from_storage
from livescale.control.multicast.chain import plan_chains, predict_chain_ns
from livescale.control.multicast.request import PlanRequest
from livescale.plans import PlannedLoad, ScalePlan
from livescale.topology import Topology
from livescale.types import FromWorker


class PlanError(ValueError):
    """No plan is possible; the message says why."""


def make_plan(request: PlanRequest, topology: Topology, strategy: str = "auto") -> ScalePlan:
    """The plan of `strategy` ("auto": the best prediction of all). Raises PlanError."""
    grid = ChunkGrid(request.layer_bytes, request.chunk_bytes)
    size = request.tp_size
    groups = request.targets or tuple(
        tuple(request.spare[i : i + size])
        for i in range(0, min(len(request.spare), request.instances * size) - size + 1, size)
    )
    if not groups:
        raise PlanError(f"{request.model}: no {size} spare workers")
    receivers = [worker for workers in groups for worker in workers]
    if not request.sources:
        loads = [PlannedLoad(receiver, (from_storage(grid),)) for receiver in receivers]
        predicted = None
    else:
        chains = plan_chains([s.workers for s in request.sources], groups, topology.devices)
        sender = {target: source for chain in chains for source, target in chain.hops()}
        loads = [PlannedLoad(r, (Feed(FromWorker(sender[r]), grid.all()),)) for r in receivers]
        times = [
            predict_chain_ns(c, sum(grid.layer_bytes), request.chunk_bytes, topology.devices)
            for c in chains
        ]
        predicted = max((t for t in times if t is not None), default=None)
    return ScalePlan(
        request.plan,
        request.model,
        "chain" if request.sources else "storage",
        groups,
        tuple(loads),
        request.chunk_bytes,
        sum(grid.layer_bytes),
        predicted,
    )
