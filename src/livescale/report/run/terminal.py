"""Plain text for a terminal: aligned tables, durations and step charts in ASCII, no colours.

Functions return lines or strings and print nothing. Which figures are shown is decided elsewhere.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

from livescale.config.slo import SloAbsolute
from livescale.values.units import NS_PER_S

WIDTH_CHARS = 90
"""Width of charts, unless another one is given."""

_LABEL_CHARS = 6
_CHART_ROWS_MAX = 16
_ABSENT = "-"
_FILLING = " .:-=+*#"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The rows in aligned columns under a ruled header; numbers and absent values to the right.

    None is shown as "-", floats with three significant digits. All rows are as long as the header.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    columns = range(len(header))
    widths = [max(len(line[c]) for line in [list(header), *cells]) for c in columns]
    is_right = [
        all(value is None or isinstance(value, int | float) for value in column)
        for column in ([row[c] for row in rows] for c in columns)
    ]

    def line(texts: Sequence[str]) -> str:
        fitted = (
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(texts, widths, is_right, strict=True)
        )
        return "  ".join(fitted).rstrip()

    return "\n".join([line(header), "  ".join("-" * w for w in widths), *map(line, cells)])


def slo_of_models(slo: SloAbsolute) -> str:
    """What stands behind general bounds if some models are judged by their own."""
    count = len(slo.of_models)
    if not count:
        return ""
    return f"; {count} model{'s' if count > 1 else ''} by bounds of their own"


def seconds(value_s: float | None) -> str:
    """A duration as a person reads it: "12.3 ms", "1.23 s"; "-" if there is none."""
    if value_s is None:
        return _ABSENT
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if abs(value_s) * factor >= 1:
            return f"{_digits(value_s * factor)} {unit}"
    return "0 s" if value_s == 0 else f"{_digits(value_s * 1e6)} us"


def filling(done: int, of: int) -> str:
    """How much there is, as one of _FILLING: blank only for nothing."""
    level = done * (len(_FILLING) - 1) // of if of else 0
    return _FILLING[max(level, min(done, 1))]


def charts_and_table(
    instances: Mapping[str, Sequence[tuple[int, int]]],
    end_ns: int,
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
) -> str:
    """One `step_chart` for each, by its title, all of the same time: a second beyond the end; and a
    table. Empty without any."""
    if not instances:
        return ""
    until_ns = max([end_ns, *(of[-1][0] for of in instances.values())]) + NS_PER_S
    charts = [step_chart(title, of, until_ns) for title, of in instances.items()]
    return "\n\n".join([*charts, table(header, rows)])


def step_chart(
    title: str,
    steps: Sequence[tuple[int, int]],
    until_ns: int,
    width_chars: int = WIDTH_CHARS,
) -> str:
    """A count over time, one line per level, "#" where the count reaches it.

    `steps` are (time, count from then on) in ascending time; before the first the count is 0. The
    chart shows [0, until_ns). A column shows the largest count of its time, so that no short peak
    is lost; levels are thinned out when there are too many for the screen.
    """
    columns = max(1, width_chars - _LABEL_CHARS - 3)
    heights = _column_heights(steps, until_ns, columns)
    highest = max(heights)
    stride = max(1, -(-highest // _CHART_ROWS_MAX))
    lines = [title]
    for level in range(-(-highest // stride) * stride, 0, -stride):
        bar = "".join("#" if height > level - stride else " " for height in heights)
        lines.append(f"{level:>{_LABEL_CHARS}} | {bar}".rstrip())
    margin = " " * (_LABEL_CHARS + 1)
    lines.append(f"{margin}+{'-' * (columns + 1)}")
    end = seconds(until_ns / NS_PER_S)
    lines.append(f"{margin}  0 s{end:>{max(0, columns - 3)}}")
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return _ABSENT
    return _digits(value) if isinstance(value, float) else str(value)


def _digits(value: float) -> str:
    """Three significant digits, never in exponent form above 0.001."""
    magnitude = abs(value)
    if magnitude >= 100 or value == 0:
        return f"{value:.0f}"
    if magnitude < 0.001:
        return f"{value:.2e}"
    decimals = 1 if magnitude >= 10 else 2 if magnitude >= 1 else 3
    return f"{value:.{decimals}f}"


def _column_heights(steps: Sequence[tuple[int, int]], until_ns: int, columns: int) -> list[int]:
    """The largest count within each of `columns` equal parts of [0, until_ns)."""
    times = [at_ns for at_ns, _ in steps]
    heights = []
    for column in range(columns):
        start_ns = until_ns * column // columns
        stop_ns = until_ns * (column + 1) // columns
        first = bisect.bisect_right(times, start_ns) - 1  # the step that holds at the start
        last = bisect.bisect_left(times, stop_ns)
        counts = [count for _, count in steps[max(first, 0) : max(last, first + 1)]]
        heights.append(max(counts, default=0))
    return heights
