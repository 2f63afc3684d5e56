"""The HTML report: one file that says what one run did, or several over the same load.

It works on run records alone, so real and simulated runs are shown alike; what a record lacks is
left out, and the page says so. The file needs no network and no scripts. The same runs give the
same bytes.
"""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from livescale.report.comparison import compared_figures
from livescale.report.event_rows import (
    failover_table,
    life_table,
    scale_event_table,
    worth_sentence,
)
from livescale.report.reported_run import ReportedRun
from livescale.report.terminal import seconds
from livescale.settings import size_text

_GROUPS = ("TTFT mean", "TBT mean", "instances, mean", "scale-ups")
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
        failovers=[(run.name, failover_table(run)) for run in runs if run.report.history.losses],
        events=[(run.name, scale_event_table(run)) for run in runs],
        worth=[(run.name, worth_sentence(run), life_table(run)) for run in runs],
        notes=gallery.notes,
    )


# -- helpers --------------------------------------------------------------------------------------


def _facts(runs: Sequence[ReportedRun]) -> list[tuple[str, str]]:
    """What all runs have in common, or what each of them has."""
    found = {
        "load": [run.report.trace for run in runs],
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
        return run.report.slo_rule
    bounds = f"TTFT ≤ {seconds(run.slo.ttft_ns / 1e9)}"
    if run.slo.tbt_ns is not None:
        bounds += f", mean TBT ≤ {seconds(run.slo.tbt_ns / 1e9)}"
    return f"{run.report.slo_rule} ({bounds})" if run.report.slo_rule.endswith("mean") else bounds


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
    )
    if len(runs) == 1:
        return told
    return f"{told} Small figures are ratios to the first run, {runs[0].name}."
