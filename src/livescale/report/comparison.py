"""Runs beside one another in numbers: the rows of a table, for a terminal and for a page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from livescale.report.reported_run import ReportedRun
from livescale.report.terminal import seconds, table
from livescale.settings import size_text

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
        row("requests", "requests", _count),
        row("failed", "failed", _count),
        row("SLO attainment", "slo_attainment", _percent),
        row("goodput", "goodput_per_s", _per_s, relative=True),
    ]
    for label in ("TTFT", "TBT"):
        for part in ("mean", "p50", "p90", "p99"):
            name = f"{label.lower()}_{part}_s"
            rows.append(row(f"{label} {part}", name, seconds, relative=True))
    rows += [
        row("instances, mean", "instances_mean", _decimal, relative=True),
        row("instances, max", "max_instances", _count),
        row("GPU time", "device_seconds", _device_time, relative=True),
        row("price of GPU time", "dollars", _dollars, relative=True),
        row("scale-ups", "scale_ups", _count),
        row("scale-downs", "scale_downs", _count),
        row("host copies per model, mean", "host_copies_per_model_mean", _decimal),
        row("host copies per model, max", "host_copies_per_model_max", _count),
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


def as_json(runs: Sequence[ReportedRun]) -> list[dict[str, object]]:
    """The figures of every run by name; one that could not be measured is absent.

    To a run report's own figures come `name`, `cluster`, means and 90th percentiles of latencies,
    `instances_mean`, `device_seconds`, their price in `dollars`, and `carried_bytes` by kind of
    link.
    """
    return [run.figures for run in runs]


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


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _decimal(value: float) -> str:
    return f"{value:.2f}"


def _percent(value: float) -> str:
    """Rounded down: 100 % means all of them."""
    return f"{int(value * 10_000) / 100:.2f} %"


def _per_s(value: float) -> str:
    return f"{value:.2f} /s"


def _device_time(value_s: float) -> str:
    return f"{value_s:,.0f} s" if value_s < 36_000 else f"{value_s / 3600:,.1f} h"


def _dollars(value: float) -> str:
    return f"${value:,.2f}"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _words(kind: str) -> str:
    return {"nic": "NICs", "group": "scale-up groups", "host": "host links"}.get(
        kind, kind.replace("_", " ")
    )
