"""Whole simulations with known outcomes: bursts, chains, records."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from worlds import MIB, MS, Row, make_config, make_model

from livescale.latency.shapes import LLAMA_3_8B
from livescale.latency.work import LinearLatency
from livescale.messages.events import InstanceReported
from livescale.sim.base.config import FaultConfig, SimConfig
from livescale.sim.base.run_notes import SimResult
from livescale.sim.world.simulate import simulate
from livescale.telemetry.record.record import ScaleLine, StepLine, read_record
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.types import Outcome
from slowness import patient

_S = 1000 * MS
_CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
from worlds import make_world
from livescale.sim.world.simulate import simulate
for seed in (3, 11, 27):
    world = make_world(seed)
    simulate(world.rows, world.config, seed, sys.stdout.buffer)
"""


def burst(requests: int = 600) -> SimResult:
    """100 requests of 1000 tokens per second, long after the first instance is there."""
    rows = [Row(20 * _S + number * 10 * MS, 1000, 50) for number in range(requests)]
    return simulate(rows, SimConfig.default(LLAMA_3_8B, workers=8), seed=1)


def grown(result: SimResult) -> list[ScaleLine]:
    return [line for line in result.scales if line.to_instances > line.from_instances]


def test_a_burst_grows_the_pool_and_its_end_shrinks_it_to_one() -> None:
    result = burst()
    assert {line.outcome for line in result.requests} == {Outcome.FINISHED}
    assert max(count.serving for count in result.instances) == 8
    last = result.instances[-1]
    assert (last.loading, last.serving, last.draining) == (0, 1, 0)


def test_phases_of_a_scale_up_are_in_order() -> None:
    lines = grown(burst())
    assert lines
    for line in lines:
        assert len(line.loads) == line.to_instances - line.from_instances
        for load in line.loads:
            assert load.failed is None
            phases = (load.first_byte_ns, load.first_layer_ns, load.loaded_ns, load.first_token_ns)
            known = [ns for ns in (line.decided_ns, line.planned_ns, *phases) if ns is not None]
            assert len(known) == 6, load
            assert known == sorted(known)


def test_storage_is_read_once_and_chains_bring_the_rest() -> None:
    upstreams = [load.upstream for line in grown(burst()) for load in line.loads]
    assert upstreams.count("storage") == 1
    assert len(upstreams) >= 8


def test_a_chain_takes_as_long_as_its_law_says() -> None:
    """Loads of a chain of n targets end within (chunks + n - 1) / chunks of one copy."""
    chunks = 64
    model = make_model("m", 12, 4 * MIB)
    assert model.size_bytes == chunks * MIB
    for targets in (1, 3, 6):
        policy = ModelPolicy(model, 1, 1 + targets, 1_000, 1_000)
        config = make_config((policy,), workers=1 + targets)
        rows = [Row(2 * _S, 4_000, 2) for _ in range(60)]
        line = grown(simulate(rows, config, seed=0))[1]
        assert len(line.loads) == targets
        loaded_ns = [load.loaded_ns for load in line.loads if load.loaded_ns is not None]
        one_copy_ns = model.size_bytes * _S // (1 << 30)
        expected_ns = one_copy_ns * (chunks + targets - 1) // chunks
        took_ns = max(loaded_ns) - line.decided_ns
        # Orders and reports cross the network, and the controller steps at most once per gap.
        slack_ns = 2 * config.message_delay_ns + config.step_gap_ns
        assert expected_ns <= took_ns <= expected_ns + slack_ns + MS
        assert line.predicted_ns is not None
        assert abs(line.predicted_ns - expected_ns) <= len(line.loads)  # a nanosecond a hop


def test_a_full_queue_rejects_and_says_so() -> None:
    model = make_model("m", 2, MIB)
    config = make_config((ModelPolicy(model, 1, 1, 1_000, 512),), workers=1)
    config = msgspec.structs.replace(config, queue_requests_max=5)
    result = simulate([Row(0, 10, 2) for _ in range(8)], config, seed=0)
    rejected = [line for line in result.requests if line.outcome is Outcome.FAILED]
    assert len(rejected) == 3
    assert all(line.error == "5 requests wait already" for line in rejected)
    assert all(line.attempts == 0 for line in rejected)


def test_a_full_queue_of_prompt_tokens_rejects_and_says_so() -> None:
    model = make_model("m", 2, MIB)
    config = make_config((ModelPolicy(model, 1, 1, 1_000, 512),), workers=1)
    config = msgspec.structs.replace(config, queue_prompt_tokens_max=25)
    result = simulate([Row(0, 10, 2) for _ in range(3)], config, seed=0)
    assert [line.error for line in result.requests] == ["20 prompt tokens wait already", None, None]


