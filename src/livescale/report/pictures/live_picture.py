"""One picture of the same load with and without live scaling, to stand alone in a document."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from livescale.common.errors import UserError
from livescale.report.pictures.canvas import (
    PlotRow,
    amount_axis,
    draw_picture,
    line_look,
    step_line,
    time_axis,
)
from livescale.report.pictures.live_figures import source_lane, target_layers
from livescale.report.pictures.series import request_series
from livescale.report.run.live_loads import LoadStory, load_stories
from livescale.report.run.reported_run import ReportedRun
from livescale.report.run.terminal import seconds
from livescale.values.units import NS_PER_S

_NAMES_MAX = 4


class NothingToShow(UserError):
    """A run has no load while requests came: says which."""


def live_picture(path: Path, runs: Sequence[ReportedRun], title: str | None = None) -> None:
    """First tokens of all runs over time, and of each run the first load that came after its
    beginning, from the loading instance's side and its source's.

    Writes an SVG, a PDF or a PNG; its title says what is drawn, unless there is another. Raises
    NothingToShow without such a load; else as `draw_picture`.
    """
    stories = [_first_load(run) for run in runs]
    until_s = max(run.end_ns for run in runs) / NS_PER_S * 1.02
    told = "requests that have had their first token; dotted: the new instance has all layers"
    rows = [PlotRow(2.3, lambda axes: _first_tokens(axes, runs, stories, until_s), told)]
    for run, story in zip(runs, stories, strict=True):
        rows += _rows(run, story, until_s)
    draw_picture(path, title or _title(runs, stories), rows)


# -- helpers, in the order used -------------------------------------------------------------------


def _title(runs: Sequence[ReportedRun], stories: Sequence[LoadStory]) -> str:
    """What is drawn: of which runs, and whether their first new instances helped or were waited
    for."""
    helped = [bool(story.taken) for story in stories]
    how = "helps while it loads" if all(helped) else "is waited for"
    if any(helped) and not all(helped):
        how = "helps while it loads, or is waited for"
    names = ", ".join(run.name for run in runs[:_NAMES_MAX])
    if len(runs) > _NAMES_MAX:
        names += f" and {len(runs) - _NAMES_MAX} more"
    return f"{names}: first tokens, and the first new instance, which {how}"


def _first_load(run: ReportedRun) -> LoadStory:
    for story in load_stories(run.history):
        if story.ordered_ns >= run.started_ns:
            return story
    raise NothingToShow(f"{run.name}: no instance was loaded while requests came")


def _first_tokens(
    axes: Axes, runs: Sequence[ReportedRun], stories: Sequence[LoadStory], until_s: float
) -> None:
    """Requests that have had their first token, over time."""
    largest = 0
    for number, (run, story) in enumerate(zip(runs, stories, strict=True)):
        of = request_series(run)
        at_s = np.sort((of.due_s + of.ttft_s)[~np.isnan(of.ttft_s)])
        largest = max(largest, len(at_s))
        steps = [(float(at), float(count)) for count, at in enumerate(at_s, 1)]
        ttft = run.summary.ttft
        told = (
            "" if ttft is None else f": TTFT p50 {seconds(ttft.p50_s)}, p99 {seconds(ttft.p99_s)}"
        )
        look = {**line_look(number, len(runs)), "linewidth": 1.8}
        step_line(axes, steps, until_s, label=f"{run.name}{told}", **look)
        if story.loaded_ns is not None:
            loaded_s = (story.loaded_ns - run.started_ns) / NS_PER_S
            axes.axvline(loaded_s, color=look["color"], linewidth=1.1, linestyle=":")
    time_axis(axes, until_s)
    amount_axis(axes, "requests", largest, is_count=True)
    axes.legend(loc="upper left", frameon=False, handlelength=1.6)


def _rows(run: ReportedRun, story: LoadStory, until_s: float) -> list[PlotRow]:
    zero_ns = run.started_ns

    rows: list[PlotRow] = []
    where = f"{run.name}: "
    if story.source >= 0:
        told = f"{where}batches that w{story.source} takes over, and the layers behind them"
        rows.append(PlotRow(0.75, lambda axes: source_lane(axes, story, zero_ns, until_s), told))
        where = ""
    told = f"{where}layers of w{story.worker} as they arrive"
    if story.taken:
        told += "; a dot is a batch that it hands over"
    height_in = 1.6 if story.taken else 1.0
    rows.append(PlotRow(height_in, lambda axes: target_layers(axes, story, zero_ns, until_s), told))
    return rows
