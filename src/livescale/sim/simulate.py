"""One simulation from loads to results: the way in for commands, benchmarks and tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from livescale.member.member import Member
from livescale.sim.config import SimConfig
from livescale.sim.faults import Delays, plan_faults
from livescale.sim.gateway import Row
from livescale.sim.run_notes import InstanceCount
from livescale.sim.world import SimWorld
from livescale.telemetry.record import RequestLine, ScaleLine


@dataclass(frozen=True, slots=True)
class SimResult:
    """What came of a run. Times are nanoseconds of virtual time since its start.

    Request lines come in the order in which requests ended, scale lines in order of completion;
    `instances` has one entry for every change of a model's counts.
    """

    requests: tuple[RequestLine, ...]
    scales: tuple[ScaleLine, ...]
    instances: tuple[InstanceCount, ...]
    steps: int
    stale_events: int
    actions: int
    end_ns: int


def simulate(
    rows: Sequence[Row] | Mapping[str, Sequence[Row]],
    config: SimConfig,
    seed: int,
    record_file: IO[bytes] | None = None,
    make_member: Callable[..., Member] = Member,
) -> SimResult:
    """Run the load through a simulated pool until everything has come to rest.

    `rows` is the load of the only model, or loads by model name. The seed decides faults and
    delays; the same arguments give the same result and, byte for byte, the same record. Every
    member is made by `make_member`, of the arguments of a Member. Raises InvariantBroken when a
    rule of the simulated world breaks.
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
    delays = Delays(config.faults, config.message_delay_ns, seed)
    world = SimWorld(config, plan, delays, record_file, make_member)
    for _, request, model, row in arrivals:
        world.arrive_at(request, model, row)
    world.run()
    return SimResult(
        requests=tuple(world.notes.requests),
        scales=tuple(world.notes.scales),
        instances=tuple(world.notes.instances),
        steps=world.steps,
        stale_events=world.stale_events,
        actions=world.clock.actions_run,
        end_ns=world.clock.now_ns,
    )
