"""A reproduction as Markdown (one table, the notes, what is absent) and its pictures, drawn with
matplotlib as SVG files. The same picture gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from livescale.lab.reproduce.base.claim import JUDGES, Picture, Reproduction

_SALT = "livescale"
"""Ids inside an SVG file are hashed with it; by default they are drawn anew each time."""


_STYLES = ("-", "--", "-.", ":")
_MARKED = 20
"""Points of a line that are marked each."""


def draw(picture: Picture, path: Path) -> None:
    """Write one picture. No window system and no state of pyplot is needed."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    draw_panel(picture, figure.add_subplot())
    save(figure, path)


def draw_panel(picture: Picture, axes: Axes) -> None:
    """The picture on these axes."""
    for number, curve in enumerate(picture.curves):
        xs, ys = zip(*curve.points, strict=True)
        if picture.names:
            width = 0.8 / len(picture.curves)
            offset = (number - (len(picture.curves) - 1) / 2) * width
            axes.bar([x + offset for x in xs], ys, width, label=curve.label)
            continue
        # Dashes in turn, so that lines that lie upon each other are both seen.
        style = _STYLES[number % len(_STYLES)]
        drawn = "steps-post" if curve.is_step else "default"
        marker = "o" if not curve.is_step and len(xs) <= _MARKED else ""
        axes.plot(xs, ys, style, drawstyle=drawn, marker=marker, markersize=3, label=curve.label)
    if picture.names:
        axes.set_xticks(range(len(picture.names)), picture.names)
    elif picture.is_log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
    elif all(x == round(x) for curve in picture.curves for x, _ in curve.points):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.set_title(picture.title, fontsize=10)
    axes.set_xlabel(picture.x)
    axes.set_ylabel(picture.y)
    axes.grid(alpha=0.3)
    if len(picture.curves) > 1:
        axes.legend(fontsize=7)


def save(figure: Figure, path: Path) -> None:
    """As SVG or PDF, by the path's suffix, without a date."""
    metadata = {"Date": None} if path.suffix == ".svg" else {"CreationDate": None}
    with matplotlib.rc_context({"svg.hashsalt": _SALT}):
        figure.savefig(path, format=path.suffix[1:], metadata=metadata)


def draw_all(found: Reproduction, folder: Path) -> dict[str, str]:
    """Draw the pictures of the verdicts into the folder; names of the files by id."""
    pictures = {v.claim.id: v.measured.picture for v in found.verdicts if v.measured.picture}
    for name, picture in pictures.items():
        draw(picture, folder / f"{name.lower()}-1.svg")
    return {name: f"{name.lower()}-1.svg" for name in pictures}


def as_markdown(found: Reproduction, pictures: Mapping[str, str] | None = None) -> str:
    """`pictures` are the names of files beside the document, by id of the claim."""
    lines: list[str] = []
    if found.verdicts:
        names = ("id", "judges", "statement", "setup", "paper", "ours", "tolerance", "within")
        lines += [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for verdict in found.verdicts:
        claim = verdict.claim
        mark = "yes" if verdict.within else "**no**"
        statement = claim.statement + (f": {claim.corrected}" if claim.corrected else "")
        cells = [claim.id, claim.judges, statement, claim.setup, claim.paper]
        cells += [verdict.ours, claim.tolerance, mark]
        lines.append(f"| {' | '.join(cell.replace('|', '¦') for cell in cells)} |")
    lines += ["", *_headline(found)]
    notes = [f"- {v.claim.id}: {v.claim.note}" for v in found.verdicts if v.claim.note]
    if notes:
        lines += ["", "Notes:", "", *notes]
    if found.absent:
        lines += ["", "Not measured:", ""]
        lines += [f"- {name}: {reason}" for name, reason in found.absent.items()]
    for name, file in (pictures or {}).items():
        lines += ["", f"![{name}]({file})"]
    return "\n".join(lines).strip() + "\n"


# -- helpers --------------------------------------------------------------------------------------


def _headline(found: Reproduction) -> list[str]:
    """How many claims are within tolerance, by what they judge and by statement, never mixed."""
    lines = ["Within tolerance:", "", "| judges | as printed | as corrected |", "|---|---|---|"]
    for name, judges in (*((judges, judges) for judges in JUDGES), ("all", None)):
        printed, corrected = (found.count(kind, judges) for kind in ("printed", "corrected"))
        lines.append(f"| {name} | {printed} | {corrected} |")
    return lines
