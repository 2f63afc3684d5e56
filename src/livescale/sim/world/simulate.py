"""One simulation from loads to results: the way in for commands, benchmarks and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO

from livescale.load.traces import TraceRow
from livescale.sim.base.config import SimConfig
from livescale.sim.base.run_notes import SimResult
from livescale.sim.world.faults import plan_faults
from livescale.sim.world.world import SimWorld


def simulate(
    rows: Sequence[TraceRow] | Mapping[str, Sequence[TraceRow]],
    config: SimConfig,
    seed: int,
    record_file: IO[bytes] | None = None,
) -> SimResult:
    """Run the load through a simulated pool until everything has come to rest.

    `rows` is the load of the only model, or loads by model name. The seed decides faults and
    delays; the same arguments give the same result and, byte for byte, the same record. Raises
    InvariantBroken when a rule of the simulated world breaks.
    """
    loads = rows if isinstance(rows, Mapping) else {config.controller.models[0].spec.name: rows}
    arrivals = [
        (row.arrival_ns, f"{model}-{number}", model, row)
        for model, load in loads.items()
        for number, row in enumerate(load)
    ]
    arrivals.sort(key=lambda arrival: arrival[:2])
    ids = [(arrival_ns, request) for arrival_ns, request, _, _ in arrivals]
    plan = plan_faults(config.faults, config.workers, len(config.hosts), ids, seed)
    world = SimWorld(config, plan, seed, record_file)
    for _, request, model, row in arrivals:
        world.arrive_at(request, model, row)
    return world.run()
