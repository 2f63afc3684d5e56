"""From times of whole Runs to operations: machines whose law is known, and the command itself."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.clusters.profiles import read_profile
from livescale.config.reading import load_config
from livescale.lab.bench.engines.profile_points import (
    ProfiledModel,
    ProfileLimits,
    TimedRun,
    operations,
)
from livescale.latency.table import TableLatency
from livescale.latency.work import RunWork
from livescale.main import main
from livescale.runtime.models.timed_latency import latency

MODEL = ProfiledModel("machine", "m", layers=4, heads=4, kv_heads=2, head_dim=64)
LIMITS = ProfileLimits(1024, 32, 2048)

machines = st.fixed_dictionaries(
    {
        "fixed": st.integers(100_000, 5_000_000),
        "token": st.integers(5_000, 200_000),
        "pair": st.integers(1, 200),
        "context": st.integers(10, 2_000),
        "sampled": st.integers(1_000, 50_000),
    }
)


def time_ns(machine: dict[str, int], work: RunWork) -> int:
    """What every Run takes on a machine whose parts just add up."""
    pairs = sum(new * (new + 2 * before) for new, before in work.prefills) // 2
    return (
        machine["fixed"]
        + machine["token"] * work.token_count
        + machine["pair"] * pairs
        + machine["context"] * work.decode_context_tokens
        + machine["sampled"] * work.sampled
    )


def table_of(
    machine: dict[str, int], noise: float = 0.0, limits: ProfileLimits = LIMITS
) -> TableLatency:
    rng = random.Random(0)
    times = {
        run: round(time_ns(machine, run.work) * (1 + noise * rng.random())) for run in limits.grid()
    }
    return TableLatency.measured(operations(times, limits, MODEL))


@given(machine=machines)
def test_a_machine_whose_parts_add_up_is_predicted(machine: dict[str, int]) -> None:
    """Between the points of the grid, too, where straight lines of logs are no exact answer."""
    table = table_of(machine)
    for run in LIMITS.held_out():
        measured_ns = time_ns(machine, run.work)
        assert table.run_ns(run.work) == pytest.approx(measured_ns, rel=0.12), run
    for run in LIMITS.grid():
        if run.samples and (run.decodes or not run.prefills[0][1]):
            assert table.run_ns(run.work) == pytest.approx(time_ns(machine, run.work), rel=0.02)


@given(machine=machines)
def test_noise_does_not_bring_an_operation_to_nothing(machine: dict[str, int]) -> None:
    table = table_of(machine, noise=0.2)
    for run in LIMITS.held_out():
        ratio = table.run_ns(run.work) / time_ns(machine, run.work)
        assert 0.7 < ratio < 1.8, run


@given(st.integers(1, 2048), st.integers(1, 64), st.integers(64, 4096), st.sampled_from([0.0, 0.2]))
def test_grids_of_any_size_give_a_table(
    chunk: int, decodes: int, context: int, noise: float
) -> None:
    limits = ProfileLimits(min(chunk, context), decodes, context)
    machine = {"fixed": 10**6, "token": 10**4, "pair": 10, "context": 100, "sampled": 10**4}
    table = table_of(machine, noise, limits)
    for run in limits.grid():
        assert all(sum(chunk) <= context for chunk in run.prefills)
        assert run.context <= context
        assert table.run_ns(run.work) > 0
    grid = set(limits.grid())
    assert all(run.context_tokens <= 64 * 4096 + context for run in grid)
    assert not grid & {run for run in limits.held_out() if run.kind == "mixed"}


def test_what_was_not_measured_is_left_out() -> None:
    machine = {"fixed": 10**6, "token": 10**4, "pair": 10, "context": 100, "sampled": 10**4}
    small = [run for run in LIMITS.grid() if run.context_tokens < 200]
    profile = operations({run: time_ns(machine, run.work) for run in small}, LIMITS, MODEL)
    assert max(point.tokens for point in profile.linear) < 200
    work = TimedRun((), 2, 64).work
    table = TableLatency.measured(profile)
    assert table.run_ns(work) == pytest.approx(time_ns(machine, work), rel=0.05)


@pytest.mark.usefixtures("machine")
@pytest.mark.long
def test_the_command_writes_a_profile_that_timed_workers_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, figures_file = tmp_path / "machine.csv", tmp_path / "figures.json"
    sizes = ("--shape", "64x2", "--vocabulary", "1024", "--dtype", "float32", "--seconds", "1")
    limits = ("--chunk-max", "32", "--batch-max", "4", "--context-max", "64")
    words = ["bench", "profile", "--out", str(out), *sizes, *limits, "--json", str(figures_file)]
    assert main(words) == 0
    figures = json.loads(figures_file.read_text())
    assert (figures["gpu"], figures["model"]) == ("cpu", "made-64x2")
    assert figures["is_complete"]
    assert figures["rounds"] >= 1
    assert {len(held["prefills"]) for held in figures["held_out"]} == {0, 1}
    assert all(held["predicted_ms"] > 0 for held in figures["held_out"])
    assert figures["held_out_error_percent"] > 0
    assert "mean error" in capsys.readouterr().out
    profile = read_profile(out)
    assert profile.layers == 2
    flags = {"device": "timed", "timed_profile": str(out)}
    assert latency(load_config(None, [str(tmp_path)], {}, flags)) == TableLatency.measured(profile)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--chunk-max", "0"), "at least 1"),
        (("--context-max", "100"), "--context-max must be at least 1024"),
        (("--seconds", "0"), "--seconds must be positive"),
        (("--shape", "big"), "HIDDENxLAYERS"),
    ],
)
def test_what_cannot_be_measured_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], words: str
) -> None:
    assert main(["bench", "profile", "--out", str(tmp_path / "p.csv"), *flags]) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "p.csv").exists()
