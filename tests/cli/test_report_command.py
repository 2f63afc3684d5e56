"""`livescale report`: records in, text, page, picture and figures out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from livescale.cli.main import main


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "chain.jsonl"
    words = ["simulate", "gamma:rate=30,cv=2,seconds=4,input=2000,output=4", "--record", str(path)]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "livescale.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return path


def test_one_record_is_told_and_drawn(
    record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, picture, figures = (tmp_path / name for name in ("a.html", "a.svg", "a.json"))
    outputs = ["--page", str(page), "--picture", str(picture), "--json", str(figures)]
    assert main(["report", str(record), *outputs]) == 0
    assert "instances that serve" in capsys.readouterr().out
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert picture.read_text().count("<svg") == 1
    (of,) = json.loads(figures.read_text())["runs"]
    assert of["name"] == "chain"
    assert of["failed"] == 0
    assert of["requests"] > 50


def test_two_records_are_compared_by_the_first_ones_slo(
    record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(record), str(record)]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split() == ["chain", "chain"]
    assert "(x1.00)" in printed


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("", [], "no request"),
        ("what\n", [], "not a line of a run record"),
        (None, ["--slo", "soon"], "soon"),
        (None, ["--picture", "a.gif"], ".svg or .png"),
        (None, ["--page", "/nowhere/a.html"], "cannot be written"),
        (None, ["--picture", "/nowhere/a.png"], "cannot be written"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    record: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    words: list[str],
    said: str,
) -> None:
    path = record
    if text is not None:
        path = tmp_path / "other.jsonl"
        path.write_text(text)
    assert main(["report", str(path), *words]) == 1
    told = capsys.readouterr().err
    assert said in told
    assert len(told.splitlines()) == 1
