"""Bounds that make requests fail, drawn from a seed around a world that was drawn with narrow ones.

In most worlds these are wide, so that what fails in them is little and what is served is much. The
faults stay as they are.
"""

from __future__ import annotations

import random

import msgspec

from livescale.sim.config import SimConfig
from livescale.sim.swarm.worlds import SwarmWorld
from livescale.traces import TraceRow

_NARROW_SHARE = 0.04
"""Of the worlds so many keep each of the narrow bounds."""
_STRAYS = 12
"""Where bounds are wide, one of so many requests may be for a model that is not served."""


def with_wide_bounds(world: SwarmWorld) -> SwarmWorld:
    """The world with most of its bounds widened."""
    rng = random.Random(f"bounds {world.seed}")
    rows, config = world.rows, world.config
    controller = config.controller
    if rng.random() >= _NARROW_SHARE:
        rows = _with_few_strays(rows, config)
    if rng.random() >= _NARROW_SHARE:
        attempts = controller.request_attempts_max + rng.choice([2, 5, 20])
        controller = msgspec.structs.replace(controller, request_attempts_max=attempts)
    if rng.random() >= _NARROW_SHARE:
        failures = controller.load_failures_max + rng.choice([10, 30])
        controller = msgspec.structs.replace(controller, load_failures_max=failures)
    config = msgspec.structs.replace(config, controller=controller)
    if rng.random() >= _NARROW_SHARE:
        most = max(config.queue_requests_max, _places(rows))
        config = msgspec.structs.replace(config, queue_requests_max=most)
    return SwarmWorld(rows, config, world.seed)


# -- helpers, in the order used -------------------------------------------------------------------


def _with_few_strays(
    rows: dict[str, list[TraceRow]], config: SimConfig
) -> dict[str, list[TraceRow]]:
    """The last requests before a model is there, and the first ones after it was withdrawn."""
    added = {c.added.spec.name: c.at_ns for c in config.changes if c.added is not None}
    removed = {c.removed: c.at_ns for c in config.changes if c.removed}
    found = {}
    for model, load in rows.items():
        begin_ns, end_ns = added.get(model, 0), removed.get(model)
        early = [row for row in load if row.arrival_ns < begin_ns]
        late = [row for row in load if end_ns is not None and row.arrival_ns >= end_ns]
        served = [row for row in load if row not in early and row not in late]
        few = len(served) // _STRAYS
        found[model] = [*early[len(early) - few // 2 :], *served, *late[: few - few // 2]]
    return found


def _places(rows: dict[str, list[TraceRow]]) -> int:
    """Places in the line for all but every twelfth request, should all of them wait at a time."""
    total = sum(map(len, rows.values()))
    places = max(map(len, rows.values()), default=0)
    while places > 1 and sum(max(0, len(r) - places + 1) for r in rows.values()) * _STRAYS <= total:
        places -= 1
    return places
