"""`livescale bench soak`: the flags."""

from __future__ import annotations

import argparse
from pathlib import Path

from livescale.bench.soak.faults import FAULT_KINDS
from livescale.bench.soak.run import SoakOptions, run_soak
from livescale.cli.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, SoakOptions()
    words = "after which it ends (default: about 20 minutes)"
    add("--requests", type=int, default=defaults.requests, metavar="N", help=words)
    add("--seed", type=int, default=defaults.seed, help="of the load and of the faults")
    add("--rate", type=float, default=defaults.rate, help="requests per second, in the mean")
    add("--device", choices=("cpu", "timed"), default=defaults.device, help="of the workers")
    add("--faults", default=",".join(defaults.faults), metavar="KIND,…", help="or none")
    words = "mean time between two faults"
    add("--fault-every-s", type=float, default=defaults.fault_every_s, metavar="S", help=words)
    words = "the pool's setting (default: its default)"
    add("--lost-after-ms", type=int, metavar="MS", help=words)
    add("--json", type=Path, help="write the figures to this file")


def run(arguments: argparse.Namespace) -> tuple[dict[str, object], bool]:
    """The figures, and whether all is well; the table is printed."""
    report = run_soak(_options(arguments), _say)
    print(f"\n{report.text()}", flush=True)
    return report.as_json(), report.is_good


# -- helpers, in the order used -------------------------------------------------------------------


def _options(arguments: argparse.Namespace) -> SoakOptions:
    faults = () if arguments.faults == "none" else tuple(arguments.faults.split(","))
    for kind in faults:
        if kind not in FAULT_KINDS:
            raise UserError(f"--faults: unknown {kind!r}, there are {', '.join(FAULT_KINDS)}")
    if arguments.requests < 1:
        raise UserError("--requests must be at least 1")
    if arguments.rate <= 0 or arguments.fault_every_s <= 0:
        raise UserError("--rate and --fault-every-s must be positive")
    return SoakOptions(
        requests=arguments.requests,
        seed=arguments.seed,
        rate=arguments.rate,
        device=arguments.device,
        faults=faults,
        fault_every_s=arguments.fault_every_s,
        lost_after_ms=arguments.lost_after_ms,
    )


def _say(line: str) -> None:
    print(line, flush=True)
