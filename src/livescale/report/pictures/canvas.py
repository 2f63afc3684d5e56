"""A matplotlib canvas of one look: axes on it, and the inline SVG that comes out.

Only this module and the figures know matplotlib, and they are imported when a report is made. No
name that a user chose is ever drawn: names stand in the page, where they are escaped.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, cast

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from livescale.common.errors import UserError
from livescale.report.run.terminal import seconds

P = ParamSpec("P")
WIDE_IN = 10.0
HALF_IN = 4.9
THIRD_IN = 3.6
"""Widths of figures that fill the page, and of those that stand two in a row."""

ACCENT = "#0072B2"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5B4B8A")
"""Okabe and Ito's palette, which people with any kind of colour blindness can tell apart, without
its yellow (too pale for lines on white)."""

REST = "#9AA3AF"
"""What is not worth a colour of its own."""
LOAD = "#AEB7C2"
INK = "#374151"
LIMIT = "#111827"
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
"""Line styles: when the colours are used up, they come again with the next of these."""

_LEFT_IN, _RIGHT_IN, _TOP_IN, _BOTTOM_IN = 0.72, 0.12, 0.1, 0.46
_TITLE_IN, _CAPTION_IN, _GAP_IN = 0.34, 0.3, 0.08
_LOOK: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "livescale",
    # Letters that can be searched and copied.
    "pdf.fonttype": 42,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.5,
    "text.parse_math": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#9AA3AF",
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E5E7EB",
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "path.simplify": True,
    "path.simplify_threshold": 0.2,
}
_ID = re.compile(r'(\bid="|url\(#|href="#)')
_UNSAID = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_PICTURE_METADATA = {
    "svg": _UNSAID,
    "pdf": dict.fromkeys(("Creator", "Producer", "CreationDate")),
    "png": {"Software": None},
}
"""What a picture says of its making, by ending: nothing that differs from time to time."""


@dataclass(frozen=True, slots=True)
class PlotRow:
    """One of several plots over one another, and its height with everything around it."""

    height_in: float
    plot: Callable[[Axes], None]
    caption: str = ""


def figure(
    described: str, *, width_in: float = WIDE_IN, height_in: float = 2.1
) -> Callable[[Callable[Concatenate[Axes, P], None]], Callable[Concatenate[str, P], str]]:
    """Makes what plots on axes a figure: it takes a name in place of them, and returns an SVG
    element (see `draw_rows`). {} in `described` is the first argument behind the name."""

    def of(plot: Callable[Concatenate[Axes, P], None]) -> Callable[Concatenate[str, P], str]:
        def drawn(name: str, /, *args: P.args, **kwargs: P.kwargs) -> str:
            row = PlotRow(height_in, lambda axes: plot(axes, *args, **kwargs))
            return draw_rows(name, described.format(*args), [row], width_in=width_in)

        return drawn

    return of


def draw_rows(
    name: str, described: str, rows: Sequence[PlotRow], *, width_in: float = WIDE_IN
) -> str:
    """An SVG element of several plots over one another that share the last one's x axis.

    `name` is unique in the page: it begins every id inside of the figure. `described` is what is
    read out to those who cannot see it. The same calls give the same text.
    """
    with matplotlib.rc_context(cast(Any, _LOOK)):
        figure = _figure(rows, width_in, 0.0)
        file = io.StringIO()
        figure.savefig(file, format="svg", dpi=160, transparent=True, metadata=_UNSAID)
    text = file.getvalue()
    element = text[text.index("<svg") :]
    element = _ID.sub(rf"\g<1>{name}-", element)
    opening = f'<svg role="img" aria-label="{html.escape(described)}" '
    return element.replace("<svg ", opening, 1)


def draw_picture(path: Path, title: str, rows: Sequence[PlotRow]) -> None:
    """Write the plots as one picture that stands alone: with its title, on white, and with letters
    as outlines in an SVG. The same calls give the same bytes. OSError if the file cannot be
    written, UserError for another ending than .svg, .pdf or .png."""
    kind = path.suffix.removeprefix(".")
    if kind not in _PICTURE_METADATA:
        raise UserError(f"{path}: a picture ends in .svg, .pdf or .png")
    with matplotlib.rc_context(cast(Any, {**_LOOK, "svg.fonttype": "path"})):
        figure = _figure(rows, WIDE_IN, _TITLE_IN)
        at = (_LEFT_IN / WIDE_IN, 1 - 0.12 / figure.get_figheight())
        figure.text(*at, title, va="top", fontsize=10.5, color=LIMIT)
        metadata = _PICTURE_METADATA[kind]
        figure.savefig(path, format=kind, dpi=160, facecolor="white", metadata=metadata)


def _figure(rows: Sequence[PlotRow], width_in: float, title_in: float) -> Figure:
    """The plots from top to bottom; the last one has the x axis."""
    total_in = title_in + sum(row.height_in for row in rows)
    figure = Figure(figsize=(width_in, total_in))
    top_in = total_in - title_in
    for row in rows:
        is_last = row is rows[-1]
        below_in = _BOTTOM_IN if is_last else _GAP_IN
        above_in = _CAPTION_IN if row.caption else _TOP_IN
        box = (
            _LEFT_IN / width_in,
            (top_in - row.height_in + below_in) / total_in,
            1 - (_LEFT_IN + _RIGHT_IN) / width_in,
            (row.height_in - above_in - below_in) / total_in,
        )
        axes = figure.add_axes(box)
        row.plot(axes)
        if row.caption:
            axes.set_title(row.caption, loc="left", fontsize=8.5, color=INK, pad=4)
        if not is_last:
            axes.tick_params(axis="x", labelbottom=False)
            axes.set_xlabel("")
        top_in -= row.height_in
    return figure


def time_axis(axes: Axes, until_s: float, from_s: float = 0) -> None:
    """Seconds since the load's start along x."""
    axes.set_xlim(from_s, until_s)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 3, 5, 6, 10]))
    axes.set_xlabel("seconds since the load began")
    axes.grid(visible=False, axis="x")


