"""Live loads as reports tell them: BlitzScale's worked example, and what real orders leave."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_records import (
    ENDS,
    LAYERS,
    LOAD_UNITS,
    LOADS,
    SOURCE,
    SPLITS,
    TARGET,
    UNIT_NS,
    live_example,
    load,
    step,
    waiting_example,
)
from reported_records import STARTED_NS, S, reported, simulated

from livescale.common.errors import UserError
from livescale.messages.events import HoldingCompleted, HoldingFailed, LayerArrived, LiveStarted
from livescale.report.html import html_report
from livescale.report.pictures.live_picture import NothingToShow, live_picture
from livescale.report.run.live_loads import live_text
from livescale.report.run_report import run_text
from livescale.telemetry.history.reading import read_history
from livescale.values.types import InstanceState

T0_NS = STARTED_NS + S


def test_the_worked_example_is_told_as_it_went() -> None:
    (story,) = reported("zigzag", live_example()).live_stories
    assert (story.worker, story.source) == (TARGET.worker, SOURCE.worker)
    assert (story.order, story.layers) == ("zigzag", LAYERS + 2)
    assert story.ordered_ns == story.live_ns == story.first_layer_ns == T0_NS
    assert story.help_ns == T0_NS + SPLITS[0] * UNIT_NS
    assert story.loaded_ns == story.end_ns == T0_NS + 40 * UNIT_NS
    assert [batch.next_layer - 1 for batch in story.taken] == list(SPLITS)
    assert [batch.answered_ns for batch in story.taken] == [T0_NS + e * UNIT_NS for e in ENDS]
    # The source has no pause: it takes each batch over when the one before is done.
    assert [b.at_ns for b in story.taken[1:]] == [b.answered_ns for b in story.taken[:-1]]
    assert story.live_layers == sum(SPLITS)
    assert story.requests_given == len(SPLITS)
    assert [watermark for _, watermark, _ in story.steps] == [*range(2, LAYERS + 3)]
    arrivals = [at for at, _, _ in story.steps[:-1]]
    assert all(b - a == LOAD_UNITS * UNIT_NS for a, b in pairwise(arrivals))


def test_a_load_that_is_waited_for_is_not_live() -> None:
    run = reported("stop-the-world", waiting_example())
    assert run.live_stories == []
    assert live_text(run.live_stories, run.started_ns) == ""
    assert "first_help_s" not in run.figures
    assert "1st help" not in run_text(run)
    assert "Live scaling" not in html_report([run], "One")


def test_live_is_a_state_of_its_own_until_the_instance_serves() -> None:
    history = read_history(live_example())
    states = [(state, b - a) for state, a, b in history.by_number[2].stretches(history.end_ns + 1)]
    assert states == [(InstanceState.LIVE, 40 * UNIT_NS), (InstanceState.SERVING, 1)]
    assert history.by_number[2].loading_ns == 40 * UNIT_NS


@given(loaded=st.integers(0, 9), is_late=st.booleans())
def test_a_live_load_may_fail_at_any_layer(loaded: int, is_late: bool) -> None:
    lines = [*live_example()[:3], step(T0_NS, (), (load(LOADS, "zigzag"),))]
    lines.append(step(T0_NS + is_late, (LiveStarted(LOADS),)))
    for layer in range(loaded):
        at_ns = T0_NS + (layer + 1) * UNIT_NS
        lines.append(step(at_ns, (LayerArrived(LOADS, layer, layer + 1, layer),)))
    end_ns = T0_NS + S
    last = HoldingCompleted(LOADS, 1) if loaded == 9 else HoldingFailed(LOADS, "link lost")
    lines.append(step(end_ns, (last,)))
    run = reported("failed", tuple(lines))
    (story,) = run.live_stories
    assert (story.end_ns, story.source, story.taken, story.help_ns) == (end_ns, -1, (), None)
    assert (story.loaded_ns is None) == (loaded < 9)
    assert story.live_layers == max(loaded - 1, 0)
    assert (run.history.by_number[2].ending == "") == (loaded == 9)
    assert f"{loaded} of {LAYERS + 2}" in live_text(run.live_stories, run.started_ns)


def test_the_terminal_shows_layers_work_and_batches() -> None:
    run = reported("zigzag", live_example())
    text = run_text(run)
    assert "1st help" in text
    shown_rows = r"^ *(layers there|layers run|batches given) \|(.*)\|"
    rows = dict(re.findall(shown_rows, text, re.M))
    levels = " .:-=+*#"
    for name in ("layers there", "layers run"):
        shown = [levels.index(cell) for cell in rows[name]]
        assert shown == sorted(shown)
        assert shown[-1] == 7
    given = [int(cell) for cell in rows["batches given"] if cell != " "]
    assert sum(given) == len(SPLITS)
    # A batch is handed over at unit 1 of 40, the last at 27 of 40.
    columns = [at for at, cell in enumerate(rows["batches given"]) if cell != " "]
    assert (columns[0], columns[-1]) == (1, 40)


def test_the_page_shows_every_batch_and_the_phases() -> None:
    runs = [reported("stop", waiting_example()), reported("zigzag", live_example())]
    page = html_report(runs, "Both")
    assert 'id="live"' in page
    assert "live: loading, and at work" in page
    section = page[page.index('id="live"') : page.index('id="latency"')]
    assert "w1 helps w0 (zigzag), ordered at 1.00 s: 7 batches of 7 requests" in section
    (figure,) = re.findall(r"<figure>.*?(<svg.*?</svg>)\s*</figure>", section, re.DOTALL)
    svg = ElementTree.fromstring(figure)
    texts = ["".join(node.itertext()) for node in svg.iter() if node.tag.endswith("}text")]
    numbers = [text for text in texts if text in {str(n + 1) for n in SPLITS}]
    assert {"w0", "w1: layers", "layers run"} <= set(texts)
    assert len(numbers) >= len(SPLITS)
    assert "first help" in page[page.index('id="events"') :]
    assert "zigzag: helps instance 1" in page


def test_figures_say_when_help_came_first() -> None:
    figures = reported("zigzag", live_example()).figures
    assert figures["live_loads"] == 1
    assert figures["batches_handed_over"] == figures["requests_handed_over"] == len(SPLITS)
    assert figures["first_help_s"] == pytest.approx(SPLITS[0] * UNIT_NS / S)


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_a_picture_of_both_is_the_same_each_time(tmp_path: Path, kind: str) -> None:
    written = []
    for name in ("a", "b"):
        runs = [reported("stop", waiting_example()), reported("zigzag", live_example())]
        path = tmp_path / f"{name}.{kind}"
        live_picture(path, runs)
        written.append(path.read_bytes())
    assert written[0] == written[1]
    assert len(written[0]) > 10_000
    if kind == "svg":
        assert ElementTree.fromstring(written[0]).tag.endswith("}svg")


def test_a_picture_needs_a_load_and_a_known_kind(tmp_path: Path) -> None:
    run = reported("cut", waiting_example()[:3])
    with pytest.raises(NothingToShow, match="cut: no instance was loaded"):
        live_picture(tmp_path / "a.svg", [run])
    with pytest.raises(UserError, match=r"\.svg, \.pdf or \.png"):
        live_picture(tmp_path / "a.gif", [reported("stop", waiting_example())])
    assert list(tmp_path.iterdir()) == []


def test_records_without_live_scaling_have_no_stories_of_it() -> None:
    run = reported("any", simulated())
    assert len(run.history.instances) > 1
    assert run.live_stories == []
