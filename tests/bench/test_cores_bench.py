"""`bench cores` from the command line to its figures and its file, as small as it can be."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from livescale.config.cores import read_cores
from livescale.control.stages.compensation import fit_cores
from livescale.lab.bench.engines.cores import CoresOptions, CoresReport
from livescale.main import main

CPUS = len(os.sched_getaffinity(0))


@pytest.mark.long
@pytest.mark.skipif(CPUS < 2, reason="a profile needs two cores")
@pytest.mark.usefixtures("machine")
def test_each_number_of_cores_is_timed_and_the_file_can_be_read(tmp_path: Path) -> None:
    out, figures = tmp_path / "cores.json", tmp_path / "figures.json"
    tiny = ["--shape", "64x2", "--vocabulary", "512", "--prompt-tokens", "8", "--rounds", "2"]
    asked = ["bench", "cores", *tiny, "--cores-max", "2", "--out", str(out), "--json", str(figures)]
    assert main(asked) == 0
    found = json.loads(figures.read_text())
    assert found["service_ms"].keys() == {"1", "2"}
    assert found["ratio_to_one_core"]["1"] == 1
    model = read_cores(out)
    assert model.fixed_ns / 1e6 == pytest.approx(found["fixed_ms"])
    assert model.shared_ns / 1e6 == pytest.approx(found["shared_ms"])


def test_the_fastest_counts_and_the_change_is_from_half_to_all() -> None:
    times = {1: [90, 80], 2: [70, 50, 60], 4: [35, 95]}
    model = fit_cores([(n, min(its)) for n, its in times.items()])
    report = CoresReport(CoresOptions(), times, model)
    assert report.change_percent == pytest.approx(-30)
    assert "-30 % from 2 to 4 cores" in report.text()


@pytest.mark.parametrize(
    "words", [["--rounds", "0"], ["--cores-max", "-1"], ["--out", "/none/such/file"]]
)
def test_what_cannot_be_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cores", *words]) == 1
    assert words[0] in capsys.readouterr().err
