"""Figures of a paper, drawn from our figures: panels as the paper has them, what the paper prints
beside ours, and the data. Curves of the paper exist as drawings only, and are not here.
"""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from livescale.lab.reproduce.base.claim import Picture
from livescale.lab.reproduce.base.figures import draw_panel, save

INDEX = "figures.md"
_PANEL_WIDTH, _PANEL_HEIGHT = 3.6, 2.6
_LINE_HEIGHT = 0.15
"""Inches."""
_LETTERS = 13
"""In an inch of text."""


@dataclass(frozen=True, slots=True)
class Printed:
    """A figure that the paper prints ("-": it prints none), and ours."""

    what: str
    paper: str
    ours: str


@dataclass(frozen=True, slots=True)
class PaperFigure:
    """One figure: rows of panels. `note` says what it shows that the paper's does not, or lacks."""

    number: int
    title: str
    rows: tuple[tuple[Picture, ...], ...]
    printed: tuple[Printed, ...] = ()
    note: str = ""

    @property
    def name(self) -> str:
        """Of its files."""
        return f"figure-{self.number:02}"

    def data(self) -> list[tuple[str, str, str, float]]:
        """(panel, curve, x, y) of every point."""
        return [
            (picture.title, curve.label, picture.names[int(x)] if picture.names else f"{x:.9g}", y)
            for row in self.rows
            for picture in row
            for curve in picture.curves
            for x, y in curve.points
        ]


def write_figure(figure: PaperFigure, folder: Path) -> list[str]:
    """Names of its files in the folder: SVG, PDF, its data, and what the paper prints beside ours.

    Raises OSError.
    """
    drawing = _drawing(figure)
    names = [f"{figure.name}.{kind}" for kind in ("svg", "pdf")]
    for name in names:
        save(drawing, folder / name)
    names.append(f"{figure.name}.csv")
    _write_csv(folder / names[-1], ("panel", "curve", "x", "y"), figure.data())
    if figure.printed:
        names.append(f"{figure.name}-printed.csv")
        rows = [(printed.what, printed.paper, printed.ours) for printed in figure.printed]
        _write_csv(folder / names[-1], ("what", "paper", "ours"), rows)
    return names


def index(figures: Sequence[PaperFigure], absent: Iterable[tuple[int, str]]) -> str:
    """All figures as Markdown, with what the paper prints beside ours; and why others are not
    there."""
    lines = ["# BlitzScale's figures, with our figures", ""]
    for figure in figures:
        lines += [f"## Figure {figure.number}: {figure.title}", ""]
        lines += [f"![Figure {figure.number}]({figure.name}.svg)", ""]
        lines += [f"[PDF]({figure.name}.pdf), [data]({figure.name}.csv)", ""]
        if figure.printed:
            lines += ["| | paper | ours |", "|---|---|---|"]
            lines += [f"| {p.what} | {p.paper} | {p.ours} |" for p in figure.printed]
            lines.append("")
        if figure.note:
            lines += [figure.note[0].upper() + figure.note[1:] + ".", ""]
    missing = [f"- Figure {number}: {reason}" for number, reason in absent]
    if missing:
        lines += ["Not drawn:", "", *missing, ""]
    return "\n".join(lines)


# -- helpers --------------------------------------------------------------------------------------


def _drawing(figure: PaperFigure) -> Figure:
    """The panels in their rows, and below them a line for each figure that the paper prints."""
    columns = max(map(len, figure.rows))
    heights = [_PANEL_HEIGHT] * len(figure.rows)
    width = max(_PANEL_WIDTH * columns, 2 * _PANEL_WIDTH)
    words = [f"{p.what}: paper {p.paper}; ours {p.ours}" for p in figure.printed]
    lines = [line for text in words for line in textwrap.wrap(text, int(width * _LETTERS))]
    heights.append(_LINE_HEIGHT * (len(lines) + 1))
    drawing = Figure(figsize=(width, sum(heights)), layout="constrained")
    drawing.suptitle(f"Figure {figure.number}: {figure.title}", fontsize=11)
    grid = drawing.add_gridspec(len(heights), columns, height_ratios=heights)
    for number, row in enumerate(figure.rows):
        for column, picture in enumerate(row):
            draw_panel(picture, drawing.add_subplot(grid[number, column]))
    below = drawing.add_subplot(grid[-1, :])
    below.axis("off")
    text = below.text(0, 1, "\n".join(lines), fontsize=8, va="top", transform=below.transAxes)
    text.set_in_layout(False)
    return drawing


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
