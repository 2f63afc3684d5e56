"""The page: whole, self-contained, escaped, and honest about what it does not have."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from reported_records import STARTED_NS, S, reported, requests, simulated

from livescale.report.comparison import compared_figures, comparison_table
from livescale.report.html import html_report, write_html_report
from livescale.report.run.reported_run import ReportedRun
from livescale.telemetry.record.record import AnyLine, RunLine, StepLine, TrafficLine

VOID = {"meta", "br", "img", "hr", "link", "input"}
HOSTILE = '<script>alert("&")</script>$x_1$'


@dataclass
class Page(HTMLParser):
    """A parsed page: elements with attributes, texts by the innermost element, tables."""

    source: str
    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data.strip()))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def said(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]

    @property
    def text(self) -> str:
        return "\n".join(text for _, text in self.texts)


def with_traffic(lines: tuple[AnyLine, ...]) -> tuple[AnyLine, ...]:
    moved = [TrafficLine(STARTED_NS + k * S, {"nic": 10**9 * k, "host": 10**8}) for k in range(6)]
    return (*lines, *moved)


def renamed(lines: tuple[AnyLine, ...], name: str) -> tuple[AnyLine, ...]:
    """The record of a model of another name."""
    text = msgspec.json.encode(lines)
    quoted = msgspec.json.encode(name)
    text = re.sub(rb'"llama-3-8b"', lambda _: quoted, text)
    return tuple(msgspec.json.decode(text, type=list[AnyLine]))


@pytest.fixture(scope="module")
def runs() -> list[ReportedRun]:
    fast = reported("auto", with_traffic(simulated()), cluster="a testbed")
    slow = reported("storage", simulated("storage"), cluster="a testbed")
    return [fast, slow]


@pytest.fixture(scope="module")
def source(runs: list[ReportedRun]) -> str:
    return html_report(runs, "A burst")


@pytest.fixture(scope="module")
def alone(runs: list[ReportedRun]) -> str:
    """The page of the run whose traffic is not known."""
    return html_report(runs[1:], "One")


@pytest.fixture(scope="module")
def page(source: str) -> Page:
    return Page(source)


def test_ids_are_unique_and_what_is_referred_to_is_there(page: Page, source: str) -> None:
    ids = Counter(a["id"] for _, a in page.elements if "id" in a)
    assert max(ids.values()) == 1
    referred = set(re.findall(r"url\(#([^)]+)\)", source))
    referred |= {str(a["href"])[1:] for _, a in page.elements if str(a.get("href"))[0] == "#"}
    referred |= {str(a["xlink:href"])[1:] for _, a in page.elements if "xlink:href" in a}
    assert referred
    assert referred <= set(ids)


def test_the_page_needs_nothing_from_outside_and_no_scripts(page: Page, source: str) -> None:
    names = {tag for tag, _ in page.elements}
    assert not names & {"script", "link", "img", "iframe", "object", "foreignobject"}
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href", "action"):
                assert str(value).startswith("#"), (tag, name, value)
            assert not name.startswith("on"), (tag, name)
    outside = set(re.findall(r"https?://[^\s\"'<>)]+", source))
    assert outside <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "@import" not in source


def test_every_figure_is_well_formed_and_can_be_read_out(source: str) -> None:
    figures = re.findall(r"<figure>.*?(<svg.*?</svg>)\s*</figure>", source, re.DOTALL)
    assert len(figures) > 15
    for figure in figures:
        svg = ElementTree.fromstring(figure)
        assert svg.attrib["role"] == "img"
        assert len(svg.attrib["aria-label"]) > 10
        assert svg.attrib["viewBox"]


def test_the_same_runs_give_the_same_bytes(alone: str) -> None:
    again = [reported("storage", simulated("storage"), cluster="a testbed")]
    assert html_report(again, "One") == alone


def test_sections_have_a_sentence_and_a_panel_for_every_run(page: Page) -> None:
    headings = ["In short", "Summary", "Load and capacity", "Devices", "Instances", "Latency"]
    headings += [
        "Goodput",
        "Network",
        "Host memory",
        "Scale events",
        "What instances were worth",
        "What is left out",
    ]
    assert page.said("h2") == headings
    assert all(text.endswith(".") for text in page.said("p"))
    captions = Counter(page.said("figcaption"))
    # capacity, devices, lanes, close up, TTFT and TBT, host memory; network only where it is known
    assert captions["auto"] == 8
    assert captions["storage"] == 7
    assert page.said("summary") == ["auto", "storage"] * 2


def test_the_summary_has_every_compared_figure(runs: list[ReportedRun], page: Page) -> None:
    cells = set(page.said("td")) | set(page.said("th"))
    rows = compared_figures(runs)
    assert len(rows) > 18
    for row in rows:
        assert {row.label, *row.texts} <= cells
    ratios = [f"×{r:.2f}" for row in rows for r in row.ratios if r is not None]
    assert Counter(t for t in page.said("small") if t.startswith("×")) == Counter(ratios)


def test_what_a_record_lacks_is_said_and_left_out(alone: str) -> None:
    page = Page(alone)
    assert "Network" not in page.said("h2")
    assert any(
        "storage" in note and "traffic" in note and "not drawn" in note for note in page.said("li")
    )
    assert "Host memory" in page.said("h2")
    assert not [text for text in page.said("small") if text.startswith("×")]


def test_a_run_of_which_nothing_is_known_still_has_a_page(runs: list[ReportedRun]) -> None:
    empty = Page(html_report([reported("nothing", ())], "Nothing"))
    assert "Latency" not in empty.said("h2")
    assert len(empty.said("li")) >= 3
    config_only = tuple(x for x in runs[0].lines if isinstance(x, RunLine | StepLine))[:3]
    cut = Page(html_report([reported("cut short", config_only)], "Cut"))
    assert any(note.startswith("cut short") for note in cut.said("li"))
    with pytest.raises(ValueError, match="needs a run"):
        html_report([], "No runs")


def test_without_an_slo_nothing_is_judged() -> None:
    judged = reported("unjudged", requests(20))
    page = Page(html_report([dataclasses.replace(judged, slo=None)], "No SLO"))
    assert "Goodput" not in page.said("h2")
    assert "Latency" in page.said("h2")
    assert any("no SLO is known" in note for note in page.said("li"))
    # The rule stands in the head; no figure has a line for it.
    assert page.said("span").count("SLO") == 1


def test_names_are_text_wherever_they_stand() -> None:
    lines = with_traffic(renamed(simulated(), HOSTILE))
    lines += (TrafficLine(STARTED_NS + 9 * S, {HOSTILE: 10**9}),)
    run = reported(HOSTILE, lines, cluster=HOSTILE)
    page = Page(html_report([run], HOSTILE))
    assert "script" not in {tag for tag, _ in page.elements}
    assert page.said("h1") == [HOSTILE]
    assert page.said("title") == [HOSTILE]
    assert HOSTILE in page.said("td")
    assert page.text.count(HOSTILE) > 15


@pytest.mark.long
def test_a_page_does_not_grow_with_the_requests(tmp_path: Path) -> None:
    sizes = []
    for count in (2000, 20_000):
        path = tmp_path / f"{count}.html"
        write_html_report(path, [reported("many", requests(count))], "Many")
        sizes.append(path.stat().st_size)
    assert sizes[1] < 2 * sizes[0] < 1_000_000


def test_of_many_workers_the_first_lanes_are_drawn() -> None:
    page = Page(html_report([reported("wide", simulated(workers=70))], "Wide"))
    labels = [text for text in page.said("text") if re.fullmatch(r"w\d+", text)]
    assert "w62" in labels
    assert "w64" not in labels
    assert any("first 64 of 70 workers" in note for note in page.said("li"))


def test_the_comparison_is_a_table_and_json(runs: list[ReportedRun]) -> None:
    header, _, *rows = comparison_table(runs).splitlines()
    assert header.split() == ["auto", "storage"]
    (loading,) = [row for row in rows if row.startswith("TTFT p99")]
    assert re.search(r"\(x\d+(\.\d+)?\)$", loading)
    figures = json.loads(json.dumps([run.figures for run in runs]))
    assert [of["name"] for of in figures] == ["auto", "storage"]
    for of, run in zip(figures, runs, strict=True):
        assert of["device_seconds"] == pytest.approx(run.device_s)
        assert of.items() >= json.loads(json.dumps(run.as_json())).items()
        assert "dollars" not in of
    assert figures[0]["carried_bytes"] == {"host": 10**8, "nic": 5 * 10**9}
    assert "carried_bytes" not in figures[1]
    ratio = figures[1]["ttft_p99_s"] / figures[0]["ttft_p99_s"]
    assert ratio > 2, "loading from storage is what makes the other run slow"


def test_the_price_is_that_of_the_device_time() -> None:
    run = reported("priced", simulated(), device_dollars_per_hour=36.0)
    assert run.dollars == pytest.approx(run.device_s / 100)
    assert f"${run.dollars:,.2f}" in comparison_table([run])
    assert run.figures["dollars"] == run.dollars


@pytest.mark.usefixtures("machine")
def test_nothing_is_drawn_before_a_report_is_made() -> None:
    code = "import sys, livescale.report.html, livescale.report.comparison; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"matplotlib", "jinja2", "numpy"} & set(done.stdout.split())
