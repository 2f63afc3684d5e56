"""What demos have in common: a model that is made where there is none, an SLO that does not grow
with a run's own delays, what was played, and a check of every token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from livescale.common.errors import UserError
from livescale.config.slo import SloAbsolute, SloRule
from livescale.engine.files.make import make_model
from livescale.engine.files.model_files import read_manifest
from livescale.lab.bench.base.token_checks import wrong_timed_tokens
from livescale.lab.client import replayer
from livescale.load.traces import TraceRow
from livescale.report.run.reported_run import ReportedRun
from livescale.report.run.summary import summarize
from livescale.telemetry.history.reading import read_history
from livescale.telemetry.record.record import read_record, with_client_times, write_record
from livescale.values.units import NS_PER_MS

_PRESET = "demo"
SLO_MULTIPLE = 5


def make_model_once(directory: Path) -> None:
    """The demos' model, where there is none."""
    if not directory.exists():
        print(f"making a model of about 100 MB in {directory} …", flush=True)
        make_model(directory, _PRESET)


def measured_tokens_per_s(record: Path) -> int | None:
    """Prompt tokens that an instance computes in a second, as the first one measured. None: it has
    not yet."""
    measured = read_history(read_record(record)).measured
    return measured[0].prefill_tokens_per_s if measured else None


def tokens_per_s(record: Path) -> int:
    """The same. Raises UserError if no instance has measured it."""
    rate = measured_tokens_per_s(record)
    if rate is None:
        raise UserError("the pool did not say how many prompt tokens an instance can compute")
    return rate


def slo_alone(rows: Sequence[TraceRow], record: Path) -> SloAbsolute:
    """A TTFT of SLO_MULTIPLE times that of a mean prompt that nothing waits with. Raises UserError
    if no instance has measured what it computes."""
    rate = tokens_per_s(record)
    prompt_tokens = sum(row.input_tokens for row in rows) / max(len(rows), 1)
    bound_ms = math.ceil(SLO_MULTIPLE * prompt_tokens * 1000 / rate)
    words = f"{SLO_MULTIPLE} times that of a prompt of {prompt_tokens:.0f} tokens alone"
    print(f"SLO: a TTFT of {bound_ms} ms, {words}", flush=True)
    return SloAbsolute(bound_ms * NS_PER_MS)


@dataclass(frozen=True, slots=True)
class Played:
    """What a run left: the client's results, when its load began, and the record's place."""

    results: list[replayer.ReplayResult]
    started_ns: int
    record: Path

    def reported(self, name: str, trace: str, rule: SloRule, words: str) -> ReportedRun:
        """The record joined with the client's times (they are written to it, too)."""
        timings = [result.timing() for result in self.results]
        figures = summarize(timings, rule)
        lines = with_client_times(read_record(self.record), timings, figures.slo)
        write_record(self.record, lines)
        return ReportedRun(name, trace, lines, figures, self.started_ns, words, figures.slo)


@dataclass(frozen=True, slots=True)
class TokenChecks:
    """Tokens held `against` what must come: how many, and which were not that choice."""

    against: str
    tokens: int
    wrong: int
    near_ties: int = 0

    def text(self) -> str:
        return (
            f"tokens    {self.tokens} checked against {self.against}, wrong: {self.wrong}"
            f" (near ties: {self.near_ties})"
        )

    def as_json(self) -> dict[str, object]:
        return {
            "tokens": self.tokens,
            "token_mismatches": self.wrong,
            "near_ties": self.near_ties,
        }


def checked_tokens(
    directory: Path, results: Sequence[replayer.ReplayResult], device: str
) -> TokenChecks:
    """Hold every token against one forward of the model in `directory`, as transformers computes
    it; those that timed devices make up against an executor that nothing disturbs."""
    answered = [(r.prompt_ids, r.token_ids) for r in results if r.token_ids]
    is_timed = device == "timed"
    against = "a timed executor" if is_timed else "transformers"
    print(f"checking every token against {against} …", flush=True)
    if is_timed:
        manifest = read_manifest(directory, directory.name)
        wrong = sum(wrong_timed_tokens(manifest, answered))
        return TokenChecks(against, sum(len(ids) for _, ids in answered), wrong)
    # Imported here: torch takes a second, and the processes of the pool are gone by now.
    from livescale.engine.oracle import GreedyOracle

    checks = GreedyOracle(directory).check_many(answered)
    return TokenChecks(
        against,
        sum(check.tokens for check in checks),
        sum(len(check.wrong) for check in checks),
        sum(check.near_ties for check in checks),
    )
