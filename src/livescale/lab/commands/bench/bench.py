"""`livescale bench WHAT`: figures as ratios taken in one run; a table, and JSON with `--json`."""

from __future__ import annotations

import argparse
from pathlib import Path

from livescale.lab.commands.bench import (
    engine_benches,
    kv_bench,
    line_benches,
    pool_benches,
    ray_bench,
    sim_benches,
    transfer_benches,
)

_BENCHES = {
    **engine_benches.BENCHES,
    **transfer_benches.BENCHES,
    **pool_benches.BENCHES,
    **sim_benches.BENCHES,
    **line_benches.BENCHES,
    "kv": kv_bench.KV,
    "ray": ray_bench.RAY,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    for name, bench in _BENCHES.items():
        own = benches.add_parser(name, help=bench.help, description=bench.help)
        bench.add_arguments(own)
        own.add_argument("--json", type=Path, help="Write the figures to this file (JSON).")


def run(arguments: argparse.Namespace) -> int:
    """0 when the figures could be taken."""
    return _BENCHES[arguments.bench].run(arguments)
