"""Swarm: random worlds with faults. Every request ends, no rule breaks, and records replay."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from worlds import make_world

from livescale.sim.simulate import SimResult, simulate
from livescale.telemetry.record import read_record
from livescale.telemetry.replay import replay
from livescale.types import Outcome

SEEDS = 200
PER_TEST = 25
_SEEDS_FILE = Path(__file__).parent / "seeds.txt"


def run_world(seed: int, record_file: io.BytesIO | None = None) -> SimResult:
    """Simulate; a failure names the seed, which is the bug report."""
    world = make_world(seed)
    try:
        result = simulate(world.rows, world.config, seed, record_file)
    except Exception as error:
        pytest.fail(f"seed {seed}: {type(error).__name__}: {error}")
    assert len(result.requests) == sum(len(rows) for rows in world.rows.values()), f"seed {seed}"
    return result


@pytest.mark.parametrize("first", range(0, SEEDS, PER_TEST))
def test_random_worlds_come_to_rest(first: int) -> None:
    for seed in range(first, first + PER_TEST):
        run_world(seed)


def test_seeds_that_once_failed() -> None:
    lines = _SEEDS_FILE.read_text().splitlines()
    seeds = [int(line.split()[0]) for line in lines if line and not line.startswith("#")]
    for seed in seeds:
        run_world(seed)


def test_without_faults_and_with_room_every_request_finishes() -> None:
    checked = 0
    for seed in range(SEEDS):
        config = make_world(seed).config
        if (
            config.changes
            or config.faults.until_ns
            or config.queue_requests_max < 1000
            or config.kv_blocks < 512
        ):
            continue
        checked += 1
        outcomes = {line.outcome for line in run_world(seed).requests}
        assert outcomes <= {Outcome.FINISHED}, f"seed {seed}"
    assert checked > 3


def test_records_replay(tmp_path: Path) -> None:
    lives = 0
    for seed in range(0, SEEDS, 10):
        file = io.BytesIO()
        result = run_world(seed, file)
        path = tmp_path / f"{seed}.jsonl"
        path.write_bytes(file.getvalue())
        replayed = replay(read_record(path))
        assert replayed.steps == result.steps, f"seed {seed}"
        lives += replayed.lives
    assert lives > SEEDS // 10, "some world restarts its controller"
