"""`livescale bench fidelity`: the flags, and which pools are compared."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from livescale.bench.fidelity import FidelityOptions, FidelityReport, run_fidelity
from livescale.bench.fidelity_pools import FidelityPool, cpu_pool, timed_pool
from livescale.bench.fidelity_profile import BURSTS
from livescale.cli.errors import UserError
from livescale.cli.loads import add_load_arguments, choose_load
from livescale.traces import TraceError

_KINDS = ("timed", "cpu")
_CPU_WORKERS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_load_arguments(parser, trace=None, seconds=30, divide_lengths=2)
    add = parser.add_argument
    add("--workers", default="timed,cpu", metavar="KIND,…", help="timed and cpu, or one of them")
    add("--count", type=int, default=8, help="timed workers (of those that compute there are two)")
    add("--runs", type=int, default=5, help="how often each world plays the load")
    words = "rate of the load, in percent of what the simulator says the pool can take"
    add("--load-percent", type=int, default=60, help=words)
    add("--load-seconds", type=float, default=0.7, help="time that a load of parameters takes")
    add("--bursts", type=int, default=BURSTS, help="of the calibration before")
    words = "how long the engine is profiled before workers that compute"
    add("--profile-seconds", type=float, default=20.0, help=words)
    add("--report", type=Path, metavar="DIR", help="all records and a page for each kind")


def run(arguments: argparse.Namespace) -> tuple[dict[str, object], bool]:
    """The figures, and whether timed workers behaved as simulated. The tables are printed.

    The first kind's figures stand at the top, those of another under its name.
    """
    kinds = tuple(arguments.workers.split(","))
    _check(arguments, kinds)
    try:
        load = choose_load(arguments)
    except TraceError as error:
        raise UserError(str(error)) from error
    options = FidelityOptions(
        trace=load.name,
        rows=load.rows,
        runs=arguments.runs,
        load_percent=arguments.load_percent,
        bursts=arguments.bursts,
        seed=arguments.seed,
        report=arguments.report,
    )
    reports = [_compare(kind, arguments, options) for kind in kinds]
    figures = reports[0].as_json()
    figures |= {report.pool.kind: report.as_json() for report in reports[1:]}
    return figures, all(report.is_good for report in reports if report.pool.kind == "timed")


# -- helpers, in the order used -------------------------------------------------------------------


def _check(arguments: argparse.Namespace, kinds: tuple[str, ...]) -> None:
    if len(set(kinds)) < len(kinds) or not set(kinds) <= set(_KINDS):
        raise UserError(f"--workers {arguments.workers!r}: write timed, cpu or both")
    if arguments.count < 2 or arguments.runs < 1 or arguments.bursts < 1:
        raise UserError("--count must be at least 2, --runs and --bursts at least 1")
    if not 1 <= arguments.load_percent <= 100:
        raise UserError("--load-percent must be 1 to 100")
    if arguments.load_seconds <= 0 or arguments.profile_seconds <= 0:
        raise UserError("--load-seconds and --profile-seconds must be positive")


def _compare(kind: str, arguments: argparse.Namespace, options: FidelityOptions) -> FidelityReport:
    with tempfile.TemporaryDirectory(prefix="livescale-fidelity-") as name:
        scratch = Path(name)
        pool = _pool(kind, scratch, arguments)
        _say(f"{pool.config.workers} {kind} workers: calibrating …")
        report = run_fidelity(pool, options, scratch, _say)
    print(f"\n{report.text()}\n", flush=True)
    return report


def _pool(kind: str, scratch: Path, arguments: argparse.Namespace) -> FidelityPool:
    if kind == "timed":
        return timed_pool(scratch, arguments.count, arguments.load_seconds)
    return cpu_pool(scratch, _CPU_WORKERS, arguments.load_seconds, arguments.profile_seconds, _say)


def _say(line: str) -> None:
    print(line, flush=True)