def test_a_request_that_no_instance_takes_in_time_ends() -> None:
    """One request runs for 80 ms, and one is dispatched ahead of that."""
    model = make_model("m", 2, MIB)
    config = make_config((ModelPolicy(model, 1, 1, 1_000, 512),), workers=1)
    slow = LinearLatency(base_ns=40 * MS, per_token_ns=0)
    config = msgspec.structs.replace(
        config,
        latency={"": slow},
        controller=msgspec.structs.replace(
            config.controller, sequences_max=1, dispatched_ahead_max=1
        ),
        queue_timeout_ns=150 * MS,
    )
    # There is an instance by then.
    result = simulate([Row(1_000 * MS, 10, 2) for _ in range(5)], config, seed=0)
    failed = [line for line in result.requests if line.outcome is Outcome.FAILED]
    assert [line.request for line in failed] == ["m-3", "m-4"]
    for line in failed:
        assert line.error == "no instance of m took it in time"
        assert line.finished_ns - line.queued_ns == 150 * MS
        assert line.attempts == 0


def test_a_request_too_large_for_an_instance_fails_by_name() -> None:
    model = make_model("m", 2, MIB)
    config = make_config((ModelPolicy(model, 1, 1, 1_000, 512),), workers=1)
    result = simulate([Row(0, 9_000, 2)], config, seed=0)
    assert result.requests[0].outcome is Outcome.FAILED
    assert "needs KV for 9001 tokens" in (result.requests[0].error or "")


def test_more_requests_than_kv_are_set_back_and_finish(tmp_path: Path) -> None:
    """All prompts fit at once, all that is generated does not."""
    model = make_model("m", 2, MIB)
    config = make_config((ModelPolicy(model, 1, 1, 1_000, 40),), workers=1)
    config = msgspec.structs.replace(config, kv_blocks=40, growth_tokens=0)
    path = tmp_path / "record.jsonl"
    with path.open("wb") as file:
        result = simulate([Row(0, 60, 100) for _ in range(8)], config, 0, file)
    assert [line.outcome for line in result.requests] == [Outcome.FINISHED] * 8
    reports = [
        event
        for line in read_record(path)
        if isinstance(line, StepLine)
        for event in line.events
        if isinstance(event, InstanceReported)
    ]
    assert reports[-1].preemptions > 0
    assert reports[-1].prefix_lookup_tokens > 8 * 60, "whoever was set back is looked up again"
    assert (reports[-1].kv_blocks_used, reports[-1].queued_prefill_tokens) == (0, 0)
    assert len({pair for report in reports for pair in report.started}) == 8
    assert sum(len(report.started) for report in reports) == 8, "a request starts once"


def test_a_lost_worker_costs_an_attempt_and_no_tokens() -> None:
    model = make_model("m", 2, MIB)
    faults = FaultConfig(worker_losses=1, rejoin_ns=100 * MS, until_ns=500 * MS)
    config = make_config((ModelPolicy(model, 1, 1, 1_000, 512),), 1, faults)
    for seed in range(5):
        result = simulate([Row(0, 10, 300)], config, seed)
        (line,) = result.requests
        assert line.outcome is Outcome.FINISHED
        assert len(line.token_ns) == 300
        assert line.attempts in (1, 2)


@pytest.mark.usefixtures("machine")
def test_the_same_seed_gives_the_same_bytes_whatever_hashing_does() -> None:
    here = Path(__file__).parent

    def record(hash_seed: str) -> bytes:
        child = subprocess.run(
            [sys.executable, "-c", _CHILD, str(here)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            timeout=patient(60),
        )
        return child.stdout

    with ThreadPoolExecutor() as threads:
        records = list(threads.map(record, ("1", "2")))
    assert len(records[0]) > 10_000
    assert records[0] == records[1]


def test_another_seed_gives_other_faults() -> None:
    model = make_model("m", 2, MIB)
    faults = FaultConfig(worker_losses=3, until_ns=2 * _S)
    config = make_config((ModelPolicy(model, 1, 3, 1_000, 512),), 3, faults)
    rows = [Row(number * 20 * MS, 50, 20) for number in range(50)]
    files = [io.BytesIO(), io.BytesIO()]
    for seed, file in enumerate(files):
        simulate(rows, config, seed, file)
    assert files[0].getvalue() != files[1].getvalue()
