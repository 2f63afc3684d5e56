"""From a cluster's file, models by name and a system to the configuration of a simulated pool.

A device's memory is cut as a worker cuts it: an arena for the largest model's rank, and for
another one beside it where a pool has several models and KV room enough without that; a reserve for
activations and the runtime; and the rest of nine tenths for KV.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import msgspec

from livescale.batching.live.live_batch import LiveLimits
from livescale.clusters.files import NamedTopology
from livescale.clusters.topology import Topology
from livescale.common.settings import unknown
from livescale.config.automatic import CONTEXTS
from livescale.config.slo import SloAbsolute
from livescale.control.state.config import ControllerConfig
from livescale.latency.accelerators import ACCELERATORS
from livescale.latency.models import AnyLatency
from livescale.latency.roofline import RooflineLatency
from livescale.latency.shapes import EXECUTED, PRESETS
from livescale.sim.base.config import SimConfig
from livescale.sim.pools.limits import InstanceLimits, PooledModel, PoolError, limits_of
from livescale.sim.pools.systems import System
from livescale.values.scaling_policies import Bounds, ModelPolicy, SloAim
from livescale.values.types import ModelSpec, Value, WorkerRef
from livescale.values.units import NS_PER_MS

MEMORY_PERCENT = 90
"""Of a device's memory, for parameters, KV and the reserve (the usual setting of engines)."""
RESERVE_BYTES = 2_000_000_000
"""For activations and the runtime: the lower end of what engines were seen to take (2 to 5 GB)."""
_BLOCK_TOKENS = 16
GRACE_NS = 30 * 86_400_000_000_000
"""A pool that is far too small ends late: a month of virtual time, not a fault of the world."""


class _Constants(Value, frozen=True):
    """A policy's settings for one preset on A800 devices, from the BlitzScale authors' code."""

    tp_size: int
    prefill_tokens_per_s: int
    kv_blocks: int
    scale_down_timeout_ns: int


_AUTHORS = {
    "llama-2-7b": _Constants(1, 13_000, 8_000, 333 * NS_PER_MS),
    "llama-3-8b": _Constants(1, 15_000, 30_000, 333 * NS_PER_MS),
    "mistral-24b": _Constants(2, 12_000, 32_000, 333 * NS_PER_MS),
    "qwen2.5-72b": _Constants(4, 5_300, 4_000, 1_000 * NS_PER_MS),
}
_AUTHORS_KINDS = ("a100", "a800")
_AUTHORS_KV_UPPER_PERMILLE, _AUTHORS_KV_LOWER_PERMILLE = 950, 750


@dataclass(frozen=True, slots=True)
class _Room:
    """What one kind of device has for these models. The arena ends with the residents' memory."""

    kind: str
    arena_bytes: int
    resident_bytes: int
    kv_bytes: int


def build_config(
    cluster: NamedTopology,
    models: Sequence[PooledModel],
    system: System,
    weights: Mapping[str, int] | None = None,
) -> SimConfig:
    """The pool of that cluster with these models, run as that system.

    `weights` are tokens asked of each model (`limits.py`). Raises PoolError.
    """
    specs = [_spec(model) for model in models]
    kind = _only_kind(cluster)
    fitting = [_fitting(cluster, spec) for spec in specs]
    room = _room(cluster, kind, specs, system)
    limits = limits_of(len(cluster.topology.devices), models, fitting, system, weights)
    policies = tuple(
        _aimed(_policy(model, spec, limit, room), system.aim, model.slo)
        for model, spec, limit in zip(models, specs, limits, strict=True)
    )
    topology = cluster.topology
    devices = tuple(
        msgspec.structs.replace(
            topology.devices[ref], arena_bytes=room.arena_bytes, kv_bytes=room.kv_bytes
        )
        for ref in sorted(topology.devices)
    )
    world = SimConfig(
        controller=pool_controller(topology, system, policies),
        devices=devices,
        latency=_latencies(kind, models),
        hosts=tuple(topology.agents[ref] for ref in sorted(topology.agents)),
        block_tokens=_BLOCK_TOKENS,
        load_ns=system.load_ns,
        group_setup_ns=system.group_setup_ns,
        resident_bytes=room.resident_bytes,
        live=LiveLimits(tbt_ns=_tbt_ns(models)),
        grace_ns=GRACE_NS,
    )
    return msgspec.structs.replace(world, **system.world)


