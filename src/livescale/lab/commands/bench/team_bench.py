"""`livescale bench teams`: its flags."""

from __future__ import annotations

import argparse
from pathlib import Path

from livescale.common.errors import UserError
from livescale.lab.bench.lines.teams import STRATEGIES, TeamsOptions, run_teams
from livescale.lab.commands.bench.bench_flags import (
    Bench,
    at_least,
    chosen,
    finish,
    options_of,
    say,
)

_LOAD_S_MIN, _LOAD_S_MAX, _RUN_MS_MIN, _RUN_MS_MAX = 1, 120, 10, 10_000
_OUTPUT_TOKENS_MAX = 256


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, TeamsOptions()
    words = "Team settings to compare (default: all). The first is the main result."
    add("--teams", default=",".join(defaults.strategies), metavar="NAME,…", help=words)
    add(
        "--plays",
        type=int,
        default=defaults.plays,
        metavar="N",
        help="Runs of each setting. The result is the median.",
    )
    words = "Duration of a load."
    add("--load-seconds", type=float, default=defaults.load_s, metavar="S", help=words)
    words = "Step time of a prompt."
    add("--run-ms", type=int, default=defaults.run_ms, metavar="MS", help=words)
    words = "Output tokens of each request."
    add("--output-tokens", type=int, default=defaults.output_tokens, metavar="N", help=words)
    add("--folder", type=Path, metavar="DIR", help="Folder of the run records.")


def _teams(arguments: argparse.Namespace) -> int:
    """Measure gain and cost of teams of loading instances, beside the simulator.

    0 when every token was right.
    """
    at_least(arguments, 1, "plays")
    if not _LOAD_S_MIN <= arguments.load_seconds <= _LOAD_S_MAX:
        raise UserError(f"--load-seconds must be {_LOAD_S_MIN} to {_LOAD_S_MAX}")
    if not _RUN_MS_MIN <= arguments.run_ms <= _RUN_MS_MAX:
        raise UserError(f"--run-ms must be {_RUN_MS_MIN} to {_RUN_MS_MAX}")
    if not 1 <= arguments.output_tokens <= _OUTPUT_TOKENS_MAX:
        raise UserError(f"--output-tokens must be 1 to {_OUTPUT_TOKENS_MAX}")
    names = tuple(dict.fromkeys(chosen(arguments.teams.split(","), "--teams", STRATEGIES)))
    options = options_of(TeamsOptions, arguments, strategies=names, load_s=arguments.load_seconds)
    report = run_teams(options, say)
    return finish(report, arguments, is_good=report.token_mismatches == 0)


TEAMS = Bench(_add_arguments, _teams)
