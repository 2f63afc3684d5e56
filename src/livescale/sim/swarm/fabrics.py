"""Clusters drawn from a seed, around a world that was drawn without one.

Hosts with several devices, leaves with limited spines, scale-up groups, NICs of different rates,
local and remote storage, more models than there is room for at a time, and faults of hosts, links
and bytes. Half of all worlds stay as they are.
"""

from __future__ import annotations

import random

from msgspec.structs import replace

from livescale.clusters.topology import Device, Host, Leaf
from livescale.latency.work import LinearLatency
from livescale.load.traces import TraceRow
from livescale.sim.base.config import FaultConfig, SimConfig
from livescale.sim.swarm.worlds import MIB, SwarmWorld, changed, draw_rows, make_model
from livescale.values.copy_strategies import (
    AllCopies,
    CacheCopies,
    NoCopies,
    Placement,
    SpreadCopies,
)
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.units import NS_PER_MS

_RATE = 1 << 30


def with_fabric(world: SwarmWorld) -> SwarmWorld:
    """The world on a drawn cluster, or as it is."""
    rng = random.Random(f"fabric {world.seed}")
    if rng.random() < 0.5:
        return world
    config, rows = _with_more_models(world.config, rng)
    config = _with_links(_with_hosts(config, rng), rng)
    config = _with_small_arenas(_with_strategy(config, rng), world.seed)
    config = changed(
        config,
        coalesces=rng.random() < 0.5,
        report_gap_ns=rng.choice([5, 100]) * NS_PER_MS,
        load_ns=random.Random(f"load time {world.seed}").choice([None] * 9 + [50 * NS_PER_MS]),
        faults=_more_faults(config.faults, rng),
    )
    return SwarmWorld(world.rows | rows, config, world.seed)


# -- helpers, in the order used -------------------------------------------------------------------


