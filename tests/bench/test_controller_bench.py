"""`bench controller`: figures of a small pool; what they mean, not how large they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from livescale.main import main

SMALL = ["bench", "controller", "--workers", "4,8", "--workers-per-model", "4", "--seconds", "2"]


def test_steps_of_pools_of_several_sizes_are_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    assert main([*SMALL, "--rate", "5", "--cv", "1", "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert figures["system"] == "livescale"
    small, large = figures["pools"]
    assert [(pool["workers"], pool["models"]) for pool in (small, large)] == [(4, 1), (8, 2)]
    assert large["requests"] > small["requests"] > 0
    for pool in (small, large):
        assert pool["steps"] > pool["requests"], "each comes, and ends"
        assert 0 < pool["p50_ms"] <= pool["p99_ms"] <= pool["worst_ms"]
        assert 0 < pool["start_worst_ms"] <= pool["start_ms"]
    assert "p99 ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "3"], "numbers from 4 "),
        (["--workers", "2000"], "to 1024"),
        (["--workers", "many"], "--workers"),
        (["--system", "fastest"], "fastest"),
        (["--rate", "0"], "--rate must be positive"),
        (["--cv", "nan"], "--cv"),
        (["--cv", "50"], "--cv"),
        (["--replays", "0"], "--replays must be at least 1"),
        (["--rate", "0.0001"], "raise --rate"),
    ],
)
def test_wrong_input_is_named(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *arguments]) == 1
    assert words in capsys.readouterr().err
