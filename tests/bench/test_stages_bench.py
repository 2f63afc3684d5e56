"""`livescale bench stages`: stages that scale by themselves, in a pool and in virtual time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from livescale.config.slo import RequestTiming
from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.lines.stage_figures import StageRun, read_run, together
from livescale.lab.bench.lines.stage_scene import StageScene
from livescale.main import main
from livescale.values.stages import check_stages
from livescale.values.types import ModelSpec

HEADLINE = [
    "goodput_per_device_ratio_to_uniform",
    "stages_grown",
    "sim_deviation",
    "token_mismatches",
]
POLICIES = ["stages", "pipelines"]
TRIES = 5
REQUESTS, STAGES, SLOW = 100, 3, 1


def played(words: list[str], file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What is printed. On busy cores all first tokens may be late, which the command refuses to
    judge, and no stage may be seen to be slow: then all is played again."""
    for _ in range(TRIES):
        code = main(["bench", "stages", *words, "--json", str(file)])
        told = capsys.readouterr()
        if code != 0:
            assert "no request had its first token within the SLO" in told.err
        elif SLOW in json.loads(file.read_text())["stages_grown"]:
            return told.out
    raise AssertionError("the slow stage grew in no play")


@pytest.mark.long
@pytest.mark.usefixtures("machine")
@pytest.mark.timeout(1500)
def test_a_pool_and_its_simulation_are_played_by_both_policies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "figures.json", tmp_path / "records"
    words = ["--stages", str(STAGES), "--run-ms", "30", "--requests", str(REQUESTS)]
    table = played([*words, "--folder", str(folder)], file, capsys)
    figures: dict[str, Any] = json.loads(file.read_text())
    assert list(figures)[:4] == HEADLINE
    assert f"stage {SLOW} is the slow one" in table
    assert figures["slow_stage"] == SLOW
    assert figures["decoder_layers"] == [2, 3, 2]
    assert {path.name for path in folder.iterdir()} == {f"{name}-1.jsonl" for name in POLICIES}
    assert figures["simulated"]["stages_grown"] == [SLOW]
    for world in (figures, figures["simulated"]):
        own, uniform = (world["policies"][name] for name in POLICIES)
        assert world["stages_grown"] == [int(stage) for stage in own["grown"]]
        assert list(uniform["grown"]) == [str(number) for number in range(STAGES)]
        for run in (own, uniform):
            assert run["requests"] == REQUESTS
            assert 0 < run["good"] <= REQUESTS
            assert 0 < run["ttft_p50_s"] <= run["ttft_p99_s"]
            assert run["good_per_device_s"] == pytest.approx(run["good"] / run["device_s"])
        assert world[HEADLINE[0]] == pytest.approx(
            own["good_per_device_s"] / uniform["good_per_device_s"]
        )
    assert figures["simulated"][HEADLINE[0]] > 1
    off = figures["sim_deviations"]["policies"]
    goodput = [off[name]["good_per_device_s"] for name in POLICIES]
    assert figures["sim_deviation"] == max(goodput, key=abs)
    assert figures["token_mismatches"] == 0
    assert figures["tokens"] == 2 * REQUESTS + figures["computed_tokens"]
    assert figures["computed_tokens"] > 0
    assert [len(figures["plays"][name]) for name in POLICIES] == [1, 1]


@pytest.mark.parametrize("stages", [2, 3, 8, 16])
def test_one_stage_is_slow_by_its_layers(stages: int) -> None:
    scene = StageScene(stages=stages, run_ms=30)
    layers = sum(scene.layers)
    spec = ModelSpec("line", (1,) * (layers + 2), layers, 4096)
    assert check_stages(spec, scene.spans) == scene.spans
    own = [span.decoder_layers(spec.layers) for span in scene.spans]
    assert tuple(own) == scene.layers
    slow = own.pop(scene.slow_stage)
    assert {slow / others for others in own} == {1.5}


def test_requests_are_as_many_as_are_asked_for_and_others_with_another_seed() -> None:
    scene = StageScene(requests=333)
    rows = scene.rows(1)
    assert len(rows) == 333
    assert rows == scene.rows(1)
    assert rows != scene.rows(2)
    assert [row.arrival_ns for row in rows] == sorted(row.arrival_ns for row in rows)


def test_several_runs_count_as_one() -> None:
    one = StageRun(10, 12, 4.0, (1, 3), {3: (2, "overloaded")})
    other = StageRun(20, 20, 6.0, (2,), {1: (2, "over_target"), 3: (3, "over_target")})
    both = together([one, other])
    assert (both.good, both.requests, both.good_per_device_s) == (30, 32, 3.0)
    assert both.ttft_s(50) == 2e-9
    assert both.grown == {1: (2, "over_target"), 3: (3, "overloaded")}


def test_good_is_what_came_in_time() -> None:
    def timing(number: int, token_ns: tuple[int, ...]) -> RequestTiming:
        return RequestTiming(f"r-{number}", 100 * number, 100 * number, token_ns, 999, ok=True)

    # In time to the nanosecond, late, and without a token.
    timings = [timing(1, (150,)), timing(2, (251,)), timing(3, ())]
    run = read_run([], 50, timings)
    assert (run.good, run.requests, run.grown) == (1, 3, {})
    assert run.ttft_ns == (50, 51)
    with pytest.raises(BenchError, match="within the SLO"):
        read_run([], 50, timings[1:])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--stages", "1"], "--stages"),
        (["--run-ms", "1"], "--run-ms"),
        (["--requests", "5"], "--requests"),
        (["--plays", "0"], "--plays"),
    ],
)
def test_wrong_flags_are_named(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "stages", *words]) == 1
    error = capsys.readouterr().err
    assert named in error
    assert "Traceback" not in error