def _with_more_models(
    config: SimConfig, rng: random.Random
) -> tuple[SimConfig, dict[str, list[TraceRow]]]:
    """Models that may go to zero and take turns on whatever is no model's by right."""
    taken = sum(max(p.instances_min, 1) * p.spec.tp_size for p in config.policies)
    room = config.workers - taken
    if room < 1 or rng.random() < 0.5:
        return config, {}
    more, rows, latency = [], {}, dict(config.latency)
    for number in range(rng.randint(1, 4)):
        spec = make_model(f"more{number}", rng.randint(1, 6), rng.randint(1, 6) * MIB)
        spec = replace(spec, tp_size=rng.randint(1, min(room, 2)))
        most = rng.randint(1, max(room // spec.tp_size, 1))
        idle_ns = rng.choice([10, 300]) * NS_PER_MS
        more.append(ModelPolicy(spec, 0, most, priority=rng.choice([0, 0, 2]), idle_ns=idle_ns))
        span_ns = max(config.faults.until_ns, 500 * NS_PER_MS)
        rows[spec.name] = [row for row in draw_rows(rng, span_ns) if rng.random() < 0.5]
        latency[spec.name] = LinearLatency(
            rng.choice([1, 8]) * NS_PER_MS, rng.choice([5_000, 90_000]), 10
        )
    size_bytes = sum(policy.spec.size_bytes * policy.spec.tp_size for policy in more)
    hosts = tuple(
        replace(host, memory_bytes=host.memory_bytes + size_bytes) for host in config.hosts
    )
    models = (*config.controller.models, *more)
    return changed(config, controller={"models": models}, hosts=hosts, latency=latency), rows


def _with_hosts(config: SimConfig, rng: random.Random) -> SimConfig:
    """Several devices per host; leaves by host, or by device (rails); a group per host."""
    per_host = rng.randint(1, 4)
    leaves = rng.choice([["leaf"], ["leaf", "leaf-b"], ["leaf", "leaf-b", "leaf-c"]])
    has_rails, has_groups = rng.random() < 0.3, rng.random() < 0.5
    has_kinds = rng.random() < 0.3
    names = [host.name for host in config.hosts]
    if not names:
        names = [f"host-{n}" for n in range(-(-config.workers // per_host))]
    devices = []
    for number in range(config.workers):
        host = number // per_host % len(names)
        rate = _RATE // rng.choice([1, 1, 2, 8])
        devices.append(
            Device(
                kind=rng.choice(["sim", "sim-b"]) if has_kinds else "sim",
                host=names[host],
                leaf=leaves[(number if has_rails else host) % len(leaves)],
                arena_bytes=1 << 30,
                kv_bytes=rng.choice([1 << 23, 1 << 30]),
                uplink_bytes_per_s=rate,
                downlink_bytes_per_s=rate * rng.choice([1, 1, 2]),
                group=names[host] if has_groups else "",
            )
        )
    hosts = tuple(
        Host(
            name=host.name,
            leaf=leaves[number % len(leaves)],
            memory_bytes=host.memory_bytes,
            uplink_bytes_per_s=_RATE // rng.choice([1, 4]),
            downlink_bytes_per_s=_RATE // rng.choice([1, 4]),
            device_bytes_per_s=rng.choice([None, 4 * _RATE]),
            storage_bytes_per_s=rng.choice([None, 1 << 27, 1 << 29]),
        )
        for number, host in enumerate(config.hosts)
    )
    kv_blocks = rng.choice([config.kv_blocks, None])
    return changed(config, devices=tuple(devices), hosts=hosts, kv_blocks=kv_blocks)


def _with_small_arenas(config: SimConfig, seed: int) -> SimConfig:
    """Some devices hold the smaller models only. Every model's least number still fits the rest."""
    rng = random.Random(f"arenas {seed}")
    sizes = sorted(policy.spec.size_bytes for policy in config.policies)
    needed = sum(max(p.instances_min, 1) * p.spec.tp_size for p in config.policies)
    if sizes[0] == sizes[-1] or rng.random() < 0.5:
        return config
    small = rng.randint(0, max(config.workers - needed, 0))
    devices = list(config.devices)
    for number in rng.sample(range(config.workers), small):
        arena_bytes = rng.choice(sizes[:-1])
        devices[number] = replace(devices[number], arena_bytes=arena_bytes)
    return changed(config, devices=tuple(devices))


def _with_links(config: SimConfig, rng: random.Random) -> SimConfig:
    """Spines that carry less than the NICs below them, and the rates of groups and storage."""
    names = sorted({device.leaf for device in config.devices} | {h.leaf for h in config.hosts})
    leaves = tuple(
        Leaf(name, _RATE // rng.choice([1, 4]), _RATE // rng.choice([1, 4]))
        for name in names
        if rng.random() < 0.7
    )
    has_local = config.hosts and all(h.storage_bytes_per_s is not None for h in config.hosts)
    remote = config.controller.remote_storage_bytes_per_s
    controller = {
        "leaves": leaves,
        "group_bytes_per_s": rng.choice([None, 8 * _RATE]),
        "remote_storage_bytes_per_s": rng.choice([remote, None]) if has_local else remote,
    }
    return changed(config, controller=controller)


def _with_strategy(config: SimConfig, rng: random.Random) -> SimConfig:
    """Another way to move parameters, where host copies are kept and where not."""
    choices: list[tuple[Placement, str]] = []
    if config.hosts:
        for strategy in ("auto", "sharded", "tree", "unicast", "host"):
            choices += [(SpreadCopies(), strategy)] * 2
        choices += [
            (CacheCopies(30 * NS_PER_MS), "host"),
            (AllCopies(), "auto"),
            (NoCopies(), "tree"),
        ]
    else:
        choices += [(NoCopies(), name) for name in ("auto", "sharded", "unicast", "storage")]
    placement, multicast = rng.choice(choices)
    chunk_bytes = rng.choice([MIB // 4, MIB])
    controller = {"placement": placement, "multicast": multicast, "chunk_bytes": chunk_bytes}
    return changed(config, controller=controller)


def _more_faults(faults: FaultConfig, rng: random.Random) -> dict[str, int]:
    """Faults of whole hosts, links, bytes and progress messages, where there are any."""
    if not faults.until_ns:
        return {}
    return {
        "host_losses": rng.choice([0, 0, 1, 3]),
        "slow_links": rng.choice([0, 1, 5]),
        "slow_permille": rng.choice([1, 50, 500]),
        "cut_links": rng.choice([0, 1, 3]),
        "link_ns": rng.choice([5, 100, 1000]) * NS_PER_MS,
        "corruptions": rng.choice([0, 1, 10]),
        "lost_permille": rng.choice([0, 100, 500]),
    }
