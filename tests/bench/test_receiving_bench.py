"""`bench receiving` with a tiny model: what the figures are, not how large; and the rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from livescale.lab.bench.transfer.receiving_report import (
    PROCESS,
    THREADS,
    ReceivingReport,
    ReceivingRow,
    Round,
    Window,
)
from livescale.main import main
from slowness import patient

TINY = ("--shape", "64x2", "--vocabulary", "512", "--sequences", "2", "--size", "2MiB")
SHORT = ("--chunk", "128KiB", "--rounds", "2", "--rates", "1gbit")


@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_both_ways_have_figures_of_each_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    window = ("--window-s", f"{patient(0.02):.3f}")
    assert main(["bench", "receiving", *TINY, *SHORT, *window, "--json", str(out)]) == 0
    figures: dict[str, Any] = json.loads(out.read_text())
    rows = figures["rows"]
    assert [(row["rate_gbit_per_s"], row["way"]) for row in rows] == [(1, THREADS), (1, PROCESS)]
    for row in rows:
        assert len(row["compute_ratios"]) == len(row["receive_ratios"]) == figures["rounds"] == 2
        # Something was computed and received in each window, and took CPU time.
        named = ("steps_per_s", "step_cpu_ms", "gbit_per_s", "receive_cpu_s_per_gib")
        assert all(row[f"{name}_{when}"] > 0 for name in named for when in ("alone", "together"))
    assert figures["threads_within_limit"] is (rows[0]["cost_percent"] <= 5)
    printed = capsys.readouterr().out
    assert "the 5 % of the rule" in printed
    assert "load averages" in printed


def of_way(way: str, steps: int, received: int) -> ReceivingRow:
    """100 steps and 1000 bytes alone, in each of the windows."""
    taken = {"steps_ns": 10**9, "compute_cpu_ns": 10**9, "step_p99_ns": 10**7}
    came = {"received_ns": 10**9, "receive_cpu_ns": 10**8}
    one = Round(
        computing=Window(steps=100, **taken),
        receiving=Window(received_bytes=1000, **came),
        together=Window(steps=steps, received_bytes=received, **taken, **came),
    )
    return ReceivingRow(125_000_000, way, (one, one, one))


@pytest.mark.parametrize(
    ("steps", "received", "cost", "is_within"),
    [(96, 1000, 4, True), (100, 960, 4, True), (94, 1000, 6, False), (100, 900, 10, False)],
)
def test_the_rule_is_about_what_suffers_more_and_about_threads(
    steps: int, received: int, cost: float, is_within: bool
) -> None:
    rows = (of_way(THREADS, steps, received), of_way(PROCESS, 50, 1000))
    report = ReceivingReport({}, rows, 0.0, ((0, 0, 0), (0, 0, 0)))
    assert rows[0].cost_percent == pytest.approx(cost)
    assert report.is_within is is_within
    assert report.gains[1.0] == pytest.approx((50 / steps, 1000 / received))
    assert ("within the 5 %" in report.text()) is is_within


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rates", "fast"], "'fast' is no rate"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--sequences", "0"], "--sequences must be at least 1"),
        (["--window-s", "0"], "--window-s must be positive"),
        (["--window-s", "nan"], "--window-s must be positive"),
        (["--shape", "64"], "must be HIDDENxLAYERS"),
    ],
)
def test_wrong_input_is_named_in_one_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "receiving", *arguments]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
