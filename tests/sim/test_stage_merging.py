"""Runs that wait at an instance of a later stage are carried out as one: requests wait less."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from worlds import MIB, MS, Row, make_config, make_model

from livescale.batching.live.live_batch import LiveLimits
from livescale.latency.work import LinearLatency
from livescale.messages.events import InstanceReported, StageCounts
from livescale.sim.base.config import SimConfig
from livescale.sim.world.simulate import simulate
from livescale.telemetry.record.record import StepLine, read_record
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.stages import even_stages, stage_specs

BEGIN_NS = 3_000 * MS
OUTPUTS = 40
ROWS = [Row(BEGIN_NS + n * 5 * MS, 32, OUTPUTS) for n in range(60)]


def world(leaders: int, merges: bool) -> SimConfig:
    """So many instances of the first stage, and one of the second. A Run costs 4 ms, a token 20 µs
    per stage."""
    spec = replace(make_model("m", 4, 4 * MIB), row_bytes_per_token=256)
    stages = stage_specs(spec, even_stages(spec, 2))
    counts = (leaders, 1)
    models = tuple(ModelPolicy(s, n, n) for s, n in zip(stages, counts, strict=True))
    return replace(
        make_config(models, workers=sum(counts)),
        latency={"": LinearLatency(4 * MS, 20_000)},
        kv_blocks=4096,
        live=LiveLimits(merges_runs=merges),
    )


def played(leaders: int, merges: bool, path: Path) -> tuple[float, StageCounts]:
    """Mean latency in ns, and what the instance of the second stage counted."""
    with path.open("wb") as file:
        result = simulate({"m": ROWS}, world(leaders, merges), 0, file)
    assert all(len(line.token_ns) == OUTPUTS for line in result.requests)
    latencies_ns = [line.finished_ns - line.due_ns for line in result.requests]
    counts = {
        event.instance: event.stage
        for line in read_record(path)
        if isinstance(line, StepLine)
        for event in line.events
        if isinstance(event, InstanceReported) and event.stage is not None
    }
    return sum(latencies_ns) / len(ROWS), counts[max(counts)]


@pytest.mark.parametrize(("leaders", "ratio"), [(2, 0.6), (4, 0.4)])
def test_requests_of_several_leaders_wait_less(leaders: int, ratio: float, tmp_path: Path) -> None:
    alone_ns, alone = played(leaders, False, tmp_path / "alone")
    merged_ns, merged = played(leaders, True, tmp_path / "merged")
    assert merged_ns <= ratio * alone_ns
    assert merged.waited_ns <= ratio * alone.waited_ns
    # The device's time per Run is less, though each leader's Runs have fewer tokens.
    assert merged.busy_ns * alone.done <= ratio * alone.busy_ns * merged.done
    assert alone.merged == 0
    assert merged.merged >= merged.done // 3


def test_one_leader_with_even_stages_loses_nothing(tmp_path: Path) -> None:
    alone_ns, _ = played(1, False, tmp_path / "alone")
    merged_ns, merged = played(1, True, tmp_path / "merged")
    assert merged_ns == alone_ns
    assert not merged.merged
