"""Formats of request traces: lines of files become TraceRows. Formats are recognized by content.

Ground floor: reading only; what can be done with rows is in `traces.py`. Known are

- LiveScale's own CSV: `arrival_s` (decimal seconds from the window's start), `input_tokens`,
  `output_tokens`;
- the Azure LLM inference trace (Patel et al., Splitwise, ISCA'24): CSV with `TIMESTAMP` (a date
  and time of day, UTC, up to nine fractional digits), `ContextTokens`, `GeneratedTokens`;
- BurstGPT (Wang et al., KDD'25): CSV with `Timestamp` (seconds), `Request tokens`, `Response
  tokens`, with or without `Session ID` and `Elapsed time`;
- Mooncake (Qin et al., FAST'25): one JSON object per line with `timestamp` (milliseconds),
  `input_length`, `output_length`.

Columns are found by name and may be more; arrivals are ascending, with ties. In the three public
formats the first row, whatever became of it, is time 0, and a request without prompt or output
tokens is one that failed: it is counted, not replayed.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from decimal import Decimal, InvalidOperation
from pathlib import Path

import msgspec

from livescale.common.errors import UserError
from livescale.values.types import Value
from livescale.values.units import NS_PER_MS, NS_PER_S

OWN_COLUMNS = ("arrival_s", "input_tokens", "output_tokens")
"""The header of LiveScale's own format."""


class TraceError(UserError, ValueError):
    """A trace cannot be found or read; the message names the file and, where known, the line."""


class TraceRow(Value, frozen=True):
    """One request of a trace: when it arrives after the trace's start, and its lengths."""

    arrival_ns: int
    input_tokens: int
    output_tokens: int

    def at(self, arrival_ns: int) -> TraceRow:
        """The same request at another time."""
        return TraceRow(arrival_ns, self.input_tokens, self.output_tokens)


@dataclass(frozen=True, slots=True)
class ParsedTrace:
    """The rows of a trace, the format they came in, and how many failed requests were left out."""

    rows: list[TraceRow]
    format: str
    failed_requests: int = 0


def parse_trace_file(path: Path) -> ParsedTrace:
    """All requests of a file, gzipped if its name ends in .gz. Raises TraceError."""
    text = _read_text(path)
    if text.lstrip().startswith("{"):
        return _collect(path, _mooncake(text), "mooncake", counts_failed=True)
    try:
        header = next(csv.reader(io.StringIO(text, newline="")), [])
    except csv.Error as error:
        raise TraceError(f"{path}, line 1: {error}") from None
    form = _form_of(path, header)
    return _collect(path, _cells(text, header, form), form.name, form.counts_failed)


# -- helpers, in the order used -------------------------------------------------------------------

_DIGITS_MAX = 18
"""Of a number of tokens or of nanoseconds."""

_Record = tuple[int, int, int]
"""Arrival (absolute, ns), input tokens, output tokens."""


@dataclass(frozen=True, slots=True)
class _Form:
    """A CSV format: its columns for arrival, input and output tokens, and how times are written."""

    name: str
    columns: tuple[str, str, str]
    arrival_ns: Callable[[str, str], int]
    counts_failed: bool


class _LineError(ValueError):
    """What is wrong with a line, and which one it is."""

    def __init__(self, line: int, problem: object) -> None:
        super().__init__(f"line {line}: {problem}")


