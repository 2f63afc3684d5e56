"""Instances that serve in teams while they load, drawn from a seed, in a world without."""

from __future__ import annotations

import random

from msgspec.structs import replace

from livescale.batching.live.live_batch import TEAM_ENDS
from livescale.latency.work import LinearLatency
from livescale.load.traces import TraceRow
from livescale.sim.base.config import ModelChange
from livescale.sim.swarm.live import with_long_loads
from livescale.sim.swarm.worlds import MIB, SwarmWorld, make_device, make_model
from livescale.values.bindings import LateBinding
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.units import NS_PER_MS


def with_teams(world: SwarmWorld) -> SwarmWorld:
    """In a third of the worlds instances that load serve in teams, mostly of the multicast that is
    meant for these, and in most of these worlds loads take their time."""
    rng = random.Random(f"teams {world.seed}")
    if rng.randrange(3):
        return world
    multicast = rng.choice([world.config.controller.multicast, "binomial", "binomial"])
    if multicast == "host":
        multicast = "host-k-way"
    teams = rng.choice(["cover", "pairs"])
    live = replace(world.config.live, team_end=rng.choice(TEAM_ENDS))
    world = world.changed(controller={"teams": teams, "multicast": multicast}, live=live)
    if world.config.faults.until_ns:
        lines = random.Random(f"lines between members {world.seed}")
        world = world.changed(faults={"line_loss_permille": lines.choice([0, 10, 100])})
    # Least numbers of models with roles are those of their roles.
    if any(policy.roles for policy in world.config.controller.models):
        return world
    loads = random.Random(f"loads of teams {world.seed}")
    if loads.random() < 0.5:
        return _with_team_loads(world, loads)
    if rng.random() < 0.2:
        return world
    return with_long_loads(_with_sources(world), rng)


def _with_sources(world: SwarmWorld) -> SwarmWorld:
    """Two instances of each model are there, where there are workers for more than these: from a
    single one no team forms before all of the model is nearly there."""
    config = world.config
    models = config.controller.models
    needed = sum(2 * policy.spec.tp_size for policy in models)
    largest = max(policy.spec.size_bytes for policy in models)
    roomy = sum(device.arena_bytes >= largest for device in config.devices)
    if needed + 2 > roomy or config.changes:
        return world
    if any(policy.instances_max < 3 for policy in models):
        return world
    grown = tuple(replace(p, instances_min=max(p.instances_min, 2)) for p in models)
    return world.changed(controller={"models": grown})


def _with_team_loads(world: SwarmWorld, rng: random.Random) -> SwarmWorld:
    """One model that loads on all other workers at once while its prompts wait: what teams are for,
    which bursts and limits drawn by chance hardly ever come to. Faults and all else stay, and last
    as long as the load."""
    sources, targets = rng.choice([1, 2, 2, 3]), rng.randint(2, 6)
    layers, load_ns = rng.randint(2, 34), rng.choice([300, 1_200]) * NS_PER_MS
    spec = make_model("m0", layers, rng.randint(1, 4) * MIB)
    rate = spec.size_bytes * 1_000 * NS_PER_MS // load_ns
    policy = ModelPolicy(spec, instances_min=sources, instances_max=sources)
    everywhere = sources + targets
    grown = replace(policy, instances_min=everywhere, instances_max=everywhere)
    start_ns = 4_000 * NS_PER_MS
    controller = {
        "models": (policy,),
        "workers_expected": everywhere,
        "chunk_bytes": 64 << 10,
        "sequences_max": rng.choice([4, 16]),
        "binding": rng.choice(
            [world.config.controller.binding, LateBinding(ahead_tokens_max=32, run_tokens_max=16)]
        ),
    }
    faults = {"until_ns": start_ns + 2 * load_ns} if world.config.faults.until_ns else {}
    prompts = [
        TraceRow(
            start_ns - rng.randrange(1_000) * NS_PER_MS, rng.randint(4, 64), rng.choice([1, 1, 8])
        )
        for _ in range(rng.randint(50, 300))
    ]
    rows = {"m0": sorted(prompts, key=lambda row: row.arrival_ns)}
    changed = world.changed(
        controller=controller,
        faults=faults,
        devices=(make_device(rate),) * everywhere,
        hosts=(),
        latency={"": LinearLatency(2 * NS_PER_MS, rng.choice([NS_PER_MS // 4, NS_PER_MS]))},
        run_tokens_max=rng.choice([16, 128]),
        kv_blocks=512,
        queue_requests_max=1_000,
        changes=(ModelChange(start_ns, changed=grown),),
    )
    return SwarmWorld(rows, changed.config, world.seed)
