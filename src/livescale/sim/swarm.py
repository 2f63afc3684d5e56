"""The swarm: worlds drawn from seeds, each run with faults until they stop and then to its rest.

A seed is a whole history: the world, its load and its faults follow from it, and so does whatever
goes wrong in it. While faults happen the checkers watch; afterwards every request must end, every
load finish and every order be answered within `SimConfig.grace_ns` of virtual time.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import IO

from livescale.sim.simulate import SimResult, simulate
from livescale.sim.swarm_clients import with_clients
from livescale.sim.swarm_fabrics import with_fabric
from livescale.sim.swarm_files import with_bad_files
from livescale.sim.swarm_limits import with_changed_limits
from livescale.sim.swarm_live import with_live
from livescale.sim.swarm_silence import with_silence
from livescale.sim.swarm_worlds import SwarmWorld, draw_flat_world


@dataclass(frozen=True, slots=True)
class SeedOutcome:
    """What came of one seed: `error` is empty when every rule held."""

    seed: int
    events: int
    error: str = ""
    #: where it was raised, for a person
    trace: str = ""


def draw_world(seed: int) -> SwarmWorld:
    """The world of a seed."""
    drawn = with_bad_files(with_live(with_fabric(draw_flat_world(seed))))
    return with_clients(with_changed_limits(with_silence(drawn)))


def run_world(world: SwarmWorld, record_file: IO[bytes] | None = None) -> SimResult:
    """Run a world to its rest. Raises what breaks: InvariantBroken, or the product's own error."""
    result = simulate(world.rows, world.config, world.seed, record_file)
    sent = sum(len(rows) for rows in world.rows.values())
    assert len(result.requests) == sent, f"{len(result.requests)} of {sent} requests are written"
    return result


def run_seed(seed: int) -> SeedOutcome:
    """Run the world of a seed; whatever it raises is the outcome."""
    try:
        result = run_world(draw_world(seed))
    except Exception as error:
        return SeedOutcome(seed, 0, f"{type(error).__name__}: {error}", traceback.format_exc())
    return SeedOutcome(seed, result.actions)
