"""Live scaling drawn from a seed, in a world that was drawn without it."""

from __future__ import annotations

import random

from msgspec.structs import replace

from livescale.batching.live.live_batch import LiveLimits
from livescale.control.state.config import ANY_PAIR, PairRule
from livescale.load.traces import TraceRow
from livescale.sim.swarm.worlds import SwarmWorld, changed
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.units import NS_PER_MS

_SPAN_NS = 6_000 * NS_PER_MS


def with_live(world: SwarmWorld) -> SwarmWorld:
    """The world with loading instances that help, or as it is. Limits are small, so that they are
    met, and partners are given up early in some worlds."""
    rng = random.Random(f"live {world.seed}")
    order = rng.choice(["zigzag"] * 3 + ["best-effort"] * 2 + ["overlap", "stop-the-world"])
    if order == "stop-the-world":
        return world
    config = world.config
    row_bytes = rng.choice([0, 256, 1 << 16])

    def with_rows(policy: ModelPolicy) -> ModelPolicy:
        spec = replace(policy.spec, row_bytes_per_token=row_bytes)
        return replace(policy, spec=spec)

    controller = {
        "models": tuple(map(with_rows, config.controller.models)),
        "live_order": order,
        "live_over_ns": rng.choice([0, 0, 0, config.controller.live_over_ns]),
        "live_ahead_max": rng.choice([1, 8, 32]),
        "pairs": random.Random(f"pairs {world.seed}").choice(
            [None, ANY_PAIR, ANY_PAIR, PairRule(load_tokens_min=100)]
        ),
    }
    batches_max, batch_tokens_max = rng.choice([1, 2, 16]), rng.choice([16, 300, 2048])
    span_ns = rng.choice([1, 5, 20]) * NS_PER_MS
    limits = LiveLimits(
        batches_max=batches_max,
        batch_tokens_max=batch_tokens_max,
        span_ns=span_ns,
        # As long as a Run full of prompts, or no longer than one live Run.
        gap_ns=0 if span_ns == 5 * NS_PER_MS else span_ns,
        kv_layers_ahead=rng.choice([1, 4]),
        answer_ns=rng.choice([30, 300, 5000]) * NS_PER_MS,
        decodes_first=random.Random(f"decodes {world.seed}").random() < 0.8,
        kv_holds_pulls=random.Random(f"kv {world.seed}").random() < 0.8,
        kv_follows=random.Random(f"kv follows {world.seed}").random() < 0.8,
        kv_straight=random.Random(f"kv straight {world.seed}").random() < 0.8,
        pull_early_permille=random.Random(f"early {world.seed}").choice([0, 500, 2000]),
        move_factor=random.Random(f"moves {world.seed}").choice([0, 1, 16]),
    )
    changes = tuple(
        change if change.added is None else replace(change, added=with_rows(change.added))
        for change in config.changes
    )
    world = world.changed(controller=controller, live=limits, changes=changes)
    return with_long_loads(world, rng) if rng.random() < 0.6 else world


def with_long_loads(world: SwarmWorld, rng: random.Random) -> SwarmWorld:
    """Links on which a load takes its time, room for the KV of many requests, and bursts that
    overload those that serve: there is something to help with while layers arrive."""
    config = world.config
    most_bytes = max(policy.spec.size_bytes for policy in config.policies)
    rate = most_bytes * 1_000 // rng.choice([100, 300, 1_000])

    def grown(policy: ModelPolicy) -> ModelPolicy:
        known = rng.choice([policy.prefill_tokens_per_s, 5_000])
        least = max(policy.instances_min, 1)
        return replace(
            policy, instances_min=least, instances_max=config.workers, prefill_tokens_per_s=known
        )

    models = config.controller.models
    needed = sum(max(policy.instances_min, 1) * policy.spec.tp_size for policy in models)
    if needed < config.workers:
        models = tuple(map(grown, models))
    devices = tuple(
        replace(device, uplink_bytes_per_s=rate, downlink_bytes_per_s=rate)
        for device in config.devices
    )
    faults = {}
    if config.faults.until_ns:
        faults = {"until_ns": _SPAN_NS, "pair_loss_permille": rng.choice([0, 100, 300])}
    rows = {}
    for model, steady in world.rows.items():
        burst = [row for _ in range(rng.randint(1, 4)) for row in _burst(rng)]
        rows[model] = sorted([*steady, *burst], key=lambda row: row.arrival_ns)
    controller = {"models": models, "sequences_max": rng.choice([4, 32])}
    config = changed(config, controller=controller, devices=devices, faults=faults, kv_blocks=512)
    return SwarmWorld(rows, config, world.seed)


def _burst(rng: random.Random) -> list[TraceRow]:
    start_ns, gap_ns = rng.randrange(_SPAN_NS), rng.choice([0, NS_PER_MS])
    return [
        TraceRow(start_ns + number * gap_ns, rng.randint(1, 300), rng.randint(1, 30))
        for number in range(rng.randint(5, 40))
    ]
