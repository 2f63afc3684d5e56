"""What commands that play a trace share: which requests, from where, and figures to a file."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from livescale.common.errors import UserError
from livescale.common.settings import amount_of_bytes
from livescale.load.arrivals import named_trace
from livescale.load.formats import ParsedTrace
from livescale.load.traces import TraceRow, burst_trace, divide_lengths, summary, upscale, window
from livescale.values.units import NS_PER_S

DEFAULT_TRACE = "azurecode_0855_5min"


@dataclass(frozen=True, slots=True)
class Load:
    """The requests to play and where they come from."""

    name: str
    rows: list[TraceRow]


def add_load_arguments(
    parser: argparse.ArgumentParser, *, trace: str | None, seconds: int, divide_lengths: int
) -> None:
    """The flags of `choose_load`; `trace` is the positional argument's name (None: a flag)."""
    words = (
        f"Trace: a file, a name (default: {DEFAULT_TRACE}), burst, or"
        " gamma:rate=6,cv=4,seconds=600,input=512,output=128."
    )
    if trace is None:
        parser.add_argument("--trace", help=words)
    else:
        parser.add_argument("trace", metavar=trace, nargs="?", help=words)
    words = f"Seconds of the trace (default: {seconds})."
    parser.add_argument("--seconds", type=int, help=words)
    parser.set_defaults(default_seconds=seconds)
    parser.add_argument(
        "--factor", type=float, default=1.0, help="Factor on the number of requests."
    )
    parser.add_argument(
        "--divide-lengths",
        type=int,
        default=divide_lengths,
        help="Divisor of prompt and output lengths.",
    )
    parser.add_argument("--seed", type=int, default=0, help="Random seed.")


def choose_load(arguments: argparse.Namespace) -> Load:
    """The trace's requests as asked for; prints what they are.

    Without a trace and without LIVESCALE_DATA a trace of the same shape is generated. Raises
    UserError or TraceError.
    """
    seconds = seconds_of(arguments)
    if min(seconds, arguments.divide_lengths) < 1 or not 0 < arguments.factor <= 1000:
        raise UserError("--seconds and --divide-lengths must be at least 1, --factor in (0, 1000]")
    data = data_folder()
    stop_ns = seconds * NS_PER_S
    if arguments.trace is None and data is None:
        trace = ParsedTrace(burst_trace(arguments.seed, stop_ns), "burst")
        name = f"generated burst (seed {arguments.seed})"
        print(f"LIVESCALE_DATA is not set: playing a generated trace shaped like {DEFAULT_TRACE}")
    else:
        name = arguments.trace or DEFAULT_TRACE
        trace = named_trace(name, data, arguments.seed)
    rows = window(trace.rows, 0, stop_ns)
    if arguments.factor != 1:
        rows = upscale(rows, arguments.factor, arguments.seed)
    if not rows:
        raise UserError(f"trace {name} has no request in its first {seconds} s")
    rows = divide_lengths(rows, arguments.divide_lengths)
    facts = summary(rows)
    print(
        f"trace: {name}, first {seconds} s: {facts.requests} requests, at most"
        f" {facts.second_requests_max} in a second; prompts of {facts.input_tokens_mean:.0f} and"
        f" outputs of {facts.output_tokens_mean:.1f} tokens on average"
    )
    if trace.failed_requests:
        print(f"  failed requests of the file, left out: {trace.failed_requests}")
    print(f"  lengths divided by {arguments.divide_lengths}, arrivals times {arguments.factor:g}")
    return Load(name, rows)


def seconds_of(arguments: argparse.Namespace) -> int:
    """How much of the trace is played. Without the flag it is the default of the command."""
    return int(arguments.default_seconds if arguments.seconds is None else arguments.seconds)


def data_folder() -> Path | None:
    """The folder of public traces, where the environment names one."""
    data = os.environ.get("LIVESCALE_DATA")
    return Path(data) if data else None


def whole_bytes(text: str, flag: str) -> int:
    """The bytes of "64MiB", at least one. Raises UserError."""
    size = amount_of_bytes(text, flag)
    if size < 1:
        raise UserError(f"{flag} must be at least 1 byte")
    return size


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """The file or folder is written meanwhile: an OSError becomes a UserError that names it."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error


def write_json(path: Path, figures: dict[str, object]) -> None:
    """Write one JSON object for machines. Raises UserError."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n")
