"""Runs beside one another in numbers: the rows of a table, for a terminal and for a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from livescale.common.settings import size_text
from livescale.report.run.reported_run import ReportedRun
from livescale.report.run.terminal import seconds, table

_ABSENT = "-"


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One row: a figure of every run (None: not known) in words, and against the first run.

    `ratios` is empty where a ratio would say nothing; it has None for the first run, and where
    the first run's figure is absent or 0.
    """

    label: str
    texts: tuple[str, ...]
    ratios: tuple[float | None, ...] = ()


def compared_figures(runs: Sequence[ReportedRun]) -> list[ComparedFigure]:
    """The rows, without those of which no run has anything."""
    figures = [run.figures for run in runs]

    def row(
        label: str, name: str, text: Callable[[float], str], *, relative: bool = False
    ) -> ComparedFigure:
        return _figure(label, [_number(of.get(name)) for of in figures], text, relative=relative)

    rows = [
        row("requests", "requests", "{:,.0f}".format),
        row("failed", "failed", "{:,.0f}".format),
        row("SLO attainment", "slo_attainment", _percent),
        row("goodput", "goodput_per_s", "{:.2f} /s".format, relative=True),
    ]
    for label in ("TTFT", "TBT"):
        for part in ("mean", "p50", "p90", "p99"):
            name = f"{label.lower()}_{part}_s"
            rows.append(row(f"{label} {part}", name, seconds, relative=True))
    slow = "slow_{}_s"
    rows += [
        row("slowest 5 %, TTFT mean", slow.format("ttft"), seconds, relative=True),
        row("waited: model loading", slow.format("loading"), seconds),
        row("waited: devices full", slow.format("full"), seconds),
        row("waited: neither", slow.format("held_back"), seconds),
        row("computed", slow.format("compute"), seconds),
        row("instances, mean", "instances_mean", "{:.2f}".format, relative=True),
        row("instances, max", "max_instances", "{:,.0f}".format),
        row("GPU time", "device_seconds", _device_time, relative=True),
        row("of it loading", "device_load_s", _device_time),
        row("of it serving", "device_serve_s", _device_time),
        row("of it draining", "device_drain_s", _device_time),
        row("spare: parameters, no instance", "device_spare_s", _device_time, relative=True),
        row("idle devices", "device_idle_s", _device_time),
        row("lost devices", "device_lost_s", _device_time),
        row("devices that left", "device_left_s", _device_time),
        row("starts of instances", "starts", "{:,.0f}".format),
        row("warm starts", "warm_hit_rate", _percent),
        row("loaded to devices", "loaded_bytes", size_text, relative=True),
        row("price of GPU time", "dollars", "${:,.2f}".format, relative=True),
        row("scale-ups", "scale_ups", "{:,.0f}".format),
        row("scale-downs", "scale_downs", "{:,.0f}".format),
        row("host copies per model, mean", "host_copies_per_model_mean", "{:.2f}".format),
        row("host copies per model, max", "host_copies_per_model_max", "{:,.0f}".format),
    ]
    for kind in dict.fromkeys(kind for run in runs for kind in run.carried_bytes):
        amounts = [run.carried_bytes.get(kind) for run in runs]
        rows.append(_figure(f"moved over {_words(kind)}", amounts, size_text, relative=True))
    return [row for row in rows if any(text != _ABSENT for text in row.texts)]


def comparison_table(runs: Sequence[ReportedRun]) -> str:
    """The runs as columns of plain text; figures against the first run in brackets."""
    header = ["", *(run.name for run in runs)]
    rows = []
    for figure in compared_figures(runs):
        ratios = figure.ratios or (None,) * len(runs)
        texts = [
            text if ratio is None else f"{text} (x{_ratio(ratio)})"
            for text, ratio in zip(figure.texts, ratios, strict=True)
        ]
        rows.append([figure.label, *texts])
    return table(header, rows)


# -- helpers --------------------------------------------------------------------------------------


def _figure(
    label: str,
    values: Sequence[float | None],
    text: Callable[[float], str],
    *,
    relative: bool = False,
) -> ComparedFigure:
    texts = tuple(_ABSENT if value is None else text(value) for value in values)
    if not relative or len(values) < 2:
        return ComparedFigure(label, texts)
    base = values[0]
    others = [value / base if base and value is not None else None for value in values[1:]]
    return ComparedFigure(label, texts, (None, *others))


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) else None


def _percent(value: float) -> str:
    """Rounded down: 100 % means all of them."""
    return f"{int(value * 10_000) / 100:.2f} %"


def _device_time(value_s: float) -> str:
    return f"{value_s:,.0f} s" if value_s < 36_000 else f"{value_s / 3600:,.1f} h"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _words(kind: str) -> str:
    return {"nic": "NICs", "group": "scale-up groups", "host": "host links"}.get(
        kind, kind.replace("_", " ")
    )
