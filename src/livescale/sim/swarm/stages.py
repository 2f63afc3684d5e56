"""Models in stages, drawn from a seed, in a world without."""

from __future__ import annotations

import random
from collections.abc import Iterable

from msgspec.structs import replace

from livescale.sim.base.config import ModelChange, SimConfig
from livescale.sim.swarm.worlds import SwarmWorld, changed, has_room
from livescale.values.copy_strategies import KeyStageCopies
from livescale.values.scaling_policies import ModelPolicy, ScalingPolicy, StagesByQueue
from livescale.values.stages import even_stages, stage_specs
from livescale.values.types import ModelSpec
from livescale.values.units import NS_PER_MS


def with_stages(world: SwarmWorld) -> SwarmWorld:
    """In a quarter of the worlds whose instances have neither roles nor teams a model has stages,
    each with limits of its own, and KV for the longest requests in each share."""
    rng = random.Random(f"parts of models drawn for {world.seed}")
    config = world.config
    whole = config.controller.models[0]
    layers = whole.spec.layers - 2
    is_other = bool(whole.roles) or config.controller.teams is not None
    if rng.randrange(4) or is_other or whole.spec.tp_size > 1 or layers < 2:
        return world
    spec = replace(whole.spec, row_bytes_per_token=rng.choice([0, 256, 4096]), is_tied=False)
    count = rng.randint(2, min(layers, 4))
    specs = stage_specs(spec, even_stages(spec, count))
    whole = replace(whole, scaling=_scaling(whole, random.Random(f"by queues {world.seed}")))
    models = (*_staged(whole, specs, rng), *config.controller.models[1:])
    needed = sum(max(p.instances_min, 1) * p.spec.tp_size for p in models)
    added = [change.added for change in config.changes if change.added is not None]
    # One that may have no instance, too: stages give up none for it.
    to_come = sum(max(policy.instances_min, 1) * policy.spec.tp_size for policy in added)
    more = max(needed + max(rng.randint(0, 3), to_come) - config.workers, 0)
    # A stage takes any device that it fits on, and stays where a larger one then lacks room.
    largest = max(spec.size_bytes for spec in specs)
    devices = tuple(
        replace(one, arena_bytes=max(one.arena_bytes, largest))
        for one in (*config.devices, *((config.devices[0],) * more))
    )
    changes = [
        staged for change in config.changes for staged in _changes(change, whole, specs, rng)
    ]
    controller: dict[str, object] = {"models": models, "workers_expected": len(devices)}
    config = replace(config, devices=devices, changes=tuple(changes), kv_blocks=512)
    controller |= _host_memory(config, random.Random(f"key stages {world.seed}"))
    drawn = changed(config, controller=controller)
    if not has_room(drawn):
        drawn = changed(drawn, changes=_with_least(changes, models))
    return SwarmWorld(world.rows, drawn, world.seed)


def _host_memory(config: SimConfig, rng: random.Random) -> dict[str, object]:
    """Where all hosts read the models' files, half of the worlds keep key stages in host memory.
    Stages are placed in any way."""
    drawn: dict[str, object] = {
        "stage_placement": rng.choice(["as-models", "quart", "quart", "spread"])
    }
    read_files = [one.reads_files for one in config.devices]
    read_files += [one.reads_files for one in config.hosts]
    if config.hosts and all(read_files) and rng.random() < 0.5:
        drawn["placement"] = KeyStageCopies(rng.choice([85, 85, 50, 100]))
        drawn["multicast"] = rng.choice(["auto", "host"])
    return drawn


def _scaling(policy: ModelPolicy, rng: random.Random) -> ScalingPolicy | None:
    """In half of the worlds all stages scale together, by what waits at them."""
    if rng.random() < 0.5:
        return policy.scaling
    return StagesByQueue(
        slo_ns=rng.choice([20, 200, 1_000]) * NS_PER_MS,
        period_ns=rng.choice([20, 200]) * NS_PER_MS,
        scale_down_timeout_ns=rng.choice([30, 500]) * NS_PER_MS,
        replicas_total=rng.choice([None, 8]),
        smooths=rng.random() < 0.5,
        is_uniform=rng.random() < 0.3,
    )


def _staged(
    policy: ModelPolicy, specs: Iterable[ModelSpec], rng: random.Random
) -> list[ModelPolicy]:
    """Each stage needs an instance at least. Capacity is that of the whole model: not known."""
    found = []
    for spec in specs:
        least = rng.choice([1, 1, max(policy.instances_min, 1)])
        most = max(least, rng.choice([least, policy.instances_max]))
        found.append(
            replace(
                policy,
                spec=spec,
                instances_min=least,
                instances_max=most,
                prefill_tokens_per_s=None,
                kv_blocks=None,
            )
        )
    return found


def _changes(
    change: ModelChange, whole: ModelPolicy, specs: tuple[ModelSpec, ...], rng: random.Random
) -> list[ModelChange]:
    """What is changed of the model is changed of each stage."""
    name = whole.spec.name
    if change.removed == name:
        return [ModelChange(change.at_ns, removed=spec.name) for spec in specs]
    if change.changed is not None and change.changed.spec.name == name:
        staged = _staged(replace(change.changed, scaling=whole.scaling), specs, rng)
        return [ModelChange(change.at_ns, changed=policy) for policy in staged]
    return [change]


def _with_least(
    changes: Iterable[ModelChange], models: Iterable[ModelPolicy]
) -> tuple[ModelChange, ...]:
    """The least numbers of instances stay those of the start: there is no room for more."""
    least = {policy.spec.name: policy.instances_min for policy in models}

    def kept(policy: ModelPolicy | None) -> ModelPolicy | None:
        if policy is None or policy.spec.name not in least:
            return policy
        own = min(policy.instances_min, least[policy.spec.name])
        return replace(policy, instances_min=own)

    return tuple(replace(change, changed=kept(change.changed)) for change in changes)
