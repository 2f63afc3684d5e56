"""Systems for comparison whose models are cut into stages, or could be (QUART §8.1).

They differ in how many replicas each stage gets, in whether there are stages at all, and in where
parameters come from: host memory (`quart`), disk (the systems that QUART compares with have no
cache of its kind), or other devices (`quart-multicast`). Those with `-memory` behind their name
have QUART's host memory, so that policy and memory can be told apart. What a step of QUART adds to
the one before is one line here.
"""

from __future__ import annotations

import msgspec

from livescale.sim.pools.systems import System, like
from livescale.values.copy_strategies import (
    AllCopies,
    CacheCopies,
    KeyStageCopies,
    NoCopies,
    SpreadCopies,
)
from livescale.values.scaling_policies import (
    Bounds,
    CoresModel,
    ScalingPolicy,
    StagesByQueue,
    StagesByRate,
)

_AHEAD_NS = 10_000_000_000
"""How far Cocktail's forecast looks: beyond a load of one stage from disk."""
_UNTIL_NEEDED = CacheCopies(ttl_ns=3_600_000_000_000)
"""Hosts keep what their devices loaded, longer than any load here lasts, until something else needs
the room (least recently used)."""
_PAIRS_OF_CORES = CoresModel(340_000_000, 660_000_000)
"""Four cores in place of two make a request a third shorter (QUART Figure 3b)."""
_PAIRS_MAX = 8
"""Of a host with four devices, which begin with one pair each: assumed."""


class StageSystem(System, frozen=True):
    """A system whose models scale by `scaling`, cut into stages or `is_whole`.

    An SLO that a load has becomes the policy's, if that has one. With `fixed_devices` there are so
    many replicas all the time, divided among the stages by the time that each takes.
    """

    scaling: ScalingPolicy = StagesByQueue()
    is_whole: bool = False

    def with_slo(self, slo_ns: int | None) -> StageSystem:
        """The system where requests should be answered in that time (None: the policy's own)."""
        if slo_ns is None or not isinstance(self.scaling, StagesByQueue):
            return self
        scaling = msgspec.structs.replace(self.scaling, slo_ns=slo_ns)
        return msgspec.structs.replace(self, scaling=scaling)

    def planned_for(self, requests_per_s: float) -> StageSystem:
        """The system, told before the load how many requests come on average, if it plans."""
        if not isinstance(self.scaling, StagesByRate) or self.scaling.ahead_ns is not None:
            return self
        planned = round(1000 * requests_per_s)
        scaling = msgspec.structs.replace(self.scaling, planned_per_1000_s=planned)
        return msgspec.structs.replace(self, scaling=scaling)


def _from_disk(
    name: str, sentence: str, scaling: ScalingPolicy, *, is_whole: bool = False
) -> tuple[StageSystem, StageSystem]:
    """The system, and its twin with QUART's host memory."""
    disk = StageSystem(
        name,
        f"{sentence}; loads from disk",
        multicast="storage",
        placement=NoCopies(),
        warm_spares="off",
        scaling=scaling,
        is_whole=is_whole,
    )
    memory = like(
        disk,
        f"{name}-memory",
        f"{sentence}; every host's memory has every model",
        multicast="host",
        placement=AllCopies(),
    )
    return disk, memory


_QUART = StageSystem(
    "quart",
    "each stage by its own queue (Correct and Smooth), from host memory, which has every stage",
    multicast="host",
    placement=AllCopies(),
    warm_spares="off",
)
_QUART_FROM_DISK = msgspec.structs.replace(_QUART, multicast="storage", placement=NoCopies())
_WITH_CORES = like(
    _QUART_FROM_DISK,
    "quart-cpu",
    "quart-smooth, and cores make up for replicas that go",
    scaling=StagesByQueue(cores=_PAIRS_OF_CORES, cores_max=_PAIRS_MAX),
    world={"cores": {"": _PAIRS_OF_CORES}},
)
_ALL = (
    _QUART,
    like(
        _QUART_FROM_DISK,
        "quart-correct",
        "Correct alone: no replica goes because arrivals are even; loads from disk",
        scaling=StagesByQueue(smooths=False),
    ),
    like(_QUART_FROM_DISK, "quart-smooth", "Correct and Smooth; loads from disk"),
    _WITH_CORES,
    like(
        _WITH_CORES,
        "quart-cache",
        "quart-cpu, and a host keeps what its devices loaded, the least recently used goes",
        multicast="host",
        placement=_UNTIL_NEEDED,
    ),
    like(
        _WITH_CORES,
        "quart-keys",
        "quart-cpu, and hosts keep key stages that they had; all else comes from disk",
        multicast="host",
        placement=KeyStageCopies(),
    ),
    like(
        _WITH_CORES,
        "quart-placed",
        "quart-keys, and key stages are spread over hosts, others are packed",
        multicast="host",
        placement=KeyStageCopies(),
        controller={"stage_placement": "quart"},
    ),
    like(
        _QUART,
        "quart-multicast",
        "quart, but stages come by multicast from devices and one host copy of each",
        multicast="auto",
        placement=SpreadCopies(),
    ),
    like(
        _QUART,
        "uniform",
        "quart's policy, but all stages have the same number: whole pipelines",
        scaling=StagesByQueue(is_uniform=True),
    ),
    *_from_disk(
        "inferline",
        "each stage planned for the envelope of the rate, and at once for what is above it",
        StagesByRate(),
    ),
    *_from_disk(
        "cocktail",
        "whole pipelines for the rate that is forecast, and for the queue",
        StagesByRate(ahead_ns=_AHEAD_NS, is_uniform=True),
    ),
    *_from_disk("infless", "whole models by bounds on rate and queue", Bounds(), is_whole=True),
    like(
        _QUART,
        "fixed-stages",
        "the device time of quart in replicas that serve all the time",
        fixed_like="quart",
    ),
)
STAGE_SYSTEMS: dict[str, StageSystem] = {system.name: system for system in _ALL}
