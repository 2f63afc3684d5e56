"""Draining instances that pass on what they have, drawn from a seed, in a world without."""

from __future__ import annotations

import random

from msgspec.structs import replace

from livescale.load.traces import TraceRow
from livescale.sim.swarm.worlds import SwarmWorld, changed
from livescale.values.scaling_policies import Bounds, ModelPolicy
from livescale.values.units import NS_PER_MS

_SPAN_NS = 4_000 * NS_PER_MS


def with_drains(world: SwarmWorld) -> SwarmWorld:
    """Instances that drain pass on what they have in two of three worlds; in half of these there
    are many instances with long answers to pass on."""
    rng = random.Random(f"drains {world.seed}")
    if rng.randrange(3) == 0:
        return world
    config = changed(world.config, controller={"drain": "move"})
    gap_ns = rng.choice([0, 0, 1, 20]) * NS_PER_MS
    config = replace(config, live=replace(config.live, gap_ns=gap_ns or config.live.gap_ns))
    world = SwarmWorld(world.rows, config, world.seed)
    return _with_long_answers(world, rng) if rng.random() < 0.5 else world


def _with_long_answers(world: SwarmWorld, rng: random.Random) -> SwarmWorld:
    """Bursts of prompts for which a model grows, and whose answers take longer than the time after
    which it shrinks again."""
    config = world.config
    models = config.controller.models
    needed = sum(max(policy.instances_min, 1) * policy.spec.tp_size for policy in models)

    def grown(policy: ModelPolicy) -> ModelPolicy:
        rate = policy.prefill_tokens_per_s or 2_000
        return replace(policy, instances_max=config.workers, prefill_tokens_per_s=rate)

    if needed < config.workers:
        models = tuple(map(grown, models))
    scaling = config.controller.scaling
    if isinstance(scaling, Bounds):
        timeout_ns = rng.choice([5, 30]) * NS_PER_MS
        scaling = replace(scaling, load_window_ns=50 * NS_PER_MS, scale_down_timeout_ns=timeout_ns)
    rows = {}
    for model, steady in world.rows.items():
        burst = [row for _ in range(rng.randint(1, 3)) for row in _burst(rng)]
        rows[model] = sorted([*steady, *burst], key=lambda row: row.arrival_ns)
    controller = {"models": models, "scaling": scaling}
    return SwarmWorld(rows, changed(config, controller=controller), world.seed)


def _burst(rng: random.Random) -> list[TraceRow]:
    start_ns = rng.randrange(_SPAN_NS)
    return [
        TraceRow(start_ns + number * NS_PER_MS, rng.randint(1, 200), rng.randint(20, 300))
        for number in range(rng.randint(4, 30))
    ]
