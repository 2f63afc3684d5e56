"""`livescale report RECORD…`: what run records say, as text, as a page and as a picture."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from livescale.cli.loads import write_json, writing
from livescale.common.errors import UserError
from livescale.config.slo import SloRule, parse_slo
from livescale.report.comparison import comparison_table
from livescale.report.html import write_html_report
from livescale.report.run.live_loads import live_text
from livescale.report.run.reported_run import ReportedRun
from livescale.report.run.summary import summarize
from livescale.report.run_report import failover_text, run_text
from livescale.telemetry.record.record import AnyLine, RequestLine, read_record, starts_of
from livescale.telemetry.record.record_parts import record_name

_PICTURES = (".svg", ".pdf", ".png")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("records", type=Path, nargs="+", metavar="RECORD", help="Run records to compare.")
    add(
        "--slo",
        default="5x-mean",
        help="SLO: '5x-mean' of the first record (default) or 'ttft=450ms,tbt=150ms'.",
    )
    add("--page", type=Path, metavar="FILE", help="Write an HTML page to this file.")
    words = "Select a start of the pool from each record (-1: the last)."
    add("--start", type=int, metavar="N", help=words)
    words = "Draw TTFT and the first load of each run into a file (.svg, .pdf or .png)."
    add("--picture", type=Path, metavar="FILE", help=words)
    add("--title", metavar="TEXT", help="Title of the page and the picture.")
    add("--json", type=Path, metavar="FILE", help="Write the figures to this file.")


def run(arguments: argparse.Namespace) -> int:
    """0 when everything could be read and written."""
    if arguments.picture is not None and arguments.picture.suffix not in _PICTURES:
        raise UserError(f"--picture {arguments.picture}: a picture ends in .svg, .pdf or .png")
    rule = parse_slo(arguments.slo)
    runs: list[ReportedRun] = []
    for path in arguments.records:
        for name, lines in _starts(path, arguments.start):
            slo = runs[0].slo if runs else None
            runs.append(_reported(name, lines, slo or rule, arguments.slo))
    print(run_text(runs[0]) if len(runs) == 1 else comparison_table(runs))
    if len(runs) > 1:
        for one in runs:
            told = [live_text(one.live_stories, one.started_ns), failover_text(one)]
            if any(told):
                print("\n\n".join(["", one.name, *filter(None, told)]).removeprefix("\n"))
    if arguments.json is not None:  # before what may not be drawn
        write_json(arguments.json, {"runs": [run.figures for run in runs]})
    if arguments.page is not None:
        with writing(arguments.page):
            title = arguments.title or ", ".join(one.name for one in runs)
            write_html_report(arguments.page, runs, title)
    if arguments.picture is not None:
        _draw(arguments.picture, runs, arguments.title)
    return 0


# -- helpers, in the order used -------------------------------------------------------------------


def _starts(path: Path, chosen: int | None) -> list[tuple[str, list[AnyLine]]]:
    """The starts of a pool that the record holds, each a run with a name, or the chosen one. Those
    without requests are left out."""
    starts = starts_of(read_record(path))
    name = record_name(path)
    named = [
        (f"{name}, start {number}" if len(starts) > 1 else name, lines)
        for number, lines in enumerate(starts, 1)
    ]
    if chosen is not None:
        if not 1 <= abs(chosen) <= len(named):
            raise UserError(f"--start {chosen}: {path} holds {len(named)} starts of a pool")
        named = [named[chosen - 1 if chosen > 0 else chosen]]
    found = [(name, lines) for name, lines in named if _requests(lines)]
    if not found:
        raise UserError(f"{path}: the record has no request")
    return found


def _requests(lines: Sequence[AnyLine]) -> list[RequestLine]:
    return [line for line in lines if isinstance(line, RequestLine)]


def _reported(name: str, lines: list[AnyLine], rule: SloRule, words: str) -> ReportedRun:
    """The run, from its first request on: of those that a client meant to send, if any tells."""
    requests = _requests(lines)
    requests = [line for line in requests if line.scheduled_ns is not None] or requests
    started_ns = min(line.due_ns for line in requests)
    summary = summarize([line.timing() for line in requests], rule)
    return ReportedRun(name, name, lines, summary, started_ns, words, summary.slo)


def _draw(path: Path, runs: list[ReportedRun], title: str | None) -> None:
    # Only here: drawing takes a second to import.
    from livescale.report.pictures.live_picture import NothingToShow, live_picture

    try:
        with writing(path):
            live_picture(path, runs, title)
    except NothingToShow as error:
        raise UserError(f"--picture {path}: {error}") from None
