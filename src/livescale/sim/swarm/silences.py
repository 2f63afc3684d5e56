"""Members that fall silent, drawn from a seed, in a world that was drawn without them."""

from __future__ import annotations

import random

import msgspec

from livescale.sim.swarm.worlds import MS, SwarmWorld


def with_silence(world: SwarmWorld) -> SwarmWorld:
    """In a third of the worlds with faults members stop or are cut off, for less and for more than
    anybody waits for them."""
    rng = random.Random(f"silence {world.seed}")
    faults = world.config.faults
    if not faults.until_ns or rng.random() < 0.67:
        return world
    faults = msgspec.structs.replace(
        faults,
        silences=rng.choice([1, 5, 20]),
        silence_ns_max=rng.choice([50, 300, 2_000]) * MS,
        lost_after_ns=rng.choice([50, 200]) * MS,
    )
    config = msgspec.structs.replace(world.config, faults=faults)
    return SwarmWorld(world.rows, config, world.seed)
