"""`livescale bench wires`: two pools under a small load, their comparison, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from livescale.lab.bench.hosts.wires import WiresBenchOptions, WiresReport, WiresRound
from livescale.main import main


@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_both_pools_answer_everything(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    words = ("--streams", "10", "--requests", "2", "--output-tokens", "8", "--rounds", "4")
    more = ("--workers", "2", "--step-ms", "20", "--ramp-s", "0", "--json", str(file))
    assert main(["bench", "wires", *words, *more]) == 0
    figures = json.loads(file.read_text())
    assert figures["tokens_per_round"] == 10 * 2 * 8
    assert len(figures["cpu_ratio_tls_all"]) == 2
    for kind in ("plain", "tls"):
        used = figures["cpu_us_per_token"][kind]
        assert used.keys() >= {"supervisor", "controller", "gateway", "agent", "worker", "all"}
        assert used["all"] > 0
        assert figures["tokens_per_s"][kind] > 0
    left = [c for c in psutil.Process().children(recursive=True) if c.pid not in before]
    assert left == []


def test_pools_are_compared_round_by_round_and_in_both_orders() -> None:
    # The run that begins first is a tenth cheaper; TLS costs a fifth.
    used = [("plain", 0.9), ("tls", 1.2), ("tls", 1.08), ("plain", 1.0)] * 2
    rounds = [WiresRound(kind, 1000, 2.0, {"worker": cpu_s, "none": 0.0}) for kind, cpu_s in used]
    report = WiresReport(WiresBenchOptions(), rounds)
    assert report.ratios() == pytest.approx([1.2, 1.2])
    figures = report.as_json()
    assert figures["cpu_ratio_tls"] == pytest.approx(1.2)
    assert figures["cpu_us_per_token"]["plain"] == pytest.approx(
        {"worker": 950.0, "none": 0.0, "all": 950.0}
    )
    assert "1.200" in report.text()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--streams", "0"], "--streams"),
        (["--rounds", "2"], "--rounds"),
        (["--rounds", "3"], "--rounds"),
        (["--step-ms", "0"], "--step-ms"),
        (["--ramp-s", "-1"], "--ramp-s"),
    ],
)
def test_wrong_flags_are_named(
    capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    assert main(["bench", "wires", *words]) == 1
    error = capsys.readouterr().err
    assert named in error
    assert "Traceback" not in error
