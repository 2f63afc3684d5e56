"""A reproduction as Markdown (one table, the notes, what is absent) and its pictures, drawn with
matplotlib as SVG files. The same picture gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from livescale.reproduce.claim import Picture, Reproduction

_SALT = "livescale"
"""Ids inside an SVG file are hashed with it; by default they are drawn anew each time."""


_STYLES = ("-", "--", "-.", ":")


def draw(picture: Picture, path: Path) -> None:
    """Write one picture. No window system and no state of pyplot is needed."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for number, curve in enumerate(picture.curves):
        xs, ys = zip(*curve.points, strict=True)
        # Dashes in turn, so that lines that lie upon each other are both seen.
        style = _STYLES[number % len(_STYLES)]
        drawn = "steps-post" if curve.is_step else "default"
        marker = "" if curve.is_step else "o"
        axes.plot(xs, ys, style, drawstyle=drawn, marker=marker, markersize=3, label=curve.label)
    if picture.is_log_x:
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
    with matplotlib.rc_context({"svg.hashsalt": _SALT}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def draw_all(found: Reproduction, folder: Path) -> dict[str, list[str]]:
    """Draw every picture of the verdicts into the folder; names of the files by id."""
    names: dict[str, list[str]] = {}
    for verdict in found.verdicts:
        for number, picture in enumerate(verdict.measured.pictures, 1):
            name = f"{verdict.claim.id.lower()}-{number}.svg"
            draw(picture, folder / name)
            names.setdefault(verdict.claim.id, []).append(name)
    return names


def as_markdown(found: Reproduction, pictures: Mapping[str, Sequence[str]] | None = None) -> str:
    """`pictures` are the names of files beside the document, by id of the claim."""
    lines: list[str] = []
    if found.verdicts:
        lines += ["| id | setup | paper | ours | tolerance | within |", "|---|---|---|---|---|---|"]
    for verdict in found.verdicts:
        claim = verdict.claim
        mark = "yes" if verdict.within else "**no**"
        cells = (claim.id, claim.setup, claim.paper, verdict.ours, claim.tolerance, mark)
        lines.append(f"| {' | '.join(cell.replace('|', '¦') for cell in cells)} |")
    within = sum(verdict.within for verdict in found.verdicts)
    lines += ["", f"{within} of {len(found.verdicts)} within tolerance."]
    notes = [f"- {v.claim.id}: {v.claim.note}" for v in found.verdicts if v.claim.note]
    if notes:
        lines += ["", "Notes:", "", *notes]
    if found.absent:
        lines += ["", "Not measured:", ""]
        lines += [f"- {name}: {reason}" for name, reason in found.absent.items()]
    for name, files in (pictures or {}).items():
        lines += ["", *(f"![{name}]({file})" for file in files)]
    return "\n".join(lines).strip() + "\n"
