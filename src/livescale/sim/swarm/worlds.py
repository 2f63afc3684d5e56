"""Worlds drawn from a seed: models, limits, loads, policies, placement and faults.

Everything about a world follows from its seed. What was added later is drawn from a `Random` of
its own, so that a seed that was found before means the same world.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from livescale.clusters.topology import Device, Host
from livescale.control.state.config import ControllerConfig
from livescale.latency.work import LinearLatency
from livescale.load.traces import TraceRow
from livescale.sim.base.config import FaultConfig, ModelChange, SimConfig
from livescale.values.copy_strategies import AllCopies, CacheCopies, NoCopies, SpreadCopies
from livescale.values.scaling_policies import Bounds, ModelPolicy, SloAim, TargetOngoing
from livescale.values.types import ModelSpec
from livescale.values.units import NS_PER_MS

MIB = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class SwarmWorld:
    """What `simulate` wants, without the record: loads by model, and what shapes the pool."""

    rows: dict[str, list[TraceRow]]
    config: SimConfig
    seed: int

    def changed(self, **settings: Any) -> SwarmWorld:
        """The world with other settings (see `changed`)."""
        return dataclasses.replace(self, config=changed(self.config, **settings))


def changed(
    config: SimConfig,
    *,
    faults: Mapping[str, object] | None = None,
    controller: Mapping[str, object] | None = None,
    **settings: Any,
) -> SimConfig:
    """Other settings in place of some; those of the faults and of the controller by their names."""
    return replace(
        config,
        faults=replace(config.faults, **(faults or {})),
        controller=replace(config.controller, **(controller or {})),
        **settings,
    )


def has_room(config: SimConfig) -> bool:
    """Every model can have an instance while all others have the largest least number that they
    have at any time."""
    policies = [*config.controller.models]
    for change in config.changes:
        policies += [policy for policy in (change.added, change.changed) if policy is not None]
    least: dict[str, int] = {}
    for policy in policies:
        workers = policy.instances_min * policy.spec.tp_size
        least[policy.spec.name] = max(workers, least.get(policy.spec.name, 0))
    taken = sum(least.values())
    return all(
        taken + max(policy.spec.tp_size - least[policy.spec.name], 0) <= config.workers
        for policy in policies
    )


def make_model(name: str, layers: int, layer_bytes: int) -> ModelSpec:
    """A model whose embedding and head are twice as large as its decoder layers."""
    sizes = (2 * layer_bytes, *([layer_bytes] * layers), 2 * layer_bytes)
    return ModelSpec(name, sizes, kv_bytes_per_token=1024, model_tokens_max=4096)


def make_device(link_bytes_per_s: int) -> Device:
    """A device on no host in particular."""
    link = link_bytes_per_s
    return Device("sim", "", "leaf", 1 << 30, 1 << 30, link, link)


def draw_flat_world(seed: int) -> SwarmWorld:
    """Draw models, limits, worker counts, loads and faults. All links are NICs of one rate."""
    rng = random.Random(f"world {seed}")
    workers = rng.randint(1, 8)
    count = min(rng.choice([1, 1, 2]), workers)
    policies = []
    for number in range(count):
        spec = make_model(f"m{number}", rng.randint(1, 12), rng.randint(1, 8) * MIB)
        tp_size = _tp_size(seed, workers // count)
        spec = replace(spec, tp_size=tp_size)
        least = max(1, rng.randint(1, max(1, workers // count // 2)) // tp_size)
        is_known = rng.random() < 0.5
        policies.append(
            ModelPolicy(
                spec,
                least,
                rng.randint(least, workers),
                rng.choice([2_000, 10_000]) if is_known else None,
                rng.choice([64, 512]) if is_known else None,
            )
        )
    until_ns = rng.randint(500, 3_000) * NS_PER_MS
    controller = ControllerConfig(
        tuple(policies),
        workers_expected=workers,
        settle_ns=rng.choice([0, 100, 1_000]) * NS_PER_MS,
        dispatched_ahead_max=rng.randint(1, 8),
        request_attempts_max=rng.randint(1, 3),
        load_retry_ns=rng.choice([10, 1_000]) * NS_PER_MS,
        scaling=Bounds(
            load_window_ns=rng.choice([50, 1_000]) * NS_PER_MS,
            scale_down_timeout_ns=rng.choice([5, 30, 333]) * NS_PER_MS,
        ),
    )
    link, storage = rng.choice([1 << 27, 1 << 30, 1 << 33]), rng.choice([1 << 26, 1 << 30])
    latency = LinearLatency(
        rng.choice([500_000, 5 * NS_PER_MS]), rng.choice([10_000, 200_000]), rng.choice([0, 100])
    )
    kv_blocks, run_tokens_max = rng.choice([40, 512]), rng.choice([32, 512])
    sequences_max = rng.choice([1, 4, 32])
    config = SimConfig(
        controller=replace(
            controller, remote_storage_bytes_per_s=storage, sequences_max=sequences_max
        ),
        devices=(make_device(link),) * workers,
        latency={"": latency},
        kv_blocks=kv_blocks,
        run_tokens_max=run_tokens_max,
        oldest_prompt_percent=random.Random(f"prompts {seed}").choice([1, 50, 100]),
        growth_tokens=random.Random(f"growth {seed}").choice([0, 8, 64]),
        queue_requests_max=rng.choice([4, 1_000]),
        step_gap_ns=rng.choice([0, NS_PER_MS, 5 * NS_PER_MS]),
        message_delay_ns=rng.choice([0, 200_000, 3 * NS_PER_MS]),
        holder_wait_ns=500 * NS_PER_MS,
        stall_ns=random.Random(f"stall {seed}").choice([20, 200]) * NS_PER_MS,
        grace_ns=600_000 * NS_PER_MS,
        faults=_faults(rng, until_ns),
    )
    config = _with_elastic_planes(config, seed)
    keeping = random.Random(f"spares {seed}").choice(["off", "needed", "recent", "slow-links"])
    spare_idle_ns = random.Random(f"spare idle {seed}").choice([5, 1_000]) * NS_PER_MS
    config = changed(config, controller={"warm_spares": keeping, "spare_idle_ns": spare_idle_ns})
    rows = {policy.spec.name: draw_rows(rng, until_ns) for policy in policies}
    config, more_rows = _with_changes(config, seed, until_ns)
    return SwarmWorld(rows | more_rows, config, seed)


def _aim(rng: random.Random) -> SloAim:
    """Aims that are met, some that never are, and none."""
    aim_ns = rng.choice([1, 20, 450]) * NS_PER_MS
    return SloAim(
        ttft_ns=None if aim_ns == 20 * NS_PER_MS else aim_ns,
        floor_decay_ns=rng.choice([0, 50, 1_000]) * NS_PER_MS,
        scale_down_timeout_ns=rng.choice([0, 30]) * NS_PER_MS,
        load_window_ns=rng.choice([50, 1_000]) * NS_PER_MS,
    )


def _with_elastic_planes(config: SimConfig, seed: int) -> SimConfig:
    """Hosts with agents, strategies, priorities, models that may go to zero, broken feeds."""
    rng = random.Random(f"elastic {seed}")
    policies = tuple(
        replace(
            policy,
            instances_min=rng.choice([0, policy.instances_min]),
            priority=rng.choice([0, 0, 1]),
            idle_ns=rng.choice([10, 500]) * NS_PER_MS,
            scaling=rng.choice([None, None, TargetOngoing(2000, 900, 30 * NS_PER_MS)]),
        )
        for policy in config.controller.models
    )
    aims = random.Random(f"aims {seed}")
    policies = tuple(
        replace(policy, scaling=_aim(aims)) if aims.random() < 0.3 else policy
        for policy in policies
    )
    hosts: tuple[Host, ...] = ()
    placement, multicast = rng.choice(
        [
            (SpreadCopies(), "auto"),
            (SpreadCopies(), "chain"),
            (SpreadCopies(), "binomial"),
            (CacheCopies(50 * NS_PER_MS), "host"),
            (AllCopies(), "host"),
            (NoCopies(), "storage"),
        ]
    )
    needed = sum(p.spec.size_bytes * p.spec.tp_size for p in policies)
    if rng.random() < 0.7:
        # Often room for everything on every host, sometimes barely for all of it together.
        count = rng.randint(1, 3)
        largest = max(p.spec.size_bytes * p.spec.tp_size for p in policies)
        memory = rng.choice([needed, max(largest, needed // count)])
        hosts = tuple(Host(f"host-{n}", "leaf", memory) for n in range(count))
    else:
        placement, multicast = NoCopies(), rng.choice(["chain", "auto"])
        # Without host copies nothing brings back a model whose last instance went.
    faults: dict[str, object] = {}
    if config.faults.until_ns:
        faults = {
            "agent_losses": rng.choice([0, 0, 1, 3]),
            "feed_failures": rng.choice([0, 2, 20]),
            "stalls": rng.choice([0, 0, 3]),
            "stall_ns": rng.choice([10, 1000]) * NS_PER_MS,
        }
    controller: dict[str, object] = {
        "models": policies,
        "agents_expected": len(hosts),
        "placement": placement,
        "multicast": multicast,
        "chunk_bytes": MIB,
    }
    return changed(config, controller=controller, hosts=hosts, faults=faults)


def _with_changes(
    config: SimConfig, seed: int, until_ns: int
) -> tuple[SimConfig, dict[str, list[TraceRow]]]:
    """In a third of the worlds a model is published while the pool runs, and one is withdrawn."""
    rng = random.Random(f"changes {seed}")
    if rng.random() < 0.67:
        return config, {}
    changes, rows = [], {}
    if rng.random() < 0.7:
        spec = make_model("added", rng.randint(1, 6), rng.randint(1, 4) * MIB)
        # Where all workers are some model's by right it comes only when there is room.
        taken = sum(max(p.instances_min, 1) * p.spec.tp_size for p in config.controller.models)
        room = config.workers - taken
        if room > 0:
            policy = ModelPolicy(spec, rng.choice([0, 1]), room, idle_ns=50 * NS_PER_MS)
            at_ns = rng.randrange(until_ns)
            changes.append(ModelChange(at_ns, added=policy))
            rows["added"] = draw_rows(rng, until_ns)
    names = [policy.spec.name for policy in config.controller.models]
    if rng.random() < 0.7:
        changes.append(ModelChange(rng.randrange(until_ns), removed=rng.choice(names)))
    hosts = tuple(
        replace(host, memory_bytes=host.memory_bytes + rng.choice([0, 64 * MIB]))
        for host in config.hosts
    )
    return replace(config, changes=tuple(changes), hosts=hosts), rows


def _tp_size(seed: int, workers: int) -> int:
    """In a third of the worlds an instance takes several workers. (Drawn apart, so that worlds
    that were found before this was drawn stay the same.)"""
    return min(workers, random.Random(f"ranks {seed}").choice([1, 1, 1, 1, 2, 3]))


def _faults(rng: random.Random, until_ns: int) -> FaultConfig:
    if rng.random() < 0.2:
        return FaultConfig()
    return FaultConfig(
        worker_losses=rng.choice([0, 1, 3, 10]),
        rejoin_ns=rng.choice([1, 50, 500]) * NS_PER_MS,
        controller_restarts=rng.choice([0, 0, 1, 4]),
        downtime_ns=rng.choice([10, 100]) * NS_PER_MS,
        reconnect_ns_max=rng.choice([1, 20, 500]) * NS_PER_MS,
        late_permille=rng.choice([0, 50, 300]),
        late_ns_max=rng.choice([1, 20, 200]) * NS_PER_MS,
        cancelled_permille=rng.choice([0, 100, 400]),
        until_ns=until_ns,
    )


def draw_rows(rng: random.Random, until_ns: int) -> list[TraceRow]:
    """A steady load and a burst within it."""
    burst_ns = rng.randrange(until_ns)
    steady = [rng.randrange(until_ns) for _ in range(rng.randint(0, 20))]
    burst = [burst_ns + rng.randrange(20 * NS_PER_MS) for _ in range(rng.randint(0, 30))]
    return [
        TraceRow(arrival_ns, rng.randint(1, 300), rng.randint(1, 30))
        for arrival_ns in sorted(steady + burst)
    ]
