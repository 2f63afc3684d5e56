"""`bench sim`: figures of small pools; what they mean, not how large they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from livescale.main import main


def test_pools_of_several_sizes_are_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    load = "gamma:rate=4,cv=1,seconds=12,input=300,output=20"
    sizes = ["--hosts", "1,2", "--sweep-seconds", "4", "--model", "llama-3-8b", "--tp", "1"]
    arguments = ["bench", "sim", "--trace", load, "--seconds", "12", *sizes]
    assert main([*arguments, "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    coalesced, single, small, large = figures["rows"]
    assert (coalesced["devices"], small["devices"], large["devices"]) == (32, 8, 16)
    assert coalesced["tokens"] == single["tokens"] > 0
    # One event of many steps for as many events of one.
    assert coalesced["events"] < single["events"]
    assert large["requests"] > small["requests"] > 0
    assert {row["failed"] for row in figures["rows"]} == {0}
    assert figures["events_per_s"] > 0
    assert figures["real_time_factor_32_gpus"] > 0
    assert figures["real_time_factor_32_gpus_uncoalesced"] > 0
    assert "real_time_factor_1024_gpus" not in figures
    printed = capsys.readouterr().out
    assert "x real time" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hosts", "4,2"], "must ascend"),
        (["--hosts", "many"], "write numbers"),
        (["--model", "llama-9"], "llama-9"),
        (["--tp", "3"], "3"),
    ],
)
def test_wrong_input_is_named(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    load = "gamma:rate=4,cv=1,seconds=5,input=300,output=20"
    assert main(["bench", "sim", "--trace", load, *arguments]) == 1
    assert words in capsys.readouterr().err
