"""What stages scale by, drawn from a seed, in a world whose stages scale by their queues."""

from __future__ import annotations

import random

from msgspec.structs import replace

from livescale.config.variation import variation_weights
from livescale.sim.base.config import ModelChange
from livescale.sim.swarm.worlds import SwarmWorld, changed
from livescale.values.scaling_policies import (
    LinePolicy,
    ModelPolicy,
    StagesByQueue,
    StagesByRate,
)
from livescale.values.units import NS_PER_MS


def with_stage_policies(world: SwarmWorld) -> SwarmWorld:
    """In half of the worlds whose stages scale by their queues the learned weights predict how
    evenly requests come, and more have a total (R_total) than without. In two fifths of those whose
    cores are left alone stages scale by the rate of requests instead."""
    rng = random.Random(f"policies of stages {world.seed}")
    config = world.config
    found = [p.scaling for p in config.controller.models if p.spec.stage is not None]
    policy = next((scaling for scaling in found if isinstance(scaling, StagesByQueue)), None)
    if policy is None:
        return world
    scaling = _drawn(policy, len(found), rng)
    models = tuple(_scaled(one, scaling) for one in config.controller.models)
    changes = tuple(_changed(change, scaling) for change in config.changes)
    drawn = changed(config, controller={"models": models}, changes=changes)
    return SwarmWorld(world.rows, drawn, world.seed)


def _drawn(policy: StagesByQueue, stages: int, rng: random.Random) -> LinePolicy:
    total = rng.choice([policy.replicas_total, stages + rng.randint(0, 4)])
    if policy.cores is None and rng.random() < 0.4:
        return StagesByRate(
            period_ns=policy.period_ns,
            scale_down_timeout_ns=policy.scale_down_timeout_ns,
            replicas_total=total,
            busy_permille=rng.choice([500, 800]),
            envelope_ns=rng.choice([200, 1_000]) * NS_PER_MS,
            part_ns=rng.choice([50, 200]) * NS_PER_MS,
            planned_per_1000_s=rng.choice([0, 0, 50_000]),
            ahead_ns=rng.choice([None, 100 * NS_PER_MS]),
            is_uniform=policy.is_uniform,
        )
    weights = variation_weights() if rng.random() < 0.5 else None
    return replace(policy, replicas_total=total, weights=weights)


def _scaled(policy: ModelPolicy, scaling: LinePolicy) -> ModelPolicy:
    return policy if policy.spec.stage is None else replace(policy, scaling=scaling)


def _changed(change: ModelChange, scaling: LinePolicy) -> ModelChange:
    if change.changed is None:
        return change
    return replace(change, changed=_scaled(change.changed, scaling))
