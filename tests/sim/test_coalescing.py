"""Stretches of Runs as one event: nobody outside can tell, except that it is quicker."""

from __future__ import annotations

import io
import random

import msgspec
import pytest
from worlds import MS, Row, make_config, make_model

from effort import mostly_long
from livescale.sim.base.config import FaultConfig, SimConfig
from livescale.sim.base.run_notes import SimResult
from livescale.sim.world.simulate import simulate
from livescale.values.scaling_policies import ModelPolicy

MODEL = make_model("m", 6, 1 << 20)


def run(rows: list[Row], config: SimConfig, seed: int, coalesces: bool) -> tuple[SimResult, bytes]:
    file = io.BytesIO()
    config = msgspec.structs.replace(config, coalesces=coalesces)
    return simulate(rows, config, seed, file), file.getvalue().partition(b"\n")[2]


def load(rng: random.Random, until_ms: int) -> list[Row]:
    """Steady requests with long answers, and a burst."""
    times = sorted(rng.randrange(until_ms) for _ in range(rng.randint(1, 60)))
    burst = rng.randrange(until_ms)
    times = sorted([*times, *[burst] * rng.randint(0, 30)])
    # Arrivals at whole milliseconds: ties with what else happens at the same instant.
    return [Row(at * MS, rng.randint(1, 300), rng.randint(1, 200)) for at in times]


@pytest.mark.parametrize("seed", mostly_long(range(25), range(3)))
def test_all_times_are_those_of_single_steps(seed: int) -> None:
    rng = random.Random(f"coalescing {seed}")
    policy = ModelPolicy(MODEL, rng.choice([0, 1]), 4, rng.choice([None, 10_000]), 256)
    config = make_config((policy,), workers=4)
    config = msgspec.structs.replace(
        config,
        kv_blocks=rng.choice([40, 256]),
        controller=msgspec.structs.replace(config.controller, sequences_max=rng.choice([2, 8, 64])),
        growth_tokens=rng.choice([0, 64]),
        report_gap_ns=rng.choice([0, 20, 100, 1000]) * MS,
        message_delay_ns=rng.choice([0, MS, 3 * MS]),
        step_gap_ns=rng.choice([0, MS]),
    )
    rows = load(rng, 3000)
    (one, record), (many, same_record) = (run(rows, config, seed, how) for how in (False, True))
    assert {line.request: line for line in many.requests} == {
        line.request: line for line in one.requests
    }
    assert many.requests == one.requests
    assert many.instances == one.instances
    assert many.end_ns == one.end_ns
    assert same_record == record
    assert many.actions <= one.actions


def test_stretches_begin_when_faults_are_over() -> None:
    """What a dying worker had said last is lost: so every step counts until then."""
    policy = ModelPolicy(MODEL, 1, 3, 10_000, 256)
    faults = FaultConfig(worker_losses=4, until_ns=2000 * MS, late_permille=100, late_ns_max=MS)
    config = make_config((policy,), 3, faults)
    rows = load(random.Random("faults"), 4000)
    (one, _), (many, _) = (run(rows, config, 5, how) for how in (False, True))
    assert many.requests == one.requests
    assert many.actions < one.actions
