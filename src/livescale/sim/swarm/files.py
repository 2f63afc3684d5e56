"""Files of models that go bad for a while, drawn from a seed in a world that was drawn without."""

from __future__ import annotations

import random

import msgspec

from livescale.sim.swarm.worlds import MS, SwarmWorld


def with_bad_files(world: SwarmWorld) -> SwarmWorld:
    """The world with files that cannot be loaded now and then, or as it is. Failed loads are
    given up early and tried again soon in some worlds."""
    rng = random.Random(f"files {world.seed}")
    faults = world.config.faults
    if not faults.until_ns or rng.random() < 0.5:
        return world
    faults = msgspec.structs.replace(
        faults, bad_files=rng.choice([1, 3, 10]), bad_files_ns=rng.choice([50, 500, 5_000]) * MS
    )
    controller = msgspec.structs.replace(
        world.config.controller,
        load_failures_max=rng.choice([1, 2, 3]),
        load_retry_ns_max=rng.choice([20, 1_000, 30_000]) * MS,
    )
    config = msgspec.structs.replace(world.config, faults=faults, controller=controller)
    return SwarmWorld(world.rows, config, world.seed)
