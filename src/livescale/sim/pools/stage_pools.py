"""Pools of one-pass models in stages: from a cluster, an executed model and a system to a world.

One request fills a Run and ends with its first token (QUART's models, its Table 1). A device serves
one replica of one stage, or a whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from livescale.clusters.files import NamedTopology
from livescale.latency.models import AnyLatency
from livescale.latency.shapes import ExecutedModel
from livescale.sim.base.config import SimConfig
from livescale.sim.pools.configs import GRACE_NS, pool_controller
from livescale.sim.pools.limits import PoolError
from livescale.sim.pools.stage_systems import StageSystem
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.types import SEQUENCES_MAX

ROW_BYTES = 8192
"""Of a token between stages, assumed: 4,096 numbers of 16 bits."""
_KV_BLOCKS, _BLOCK_TOKENS = 16_384, 16
"""Of every instance: 128 requests of LLAMA-7B's 1,024 tokens, more than a line ever holds."""


@dataclass(frozen=True, slots=True)
class PooledStages:
    """A model that a pool serves. Of its time stage i takes `shares[i]`; hosts have `memory_bytes`
    for copies (None: what the cluster's file says)."""

    model: ExecutedModel
    shares: tuple[int, ...]
    memory_bytes: int | None = None

    @property
    def request_tokens(self) -> int:
        """Of a request, which fills a Run: an image or a sound counts as one that no other fits
        beside."""
        return max(self.model.request_tokens, SEQUENCES_MAX)

    def capacity_per_s(self, devices: int) -> float:
        """Requests per second of so many devices, if work were divided among them at will."""
        return devices * 1e9 / self.model.executed_ns


def stage_config(cluster: NamedTopology, pooled: PooledStages, system: StageSystem) -> SimConfig:
    """The pool of that cluster with this model, run as that system. One replica of each stage at
    least, all devices at most. Raises PoolError."""
    topology = cluster.topology
    devices = len(topology.devices)
    policies, latency = _served(pooled, system, devices)
    largest = max(policy.spec.size_bytes for policy in policies)
    room = min(cluster.memory_bytes.values())
    if largest > room:
        raise PoolError(f"{pooled.model.name}: {largest} bytes do not fit into {room} of a device")
    hosts = [topology.agents[ref] for ref in sorted(topology.agents)]
    if pooled.memory_bytes is not None:
        hosts = [msgspec.structs.replace(h, memory_bytes=pooled.memory_bytes) for h in hosts]
    world = SimConfig(
        controller=pool_controller(topology, system, policies, scaling=system.scaling),
        devices=tuple(
            msgspec.structs.replace(topology.devices[ref], arena_bytes=largest, kv_bytes=1)
            for ref in sorted(topology.devices)
        ),
        latency=latency,
        hosts=tuple(hosts),
        kv_blocks=_KV_BLOCKS,
        block_tokens=_BLOCK_TOKENS,
        run_tokens_max=pooled.request_tokens,
        load_ns=system.load_ns,
        grace_ns=GRACE_NS,
    )
    return msgspec.structs.replace(world, **system.world)


def fixed_counts(shares: Sequence[int], devices: int) -> list[int]:
    """Replicas of each stage, one at least, where `devices` are dealt one at a time to the stage
    that is narrowest: the first of equals."""
    counts = [1] * len(shares)
    for _ in range(devices - len(shares)):
        narrowest = max(range(len(shares)), key=lambda i: (shares[i] / counts[i], -i))
        counts[narrowest] += 1
    return counts


# -- helpers --------------------------------------------------------------------------------------


def _served(
    pooled: PooledStages, system: StageSystem, devices: int
) -> tuple[tuple[ModelPolicy, ...], dict[str, AnyLatency]]:
    """What is served, and how long each takes for a Run."""
    model = pooled.model
    if system.is_whole:
        name = model.name
        return (ModelPolicy(model.spec(), 1, devices),), {name: model.latency()}
    staged = model.in_stages(pooled.shares, ROW_BYTES)
    if devices < len(staged.specs):
        raise PoolError(f"{model.name}: {len(staged.specs)} stages on {devices} devices")
    limits = [(1, devices)] * len(staged.specs)
    if system.fixed_devices is not None:
        counts = fixed_counts(pooled.shares, system.fixed_devices)
        limits = [(count, count) for count in counts]
    policies = tuple(
        ModelPolicy(spec, *limit) for spec, limit in zip(staged.specs, limits, strict=True)
    )
    latencies = zip(staged.specs, staged.latencies, strict=True)
    return policies, {spec.name: latency for spec, latency in latencies}