def pool_controller(
    topology: Topology, system: System, policies: tuple[ModelPolicy, ...], **more: object
) -> ControllerConfig:
    """The controller of a pool with these devices, hosts and links, as that system has it; `more`
    are fields of a ControllerConfig that the system may replace."""
    controller = ControllerConfig(
        models=policies,
        workers_expected=len(topology.devices),
        agents_expected=len(topology.agents),
        multicast=system.multicast,
        placement=system.placement,
        live_order=system.live_order,
        teams=system.teams,
        warm_spares=system.warm_spares,
        spares_ahead=system.spares_ahead,
        drain=system.drain,
        binding=system.binding,
        leaves=tuple(topology.leaves.values()),
        group_bytes_per_s=topology.group_bytes_per_s,
        remote_storage_bytes_per_s=topology.remote_storage_bytes_per_s,
    )
    return msgspec.structs.replace(controller, **{**more, **system.controller})


def tokens_max(config: SimConfig, model: str) -> int:
    """The longest request that an instance of the model can serve, prompt and answer together."""
    spec = config.spec(model)
    batcher = config.batcher(spec, config.device(0))
    return min(spec.model_tokens_max, batcher.kv_blocks * batcher.block_tokens)


def first_hosts(cluster: NamedTopology, count: int) -> NamedTopology:
    """The cluster's first hosts with all their devices."""
    devices = cluster.topology.devices
    kept = list(dict.fromkeys(device.host for device in devices.values()))[:count]
    return _part(cluster, [ref for ref in devices if devices[ref].host in kept], kept)


def first_devices(cluster: NamedTopology, count: int) -> NamedTopology:
    """The cluster's first devices and the hosts they sit in."""
    devices = cluster.topology.devices
    refs = list(devices)[:count]
    return _part(cluster, refs, [devices[ref].host for ref in refs])


def dollars_per_hour(cluster: NamedTopology) -> float | None:
    """What the hosts of the cluster's devices cost; None where the price of one is not known."""
    hosts = dict.fromkeys(device.host for device in cluster.topology.devices.values())
    prices = [cluster.price_microdollars_per_hour.get(host) for host in hosts]
    known = [price for price in prices if price is not None]
    return sum(known) / 1e6 if len(known) == len(prices) else None


# -- helpers, in the order used -------------------------------------------------------------------


def _spec(model: PooledModel) -> ModelSpec:
    """Sizes of one rank, under the name that the pool knows."""
    shape = PRESETS.get(model.preset)
    executed = EXECUTED.get(model.preset)
    if model.tp_size < 1:
        raise PoolError(f"{model.name}: tp={model.tp_size}: an instance has at least one rank")
    try:
        if shape is not None:
            spec = shape.spec(model.tp_size)
        elif executed is not None and model.tp_size == 1:
            spec = executed.spec()
        elif executed is not None:
            raise PoolError(f"{model.preset}: only its time on one device is known, not with tp")
        else:
            raise PoolError(unknown("there is no model", model.preset, (*PRESETS, *EXECUTED)))
    except ValueError as error:
        raise PoolError(str(error)) from error
    return msgspec.structs.replace(spec, name=model.name)


def _only_kind(cluster: NamedTopology) -> str:
    """A model has one latency model, so that all devices are alike."""
    kinds = list(dict.fromkeys(device.kind for device in cluster.topology.devices.values()))
    for kind in kinds:
        if kind not in ACCELERATORS:
            known = ", ".join(ACCELERATORS)
            raise PoolError(f"nothing is known of the accelerator '{kind}', only of {known}")
    if len(kinds) > 1:
        raise PoolError(f"the cluster's devices are of several kinds: {', '.join(kinds)}")
    return kinds[0]


