"""The swarm: worlds drawn from seeds, each run with faults until they stop and then to its rest.

A seed is a whole history: the world, its load and its faults follow from it, and so does whatever
goes wrong in it. While faults happen the checkers watch; afterwards every request must end, every
load finish and every order be answered within `SimConfig.grace_ns` of virtual time.
"""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass
from typing import IO

from livescale.sim.base.run_notes import SimResult
from livescale.sim.checkers.invariants import UnexplainedFailure
from livescale.sim.swarm import additions
from livescale.sim.swarm.drains import with_drains
from livescale.sim.swarm.fabrics import with_fabric
from livescale.sim.swarm.live import with_live
from livescale.sim.swarm.roles import with_roles
from livescale.sim.swarm.stage_cores import with_cores
from livescale.sim.swarm.stage_policies import with_stage_policies
from livescale.sim.swarm.stages import with_stages
from livescale.sim.swarm.teams import with_teams
from livescale.sim.swarm.worlds import SwarmWorld, draw_flat_world
from livescale.sim.world.simulate import simulate
from livescale.values.types import Outcome


@dataclass(frozen=True, slots=True)
class SeedOutcome:
    """What came of one seed: `error` is empty when every rule held.

    Of its `requests` so many `failed`, as they had to; both are 0 when a rule broke. With
    `is_unexplained` that rule was: a request failed that need not.
    """

    seed: int
    events: int
    requests: int = 0
    failed: int = 0
    is_unexplained: bool = False
    error: str = ""
    #: where it was raised, for a person
    trace: str = ""


def draw_world(seed: int) -> SwarmWorld:
    """The world of a seed."""
    drawn = additions.with_demand(additions.with_gateways(draw_lone_world(seed)))
    return additions.with_timeouts(drawn)


def draw_lone_world(seed: int) -> SwarmWorld:
    """The same with one gateway."""
    return additions.with_poison(additions.with_wide_bounds(draw_narrow_world(seed)))


def draw_narrow_world(seed: int) -> SwarmWorld:
    """The same with all its bounds narrow: much fails in it."""
    drawn = additions.with_bad_files(with_live(with_fabric(draw_flat_world(seed))))
    drawn = additions.with_refusals_and_jumps(additions.with_silence(drawn))
    drawn = additions.with_clients(additions.with_changed_limits(drawn))
    drawn = with_drains(additions.with_spares_ahead(additions.with_binding(drawn)))
    drawn = additions.with_takeovers(additions.with_tight_arenas(drawn))
    drawn = with_stages(with_teams(with_roles(additions.with_stays(drawn))))
    return additions.with_schedule(with_stage_policies(with_cores(drawn)))


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
        return SeedOutcome(
            seed,
            0,
            is_unexplained=isinstance(error, UnexplainedFailure),
            error=f"{type(error).__name__}: {error}",
            trace=traceback.format_exc(),
        )
    outcomes = Counter(line.outcome for line in result.requests)
    return SeedOutcome(seed, result.actions, outcomes.total(), outcomes[Outcome.FAILED])
