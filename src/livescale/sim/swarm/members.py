"""Members that refuse loads, and clocks that jump, drawn from a seed in a world without."""

from __future__ import annotations

import random

import msgspec

from livescale.sim.swarm.worlds import MS, SwarmWorld


def with_refusals_and_jumps(world: SwarmWorld) -> SwarmWorld:
    """In a third of the worlds with faults members refuse what they are to hold for a while; in a
    third clocks jump."""
    rng = random.Random(f"members {world.seed}")
    faults = world.config.faults
    if not faults.until_ns:
        return world
    if rng.random() < 0.33:
        faults = msgspec.structs.replace(
            faults, refusals=rng.choice([1, 5, 20]), refusal_ns=rng.choice([5, 50, 500]) * MS
        )
    if rng.random() < 0.33:
        faults = msgspec.structs.replace(
            faults,
            clock_jumps=rng.choice([1, 5, 20]),
            clock_jump_ns_max=rng.choice([10, 1_000, 100_000]) * MS,
        )
    config = msgspec.structs.replace(world.config, faults=faults)
    return SwarmWorld(world.rows, config, world.seed)