def _read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
    except OSError as error:  # gzip.BadGzipFile is one
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except (EOFError, zlib.error, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from None


def _form_of(path: Path, header: list[str]) -> _Form:
    """The format with these columns; the error is about the one that lacks the fewest."""
    nearest = min(_FORMS, key=lambda form: len(_missing(form, header)))
    if missing := _missing(nearest, header):
        names = ", ".join(form.name for form in _FORMS)
        raise TraceError(
            f"{path}, line 1: the header lacks {', '.join(missing)} of format {nearest.name}"
            f" (known are {names}, and mooncake's lines of JSON)"
        )
    return nearest


def _missing(form: _Form, header: list[str]) -> list[str]:
    return [name for name in form.columns if name not in header]


def _collect(
    path: Path, records: Iterator[tuple[int, str, _Record]], name: str, counts_failed: bool
) -> ParsedTrace:
    """Rows from (line, arrival as written, record). Raises TraceError naming file and line."""
    rows: list[TraceRow] = []
    start_ns: int | None = 0 if not counts_failed else None
    before_ns = failed = 0
    try:
        for line, written, (at_ns, inputs, outputs) in records:
            if start_ns is None:
                start_ns = before_ns = at_ns
            if at_ns < before_ns:
                raise _LineError(line, f"{written} comes after a later arrival")
            before_ns = at_ns
            if inputs and outputs:
                rows.append(TraceRow(at_ns - start_ns, inputs, outputs))
            else:
                failed += 1
    except _LineError as error:
        raise TraceError(f"{path}, {error}") from None
    return ParsedTrace(rows, name, failed)


def _cells(text: str, header: list[str], form: _Form) -> Iterator[tuple[int, str, _Record]]:
    """The records of the lines behind the header; a blank line has none."""
    at, inputs, outputs = (header.index(name) for name in form.columns)
    at_name, inputs_name, outputs_name = form.columns
    largest = max(at, inputs, outputs)
    least = 0 if form.counts_failed else 1
    reader = csv.reader(io.StringIO(text, newline=""))
    next(reader)
    try:
        for cells in reader:
            if not cells:
                continue
            if len(cells) <= largest:
                raise ValueError(f"{len(cells)} fields, at least {largest + 1} expected")
            record = (
                form.arrival_ns(at_name, cells[at]),
                _tokens(inputs_name, cells[inputs], least),
                _tokens(outputs_name, cells[outputs], least),
            )
            yield reader.line_num, f"{at_name} {cells[at]}", record
    except (ValueError, csv.Error) as error:
        raise _LineError(reader.line_num, error) from None


def _seconds_ns(column: str, text: str) -> int:
    try:
        seconds = Decimal(text)
    except InvalidOperation:
        seconds = Decimal("nan")
    if not seconds.is_finite():
        raise ValueError(f"{column} '{text}' is not a number of seconds")
    arrival_ns = _in_ns(column, seconds, NS_PER_S)
    if arrival_ns < 0:
        raise ValueError(f"{column} {text} is negative")
    return arrival_ns


def _in_ns(name: str, moment: Decimal, unit_ns: int) -> int:
    """Raises ValueError for more nanoseconds than a number may have digits."""
    # Each is looked at before it is multiplied: Decimal has a largest exponent.
    is_small = moment.adjusted() <= _DIGITS_MAX
    moment_ns = moment * unit_ns if is_small else moment
    if moment_ns.adjusted() > _DIGITS_MAX:
        raise ValueError(f"{name} {moment} is too large")
    return int(moment_ns.to_integral_value())


_DATE = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:Z|\+00:00)?", re.ASCII
)


def _date_ns(column: str, text: str) -> int:
    found = _DATE.fullmatch(text.strip())
    try:
        if found is None:
            raise ValueError
        day = date.fromisoformat(found[1]).toordinal()
    except ValueError:
        raise ValueError(
            f"{column} '{text}' is not a time such as 2023-11-16 18:17:03.9799600"
        ) from None
    hour, minute, second = int(found[2]), int(found[3]), int(found[4])
    if hour > 23 or minute > 59 or second > 59:
        raise ValueError(f"{column} '{text}' is no time of a day")
    seconds = ((day * 24 + hour) * 60 + minute) * 60 + second
    return seconds * NS_PER_S + int((found[5] or "").ljust(9, "0"))


def _tokens(column: str, text: str, least: int) -> int:
    try:
        tokens = _whole(Decimal(text))
    except (InvalidOperation, ValueError):
        raise ValueError(f"{column} '{text}' is not a whole number") from None
    if tokens < least:
        raise ValueError(f"{column} {text} is below {least}")
    return tokens


def _whole(value: Decimal) -> int:
    """The value, which may be written as 472.0. Raises ValueError. (Integers of a billion digits
    are written in a few characters.)"""
    if not value.is_finite() or value.adjusted() > _DIGITS_MAX or value % 1:
        raise ValueError(f"{value} is not a whole number")
    return int(value)


_FORMS = (
    _Form("livescale", OWN_COLUMNS, _seconds_ns, False),
    _Form("azure", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _date_ns, True),
    _Form("burstgpt", ("Timestamp", "Request tokens", "Response tokens"), _seconds_ns, True),
)


class _MooncakeLine(msgspec.Struct, frozen=True):
    """What is read of a line; `hash_ids`, the hashes of its 512-token blocks, is not."""

    timestamp: int | float
    input_length: int | float
    output_length: int | float


def _mooncake(text: str) -> Iterator[tuple[int, str, _Record]]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise _LineError(number, error) from None
        try:
            yield number, f"timestamp {row.timestamp}", _mooncake_record(row)
        except ValueError as error:
            raise _LineError(number, error) from None


def _mooncake_record(row: _MooncakeLine) -> _Record:
    # By its shortest text, a fraction of a millisecond is as it was written.
    moment = Decimal(str(row.timestamp))
    lengths = []
    for name in ("timestamp", "input_length", "output_length"):
        if (value := getattr(row, name)) < 0:
            raise ValueError(f"{name} {value} is negative")
        if name != "timestamp":
            try:
                lengths.append(_whole(Decimal(str(value))))
            except ValueError:
                raise ValueError(f"{name} {value} is not a whole number") from None
    return _in_ns("timestamp", moment, NS_PER_MS), lengths[0], lengths[1]
