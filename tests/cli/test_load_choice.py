"""What commands play: files of any format, names, generated loads."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from livescale.cli.loads import Load, add_load_arguments, choose_load
from livescale.common.errors import UserError
from livescale.load.traces import TraceRow, burst_trace, divide_lengths, window

S = 1_000_000_000


@pytest.fixture(autouse=True)
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIVESCALE_DATA", raising=False)


def chosen(*words: str) -> Load:
    parser = argparse.ArgumentParser()
    add_load_arguments(parser, trace="TRACE", seconds=60, divide_lengths=1)
    return choose_load(parser.parse_args(words))


def test_without_a_trace_a_burst_is_generated() -> None:
    assert chosen("--seed", "3").rows == burst_trace(3)
    assert chosen("--seed", "3").rows == chosen("burst", "--seed", "3").rows
    assert chosen("burst:seed=3", "--divide-lengths", "10").rows == divide_lengths(
        burst_trace(3), 10
    )


def test_a_generated_load_is_cut_and_scaled_like_any_other() -> None:
    name = "gamma:rate=6,cv=2,seconds=600"
    whole, half = chosen(name, "--seconds", "600"), chosen(name, "--seconds", "300")
    assert half.rows == window(whole.rows, 0, 300 * S)
    assert half.name == name
    assert len(chosen(name, "--factor", "2").rows) == 2 * len(chosen(name).rows)


def test_failed_requests_are_left_out_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "traces" / "originals"
    folder.mkdir(parents=True)
    lines = ["Timestamp,Model,Request tokens,Response tokens", "5.0,a,3,4", "6.0,a,9,0"]
    (folder / "gpt.v2.csv").write_text("\r\n".join(lines))
    monkeypatch.setenv("LIVESCALE_DATA", str(tmp_path))
    assert chosen("originals/gpt.v2").rows == [TraceRow(0, 3, 4)]
    assert "left out: 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["gamma:rate=zero"], "`$.rate`"),
        (["gamma:rate=0.001,seed=1"], "no request in its first 60 s"),
        (["nowhere"], "'nowhere' is not a file"),
    ],
)
def test_a_load_that_is_none_is_named(words: list[str], problem: str) -> None:
    with pytest.raises(UserError) as raised:
        chosen(*words)
    assert problem in str(raised.value)