def amount_axis(axes: Axes, label: str, largest: float, *, is_count: bool = False) -> None:
    """An amount from 0 along y, with a little room above the largest; counts have whole ticks."""
    axes.set_ylim(0, max(largest, 1 if is_count else 1e-9) * 1.06)
    steps = [1, 2, 5, 10] if is_count else [1, 2, 2.5, 5, 10]
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=steps, integer=is_count))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axes.set_ylabel(label)


def duration_ticks(axis: Axis, span_s: tuple[float, float]) -> None:
    """Ticks of a logarithmic axis as durations: "10 ms"; closer ones on a short axis."""
    is_short = span_s[1] < 100 * span_s[0]
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if is_short else (1,), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _duration(value)))
    axis.set_minor_formatter(FuncFormatter(lambda value, _: ""))


def line_look(number: int, lines: int) -> dict[str, Any]:
    """Colour and dashes of the run of this number, and its width.

    Runs are drawn in order over one another: the first are wider, so that all of several lines
    show that coincide.
    """
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[number // len(COLOURS) % len(DASHES)],
        "linewidth": min(1.3 + 0.9 * (lines - 1 - number), 3.4),
    }


def step_line(
    axes: Axes, steps: Sequence[tuple[float, float]], until_s: float, **look: Any
) -> None:
    """A count over time, from (time, count from then on); up to `until_s`."""
    before = [value for at, value in steps if at <= 0]
    shown = [(0.0, before[-1] if before else 0.0)]
    shown += [(at, value) for at, value in steps if 0 < at < until_s]
    shown.append((until_s, shown[-1][1]))
    axes.step([at for at, _ in shown], [value for _, value in shown], where="post", **look)


def _short(value: float) -> str:
    if abs(value) >= 1_000_000:
        return f"{value / 1e6:,.4g}M"
    if abs(value) >= 10_000:
        return f"{value / 1000:,.4g}k"
    return f"{value:,.4g}"


def _duration(value_s: float) -> str:
    amount, unit = seconds(value_s).split(" ")
    return f"{float(amount):g} {'µs' if unit == 'us' else unit}"
