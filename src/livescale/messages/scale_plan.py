"""ScalePlans: what one scaling decision moves, along which feeds, and how long it should take.

Ground floor: values only. Plans are made in `control/multicast`.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from livescale.clusters.topology import LinkUse
from livescale.values.chunks import Feed
from livescale.values.types import FromWorker, PlanId, Upstream, Value, WorkerRef


def pair_rate(loaded: int, layers: int) -> tuple[int, int]:
    """Throughput of a live pair with so many layers loaded, as a fraction of one instance's.

    A batch of which the target runs `loaded` layers costs the source `layers - loaded`, and no
    split is better than half each (BlitzScale §4: 1/7 becomes 1/6; twice from half the layers on).
    """
    return layers, max(layers - loaded, -(-layers // 2))


def pair_until(tokens: int, lag_tokens: int, loaded: int, layers: int) -> int:
    """When a live pair has computed so many prompt tokens, in thousandths of what one instance
    takes for a token. The layers that are missing come evenly while one instance computes
    `lag_tokens`.

    While k layers are there the source completes batches of which k are done (`pair_rate`, also
    beyond half of the layers: what the target ran ahead is used then). Both together never do more
    than two instances.
    """
    left, passed = tokens * 1000, 0
    missing = layers - loaded
    step = lag_tokens * 1000 // missing if missing else 0
    for there in range(loaded, layers):
        if left * (layers - there) <= step * layers:
            passed += left * (layers - there) // layers
            break
        left -= step * layers // (layers - there)
        passed += step
    return max(passed, tokens * 500)


class PlannedLoad(Value, frozen=True):
    """One receiver's part of a plan.

    `layer_ns` is when each layer should be complete, counted from the start of the plan; empty
    when a rate on the way is not known.
    """

    receiver: WorkerRef
    feeds: tuple[Feed, ...]
    layer_ns: tuple[int, ...] = ()

    @property
    def completed_ns(self) -> int | None:
        return max(self.layer_ns) if self.layer_ns else None


class LinkBytes(Value, frozen=True):
    """Bytes that a plan moves over one direction of one link, and those that meet serving."""

    link: LinkUse
    bytes: int
    serving_bytes: int = 0


class ScalePlan(Value, frozen=True):
    """What one scaling decision does: devices chosen, a transfer graph, predictions.

    `instances` are the workers of each new instance by rank (empty for copies to host memory);
    `loads` says from whom every receiver gets which chunks. `predicted_ns` is None when a link's
    rate is not known. `strategy` names the algorithm that made it. `serving` are the link
    directions that carried serving traffic then, whether the planner was told or not.
    """

    plan: PlanId
    model: str
    strategy: str
    instances: tuple[tuple[WorkerRef, ...], ...]
    loads: tuple[PlannedLoad, ...]
    chunk_bytes: int
    bytes_per_target: int
    predicted_ns: int | None
    links: tuple[LinkBytes, ...] = ()
    serving: tuple[LinkUse, ...] = ()

    @property
    def receivers(self) -> int:
        return len(self.loads)

    @property
    def serving_bytes(self) -> int:
        """Bytes that meet serving traffic somewhere."""
        return sum(use.serving_bytes for use in self.links)

    @property
    def avoided(self) -> tuple[LinkUse, ...]:
        """Directions with serving traffic over which the plan moves nothing."""
        used = {use.link for use in self.links if use.bytes}
        return tuple(link for link in self.serving if link not in used)

    def beside(self, serving: tuple[LinkUse, ...]) -> ScalePlan:
        """The same plan, with what meets serving traffic on these link directions."""
        busy = frozenset(serving)
        links = tuple(
            LinkBytes(u.link, u.bytes, u.bytes if u.link in busy else 0) for u in self.links
        )
        return replace(self, links=links, serving=serving)

    def load_of(self, receiver: WorkerRef) -> PlannedLoad:
        """KeyError for a worker that receives nothing."""
        for load in self.loads:
            if load.receiver == receiver:
                return load
        raise KeyError(receiver)

    def routes(self) -> tuple[str, ...]:
        """The transfer graph in words: whole feeds as paths, shared loads one line each."""
        follows = {
            load.receiver: load.feeds[0].upstream for load in self.loads if len(load.feeds) == 1
        }
        passed_on = {getattr(upstream, "worker", None) for upstream in follows.values()}
        lines = []
        for load in self.loads:
            if len(load.feeds) > 1:
                parts = " + ".join(str(feed.upstream) for feed in load.feeds)
                lines.append(f"{parts} => {load.receiver}")
            elif load.receiver not in passed_on:
                lines.append(_path(load.receiver, follows))
        return tuple(lines)

    def __str__(self) -> str:
        return f"plan {self.plan}: {self.model} by {self.strategy}: " + "; ".join(self.routes())


def _path(end: WorkerRef, follows: Mapping[WorkerRef, Upstream]) -> str:
    names = [str(end)]
    at: WorkerRef | None = end
    while at is not None and at in follows:
        upstream = follows[at]
        names.append(str(upstream))
        at = upstream.worker if isinstance(upstream, FromWorker) else None
    return " -> ".join(reversed(names))
