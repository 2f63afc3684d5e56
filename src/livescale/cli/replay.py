"""`livescale replay RUN`: would today's controller have decided the same?"""

from __future__ import annotations

import argparse
from pathlib import Path

from livescale.cli.errors import UserError
from livescale.telemetry.record import read_record
from livescale.telemetry.record_parts import RecordError
from livescale.telemetry.replay import ReplayError, replay


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run record (JSON lines)")


def run(arguments: argparse.Namespace) -> int:
    try:
        result = replay(read_record(arguments.run))
    except (RecordError, ReplayError) as error:
        raise UserError(f"{arguments.run}: {error}") from error
    print(
        f"{arguments.run}: the same {result.commands} commands for {result.events} events"
        f" in {result.steps} steps ({result.lives} controller lives)"
    )
    if result.left_out:
        print(f"{result.left_out} steps of a life that began in an earlier part were left out")
    return 0
