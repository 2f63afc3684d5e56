"""`livescale report RECORD…`: what run records say, as text, as a page and as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from livescale.cli.errors import UserError
from livescale.cli.loads import write_json
from livescale.report.comparison import as_json, comparison_table
from livescale.report.html import write_html_report
from livescale.report.reported_run import ReportedRun
from livescale.report.run_report import RunReport
from livescale.report.summary import summarize
from livescale.report.timings import due_ns, timing_of
from livescale.slo import SloError, SloRule, parse_slo
from livescale.telemetry.record import RecordError, RequestLine, read_record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("records", type=Path, nargs="+", metavar="RECORD", help="run records to compare")
    add("--slo", default="5x-mean", help="'5x-mean' (of the first) or 'ttft=450ms,tbt=150ms'")
    add("--page", type=Path, metavar="FILE", help="write an HTML page")
    words = "draw the first load of each run, .svg or .png: live scaling beside waiting for it"
    add("--picture", type=Path, metavar="FILE", help=words)
    add("--json", type=Path, metavar="FILE", help="write the figures")


def run(arguments: argparse.Namespace) -> int:
    """0 when everything could be read and written."""
    try:
        rule = parse_slo(arguments.slo)
    except SloError as error:
        raise UserError(str(error)) from error
    runs: list[ReportedRun] = []
    for path in arguments.records:
        slo = runs[0].slo if runs else None
        runs.append(_read(path, slo or rule, arguments.slo))
    print(runs[0].report.text() if len(runs) == 1 else comparison_table(runs))
    if len(runs) > 1:
        for one in runs:
            if one.report.live_text:
                print(f"\n{one.name}\n\n{one.report.live_text}")
    if arguments.page is not None:
        try:
            write_html_report(arguments.page, runs, ", ".join(one.name for one in runs))
        except OSError as error:
            raise UserError(f"{arguments.page}: cannot be written: {error.strerror}") from error
    if arguments.picture is not None:
        _draw(arguments.picture, runs)
    if arguments.json is not None:
        write_json(arguments.json, {"runs": as_json(runs)})
    return 0


# -- helpers, in the order used -------------------------------------------------------------------


def _read(path: Path, rule: SloRule, words: str) -> ReportedRun:
    """The run, from its first request on: of those that a client meant to send, if any tells."""
    try:
        lines = list(read_record(path))
    except RecordError as error:
        raise UserError(str(error)) from error
    requests = [line for line in lines if isinstance(line, RequestLine)]
    requests = [line for line in requests if line.scheduled_ns is not None] or requests
    if not requests:
        raise UserError(f"{path}: the record has no request")
    started_ns = min(map(due_ns, requests))
    summary = summarize([timing_of(line) for line in requests], rule)
    report = RunReport(path.name, lines, summary, started_ns, words)
    return ReportedRun(path.stem, report, summary.slo)


def _draw(path: Path, runs: list[ReportedRun]) -> None:
    # Only here: drawing takes a second to import.
    from livescale.report.live_picture import NothingToShow, live_picture

    try:
        live_picture(path, runs)
    except (NothingToShow, ValueError) as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error
