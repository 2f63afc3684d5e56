"""The HTML report: one file that says what one run did, or several over the same load.

It works on run records alone, so real and simulated runs are shown alike; what a record lacks is
left out, and the page says so. The file needs no network and no scripts. The same runs give the
same bytes. Scale events, losses and instances are tables of words here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from livescale.common.settings import size_text
from livescale.report.comparison import compared_figures
from livescale.report.run.reported_run import ReportedRun
from livescale.report.run.role_usage import ROLE_HEADER, role_rows
from livescale.report.run.stage_usage import STAGE_HEADER, stage_rows
from livescale.report.run.terminal import seconds, slo_of_models
from livescale.report.run_report import (
    DEPARTURE_HEADER,
    FAILOVER_HEADER,
    change_text,
    departure_cells,
    event_stories,
    failover_cells,
    phases_s,
)
from livescale.telemetry.history.holding_history import InstanceHistory
from livescale.telemetry.record.record import LoadPhases, ScaleLine
from livescale.values.units import NS_PER_S

_GROUPS = (
    *("TTFT mean", "TBT mean", "slowest 5 %, TTFT mean", "instances, mean", "GPU time"),
    *("price of GPU time", "scale-ups"),
)
"""Rows of the summary before which there is a rule."""


def write_html_report(path: Path, runs: Sequence[ReportedRun], title: str) -> None:
    """Write the page. ValueError without runs, OSError if the file cannot be written."""
    path.write_text(html_report(runs, title), encoding="utf-8")


def html_report(runs: Sequence[ReportedRun], title: str) -> str:
    """The page. ValueError without runs."""
    if not runs:
        raise ValueError("a report needs a run")
    # Only here, so that commands which draw nothing start quickly.
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    from livescale.report.sections import Gallery

    gallery = Gallery(runs)
    sections = gallery.sections()
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["drawn"] = Markup  # SVG of our own making; names are not in it
    template = environment.from_string(files("livescale.report").joinpath("page.html").read_text())
    summary = compared_figures(runs)
    return template.render(
        title=title,
        facts=_facts(runs),
        names=[run.name for run in runs],
        summary=summary,
        summary_sentence=_summary_sentence(runs),
        has_ratios=any(row.ratios for row in summary),
        groups=_GROUPS,
        sections=sections,
        roles=[(run.name, role_table(run)) for run in runs if run.by_role],
        stages=[(run.name, stage_table(run)) for run in runs if run.by_stage],
        failovers=[(run.name, failover_table(run)) for run in runs if run.history.losses],
        departures=[(run.name, departure_table(run)) for run in runs if run.history.departures],
        events=[(run.name, scale_event_table(run)) for run in runs],
        worth=[(run.name, worth_sentence(run), life_table(run)) for run in runs],
        notes=gallery.notes,
    )


# -- helpers --------------------------------------------------------------------------------------


def _facts(runs: Sequence[ReportedRun]) -> list[tuple[str, str]]:
    """What all runs have in common, or what each of them has."""
    found = {
        "load": [run.trace for run in runs],
        "cluster": [run.cluster for run in runs],
        "SLO": [_slo_text(run) for run in runs],
        "models": [_models_text(runs)],
    }
    return [
        (name, "; ".join(dict.fromkeys(value for value in values if value)))
        for name, values in found.items()
        if any(values)
    ]


def _slo_text(run: ReportedRun) -> str:
    if run.slo is None:
        return run.slo_rule
    bounds = f"TTFT ≤ {seconds(run.slo.ttft_ns / 1e9)}"
    if run.slo.tbt_ns is not None:
        bounds += f", mean TBT ≤ {seconds(run.slo.tbt_ns / 1e9)}"
    if run.slo_rule.endswith("mean"):
        bounds = f"{run.slo_rule} ({bounds})"
    return bounds + slo_of_models(run.slo)


def _models_text(runs: Sequence[ReportedRun]) -> str:
    specs = {m: policy.spec for run in runs for m, policy in run.history.policies.items()}
    sizes = [
        f"{name} ({size_text(spec.size_bytes * spec.tp_size)})" for name, spec in specs.items()
    ]
    if len(sizes) > 4:
        return f"{', '.join(sizes[:3])} and {len(sizes) - 3} more"
    return ", ".join(sizes)


def _summary_sentence(runs: Sequence[ReportedRun]) -> str:
    told = (
        "Latencies are those of requests that ended well. Goodput counts requests that met the SLO."
        " GPU time is how long instances held devices while the load went on, loading included."
        " The slowest 5 % of the requests waited while an instance of their model loaded; else"
        " while no device was left for one; else while neither: the policy or a limit held back."
        " What they computed is what they would have needed alone."
    )
    if len(runs) == 1:
        return told
    return f"{told} Small figures are ratios to the first run, {runs[0].name}."


ROWS_MAX = 150
"""Longer tables end with how much they left out."""

_NAMES_MAX = 3
_ABSENT = "–"


@dataclass(frozen=True, slots=True)
class WordTable:
    """A table of words. Columns named in `numeric` hold figures; `left_out` rows are not shown."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[str, ...]
    left_out: int = 0


