"""What was added to drawn worlds later: more kinds of faults, and clients. Each is drawn apart from
all else, in a world that was drawn without."""

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


def with_clients(world: SwarmWorld) -> SwarmWorld:
    """In half of the worlds two to five clients share the pool, in some with weights."""
    rng = random.Random(f"clients {world.seed}")
    if rng.random() < 0.5:
        return world
    weights = tuple(rng.choice([1, 1, 2, 5]) for _ in range(rng.randint(2, 5)))
    config = msgspec.structs.replace(world.config, client_weights=weights)
    return SwarmWorld(world.rows, config, world.seed)
