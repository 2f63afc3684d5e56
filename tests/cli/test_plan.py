"""`livescale plan` and `livescale bench plan` from the command line to their figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from livescale.latency.shapes import LLAMA_3_8B
from livescale.main import main

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "topologies"
TESTBED = str(EXAMPLES / "two-leaves-of-three.yaml")
RAILS = str(EXAMPLES / "rail-optimized-8x8.yaml")


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 0
    return capsys.readouterr().out


def planned(tmp_path: Path, *words: str) -> dict[str, Any]:
    file = tmp_path / "plan.json"
    assert main(["plan", *words, "--json", str(file)]) == 0
    figures: dict[str, Any] = json.loads(file.read_text())
    return figures


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 1
    return capsys.readouterr().err


def test_a_plan_is_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    told = plan(
        capsys,
        *("--topology", TESTBED, "--model", "256MiB", "--layers", "8"),
        *("--sources", "w0", "--targets", "5"),
    )
    assert "w0 sends to w1, which passes on to w2, and so on: w3, w4, w5" in told
    assert "nothing meets serving traffic" in told
    assert "Nothing is faster than 2.25 s" in told
    rows = [line for line in told.splitlines() if line.startswith("w") and "|" in line]
    assert [row[:2] for row in rows] == ["w1", "w2", "w3", "w4", "w5"]
    assert all(row.endswith("#|") and "| " in row for row in rows)


def test_the_plan_is_written_for_machines(tmp_path: Path) -> None:
    asked = ("--topology", RAILS, "--model", "llama-3-8b", "--sources", "host0/0,w9")
    figures = planned(tmp_path, *asked, "--targets", "w24,w17,host4/1", "--strategy", "chain")
    assert figures["routes"] == ["w0.0 -> w24.0", "w9.0 -> w17.0 -> w33.0"]
    assert figures["plan"]["strategy"] == "chain"
    assert figures["plan"]["bytes_per_target"] == sum(LLAMA_3_8B.layer_bytes)
    assert figures["predicted_ns"] == max(
        max(load["layer_ns"]) for load in figures["plan"]["loads"]
    )
    assert figures["lower_bound_ns"] <= figures["predicted_ns"]
    assert figures["free_uplinks"] == ["w24.0", "w33.0"]


def test_busy_sources_ranks_host_copies_and_storage(tmp_path: Path) -> None:
    words = ("--topology", RAILS, "--model", "8B")
    avoided = planned(
        tmp_path, *words, "--sources", "w0,w8", "--targets", "w16", "--busy", "w0:out,w8:in"
    )
    assert avoided["routes"] == ["w8.0 -> w16.0"]
    assert avoided["serving_bytes"] == 0
    ranks = planned(tmp_path, *words, "--tp", "2", "--sources", "w0,w1", "--targets", "2")
    assert ranks["plan"]["bytes_per_target"] == 8_000_000_000
    assert len(ranks["plan"]["instances"]) == 2
    assert len(ranks["plan"]["loads"]) == 4
    copied = planned(tmp_path, *words, "--sources", "w0", "--targets", "host0")
    assert [use["link"]["kind"] for use in copied["plan"]["links"]] == ["host"]
    cold = planned(tmp_path, *words, "--targets", "1")
    assert cold["routes"] == ["storage -> w0.0"]
    assert cold["predicted_ns"] == pytest.approx(12.8e9, rel=0.02)
    assert cold["lower_bound_ns"] is None


def test_a_directory_is_a_model(tiny_model: Path, tmp_path: Path) -> None:
    figures = planned(
        tmp_path,
        "--topology",
        TESTBED,
        "--model",
        str(tiny_model),
        "--sources",
        "w0",
        "--targets",
        "1",
    )
    assert figures["plan"]["model"] == tiny_model.name
    assert figures["plan"]["bytes_per_target"] > 1_000_000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "8Q"), "--model '8Q'"),
        (("--targets", "w77"), "'w77'"),
        (("--targets", "6"), "--targets 6: 5 devices are free"),
        (("--sources", "w0,w4,w5", "--tp", "2"), "--sources: 3 devices are no"),
        (("--targets", "w1,w1"), "--targets: a device or host is named twice"),
        (("--sources", "nobody"), "'nobody'"),
        (("--busy", "w0"), "--busy 'w0'"),
        (("--chunk", "0"), "--chunk"),
        (("--tp", "0"), "--tp"),
        (("--model", "99999999999999999999TB"), "no size such as 8B or 16GB (at most 4.61e+06 TB)"),
        (("--model", "9" * 400 + "B"), "no size such as 8B or 16GB (at most 4.61e+06 TB)"),
        (("--topology", "/nowhere/t.yaml"), "/nowhere/t.yaml"),
    ],
)
def test_mistakes_are_named(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    usual = ("--topology", TESTBED, "--model", "1GB", "--sources", "w0", "--targets", "2")
    assert said in refused(capsys, *usual, *words)


def test_bench_plan_writes_times_and_quality(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"
    words = ("--devices", "64", "--devices", "128", "--repetitions", "2", "--json", str(file))
    assert main(["bench", "plan", *words]) == 0
    figures = json.loads(file.read_text())
    assert 0 < figures["plan_ms_128"] <= figures["plan_ms_128_p99"]
    assert len(figures["rows"]) == 2 * 2 * 6
    for row in figures["rows"]:
        assert row["quality"] >= 0.999
        if row["strategy"] in ("auto", "chain", "sharded"):
            assert row["quality"] <= 1.05
    assert "of bound" in capsys.readouterr().out
