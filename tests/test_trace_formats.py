"""The public trace formats: recognized by content, exact in time, failed requests counted."""

from __future__ import annotations

import csv
import gzip
import os
import re
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.load.formats import TraceError, TraceRow, parse_trace_file
from livescale.load.traces import find_trace, read_trace, window

S = 1_000_000_000
MS = 1_000_000

Gap = tuple[int, int, int]
"""Time since the row before in the format's unit, input tokens, output tokens."""
gaps = st.lists(
    st.tuples(st.integers(0, 10**8), st.integers(0, 4000), st.integers(0, 4000)), max_size=30
)


def azure(rows: list[tuple[int, int, int]], first: int) -> tuple[str, int]:
    """Ticks of 100 ns since `first` such ticks after the trace's day; the file and the unit."""
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for at, inputs, outputs in rows:
        seconds, ticks = divmod(first + at, 10**7)
        when = datetime(2023, 11, 16, tzinfo=UTC) + timedelta(seconds=seconds)
        lines.append(f"{when:%Y-%m-%d %H:%M:%S}.{ticks:07d},{inputs},{outputs}")
    return "\r\n".join(lines), 100  # no last newline


def burstgpt(rows: list[tuple[int, int, int]], first: int) -> tuple[str, int]:
    lines = ["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"]
    lines += [f"{first + at},GPT-4,{i},{o},{i + o},API log" for at, i, o in rows]
    return "\n".join(lines) + "\n", S


def burstgpt_sessions(rows: list[tuple[int, int, int]], first: int) -> tuple[str, int]:
    head = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens"
    lines = [f"{head},Log Type"]
    lines += [f"{first + at}.0,a-b,43,GPT-4,{i},{o},{i + o},Conversation log" for at, i, o in rows]
    return "\r\n".join(lines) + "\r\n", S


def mooncake(rows: list[tuple[int, int, int]], first: int) -> tuple[str, int]:
    line = '{{"timestamp": {}, "input_length": {}, "output_length": {}, "hash_ids": [0, 1]}}'
    return "\n".join([line.format(first + at, i, o) for at, i, o in rows]) + "\n", MS


WRITERS: dict[Callable[[list[tuple[int, int, int]], int], tuple[str, int]], str] = {
    azure: "azure",
    burstgpt: "burstgpt",
    burstgpt_sessions: "burstgpt",
    mooncake: "mooncake",
}


def written(tmp_path: Path, text: str, name: str = "trace.csv") -> Path:
    path = tmp_path / name
    content = text.encode()
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


