"""Traces: reading and writing, TraceUpscaler's rule, cutting, generated bursts."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.load.traces import (
    TraceError,
    TraceRow,
    burst_trace,
    clip,
    divide_lengths,
    find_trace,
    read_trace,
    summary,
    upscale,
    window,
)
from trace_files import write_trace

S = 1_000_000_000
HEADER = "arrival_s,input_tokens,output_tokens"

lengths = st.integers(1, 10_000)
traces = st.lists(st.builds(TraceRow, st.integers(0, 100 * S), lengths, lengths), max_size=40).map(
    lambda rows: sorted(rows, key=lambda row: row.arrival_ns)
)
seeds = st.integers(0, 1000)


def arrivals(rows: list[TraceRow]) -> list[int]:
    return [row.arrival_ns for row in rows]


def payloads(rows: list[TraceRow]) -> list[tuple[int, int]]:
    return [(row.input_tokens, row.output_tokens) for row in rows]


def written(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


# -- files ----------------------------------------------------------------------------------------


@given(rows=traces, suffix=st.sampled_from([".csv", ".csv.gz"]))
def test_what_is_written_is_read_back(
    rows: list[TraceRow], suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("traces") / f"t{suffix}"
    write_trace(path, rows)
    first = path.read_bytes()
    assert read_trace(path) == rows
    write_trace(path, rows)
    assert path.read_bytes() == first


def test_columns_are_found_by_name_and_others_ignored(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "session,output_tokens,arrival_s,raw_arrival_s,input_tokens",
        "9,3,0.5,0.000,20",
        "",
        "8,4,0.5,0.000,30",
    )
    assert read_trace(path) == [TraceRow(S // 2, 20, 3), TraceRow(S // 2, 30, 4)]


def test_arrivals_are_exact_to_the_nanosecond(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER, "1799.896769001,1,1", "1799.8967690014,1,1")
    assert arrivals(read_trace(path)) == [1_799_896_769_001] * 2


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("x,1,1", "arrival_s 'x' is not a number"),
        ("nan,1,1", "arrival_s 'nan' is not a number"),
        ("inf,1,1", "arrival_s 'inf' is not a number"),
        ("-0.5,1,1", "arrival_s -0.5 is negative"),
        ("0.5,1,1", "arrival_s 0.5 comes after a later arrival"),
        ("2,1.5,1", "input_tokens '1.5' is not a whole number"),
        ("2,-3,1", "input_tokens -3 is below 1"),
        ("2,3,0", "output_tokens 0 is below 1"),
        ("2,3", "2 fields, at least 3 expected"),
    ],
)
def test_malformed_row_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = written(tmp_path, HEADER, "1.0,1,1", line)
    with pytest.raises(TraceError) as raised:
        read_trace(path)
    assert str(raised.value).startswith(f"{path}, line 3: {problem}")


@pytest.mark.parametrize("header", ["", "arrival_s,input_tokens", "a,b,c"])
def test_missing_columns_are_named(tmp_path: Path, header: str) -> None:
    with pytest.raises(TraceError, match=r"line 1: the header lacks .*output_tokens"):
        read_trace(written(tmp_path, header))


@pytest.mark.parametrize(
    "content",
    [b"no gzip", gzip.compress(b"x" * 99)[:-9], gzip.compress(b"\xff\xfe")],
    # Compressed bytes hold the time: test processes would not agree on the names.
    ids=["no gzip", "cut off", "no text"],
)
def test_unreadable_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"t\.csv\.gz: "):
        read_trace(path)
    with pytest.raises(TraceError, match=r"missing\.csv: No such file"):
        read_trace(tmp_path / "missing.csv")


def test_a_trace_is_found_by_path_and_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    for name in ("burst.csv.gz", "calm.csv"):
        (folder / name).touch()
    assert find_trace("burst", tmp_path) == folder / "burst.csv.gz"
    assert find_trace("calm.csv", tmp_path) == folder / "calm.csv"
    assert find_trace(str(folder / "calm.csv"), None) == folder / "calm.csv"
    with pytest.raises(TraceError, match=r"'brust' is neither .* \(there: burst, calm\)"):
        find_trace("brust", tmp_path)
    with pytest.raises(TraceError, match="set LIVESCALE_DATA"):
        find_trace("burst", None)


# -- upscaling ------------------------------------------------------------------------------------


@given(rows=traces, factor=st.integers(0, 5), seed=seeds)
def test_whole_factor_repeats_each_arrival_so_often(
    rows: list[TraceRow], factor: int, seed: int
) -> None:
    scaled = upscale(rows, factor, seed)
    assert arrivals(scaled) == [at for at in arrivals(rows) for _ in range(factor)]


@given(rows=traces, factor=st.floats(0, 5), seed=seeds)
def test_upscaling_keeps_timestamps_and_payload_order(
    rows: list[TraceRow], factor: float, seed: int
) -> None:
    scaled = upscale(rows, factor, seed)
    source, times = payloads(rows), Counter(arrivals(rows))
    assert payloads(scaled) == [source[k % len(source)] for k in range(len(scaled))]
    assert arrivals(scaled) == sorted(arrivals(scaled))
    for at_ns, count in Counter(arrivals(scaled)).items():
        assert times[at_ns] * int(factor) <= count <= times[at_ns] * (int(factor) + 1)
    assert scaled == upscale(rows, factor, seed)


@given(rows=traces, factor=st.floats(0, 1, exclude_max=True), seed=seeds)
def test_factor_below_one_keeps_a_part_of_the_arrivals(
    rows: list[TraceRow], factor: float, seed: int
) -> None:
    assert Counter(arrivals(upscale(rows, factor, seed))) <= Counter(arrivals(rows))


def test_fraction_of_the_factor_is_a_probability() -> None:
    rows = [TraceRow(i * S, 1, 1) for i in range(10_000)]
    assert len(upscale(rows, 2.25, seed=1)) == pytest.approx(22_500, rel=0.01)
    assert len(upscale(rows, 0.25, seed=1)) == pytest.approx(2_500, rel=0.05)
    assert upscale(rows, 0.25, seed=1) != upscale(rows, 0.25, seed=2)


@pytest.mark.parametrize("factor", [-1.0, float("nan"), float("inf")])
def test_impossible_factor_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="cannot be scaled"):
        upscale([], factor, seed=0)


# -- cutting --------------------------------------------------------------------------------------


@given(rows=traces, cut=st.integers(0, 100 * S))
def test_two_windows_hold_every_row_once(rows: list[TraceRow], cut: int) -> None:
    early, late = window(rows, 0, cut), window(rows, cut, 101 * S)
    assert payloads(early) + payloads(late) == payloads(rows)
    assert arrivals(early) + [at + cut for at in arrivals(late)] == arrivals(rows)


@given(rows=traces, divisor=st.integers(1, 100))
def test_divided_lengths_are_rounded_up(rows: list[TraceRow], divisor: int) -> None:
    for old, new in zip(rows, divide_lengths(rows, divisor), strict=True):
        assert new.arrival_ns == old.arrival_ns
        assert 0 <= new.input_tokens * divisor - old.input_tokens < divisor
        assert 0 <= new.output_tokens * divisor - old.output_tokens < divisor


def test_clipping_counts_the_rows_it_shortens() -> None:
    rows = [TraceRow(0, 10, 10), TraceRow(1, 11, 10), TraceRow(2, 11, 11)]
    assert clip(rows, 10, 10) == ([TraceRow(i, 10, 10) for i in range(3)], 2)


# -- generated and public traces ------------------------------------------------------------------


def test_burst_has_the_shape_it_names() -> None:
    rows = burst_trace(seed=0)
    per_second = Counter(row.arrival_ns // S for row in rows)
    assert arrivals(rows) == sorted(arrivals(rows))
    assert rows[-1].arrival_ns < 60 * S
    assert 45 <= max(per_second.values()) <= 95
    assert 5 <= max(per_second, key=lambda second: per_second[second]) <= 15
    assert sum(per_second[second] for second in range(30, 60)) < 60
    many = [row for seed in range(10) for row in burst_trace(seed)]
    figures = summary(sorted(many, key=lambda row: row.arrival_ns))
    assert figures.input_tokens_mean == pytest.approx(2000, rel=0.1)
    assert figures.output_tokens_mean == pytest.approx(26, rel=0.15)
    assert sorted(row.input_tokens for row in many)[len(many) // 2] == pytest.approx(1500, rel=0.1)
    assert max(row.input_tokens for row in many) == 7437


def test_burst_is_decided_by_its_seed_and_cut_by_its_duration() -> None:
    assert burst_trace(3) == burst_trace(3) != burst_trace(4)
    short = burst_trace(3, 8 * S)
    assert arrivals(short) == arrivals(window(burst_trace(3), 0, 8 * S))
    assert burst_trace(3, 0) == []


def test_summary_finds_the_fullest_second_wherever_it_starts() -> None:
    rows = [TraceRow(at, 10, 2) for at in (0, S - 1, S, S + 5, 2 * S - 2, 4 * S)]
    figures = summary(rows)
    assert (figures.requests, figures.duration_ns) == (6, 4 * S)
    assert figures.second_requests_max == 4
    assert figures.requests_per_s_mean == 1.5
    assert (figures.input_tokens_mean, figures.output_tokens_mean) == (10, 2)


def test_summary_of_nothing_has_no_means() -> None:
    assert summary([]).input_tokens_mean is None
    assert summary([TraceRow(0, 1, 1)]).requests_per_s_mean is None


@pytest.mark.skipif("LIVESCALE_DATA" not in os.environ, reason="LIVESCALE_DATA is not set")
def test_public_windows_agree_with_their_statistics() -> None:
    data_dir = Path(os.environ["LIVESCALE_DATA"])
    windows = json.loads((data_dir / "traces" / "windows.json").read_text())
    assert windows
    for expected in windows:
        figures = summary(read_trace(find_trace(expected["file"], data_dir)))
        assert figures.requests == expected["requests"], expected["file"]
        assert figures.second_requests_max == expected["max1s_rps"], expected["file"]
        assert figures.duration_ns <= expected["duration_s"] * S, expected["file"]
        assert figures.input_tokens_mean == pytest.approx(expected["in_mean"], abs=0.1)
