"""What a planner is asked. Values only."""

from __future__ import annotations

from livescale.clusters.topology import LinkUse
from livescale.values.types import PlanId, Value, WorkerRef


class Source(Value, frozen=True):
    """A copy that can be read: the workers of an instance by rank, or a host copy's agent.

    `is_loading`: it is receiving the model itself and passes on what arrives. `readers` counts the
    transfers that read from it already.
    """

    workers: tuple[WorkerRef, ...]
    is_loading: bool = False
    readers: int = 0

    @property
    def is_host_copy(self) -> bool:
        return self.workers[0].is_agent


class PlanRequest(Value, frozen=True):
    """One scaling decision's transfer, before anybody has thought about it.

    `layer_bytes` are those of one rank. `instances` new instances of `tp_size` workers each are
    placed on some of the `spare` workers, unless `targets` says where (also for host copies, whose
    targets are agents). `busy` are link directions that serve traffic (BlitzScale §5.1: avoided
    where possible), `taken` those that other plans use now, once per use. `has_storage`: the
    targets can read the model's directory. `is_cache_local`: a host's copies feed its own devices
    alone. `is_live`: the targets work with the layers that are there, so that they want the first
    ones first. `in_teams`: they serve together while they load, so that they want different parts
    first.
    """

    plan: PlanId
    model: str
    layer_bytes: tuple[int, ...]
    chunk_bytes: int
    instances: int
    sources: tuple[Source, ...]
    spare: tuple[WorkerRef, ...] = ()
    targets: tuple[tuple[WorkerRef, ...], ...] | None = None
    tp_size: int = 1
    busy: tuple[LinkUse, ...] = ()
    taken: tuple[LinkUse, ...] = ()
    has_storage: bool = True
    is_cache_local: bool = False
    is_live: bool = False
    in_teams: bool = False
