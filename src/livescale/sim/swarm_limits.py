"""Limits that change while a drawn world runs: part of the swarm, drawn apart from all else."""

from __future__ import annotations

import random

import msgspec

from livescale.sim.config import ModelChange
from livescale.sim.swarm_worlds import MS, SwarmWorld

_UNTIL_NS = 3_000 * MS


def with_changed_limits(world: SwarmWorld) -> SwarmWorld:
    """In a third of the worlds a model of the start gets other limits, once or twice. Of its least
    number there are workers in every world: no more than it may come to have anyway."""
    rng = random.Random(f"limits {world.seed}")
    if rng.random() < 0.67:
        return world
    config = world.config
    changes = []
    for _ in range(rng.randint(1, 2)):
        policy = rng.choice(config.controller.models)
        least = rng.randint(0, max(policy.instances_min, 1))
        changed = msgspec.structs.replace(
            policy,
            instances_min=least,
            instances_max=rng.randint(max(least, 1), max(config.workers, least)),
            priority=rng.choice([0, 1, 2]),
            idle_ns=rng.choice([10, 500]) * MS,
        )
        changes.append(ModelChange(rng.randrange(_UNTIL_NS), changed=changed))
    config = msgspec.structs.replace(config, changes=(*config.changes, *changes))
    return SwarmWorld(world.rows, config, world.seed)