def scale_event_table(run: ReportedRun) -> WordTable:
    """One row per scale event and instance loaded or released; phases count from the decision."""
    phases = run.phase_names
    rows: list[tuple[str, ...]] = []
    for event in run.scale_events:
        at = _clock((event.decided_ns - run.started_ns) / NS_PER_S)
        change = change_text(event).replace("->", "→")
        head = [at, event.model, change, _reason(event), event.strategy or _ABSENT]
        for story, load in event_stories(event, _how, "instance {} released"):
            times = phases_s(event, load, phases) if load else [None] * len(phases)
            told = (_ABSENT if at_s is None else seconds(at_s) for at_s in times)
            rows.append((*head, story, *told))
            head = ["", "", "", "", ""]
    header = ("at", "model", "instances", "reason", "strategy", "how", *phases)
    return _table(header, rows, ("at", *phases))


def failover_table(run: ReportedRun) -> WordTable:
    """One row per member that was lost, and when its successor was there."""
    rows = [failover_cells(loss, run.started_ns) for loss in run.history.losses]
    return _table(FAILOVER_HEADER, rows, ("at", "requests", "replaced after"))


def departure_table(run: ReportedRun) -> WordTable:
    """One row per member that left in order, and when it was back."""
    rows = [departure_cells(one, run.started_ns) for one in run.history.departures]
    return _table(DEPARTURE_HEADER, rows, ("at", "back after"))


def role_table(run: ReportedRun) -> WordTable:
    """One row per role: its instances, and the requests that moved."""
    rows = role_rows(run.by_role, run.end_ns)
    return _table(ROLE_HEADER, rows, ROLE_HEADER[2:])


def stage_table(run: ReportedRun) -> WordTable:
    """One row per stage: its instances, what came and how busy they were."""
    return _table(STAGE_HEADER, stage_rows(run.by_stage), STAGE_HEADER[2:-1])


def life_table(run: ReportedRun) -> WordTable:
    """What each started instance cost until it served, and what it then did."""
    until_ns, started_ns = run.history.end_ns, run.started_ns
    rows = []
    for one in _started(run):
        served_s = one.serving_ns(until_ns) / NS_PER_S
        loading_s = one.loading_ns / NS_PER_S if one.loading_ns is not None else None
        received = one.received_bytes
        per_loading = served_s / loading_s if loading_s else None
        rows.append(
            (
                str(one.number),
                one.model,
                ", ".join(f"w{held.member.worker}" for held in one.holdings),
                _source(one.holdings[0].senders),
                _clock((one.changes[0][0] - started_ns) / NS_PER_S),
                _ABSENT if loading_s is None else seconds(loading_s),
                _ABSENT if received is None else size_text(received),
                seconds(served_s) if served_s else _ABSENT,
                f"{one.emitted_tokens:,}",
                _ABSENT if per_loading is None else f"{per_loading:,.3g}",
                one.ending or "still there",
            )
        )
    numeric = ("ordered at", "loading", "received", "serving", "tokens", "serving / loading")
    header = ("instance", "model", "workers", "first source", *numeric, "ended")
    return _table(header, rows, ("instance", *numeric))


def worth_sentence(run: ReportedRun) -> str:
    """What all started instances together cost and gave."""
    started = _started(run)
    if not started:
        return "No instance was started."
    until_ns = run.history.end_ns
    whole = [one for one in started if one.loading_ns is not None]
    loading_s = sum(one.loading_ns or 0 for one in whole) / NS_PER_S
    serving_s = sum(one.serving_ns(until_ns) for one in started) / NS_PER_S
    tokens = sum(one.emitted_tokens for one in started)
    moved = sum(one.received_bytes or 0 for one in started)
    parts = [
        f"{_counted(len(started), 'instance')} started: {seconds(loading_s)} of loading and"
        f" {size_text(moved)} received, for {seconds(serving_s)} of serving and {tokens:,} tokens."
    ]
    ended = [one for one in whole if one.ended_ns is not None]
    short = sum(one.serving_ns(until_ns) < (one.loading_ns or 0) for one in ended)
    if ended:
        parts.append(
            f"Of the {len(ended)} that ended, {short} served for less time than they had loaded."
        )
    unserved = len(started) - len(whole)
    if unserved:
        parts.append(f"{_counted(unserved, 'instance')} never served.")
    return " ".join(parts)


# -- helpers, in the order used -------------------------------------------------------------------


def _clock(value_s: float) -> str:
    """A time since the load's start: always in seconds, so that a column can be compared."""
    return f"{value_s:,.2f} s".replace("-", "−")


def _reason(event: ScaleLine) -> str:
    reason = event.reason.replace("_", " ")
    return reason if event.woken_by is None else f"{reason}, woken by a request"


def _how(load: LoadPhases) -> str:
    how = f"{load.upstream} → {load.worker}".replace(".0", "")
    if load.live_ns is not None:
        how += f"; {load.pairing}"
    return how if load.failed is None else f"{how} (failed: {load.failed})"


def _table(
    header: tuple[str, ...], rows: Sequence[tuple[str, ...]], numeric: tuple[str, ...]
) -> WordTable:
    left_out = max(len(rows) - ROWS_MAX, 0)
    return WordTable(header, tuple(rows[:ROWS_MAX]), numeric, left_out)


def _started(run: ReportedRun) -> list[InstanceHistory]:
    """Those whose order is on record."""
    return [one for one in run.history.instances if one.is_ordered]


def _source(senders: Sequence[str]) -> str:
    """Who sends, in few words."""
    names = [name.removesuffix(".0") for name in senders]
    if len(names) > _NAMES_MAX:
        return f"{names[0]}, {names[1]} and {len(names) - 2} more"
    return ", ".join(names) or "unknown"


def _counted(count: int, noun: str) -> str:
    return f"1 {noun} was" if count == 1 else f"{count} {noun}s were"
