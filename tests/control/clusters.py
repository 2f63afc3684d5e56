"""Small clusters to plan on, and an oracle that tries every way of feeding the targets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from livescale.clusters.topology import Device, Direction, Host, Leaf, LinkKind, LinkUse, Topology
from livescale.control.multicast.cost import CostModel
from livescale.control.multicast.fabric import Fabric
from livescale.control.multicast.request import PlanRequest, Source
from livescale.messages.scale_plan import ScalePlan
from livescale.values.chunks import ChunkGrid, Feed
from livescale.values.types import FromWorker, WorkerRef, agent_ref

W = [WorkerRef(number) for number in range(64)]
H = [agent_ref(number) for number in range(8)]
RATE = 12_500_000
"""100 Mbit/s: 80 ns per byte, so that times of whole chunks are whole nanoseconds."""


def device(
    host: str = "h",
    leaf: str = "leaf",
    rate: int | None = RATE,
    group: str = "",
    out: int | None = None,
) -> Device:
    return Device("cpu", host, leaf, 1 << 40, 1 << 30, out or rate, rate, group)


def singles(count: int, rate: int | None = RATE) -> Topology:
    """Devices on hosts of their own under one leaf."""
    return Topology({W[i]: device(f"h{i}", rate=rate) for i in range(count)})


def rails(hosts: int, per_host: int, rate: int = RATE, spine: int | None = None) -> Topology:
    """Hosts with a scale-up group each; device i of every host hangs on leaf i."""
    devices = {
        W[h * per_host + i]: device(f"h{h}", f"leaf{i}", rate, f"g{h}")
        for h in range(hosts)
        for i in range(per_host)
    }
    leaves = {f"leaf{i}": Leaf(f"leaf{i}", spine, spine) for i in range(per_host)} if spine else {}
    agents = {
        H[h]: Host(f"h{h}", "leaf0", 1 << 40, rate, rate, 2 * rate, rate // 10)
        for h in range(hosts)
    }
    return Topology(devices, agents, leaves, group_bytes_per_s=100 * rate)


def two_leaves(per_leaf: int, spine: int) -> Topology:
    """The emulated testbed: two leaves with hosts of one device each, and a spine between them."""
    devices = {
        W[number]: device(f"h{number}", f"leaf{number // per_leaf}")
        for number in range(2 * per_leaf)
    }
    return Topology(devices, {}, {name: Leaf(name, spine, spine) for name in ("leaf0", "leaf1")})


def copies(*workers: WorkerRef, readers: int = 0, is_loading: bool = False) -> tuple[Source, ...]:
    """Copies on one worker each."""
    return tuple(Source((worker,), is_loading, readers) for worker in workers)


def request(
    sources: Sequence[Source],
    targets: Sequence[WorkerRef] | Sequence[tuple[WorkerRef, ...]] | None = None,
    *,
    layers: tuple[int, ...] = (1 << 20,) * 320,
    chunk_bytes: int = 1 << 20,
    spare: Sequence[WorkerRef] = (),
    instances: int = 1,
    tp_size: int = 1,
    busy: Sequence[LinkUse] = (),
    taken: Sequence[LinkUse] = (),
    has_storage: bool = True,
) -> PlanRequest:
    groups = None
    if targets is not None:
        groups = tuple((t,) if isinstance(t, WorkerRef) else t for t in targets)
        instances = len(groups)
    return PlanRequest(
        plan=1,
        model="m",
        layer_bytes=layers,
        chunk_bytes=chunk_bytes,
        instances=instances,
        sources=tuple(sources),
        spare=tuple(spare),
        targets=groups,
        tp_size=tp_size,
        busy=tuple(busy),
        taken=tuple(taken),
        has_storage=has_storage,
    )


def nic(worker: WorkerRef, direction: Direction) -> LinkUse:
    return LinkUse(LinkKind.NIC, str(worker), direction)


def bytes_over(plan: ScalePlan, kind: LinkKind, owner: str, direction: Direction) -> int:
    return sum(u.bytes for u in plan.links if u.link == LinkUse(kind, owner, direction))


def check_reaches_all(plan: ScalePlan, asked: PlanRequest) -> None:
    """Every chunk comes to every receiver exactly once, from somebody who gets it first."""
    grid = ChunkGrid(asked.layer_bytes, asked.chunk_bytes)
    holders = {worker for source in asked.sources for worker in source.workers}
    feeds = {load.receiver: load.feeds for load in plan.loads}
    for receiver, its in feeds.items():
        chunks = sorted(c for feed in its for part in feed.chunks for c in part)
        assert chunks == list(range(grid.chunks)), f"{receiver} gets {its}"
    for receiver in feeds:
        for chunk in range(0, grid.chunks, max(1, grid.chunks // 7)):
            trail = [receiver]
            while trail[-1] not in holders:
                (feed,) = (f for f in feeds[trail[-1]] if any(chunk in p for p in f.chunks))
                if not isinstance(feed.upstream, FromWorker):
                    break
                assert feed.upstream.worker not in trail, f"chunk {chunk} goes in a circle"
                trail.append(feed.upstream.worker)


# -- the oracle -----------------------------------------------------------------------------------


def best_possible_ns(asked: PlanRequest, topology: Topology) -> int:
    """The shortest prediction over all choices of devices and all ways in which every target gets
    the whole model from one upstream."""
    grid = ChunkGrid(asked.layer_bytes, asked.chunk_bytes)
    sources = [source.workers[0] for source in asked.sources]
    times = []
    for chosen in itertools.combinations(asked.spare, asked.instances):
        for parents in _forests(chosen, sources):
            feeds = {
                (target, 0): (Feed(FromWorker(parent), grid.all()),)
                for target, parent in parents.items()
            }
            prediction = CostModel(grid, Fabric.of(asked, topology)).predict(feeds)
            assert prediction.completed_ns is not None
            times.append(prediction.completed_ns)
    return min(times)


def _forests(
    targets: Sequence[WorkerRef], sources: Sequence[WorkerRef]
) -> Iterator[dict[WorkerRef, WorkerRef]]:
    for parents in itertools.product([*sources, *targets], repeat=len(targets)):
        found = dict(zip(targets, parents, strict=True))
        if all(_ends_at(found, target, sources) for target in targets):
            yield found


def _ends_at(
    parents: dict[WorkerRef, WorkerRef], at: WorkerRef, sources: Sequence[WorkerRef]
) -> bool:
    for _ in range(len(parents) + 1):
        if at in sources:
            return True
        at = parents[at]
    return False
