"""The section about live scaling: loading instances at work, from close by."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from livescale.report import live_figures
from livescale.report.keys import KeyItem
from livescale.report.live_loads import LoadStory
from livescale.report.panels import Panel, PanelGroup
from livescale.report.reported_run import ReportedRun
from livescale.report.terminal import seconds

STORIES_MAX = 6
"""More live loads of one run than these are not drawn."""

_NS_PER_S = 1_000_000_000


def live_groups(
    runs: Sequence[ReportedRun], new_name: Callable[[], str], notes: list[str]
) -> list[PanelGroup]:
    """Nothing for runs without live loads; `notes` grow with what is left out."""
    panels = []
    for run in runs:
        for story in run.report.live_stories[:STORIES_MAX]:
            # What the source finishes a little later still belongs to the picture.
            spent_ns = max(story.end_ns - story.ordered_ns, 1_000_000)
            until_ns = story.ordered_ns + spent_ns * 115 // 100
            svg = live_figures.live_load(new_name(), story, story.ordered_ns, until_ns)
            panels.append(Panel(svg, run.name if len(runs) > 1 else "", _detail(run, story)))
        left_out = len(run.report.live_stories) - STORIES_MAX
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
        KeyItem("taken over, layers behind it", live_figures.TAKEN_SHOWN, "area"),
        KeyItem("layers there", live_figures.LAYERS),
        KeyItem("handed over", live_figures.TAKEN, "dot", width=3.6),
        KeyItem("first tokens of its own", live_figures.FIRST, "tick"),
        KeyItem("layers run", live_figures.WORK),
    ]
    return [PanelGroup(sentence, legend, panels)] if panels else []


def _detail(run: ReportedRun, story: LoadStory) -> str:
    """ "w1 helps w0 (zigzag), ordered at 12.3 s: 8 batches of 20 requests handed over"."""
    whom = f"helps w{story.source}" if story.source >= 0 else "alone"
    at = seconds((story.ordered_ns - run.report.started_ns) / _NS_PER_S)
    given = f"{len(story.taken)} batches of {story.requests_given} requests handed over"
    return f"w{story.worker} {whom} ({story.order}), ordered at {at}: {given}"