def _fitting(cluster: NamedTopology, spec: ModelSpec) -> int:
    """Instances that the pool has room for, each within one scale-up group, or one host."""
    sizes = Counter(
        ("group", device.group) if device.group else ("host", device.host)
        for device in cluster.topology.devices.values()
    )
    largest = max(sizes.values())
    if spec.tp_size > largest:
        raise PoolError(
            f"{spec.name}: an instance of {spec.tp_size} ranks fits into no group or host:"
            f" the largest has {largest} devices"
        )
    return sum(size // spec.tp_size for size in sizes.values())


def _room(cluster: NamedTopology, kind: str, specs: Sequence[ModelSpec], system: System) -> _Room:
    """How the memory of the smallest device is cut. Where spares stay, parameters have room for as
    many of the largest models as there are, while KV keeps room for `CONTEXTS` requests of the
    greatest length. Raises PoolError with both sizes."""
    memory = min(
        cluster.memory_bytes.get(ref) or ACCELERATORS[kind].memory_bytes
        for ref in cluster.topology.devices
    )
    usable = memory * MEMORY_PERCENT // 100 - RESERVE_BYTES
    largest = max(specs, key=lambda spec: spec.size_bytes)
    least_kv = max(spec.kv_bytes_per_token for spec in specs) * _BLOCK_TOKENS
    resident_bytes = largest.size_bytes * system.resident_percent // 100
    arena_bytes = largest.size_bytes + resident_bytes
    if arena_bytes + least_kv > usable:
        raise PoolError(
            f"{largest.name} does not fit: a rank has {largest.size_bytes / 1e9:.1f} GB, and of"
            f" the {memory / 1e9:.1f} GB of a device ({kind}) {usable / 1e9:.1f} GB are for"
            f" parameters and KV"
            + (f", {resident_bytes / 1e9:.1f} GB of them for residents" if resident_bytes else "")
        )
    context_bytes = max(spec.kv_bytes_per_token * spec.model_tokens_max for spec in specs)
    if system.warm_spares != "off":
        beside = (usable - arena_bytes - CONTEXTS * context_bytes) // largest.size_bytes
        arena_bytes += min(max(beside, 0), len(specs) - 1) * largest.size_bytes
    return _Room(kind, arena_bytes, resident_bytes, usable - arena_bytes)


def _policy(
    model: PooledModel, spec: ModelSpec, limits: InstanceLimits, room: _Room
) -> ModelPolicy:
    """The authors' constants where they apply; else capacity is what the first instance shows."""
    policy = ModelPolicy(
        spec=spec,
        instances_min=limits.least,
        instances_max=limits.most,
        priority=model.priority,
        idle_ns=model.idle_ns,
        roles=limits.roles,
    )
    known = _AUTHORS.get(model.preset)
    if known is None or known.tp_size != model.tp_size or room.kind not in _AUTHORS_KINDS:
        return policy
    held_blocks = room.kv_bytes // (_BLOCK_TOKENS * spec.kv_bytes_per_token)
    return msgspec.structs.replace(
        policy,
        prefill_tokens_per_s=known.prefill_tokens_per_s,
        kv_blocks=min(known.kv_blocks, held_blocks),
        scaling=Bounds(
            kv_upper_permille=_AUTHORS_KV_UPPER_PERMILLE,
            kv_lower_permille=_AUTHORS_KV_LOWER_PERMILLE,
            scale_down_timeout_ns=known.scale_down_timeout_ns,
        ),
    )


def _tbt_ns(models: Sequence[PooledModel]) -> int:
    """The least time between tokens that some model promises (0: none does)."""
    promised = [model.slo.tbt_ns for model in models if model.slo is not None]
    return min((tbt_ns for tbt_ns in promised if tbt_ns is not None), default=0)


def _aimed(policy: ModelPolicy, aim: SloAim | None, slo: SloAbsolute | None) -> ModelPolicy:
    """The model scales by that aim, if there is one, to what it promises; its other bounds stay."""
    if aim is None:
        return policy
    if aim.ttft_ns is None and slo is not None:
        aim = msgspec.structs.replace(aim, ttft_ns=slo.ttft_ns)
    room = policy.scaling if isinstance(policy.scaling, Bounds) else aim.room
    return msgspec.structs.replace(policy, scaling=msgspec.structs.replace(aim, room=room))


def _latencies(kind: str, models: Sequence[PooledModel]) -> dict[str, AnyLatency]:
    """One value per preset and TP size, however many models share it."""

    @cache
    def latency(preset: str, tp_size: int) -> AnyLatency:
        shape = PRESETS.get(preset)
        if shape is None:
            return EXECUTED[preset].latency()
        return RooflineLatency.of(kind, shape, tp_size)

    return {model.name: latency(model.preset, model.tp_size) for model in models}


def _part(cluster: NamedTopology, refs: Sequence[WorkerRef], hosts: Sequence[str]) -> NamedTopology:
    devices = {ref: cluster.topology.devices[ref] for ref in refs}
    agents = {r: host for r, host in cluster.topology.agents.items() if host.name in hosts}
    topology = replace(cluster.topology, devices=devices, agents=agents)
    named = {name: ref for name, ref in cluster.refs.items() if ref in devices or ref in agents}
    return replace(cluster, topology=topology, refs=named)
