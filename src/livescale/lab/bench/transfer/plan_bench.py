"""`bench plan`: how long planning takes, and how far its predictions are from the lower bound.

Clusters of several sizes, with a rail per position of a host or with leaves oversubscribed two to
one; every eighth device gets the model. Nothing is moved.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

from livescale.clusters.topology import Device, Host, Leaf, Topology
from livescale.control.multicast.bound import lower_bound
from livescale.control.multicast.fabric import Fabric
from livescale.control.multicast.planner import make_plan
from livescale.control.multicast.request import PlanRequest, Source
from livescale.report.run.terminal import table
from livescale.values.types import WorkerRef, agent_ref
from livescale.values.units import GBIT_BYTES

SIZES = (64, 256, 1024, 4096)
STRATEGIES = ("auto", "chain", "sharded", "binomial", "tree", "unicast")
FABRICS = ("rails", "leaf-spine")

_NIC = 100 * GBIT_BYTES
_PER_HOST = 8
_HOSTS_PER_LEAF = 16
_LAYER_BYTES = (1_050_673_152, *([436_224_000] * 32), 1_050_681_344)
"""Llama 3 8B in bf16: embedding, 32 decoder layers, head."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One strategy on one cluster. `quality` is prediction / lower bound (1 cannot be beaten)."""

    fabric: str
    devices: int
    targets: int
    strategy: str
    chosen: str
    runs: int
    plan_ms_p50: float
    plan_ms_p99: float
    predicted_ns: int
    lower_bound_ns: int
    quality: float


@dataclass(frozen=True, slots=True)
class PlanReport:
    """All rows; the headline is a chain in the largest cluster."""

    rows: tuple[PlanRow, ...]

    def as_json(self) -> dict[str, object]:
        figures: dict[str, object] = {"rows": [asdict(row) for row in self.rows]}
        for row in self.rows:
            if row.strategy == "chain" and row.fabric == FABRICS[0]:
                figures[f"plan_ms_{row.devices}"] = row.plan_ms_p50
                figures[f"plan_ms_{row.devices}_p99"] = row.plan_ms_p99
        figures["quality"] = {
            f"{row.fabric} {row.devices} {row.strategy}": row.quality for row in self.rows
        }
        return figures

    def text(self) -> str:
        header = ["fabric", "devices", "targets", "strategy", "ms p50", "ms p99", "predicted s"]
        rows = [
            [
                *(row.fabric, row.devices, row.targets, row.strategy, row.plan_ms_p50),
                *(row.plan_ms_p99, row.predicted_ns / 1e9, row.quality),
            ]
            for row in self.rows
        ]
        return table([*header, "of bound"], rows)


def run_plan(sizes: tuple[int, ...], repetitions: int, say: Callable[[str], None]) -> PlanReport:
    """Plan with every strategy on every cluster, `repetitions` times each."""
    # As the controller process does at its start.
    gc.collect()
    gc.freeze()
    rows = []
    for fabric in FABRICS:
        for size in sizes:
            say(f"{fabric}, {size} devices")
            topology = make_cluster(fabric, size)
            rows += [_row(fabric, topology, name, repetitions) for name in STRATEGIES]
    return PlanReport(tuple(rows))


def make_cluster(fabric: str, devices: int) -> Topology:
    """Hosts of eight devices with NICs of 100 Gbit/s, NVLink inside; see the module's first lines
    for the two fabrics."""
    hosts = -(-devices // _PER_HOST)
    is_rails = fabric == "rails"
    leaves = _PER_HOST if is_rails else -(-hosts // _HOSTS_PER_LEAF)
    below = hosts if is_rails else _HOSTS_PER_LEAF * _PER_HOST
    spine = below * _NIC // 2
    topology = Topology(group_bytes_per_s=1600 * GBIT_BYTES)
    for host in range(hosts):
        own = f"leaf{0 if is_rails else host // _HOSTS_PER_LEAF}"
        topology.agents[agent_ref(host)] = Host(
            f"host{host}", own, 1 << 40, _NIC, _NIC, 128 * GBIT_BYTES, 10 * GBIT_BYTES
        )
        for position in range(min(_PER_HOST, devices - host * _PER_HOST)):
            leaf = f"leaf{position}" if is_rails else own
            topology.devices[WorkerRef(host * _PER_HOST + position)] = Device(
                "a800", f"host{host}", leaf, 1 << 40, 1 << 30, _NIC, _NIC, f"nvlink{host}"
            )
    names = [f"leaf{number}" for number in range(leaves)]
    topology.leaves = {name: Leaf(name, spine, spine) for name in names}
    return topology


# -- helpers, in the order used -------------------------------------------------------------------


def _row(fabric: str, topology: Topology, strategy: str, repetitions: int) -> PlanRow:
    workers = list(topology.devices)
    asked = PlanRequest(
        plan=1,
        model="llama-3-8b",
        layer_bytes=_LAYER_BYTES,
        chunk_bytes=1 << 20,
        instances=max(1, len(workers) // 8),
        sources=(Source(tuple(workers[:1])),),
        spare=tuple(workers[1:]),
    )
    times = []
    for _ in range(repetitions):
        began_ns = time.perf_counter_ns()
        plan = make_plan(asked, topology, strategy)
        times.append((time.perf_counter_ns() - began_ns) / 1e6)
    assert plan.predicted_ns is not None, "all rates are known"
    sources = [source.workers for source in asked.sources]
    links = Fabric.of(asked, topology)
    bound = lower_bound(sources, plan.instances, sum(asked.layer_bytes), links)
    assert bound is not None, "all rates are known"
    return PlanRow(
        fabric=fabric,
        devices=len(workers),
        targets=plan.receivers,
        strategy=strategy,
        chosen=plan.strategy,
        runs=repetitions,
        plan_ms_p50=median(times),
        # The largest, unless there are more than a hundred.
        plan_ms_p99=sorted(times)[-1 - repetitions // 100],
        predicted_ns=plan.predicted_ns,
        lower_bound_ns=bound.ns,
        quality=plan.predicted_ns / bound.ns,
    )
