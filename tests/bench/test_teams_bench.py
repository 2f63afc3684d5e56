"""`livescale bench teams`: teams of loading instances, in a pool and in virtual time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.lines.team_figures import read_play
from livescale.main import main
from livescale.telemetry.record.record import read_record
from slowness import patient

HEADLINE = ["team_throughput_ratio", "first_token_ratio_to_load", "multicast_slowdown"]
TRIES, LONGER_MOST = 5, 4
MEASURED = [*HEADLINE, "team_throughput_limit", "team_formed_ratio_to_load"]


def table_of(
    words: list[str],
    file: Path,
    has_happened: Callable[[dict[str, Any]], bool],
    capsys: pytest.CaptureFixture[str],
) -> str:
    """What is printed. On busy cores a load may outlast its prompts, which the command refuses to
    judge, or what is looked for may not have come: then all is played again."""
    for _ in range(TRIES):
        code = main(["bench", "teams", *words, "--json", str(file)])
        printed = capsys.readouterr()
        if code != 0:
            assert "no prompt was queued any more at some time of the load" in printed.err
        elif has_happened(json.loads(file.read_text())):
            return printed.out
    raise AssertionError("prompts ran out in each play, or it did not happen")


def scene(run_ms: int) -> list[str]:
    """What Runs and loads take: so long that a busy machine adds little to it."""
    longer = min(patient(1), LONGER_MOST)
    return ["--load-seconds", str(round(4 * longer)), "--run-ms", str(round(run_ms * longer))]


def has_teams(figures: dict[str, Any]) -> bool:
    return bool(figures["plays"]["pairs"][0]["teams"])


def has_switched(figures: dict[str, Any]) -> bool:
    """Something decoded when teams ended, in both ways."""
    plays = [figures["plays"][f"pairs-{end}"][0] for end in ("move", "anew")]
    return all(sum(team["decoding_at_end"] for team in play["teams"]) > 0 for play in plays)


@pytest.mark.long
@pytest.mark.usefixtures("machine")
@pytest.mark.timeout(1500)
def test_a_pool_and_its_simulation_are_played_with_teams_and_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "figures.json", tmp_path / "records"
    words = ["--teams", "pairs", *scene(run_ms=120), "--folder", str(folder)]
    table = table_of(words, file, has_teams, capsys)
    figures: dict[str, Any] = json.loads(file.read_text())
    assert list(figures)[:4] == [*HEADLINE, "token_mismatches"]
    assert figures.keys() >= set(MEASURED)
    assert all(name in table for name in (*MEASURED, "token_mismatches"))
    assert figures["token_mismatches"] == 0
    assert figures["tokens"] == 2 * figures["prompts"] > 0
    assert set(figures["simulated"]) == set(figures["sim_deviation"]) == set(MEASURED)
    assert list(figures["strategies"]) == ["pairs"]
    assert list(figures["plays"]) == ["pairs", "none"]
    [with_teams], [without] = figures["plays"]["pairs"], figures["plays"]["none"]
    assert not without["teams"]
    assert not without["simulated"]["teams"]
    for play in (with_teams, with_teams["simulated"]):
        assert play["teams"]
        assert 0 < play["team_formed_ratio_to_load"] < play["first_token_ratio_to_load"]
        assert play["team_throughput_ratio"] > 0
        for team in play["teams"]:
            assert len(team["span_layers"]) == team["members"] > 1
            assert sum(team["span_layers"]) == 32
    # In virtual time nothing is in the way: teams are as fast as their spans allow.
    simulated = figures["simulated"]
    assert simulated["team_throughput_ratio"] == pytest.approx(
        simulated["team_throughput_limit"], rel=0.1
    )
    assert with_teams["simulated"]["first_token_ratio_to_load"] < 1
    assert simulated["first_token_ratio_to_load"] < 0.62
    assert simulated["multicast_slowdown"] < 1.03
    # A record that ends before the load does has no figures.
    lines = list(read_record(folder / "pairs-1.jsonl"))
    assert read_play(lines).teams
    with pytest.raises(BenchError, match="load"):
        read_play(lines[: len(lines) // 8])


@pytest.mark.long
@pytest.mark.usefixtures("machine")
@pytest.mark.timeout(1500)
def test_requests_that_decode_when_teams_end_pause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    words = ["--teams", "pairs", *scene(run_ms=80), "--output-tokens", "8"]
    table = table_of(words, file, has_switched, capsys)
    figures: dict[str, Any] = json.loads(file.read_text())
    assert list(figures)[:4] == [*HEADLINE, "token_mismatches"]
    assert figures["token_mismatches"] == 0
    assert figures["output_tokens"] == 8
    assert figures["tokens"] == 3 * 8 * figures["prompts"]
    assert list(figures["plays"]) == ["pairs-move", "pairs-anew", "none"]
    assert list(figures["switch_pause_ms"]) == ["move", "anew"]
    for end, pause in figures["switch_pause_ms"].items():
        assert 0 <= pause["p50"] <= pause["max"]
        assert figures["strategies"][f"pairs-{end}"]["team_decode_ratio"] > 0
    assert figures["simulated"]["team_decode_ratio"] > 0.5
    assert all(f"pairs-anew: {name}" in table for name in ("switch_pause_p50_ms", *HEADLINE))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--teams", "trios"], "trios"),
        (["--plays", "0"], "--plays"),
        (["--load-seconds", "0"], "--load-seconds"),
        (["--run-ms", "1"], "--run-ms"),
        (["--output-tokens", "0"], "--output-tokens"),
    ],
)
def test_wrong_flags_are_named(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "teams", *words]) == 1
    error = capsys.readouterr().err
    assert named in error
    assert "Traceback" not in error
