"""Stages whose workers get and lose cores, drawn from a seed, in a world with stages."""

from __future__ import annotations

import random
from collections import Counter

from msgspec.structs import replace

from livescale.clusters.topology import Device
from livescale.latency.work import LinearLatency, RunWork
from livescale.load.traces import TraceRow
from livescale.sim.base.config import ModelChange, SimConfig
from livescale.sim.swarm.worlds import SwarmWorld, changed
from livescale.values.scaling_policies import CoresModel, ModelPolicy, StagesByQueue

_TOKENS = 128
_WORKERS_MIN = 9


def with_cores(world: SwarmWorld) -> SwarmWorld:
    """In half of the worlds with stages all scale together, and cores make up for instances. One
    stage is slow, and requests come evenly, so that there is something to make up for.
    Workers share hosts."""
    rng = random.Random(f"cores of stages drawn for {world.seed}")
    config = world.config
    stages = [policy for policy in config.controller.models if policy.spec.stage is not None]
    if not stages or rng.randrange(2):
        return world
    name = stages[0].spec.offered_as
    run_ns = config.latency_of(stages[0].spec.name).run_ns(RunWork(((_TOKENS, 0),)))
    more = max(_WORKERS_MIN - config.workers, 0)
    devices = (*config.devices, *((config.devices[0],) * more))
    if not config.hosts:
        devices = tuple(_on_host(device, n % 3) for n, device in enumerate(devices))
    # Nearly always more than one of each worker.
    cores_max = _busiest(replace(config, devices=devices)) + rng.choice([0, 2, 5, 12])
    scaling = StagesByQueue(
        slo_ns=rng.choice([2, 4, 8]) * (len(stages) + 3) * run_ns,
        period_ns=rng.choice([25, 50]) * run_ns,
        scale_down_timeout_ns=rng.choice([20, 100]) * run_ns,
        replicas_total=rng.choice([None, None, 8]),
        cores=rng.choice([CoresModel(0.1, 0.9), CoresModel(0.6, 0.4)]),
        cores_max=cores_max,
    )
    models = tuple(_scaled(policy, scaling) for policy in config.controller.models)
    slow = rng.choice(stages).spec.name
    factor = rng.choice([3, 5])
    latency = {**config.latency, slow: LinearLatency(0, factor * run_ns // _TOKENS)}
    # Sometimes cores do nothing, whatever the policy takes them for.
    cores = {"": scaling.cores} if scaling.cores is not None and rng.random() < 0.8 else {}
    changes = tuple(_changed(change, scaling) for change in config.changes)
    config = replace(config, devices=devices, latency=latency, cores=cores, changes=changes)
    expected = len(devices) if more else config.controller.workers_expected
    controller = {"models": models, "workers_expected": expected}
    rows = {**world.rows, name: _with_even(world.rows[name], run_ns, rng)}
    return SwarmWorld(rows, changed(config, controller=controller), world.seed)


def _scaled(policy: ModelPolicy, scaling: StagesByQueue) -> ModelPolicy:
    if policy.spec.stage is None:
        return policy
    return replace(policy, scaling=scaling, instances_max=max(policy.instances_max, 6))


def _on_host(device: Device, number: int) -> Device:
    return device if device.host else replace(device, host=f"shared-{number}")


def _busiest(config: SimConfig) -> int:
    """Workers of the host that has most."""
    return max(Counter(config.device(n).host for n in range(config.workers)).values())


def _changed(change: ModelChange, scaling: StagesByQueue) -> ModelChange:
    if change.changed is None:
        return change
    return replace(change, changed=_scaled(change.changed, scaling))


def _with_even(rows: list[TraceRow], run_ns: int, rng: random.Random) -> list[TraceRow]:
    """Short requests with even gaps, fewer and then more, at most of what an even stage serves;
    of those that were drawn a few."""
    at_ns = rows[0].arrival_ns if rows else 0
    even = []
    for share in (rng.choice([0.3, 0.6]), 0.8, rng.choice([0.3, 0.6])):
        for _ in range(rng.choice([60, 120])):
            even.append(TraceRow(at_ns, _TOKENS, 1))
            at_ns += int(run_ns / share)
    return sorted([*rows[: rng.choice([0, 8])], *even], key=lambda row: row.arrival_ns)
