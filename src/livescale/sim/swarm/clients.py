"""Clients drawn from a seed, in a world that was drawn with one."""

from __future__ import annotations

import random

import msgspec

from livescale.sim.swarm.worlds import SwarmWorld


def with_clients(world: SwarmWorld) -> SwarmWorld:
    """In half of the worlds two to five clients share the pool, in some with weights."""
    rng = random.Random(f"clients {world.seed}")
    if rng.random() < 0.5:
        return world
    weights = tuple(rng.choice([1, 1, 2, 5]) for _ in range(rng.randint(2, 5)))
    config = msgspec.structs.replace(world.config, client_weights=weights)
    return SwarmWorld(world.rows, config, world.seed)
