"""Request traces as values: find, read, cut, scale and generate lists of TraceRow.

Ground floor: arithmetic lives here, formats of files in `formats.py`, arrival processes in
`arrivals.py`. Replaying a trace (sending its requests) does not, and neither does the environment:
callers pass the data directory.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from livescale.load.formats import TraceError as TraceError
from livescale.load.formats import TraceRow as TraceRow
from livescale.load.formats import parse_trace_file
from livescale.values.units import NS_PER_S

_SUFFIXES = ("", ".csv", ".csv.gz", ".jsonl", ".jsonl.gz")


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """A trace in a few numbers; `duration_ns` runs from time 0 to the last arrival.

    `second_requests_max` is the most requests in any second [t, t + 1 s), wherever it starts.
    Means are None for an empty trace, the rate also for one that ends at time 0.
    """

    requests: int
    duration_ns: int
    requests_per_s_mean: float | None
    second_requests_max: int
    input_tokens_mean: float | None
    output_tokens_mean: float | None


def find_trace(name: str, data_dir: Path | None) -> Path:
    """The file of a trace given as a path or as a name under `data_dir`/traces.

    A path that exists wins; a name may go through a folder there ("originals/…") and lack the
    suffix. Raises TraceError that lists the names that are there.
    """
    if Path(name).is_file():
        return Path(name)
    if data_dir is None:
        raise TraceError(
            f"trace '{name}' is not a file, and no data directory is known to look it up in"
            " (set LIVESCALE_DATA to the directory that holds traces/)"
        )
    folder = data_dir / "traces"
    for suffix in _SUFFIXES:
        if (folder / f"{name}{suffix}").is_file():
            return folder / f"{name}{suffix}"
    listed = ", ".join(_names(folder)) or "none"
    raise TraceError(f"trace '{name}' is neither a file nor in {folder} (there: {listed})")


def read_trace(path: Path) -> list[TraceRow]:
    """All requests of a file in any format of `formats.py`, but for those that failed.

    Raises TraceError naming file and line.
    """
    return parse_trace_file(path).rows


def upscale(rows: Sequence[TraceRow], factor: float, seed: int) -> list[TraceRow]:
    """More (or fewer) requests with the temporal pattern preserved: TraceUpscaler's rule.

    Each arrival is emitted floor(factor) times and once more with probability factor -
    floor(factor), always at its own timestamp: time is never squeezed. The k-th emitted arrival
    takes the token counts of the k-th source row, starting over when the source is exhausted.
    Sajal et al., TraceUpscaler, EuroSys 2024. Raises ValueError for a negative factor.
    """
    if not (math.isfinite(factor) and factor >= 0):
        raise ValueError(f"a trace cannot be scaled by {factor}")
    copies = math.floor(factor)
    rest = factor - copies
    rng = random.Random(seed)
    scaled: list[TraceRow] = []
    for arrival in rows:
        for _ in range(copies + (rng.random() < rest)):
            scaled.append(rows[len(scaled) % len(rows)].at(arrival.arrival_ns))
    return scaled


def at_rate(rows: Sequence[TraceRow], requests_per_s: float, seed: int) -> list[TraceRow]:
    """The rows upscaled to a mean rate, taken from time 0 to the last arrival.

    What a fraction of the factor gives is drawn, so that the mean is met by expectation. Raises
    ValueError for a trace that has no rate.
    """
    duration_ns = rows[-1].arrival_ns if rows else 0
    if not duration_ns:
        raise ValueError("a trace without requests after its start has no rate")
    return upscale(rows, requests_per_s * duration_ns / (len(rows) * NS_PER_S), seed)


def window(rows: Sequence[TraceRow], start_ns: int, stop_ns: int) -> list[TraceRow]:
    """The rows that arrive in [start_ns, stop_ns), with arrivals counted from `start_ns`."""
    kept = [row for row in rows if start_ns <= row.arrival_ns < stop_ns]
    return [row.at(row.arrival_ns - start_ns) for row in kept]


def rotate(rows: Sequence[TraceRow], by_ns: int, period_ns: int) -> list[TraceRow]:
    """The same requests `by_ns` later; what would arrive after `period_ns` begins the trace."""
    turned = [row.at((row.arrival_ns + by_ns) % period_ns) for row in rows]
    return sorted(turned, key=lambda row: row.arrival_ns)


def divide_lengths(rows: Sequence[TraceRow], divisor: int) -> list[TraceRow]:
    """The same arrivals with lengths divided, rounded up: no request becomes empty."""
    if divisor < 1:
        raise ValueError(f"lengths cannot be divided by {divisor}")
    return [
        TraceRow(
            row.arrival_ns,
            max(1, -(-row.input_tokens // divisor)),
            max(1, -(-row.output_tokens // divisor)),
        )
        for row in rows
    ]


def clip(
    rows: Sequence[TraceRow], input_max: int | None, output_max: int | None
) -> tuple[list[TraceRow], int]:
    """The rows with lengths of at most the limits, and how many rows had to be shortened."""
    if min(1 if limit is None else limit for limit in (input_max, output_max)) < 1:
        raise ValueError(f"lengths cannot be held to {input_max} and {output_max} tokens")
    clipped = [
        TraceRow(
            row.arrival_ns,
            row.input_tokens if input_max is None else min(row.input_tokens, input_max),
            row.output_tokens if output_max is None else min(row.output_tokens, output_max),
        )
        for row in rows
    ]
    return clipped, sum(new != old for new, old in zip(clipped, rows, strict=True))


def summary(rows: Sequence[TraceRow]) -> TraceSummary:
    """Size, duration, rates and mean lengths of a trace."""
    if not rows:
        return TraceSummary(0, 0, None, 0, None, None)
    arrivals = [row.arrival_ns for row in rows]
    duration_ns = arrivals[-1]
    count = len(rows)
    second_max = max(
        bisect.bisect_left(arrivals, arrival + NS_PER_S) - first
        for first, arrival in enumerate(arrivals)
    )
    return TraceSummary(
        requests=count,
        duration_ns=duration_ns,
        requests_per_s_mean=count * NS_PER_S / duration_ns if duration_ns else None,
        second_requests_max=second_max,
        input_tokens_mean=sum(row.input_tokens for row in rows) / count,
        output_tokens_mean=sum(row.output_tokens for row in rows) / count,
    )


_BURST_SHAPE = (
    (5, 0.35),  # the rise
    (7, 0.80),
    (9, 1.00),  # the peak
    (11, 0.45),
    (28, 0.09),  # a mild tail
)
"""(end in seconds, rate in parts of the peak): azurecode_0855_5min's first minute, smoothed."""

