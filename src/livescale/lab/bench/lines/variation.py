"""`bench variation`: how well burstiness along a line of stages is predicted, by three predictors.

Judged on simulated lines that training has not seen: their CVs of arrivals, loads, CVs of services
and numbers of stages lie between those of training, or beyond them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import msgspec

from livescale.config.variation import variation_weights
from livescale.control.stages.formulas.attention import learned_cvs
from livescale.control.stages.formulas.variation import (
    Flow,
    arrivals,
    departures,
    flows_in,
    line,
    qna_departures,
)
from livescale.lab.bench.lines.variation_lines import (
    BETWEEN,
    BEYOND,
    JOINED,
    LOGNORMAL,
    TRAINED,
    SimulatedLine,
    simulated_joins,
    simulated_lines,
)
from livescale.lab.bench.lines.variation_training import as_weights, trained
from livescale.report.run.terminal import table
from livescale.values.scaling_policies import VariationWeights

QNA, GAPS, LEARNED = "qna", "gaps", "learned"
PREDICTORS = (QNA, GAPS, LEARNED)
#: from measured arrivals at the stage before: as if that were the first one, and in its place
ALONE, IN_PLACE = "gaps, alone", "gaps, in place"
_KINDS = {
    "between": (simulated_lines, BETWEEN),
    "beyond": (simulated_lines, BEYOND),
    "joins": (simulated_joins, BETWEEN),
    "lognormal": (simulated_lines, LOGNORMAL),
}
_LINES_PER_JOIN = 3
_CV_GROUPS = {"below 0.5": (0.0, 0.5), "0.5 to 2": (0.5, 2.0), "above 2": (2.0, 99.0)}


@dataclass(frozen=True, slots=True)
class VariationOptions:
    """Lines of each kind, requests of a line, and what to train with; `train` is where new weights
    are written, if any are made."""

    lines: int = 250
    requests: int = 200_000
    training_lines: int = 2000
    training_requests: int = 60_000
    training_steps: int = 6000
    seed: int = 0
    train: Path | None = None


@dataclass(frozen=True, slots=True)
class Predicted:
    """A stage behind the first: what was measured, and what each predictor found from the arrivals
    at the first stage (`cvs`) and, in lines, from those at the stage before (`next_cvs`)."""

    line: SimulatedLine
    number: int
    cvs: Mapping[str, float]
    next_cvs: Mapping[str, float]

    @property
    def measured(self) -> float:
        return self.line.cvs[self.number]


@dataclass(frozen=True, slots=True)
class VariationReport:
    """All stages, by kind of lines."""

    found: Mapping[str, Sequence[Predicted]]

    def rows(self) -> list[dict[str, object]]:
        """Relative errors of each predictor, in groups."""
        rows: list[dict[str, object]] = []
        for kind, stages in self.found.items():
            for group, some in _groups(stages).items():
                for name in PREDICTORS:
                    errors = [_off(one.cvs[name], one.measured) for one in some]
                    rows.append({"kind": kind, "group": group, "predictor": name, **_sums(errors)})
            for name in stages[0].next_cvs:
                errors = [_off(one.next_cvs[name], one.measured) for one in stages]
                row = {"kind": kind, "group": "one stage", "predictor": name, **_sums(errors)}
                rows.append(row)
        return rows

    def text(self) -> str:
        rows = self.rows()
        header = ["settings", "stages", "predictor", "n", "mean", "median", "p90"]
        words = "relative errors of the CV at each stage, from the arrivals at the first one"
        also = "one stage: from measured arrivals at the stage before"
        return f"{table(header, [list(row.values()) for row in rows])}\n{words}\n{also}"

    def as_json(self) -> dict[str, object]:
        return {"rows": self.rows()}


def run_variation(options: VariationOptions, say: Callable[[str], None]) -> VariationReport:
    """Train where weights are wanted, and judge. Raises ConfigError if weights cannot be read."""
    if options.train is None:
        weights = variation_weights()
    else:
        weights = _made(options, say)
        encoded = msgspec.json.encode(weights)
        options.train.write_bytes(msgspec.json.format(encoded, indent=0) + b"\n")
        say(f"weights are in {options.train}")
    found = {}
    for number, (name, (simulated, grid)) in enumerate(_KINDS.items(), 1):
        say(f"{name}:")
        seed = 1000 * options.seed + number
        lines = simulated(grid, options.lines, options.requests, seed, say)
        found[name] = [stage for one in lines for stage in _predicted(one, weights)]
    return VariationReport(found)


# -- helpers, in the order used -------------------------------------------------------------------


def _made(options: VariationOptions, say: Callable[[str], None]) -> VariationWeights:
    seed, count, requests = 1000 * options.seed, options.training_lines, options.training_requests
    lines = simulated_lines(TRAINED, count, requests, seed, say)
    joins = simulated_joins(JOINED, count // _LINES_PER_JOIN, requests, seed, say)
    return as_weights(trained([*lines, *joins], options.training_steps, seed, say))


def _predicted(one: SimulatedLine, weights: VariationWeights) -> list[Predicted]:
    """For all stages but the first."""
    source = arrivals(1.0, one.cvs[0])
    by_name = {
        QNA: [flow.cv for flow in flows_in(one.stages, source, is_qna=True)],
        GAPS: [flow.cv for flow in flows_in(one.stages, source)],
        LEARNED: learned_cvs(one.stages, source, weights),
    }
    flows = flows_in(one.stages, source)
    return [
        Predicted(
            one,
            number,
            {name: cvs[number] for name, cvs in by_name.items()},
            _next(one, number, flows[number - 1]) if one.stages == line(one.stages) else {},
        )
        for number in range(1, len(one.stages))
    ]


def _next(one: SimulatedLine, number: int, flow: Flow) -> dict[str, float]:
    """`flow` is what was predicted to come to the stage before."""
    stage, measured = one.stages[number - 1], one.cvs[number - 1]
    return {
        QNA: qna_departures(arrivals(1.0, measured), stage).cv,
        ALONE: departures(arrivals(1.0, measured), stage).cv,
        IN_PLACE: departures(msgspec.structs.replace(flow, cv=measured), stage).cv,
    }


def _groups(stages: Sequence[Predicted]) -> dict[str, Sequence[Predicted]]:
    found: dict[str, Sequence[Predicted]] = {"all": stages}
    for name, (least, most) in _CV_GROUPS.items():
        found[f"CV {name}"] = [one for one in stages if least <= one.line.drawn_cv < most]
    for count in sorted({len(one.line.stages) for one in stages}):
        found[f"{count} stages"] = [one for one in stages if len(one.line.stages) == count]
    return {name: some for name, some in found.items() if some}


def _sums(errors: Sequence[float]) -> dict[str, object]:
    ranked = sorted(errors)
    return {
        "count": len(errors),
        "mean": fmean(errors),
        "median": median(errors),
        "p90": ranked[len(ranked) * 9 // 10],
    }


def _off(predicted: float, measured: float) -> float:
    return abs(predicted - measured) / measured
