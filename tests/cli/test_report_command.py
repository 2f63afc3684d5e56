"""`livescale report`: records in, text, page, picture and figures out."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from livescale.main import main
from livescale.telemetry.record.record import (
    AnyLine,
    RequestLine,
    RunLine,
    read_record,
    write_record,
)
from livescale.telemetry.record.record_file import RecordClaim


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "chain.jsonl"
    words = ["simulate", "gamma:rate=30,cv=2,seconds=4,input=2000,output=4", "--record", str(path)]
    assert main(words) == 0
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
        (None, ["--picture", "a.gif"], "--picture a.gif: a picture ends in .svg, .pdf or .png"),
        ("what\n", ["--picture", "a.gif"], "--picture a.gif: a picture ends in"),
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


@pytest.fixture(scope="module")
def two_starts(record: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compressed record that two starts of a pool wrote, and one in which nothing was asked."""
    path = tmp_path_factory.mktemp("starts") / "pool.jsonl.zst"
    lines = list(read_record(record))
    starts: list[AnyLine] = []
    for name in ("a", "b", "c"):
        asked = [line for line in lines if name != "b" or not isinstance(line, RequestLine)]
        starts += [
            msgspec.structs.replace(line, start=name) if isinstance(line, RunLine) else line
            for line in asked
        ]
    write_record(path, starts)
    return path


def test_each_start_of_a_pool_is_a_run(
    two_starts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(two_starts)]) == 0
    head = capsys.readouterr().out.splitlines()[0]
    assert head.split("  ")[-1] == "pool, start 3"
    assert "pool, start 1" in head
    assert "start 2" not in head
    for chosen in ("3", "-1"):
        assert main(["report", str(two_starts), "--start", chosen]) == 0
        assert "instances that serve" in capsys.readouterr().out
    for chosen, said in (("4", "holds 3 starts"), ("0", "holds 3 starts"), ("2", "no request")):
        assert main(["report", str(two_starts), "--start", chosen]) == 1
        assert said in capsys.readouterr().err
    assert main(["replay", str(two_starts)]) == 0
    assert "3 controller lives" in capsys.readouterr().out


def drawn_letters(picture: Path, letters: str) -> bool:
    """An SVG has a comment with each text that is drawn as outlines."""
    return letters in picture.read_text()


def test_a_picture_says_what_it_shows_or_what_it_is_told(record: Path, tmp_path: Path) -> None:
    own, given = tmp_path / "own.svg", tmp_path / "given.svg"
    assert main(["report", str(record), "--picture", str(own)]) == 0
    assert drawn_letters(own, "chain: first tokens, and the first new instance, which")
    words = ["--picture", str(given), "--title", "Monday, 9 o'clock"]
    page = tmp_path / "page.html"
    assert main(["report", str(record), *words, "--page", str(page)]) == 0
    assert drawn_letters(given, "Monday, 9 o'clock")
    assert not drawn_letters(given, "first new instance, which")
    assert "<title>Monday, 9 o&#39;clock</title>" in page.read_text()


def test_a_picture_can_be_a_pdf_and_is_the_same_each_time(record: Path, tmp_path: Path) -> None:
    pictures = [tmp_path / f"{number}.pdf" for number in range(2)]
    for picture in pictures:
        assert main(["report", str(record), "--picture", str(picture)]) == 0
    first, second = (picture.read_bytes() for picture in pictures)
    assert first.startswith(b"%PDF-")
    assert first == second


def test_a_simulation_never_overwrites_the_record_of_a_pool_that_runs(
    record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = record.read_bytes()
    claim = RecordClaim(record)
    words = ["simulate", "gamma:rate=30,cv=2,seconds=1,input=2000,output=4", "--record"]
    assert main([*words, str(record)]) == 1
    claim.close()
    assert "is being written by another pool or command" in capsys.readouterr().err
    assert record.read_bytes() == before


def test_figures_are_written_also_if_there_is_nothing_to_draw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calm, picture, figures = (tmp_path / name for name in ("calm.jsonl", "a.svg", "a.json"))
    words = ["simulate", "gamma:rate=2,seconds=4,input=100,output=2", "--strategy", "fixed-full"]
    assert main([*words, "--workers", "1", "--record", str(calm)]) == 0
    outputs = ["--picture", str(picture), "--json", str(figures)]
    assert main(["report", str(calm), *outputs]) == 1
    assert f"--picture {picture}: calm: no instance was loaded" in capsys.readouterr().err
    assert len(json.loads(figures.read_text())["runs"]) == 1