@given(
    gaps=gaps.filter(bool),
    writer=st.sampled_from(list(WRITERS)),
    first=st.integers(0, 10**9),
    name=st.sampled_from(["t.csv", "t.jsonl.gz", "t"]),
)
def test_every_format_gives_the_rows_that_were_written(
    gaps: list[Gap],
    writer: Callable[[list[tuple[int, int, int]], int], tuple[str, int]],
    first: int,
    name: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    at, rows = 0, []
    for number, (gap, inputs, outputs) in enumerate(gaps):
        at += gap if number else 0
        rows.append((at, inputs, outputs))
    text, unit_ns = writer(rows, first)
    parsed = parse_trace_file(written(tmp_path_factory.mktemp("traces"), text, name))
    served = [TraceRow(at * unit_ns, i, o) for at, i, o in rows if i and o]
    assert parsed.rows == served
    assert parsed.format == WRITERS[writer]
    assert parsed.failed_requests == len(rows) - len(served)


def test_time_is_counted_from_the_first_row_even_if_it_failed(tmp_path: Path) -> None:
    text, _ = burstgpt([(0, 10, 0), (3, 5, 6)], 744286)
    assert read_trace(written(tmp_path, text)) == [TraceRow(3 * S, 5, 6)]


def test_times_of_day_pass_midnight_and_may_name_utc(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-12-31 23:59:59.9999999,1,1\n2024-01-01T00:00:00.000000+00:00,1,1\n"
        "2024-01-01 00:00:01,1,1\n"
    )
    rows = read_trace(written(tmp_path, text))
    assert [row.arrival_ns for row in rows] == [0, 100, S + 100]


def test_a_byte_order_mark_and_further_columns_do_no_harm(tmp_path: Path) -> None:
    text = "\ufeffx,output_tokens,input_tokens,arrival_s\n7,2,1,0.5\n"
    parsed = parse_trace_file(written(tmp_path, text))
    assert (parsed.format, parsed.rows) == ("livescale", [TraceRow(S // 2, 1, 2)])


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
BURSTGPT = "Timestamp,Request tokens,Response tokens\n5.0,1,1\n"
MOONCAKE = '{"timestamp": 5, "input_length": 1, "output_length": 1}\n'


@pytest.mark.parametrize("number", ["1e999999", "1e99999", "-1e999999", "1e19", "9999999999999"])
@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("arrival_s,input_tokens,output_tokens\n0,9,9\n@,9,9\n", "line 3: arrival_s"),
        (BURSTGPT + "@,1,1\n", "line 3: Timestamp"),
        (MOONCAKE + MOONCAKE.replace("5", "@000", 1), "line 2"),
    ],
)
def test_moments_that_no_clock_has_are_named(
    tmp_path: Path, text: str, where: str, number: str
) -> None:
    file = written(tmp_path, text.replace("@", number))
    with pytest.raises(TraceError, match=re.escape(f"{file}, {where}")):
        parse_trace_file(file)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (AZURE + "2023-11-16 18:17:03,1,1", "line 3: TIMESTAMP 2023-11-16 18:17:03 comes after"),
        (AZURE + "2023-11-16 24:17:04,1,1", "line 3: TIMESTAMP '2023-11-16 24:17:04' is no time"),
        (AZURE + "2023-13-16 18:17:04,1,1", "line 3: TIMESTAMP '2023-13-16 18:17:04' is not a"),
        (AZURE + "18:17:04,1,1", "line 3: TIMESTAMP '18:17:04' is not a time such as"),
        (AZURE + "2023-11-16 18:17:04,1", "line 3: 2 fields, at least 3 expected"),
        (AZURE + "\n2023-11-16 18:17:04,1,x", "line 4: GeneratedTokens 'x' is not a whole"),
        (BURSTGPT + "4,1,1", "line 3: Timestamp 4 comes after a later arrival"),
        (BURSTGPT + "6,-1,1", "line 3: Request tokens -1 is below 0"),
        (BURSTGPT + "6,1,0.5", "line 3: Response tokens '0.5' is not a whole number"),
        (MOONCAKE + '{"timestamp": 6}', "line 2: Object missing required field"),
        (MOONCAKE + '{"timestamp": 6', "line 2: Input data was truncated"),
        (MOONCAKE + "\n" + MOONCAKE.replace("5", "4"), "line 3: timestamp 4 comes after"),
        (MOONCAKE.replace(": 1,", ": -1,"), "line 1: input_length -1 is negative"),
        ("TIMESTAMP,ContextTokens\n", "line 1: the header lacks GeneratedTokens of format azure"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path: Path, text: str, problem: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(TraceError) as raised:
        read_trace(path)
    assert str(raised.value).startswith(f"{path}, {problem}")


def test_names_go_through_folders_and_lack_any_suffix(tmp_path: Path) -> None:
    folder = tmp_path / "traces" / "originals"
    folder.mkdir(parents=True)
    path = written(folder, MOONCAKE, "chat.v1.jsonl.gz")
    assert find_trace("originals/chat.v1", tmp_path) == path
    with pytest.raises(TraceError, match=r"\(there: originals/chat\.v1\)"):
        find_trace("chat", tmp_path)


# -- the public originals -------------------------------------------------------------------------

CUTS = [
    ("AzureLLMInferenceTrace_code.first1800s", "azurecode_0000_30min", 0, 1800),
    ("AzureLLMInferenceTrace_code.first1800s", "azurecode_0855_5min", 855, 1155),
    ("AzureLLMInferenceTrace_code.first1800s", "azurecode_1320_5min", 1320, 1620),
    ("AzureLLMInferenceTrace_conv.first1750s", "azureconv_0000_29min", 0, 1750),
    ("AzureLLMInferenceTrace_conv.first1750s", "azureconv_1035_5min", 1035, 1335),
    ("AzureLLMInferenceTrace_conv.first1750s", "azureconv_1270_8min", 1270, 1750),
    ("BurstGPT_1.744286_72s", "burstgpt1_744286_72s", 0, 72),
    ("BurstGPT_1.822291_31s", "burstgpt1_822291_31s", 0, 31),
    ("BurstGPT_1.3064252_5s", "burstgpt1_3064252_5s", 0, 5),
    ("BurstGPT_without_fails_2.gpt4_5539015_293s", "burstgpt2gpt4_5539015_5min", 0, 293),
]

needs_data = pytest.mark.skipif("LIVESCALE_DATA" not in os.environ, reason="no LIVESCALE_DATA")


@needs_data
@pytest.mark.parametrize(("original", "normalized", "start_s", "stop_s"), CUTS)
def test_originals_cut_to_a_window_are_the_normalized_ones(
    original: str, normalized: str, start_s: int, stop_s: int
) -> None:
    """Within the normalized files' microsecond."""
    data = Path(os.environ["LIVESCALE_DATA"])
    cut = window(read_trace(find_trace(f"originals/{original}", data)), start_s * S, stop_s * S)
    expected = read_trace(find_trace(normalized, data))
    for mine, theirs in zip(cut, expected, strict=True):
        assert abs(mine.arrival_ns - theirs.arrival_ns) <= 1000
        assert mine.input_tokens == theirs.input_tokens
        assert mine.output_tokens == theirs.output_tokens


@needs_data
@pytest.mark.parametrize(
    ("name", "start_s", "stop_s"),
    [("mooncakeconv_0000_30min", 0, 1800), ("mooncakeconv_0540_5min", 540, 840)],
)
def test_mooncakes_clock_is_that_of_the_normalized_window(
    name: str, start_s: int, stop_s: int
) -> None:
    """Up to 3 s, a tick of the source's clock, were added to its arrivals; the raw ones were kept.
    What came to lie behind the window's end that way is missing in the normalized file."""
    data = Path(os.environ["LIVESCALE_DATA"])
    original = read_trace(find_trace("originals/conversation_trace.first1800s", data))
    cut = Counter(window(original, start_s * S, stop_s * S))
    with gzip.open(find_trace(name, data), "rt") as file:
        kept = Counter(
            TraceRow(
                round(float(row["raw_arrival_s"]) * 1000) * MS,
                int(row["input_tokens"]),
                int(row["output_tokens"]),
            )
            for row in csv.DictReader(file)
        )
    assert kept <= cut
    assert all(row.arrival_ns > (stop_s - start_s - 3) * S for row in cut - kept)


@needs_data
def test_every_original_is_read() -> None:
    folder = Path(os.environ["LIVESCALE_DATA"]) / "traces" / "originals"
    failed = {path.name: parse_trace_file(path).failed_requests for path in folder.iterdir()}
    assert failed.pop("BurstGPT_3.head18.csv.gz") == 1
    assert failed.pop("BurstGPT_1.744286_72s.csv.gz") == 1
    assert len(failed) == 7
    assert not any(failed.values())


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (BURSTGPT + "6,472.0,18.0\n", [TraceRow(0, 1, 1), TraceRow(S, 472, 18)]),
        (
            '{"timestamp": 0.5, "input_length": 472.0, "output_length": 2}\n'
            '{"timestamp": 27482.25, "input_length": 3, "output_length": 4}\n',
            [TraceRow(0, 472, 2), TraceRow(27_481_750_000, 3, 4)],
        ),
    ],
)
def test_whole_floats_and_fractions_of_milliseconds(
    text: str, rows: list[TraceRow], tmp_path: Path
) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    assert parse_trace_file(path).rows == rows


@pytest.mark.parametrize("amount", ["0.5", "1e999999999", "nan", "inf"])
def test_amounts_that_are_not_whole(amount: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(BURSTGPT + f"6,{amount},1\n")
    with pytest.raises(TraceError, match=r"line 3: Request tokens .* is not a whole number"):
        parse_trace_file(path)
