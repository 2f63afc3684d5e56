"""Random small worlds: everything about them is drawn from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec

from livescale.batching.latency import LinearLatency
from livescale.control.config import Bounds, ControllerConfig, ModelPolicy
from livescale.sim.config import FaultConfig, SimConfig
from livescale.sim.network import Network
from livescale.topology import Device
from livescale.types import ModelSpec

MS = 1_000_000
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a load."""

    arrival_ns: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class World:
    """What `simulate` wants, without the record."""

    rows: dict[str, list[Row]]
    config: SimConfig
    seed: int


def make_model(name: str, layers: int, layer_bytes: int) -> ModelSpec:
    """A model whose embedding and head are twice as large as its decoder layers."""
    sizes = (2 * layer_bytes, *([layer_bytes] * layers), 2 * layer_bytes)
    return ModelSpec(name, sizes, kv_bytes_per_token=1024, model_tokens_max=4096)


def make_config(
    models: tuple[ModelPolicy, ...], workers: int, faults: FaultConfig | None = None
) -> SimConfig:
    """A small fast world without chance, for examples."""
    return SimConfig(
        controller=ControllerConfig(models, workers_expected=workers, settle_ns=100 * MS),
        device=Device("sim", "", "leaf", 1 << 30, 1 << 30, 1 << 30, 1 << 30),
        network=Network(1 << 30, 1 << 28, MIB),
        latency=LinearLatency(2 * MS, 50_000, 10),
        kv_blocks=512,
        run_tokens_max=256,
        sequences_max=16,
        faults=faults if faults is not None else FaultConfig(),
    )


def make_world(seed: int) -> World:
    """Draw models, limits, worker counts, loads and faults."""
    rng = random.Random(f"world {seed}")
    workers = rng.randint(1, 8)
    count = min(rng.choice([1, 1, 2]), workers)
    policies = []
    for number in range(count):
        spec = make_model(f"m{number}", rng.randint(1, 12), rng.randint(1, 8) * MIB)
        tp_size = _tp_size(seed, workers // count)
        spec = msgspec.structs.replace(spec, tp_size=tp_size)
        least = max(1, rng.randint(1, max(1, workers // count // 2)) // tp_size)
        is_known = rng.random() < 0.5
        policies.append(
            ModelPolicy(
                spec,
                least,
                rng.randint(least, workers),
                rng.choice([2_000, 10_000]) if is_known else None,
                rng.choice([64, 512]) if is_known else None,
            )
        )
    until_ns = rng.randint(500, 3_000) * MS
    config = SimConfig(
        controller=ControllerConfig(
            tuple(policies),
            workers_expected=workers,
            settle_ns=rng.choice([0, 100, 1_000]) * MS,
            dispatched_ahead_max=rng.randint(1, 8),
            request_attempts_max=rng.randint(1, 3),
            load_retry_ns=rng.choice([10, 1_000]) * MS,
            bounds=Bounds(
                load_window_ns=rng.choice([50, 1_000]) * MS,
                scale_down_timeout_ns=rng.choice([5, 30, 333]) * MS,
            ),
        ),
        device=Device("sim", "", "leaf", 1 << 30, 1 << 30, 1 << 30, 1 << 30),
        network=Network(
            rng.choice([1 << 27, 1 << 30, 1 << 33]), rng.choice([1 << 26, 1 << 30]), MIB
        ),
        latency=LinearLatency(
            rng.choice([500_000, 5 * MS]), rng.choice([10_000, 200_000]), rng.choice([0, 100])
        ),
        kv_blocks=rng.choice([40, 512]),
        run_tokens_max=rng.choice([32, 512]),
        sequences_max=rng.choice([1, 4, 32]),
        oldest_prompt_percent=random.Random(f"prompts {seed}").choice([1, 50, 100]),
        growth_tokens=random.Random(f"growth {seed}").choice([0, 8, 64]),
        queue_requests_max=rng.choice([4, 1_000]),
        step_gap_ns=rng.choice([0, MS, 5 * MS]),
        message_delay_ns=rng.choice([0, 200_000, 3 * MS]),
        load_timeout_ns=500 * MS,
        grace_ns=120_000 * MS,
        faults=_faults(rng, until_ns),
    )
    rows = {policy.spec.name: _rows(rng, until_ns) for policy in policies}
    return World(rows, config, seed)


def _tp_size(seed: int, workers: int) -> int:
    """In a third of the worlds an instance takes several workers. (Drawn apart, so that worlds
    that were found before this was drawn stay the same.)"""
    return min(workers, random.Random(f"ranks {seed}").choice([1, 1, 1, 1, 2, 3]))


def _faults(rng: random.Random, until_ns: int) -> FaultConfig:
    if rng.random() < 0.2:
        return FaultConfig()
    return FaultConfig(
        worker_losses=rng.choice([0, 1, 3, 10]),
        rejoin_ns=rng.choice([1, 50, 500]) * MS,
        controller_restarts=rng.choice([0, 0, 1, 4]),
        downtime_ns=rng.choice([10, 100]) * MS,
        reconnect_ns_max=rng.choice([1, 20, 500]) * MS,
        late_permille=rng.choice([0, 50, 300]),
        late_ns_max=rng.choice([1, 20, 200]) * MS,
        cancelled_permille=rng.choice([0, 100, 400]),
        until_ns=until_ns,
    )


def _rows(rng: random.Random, until_ns: int) -> list[Row]:
    """A steady load and a burst within it."""
    burst_ns = rng.randrange(until_ns)
    steady = [rng.randrange(until_ns) for _ in range(rng.randint(0, 20))]
    burst = [burst_ns + rng.randrange(20 * MS) for _ in range(rng.randint(0, 30))]
    return [
        Row(arrival_ns, rng.randint(1, 300), rng.randint(1, 30))
        for arrival_ns in sorted(steady + burst)
    ]
