"""Limits that change while a drawn world runs: part of the swarm, drawn apart from all else."""

from __future__ import annotations

import random

import msgspec

from livescale.sim.config import ModelChange, SimConfig
from livescale.sim.swarm.worlds import MS, SwarmWorld

_UNTIL_NS = 3_000 * MS


def with_changed_limits(world: SwarmWorld) -> SwarmWorld:
    """In a third of the worlds a model of the start gets other limits, once or twice.

    A least number rises only where every model still gets an instance beside the least numbers of
    all others. No model gives up its least number: without room beside them requests wait for
    ever, and the world is impossible. (A pool's gateway ends such requests after the queue timeout,
    which drawn worlds do not have.)
    """
    rng = random.Random(f"limits {world.seed}")
    if rng.random() < 0.67:
        return world
    config = world.config
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
        at_ns = rng.randrange(_UNTIL_NS)
        drawn = _with_change(config, ModelChange(at_ns, changed=changed))
        if least > policy.instances_min and not _has_room(drawn):
            changed = msgspec.structs.replace(changed, instances_min=policy.instances_min)
            drawn = _with_change(config, ModelChange(at_ns, changed=changed))
        config = drawn
    return SwarmWorld(world.rows, config, world.seed)


def _has_room(config: SimConfig) -> bool:
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


def _with_change(config: SimConfig, change: ModelChange) -> SimConfig:
    return msgspec.structs.replace(config, changes=(*config.changes, change))
