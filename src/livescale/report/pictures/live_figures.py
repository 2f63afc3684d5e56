"""The section about live scaling: loading instances at work, drawn from close by: their layers,
their batches, and the instance that each helps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.ticker import MaxNLocator

from livescale.report.pictures import canvas
from livescale.report.pictures.keys import KeyItem, Panel, PanelGroup
from livescale.report.pictures.lanes import tint
from livescale.report.run.live_loads import LoadStory
from livescale.report.run.reported_run import ReportedRun
from livescale.report.run.terminal import seconds
from livescale.values.units import NS_PER_S

LAYERS = canvas.ACCENT
TAKEN = canvas.COLOURS[1]
FIRST = canvas.COLOURS[2]
WORK = canvas.COLOURS[3]
TAKEN_SHOWN = "#eaae7f"
"""TAKEN as bars have it, so that numbers on them can be read."""

_NUMBER_IN = 0.1
"""A bar at least so wide has its number in it."""
_PLOT_IN = canvas.WIDE_IN - 0.84
_LEAST_PART = 0.006
"""No bar is narrower than this part of the axis."""
_ROWS_MAX = 3


def live_load(name: str, story: LoadStory) -> str:
    """One load: the source's lane, the layers of the loading instance, and its work."""
    rows: list[canvas.PlotRow] = []
    zero_ns = story.ordered_ns
    # What the source finishes a little later still belongs to the picture.
    until_s = max(story.end_ns - zero_ns, 1_000_000) * 115 // 100 / NS_PER_S
    if story.source >= 0:
        rows.append(canvas.PlotRow(0.6, lambda axes: source_lane(axes, story, zero_ns, until_s)))
    rows.append(canvas.PlotRow(1.6, lambda axes: target_layers(axes, story, zero_ns, until_s)))

    def work(axes: Axes) -> None:
        """Layers of batches that the loading instance has run so far."""
        steps = [(0.0, 0.0), *((_s(at, zero_ns), float(ran)) for at, _, ran in story.steps)]
        canvas.step_line(axes, steps, until_s, color=WORK, linewidth=1.5)
        canvas.time_axis(axes, until_s)
        canvas.amount_axis(axes, "layers run", story.live_layers, is_count=True)
        axes.set_xlabel("seconds since the order to load it")

    rows.append(canvas.PlotRow(1.3, work))
    described = "A loading instance: its layers, its work and the batches that it handed over"
    return canvas.draw_rows(name, described, rows)


def source_lane(axes: Axes, story: LoadStory, zero_ns: int, until_s: float) -> None:
    """The batches that the source took over, each as long as its first tokens took: a number says
    how many layers it did not have to run."""
    ends_s: list[float] = []
    boxes, numbers = [], []
    for batch in story.taken:
        left = _s(batch.at_ns, zero_ns)
        # News of a batch may come to the record after its first token: something is always shown.
        right = left + until_s * _LEAST_PART
        if batch.answered_ns is not None:
            right = max(right, _s(batch.answered_ns, zero_ns))
        place = next((p for p, end in enumerate(ends_s) if end <= left), len(ends_s))
        if place == len(ends_s):
            ends_s.append(right)
        ends_s[place] = right
        place %= _ROWS_MAX
        boxes.append([(left, place), (right, place), (right, place + 0.8), (left, place + 0.8)])
        if (right - left) / until_s * _PLOT_IN >= _NUMBER_IN:
            numbers.append(((left + right) / 2, place + 0.4, batch.next_layer))
    rows = max(1, min(len(ends_s), _ROWS_MAX))
    axes.add_collection(
        PolyCollection(boxes, facecolors=[TAKEN_SHOWN], edgecolors="white", linewidths=0.8),
        autolim=False,
    )
    for x, y, number in numbers:
        axes.text(x, y, str(number), ha="center", va="center", fontsize=6.5, color=canvas.INK)
    axes.set_ylim(rows + 0.1, -0.2)
    axes.set_yticks([rows / 2 - 0.1], [f"w{story.source}"])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    canvas.time_axis(axes, until_s)


def target_layers(axes: Axes, story: LoadStory, zero_ns: int, until_s: float) -> None:
    """The layers of the loading instance as they arrive; a dot for every batch that was handed
    over, at its time and the layers that it had behind it."""
    steps = [(_s(story.ordered_ns, zero_ns), 0.0)]
    steps += [(_s(at, zero_ns), float(watermark)) for at, watermark, _ in story.steps]
    ends = [*steps, (until_s, steps[-1][1])]
    axes.fill_between(
        [x for x, _ in ends],
        [y for _, y in ends],
        step="post",
        color=tint(LAYERS, 0.2),
        linewidth=0,
    )
    canvas.step_line(axes, steps, until_s, color=LAYERS, linewidth=1.3)
    at_s = [_s(batch.at_ns, zero_ns) for batch in story.taken]
    layers = [batch.next_layer for batch in story.taken]
    axes.vlines(at_s, 0, layers, color=TAKEN, linewidth=0.9, alpha=0.6)
    axes.plot(at_s, layers, "o", color=TAKEN, markersize=3.6)
    tops = [_s(at, zero_ns) for at in story.first_ns]
    axes.plot(tops, [story.layers] * len(tops), "|", color=FIRST, markersize=7, markeredgewidth=1.2)
    canvas.time_axis(axes, until_s)
    axes.set_ylim(0, story.layers * 1.08)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.set_ylabel(f"w{story.worker}: layers")


def _s(at_ns: int, zero_ns: int) -> float:
    return (at_ns - zero_ns) / NS_PER_S


STORIES_MAX = 6
"""More live loads of one run than these are not drawn."""


def live_groups(
    runs: Sequence[ReportedRun], new_name: Callable[[], str], notes: list[str]
) -> list[PanelGroup]:
    """Nothing for runs without live loads; `notes` grow with what is left out."""
    panels = []
    for run in runs:
        for story in run.live_stories[:STORIES_MAX]:
            title = run.name if len(runs) > 1 else ""
            panels.append(Panel(live_load(new_name(), story), title, _detail(run, story)))
        left_out = len(run.live_stories) - STORIES_MAX
        if left_out > 0:
            notes.append(
                f"{run.name}: the first {STORIES_MAX} of {STORIES_MAX + left_out} live loads are"
                " drawn."
            )
    sentence = (
        "Loading instances at work, from the order to load them on. Above, the instance that is"
        " helped: every batch that it took over, until its requests had their first token; the"
        " number says how many layers were behind it. Below, the layers of the loading instance as"
        " they arrive: a dot is a batch that was handed over, at as many layers as were behind it."
        " At the bottom, how many layers of batches the loading instance has run."
    )
    legend = [
        KeyItem("taken over, layers behind it", TAKEN_SHOWN, "area"),
        KeyItem("layers there", LAYERS),
        KeyItem("handed over", TAKEN, "dot", width=3.6),
        KeyItem("first tokens of its own", FIRST, "tick"),
        KeyItem("layers run", WORK),
    ]
    return [PanelGroup(sentence, legend, panels)] if panels else []


def _detail(run: ReportedRun, story: LoadStory) -> str:
    """ "w1 helps w0 (zigzag), ordered at 12.3 s: 8 batches of 20 requests handed over"."""
    whom = f"helps w{story.source}" if story.source >= 0 else "alone"
    at = seconds((story.ordered_ns - run.started_ns) / NS_PER_S)
    given = f"{len(story.taken)} batches of {story.requests_given} requests handed over"
    return f"w{story.worker} {whom} ({story.order}), ordered at {at}: {given}"