_QUIET_RATE = 0.01
"""Rate behind the tail, in parts of the peak."""


def burst_trace(
    seed: int,
    duration_ns: int = 60 * NS_PER_S,
    *,
    peak_per_s: float = 67.0,
) -> list[TraceRow]:
    """A generated trace with one sharp burst, a mild tail, then almost nothing.

    Arrivals are Poisson with a rate that follows the first minute of the public window
    azurecode_0855_5min; a shorter duration cuts the shape, it does not squeeze it. Lengths are
    log-normal with medians, spread (means of about 2,000 and 26 tokens) and largest values of that
    window.
    """
    rng = random.Random(seed)
    return [
        TraceRow(
            arrival_ns,
            min(drawn_length(rng, 1500, 0.85), 7437),
            min(drawn_length(rng, 13, 1.18), 928),
        )
        for arrival_ns in _burst_arrivals(rng, duration_ns, peak_per_s)
    ]


def drawn_length(rng: random.Random, median: int, sigma: float) -> int:
    """A length in tokens, log-normal with that median; without a sigma it is the median."""
    return max(1, round(rng.lognormvariate(math.log(median), sigma))) if sigma else median


# -- helpers, in the order used -------------------------------------------------------------------


def _names(folder: Path) -> list[str]:
    """What can be asked for: the traces of a folder and of the folders in it."""
    found = set()
    for path in [*folder.glob("*"), *folder.glob("*/*")]:
        for suffix in reversed(_SUFFIXES[1:]):
            if path.name.endswith(suffix):
                found.add(path.relative_to(folder).as_posix().removesuffix(suffix))
                break
    return sorted(found)


def _burst_arrivals(rng: random.Random, duration_ns: int, peak_per_s: float) -> Iterator[int]:
    """Arrivals of a Poisson process whose rate is constant over each piece of the shape."""
    start_ns = 0
    for stop_s, part in (*_BURST_SHAPE, (math.inf, _QUIET_RATE)):
        stop_ns = min(duration_ns, stop_s * NS_PER_S)
        at_ns = float(start_ns)
        # A Poisson process has no memory: each piece can start afresh.
        while (at_ns := at_ns + rng.expovariate(peak_per_s * part) * NS_PER_S) < stop_ns:
            yield int(at_ns)
        start_ns = int(stop_ns)
        if start_ns >= duration_ns:
            return
