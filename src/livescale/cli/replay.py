"""`livescale replay RECORD`: would today's controller, or member, have decided the same?"""

from __future__ import annotations

import argparse
from pathlib import Path

from livescale.common.errors import UserError
from livescale.telemetry.member_record import is_member_record, read_member_record
from livescale.telemetry.record.record import read_record
from livescale.telemetry.replay import ReplayError, replay, replay_member


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "records",
        nargs="+",
        type=Path,
        metavar="RECORD",
        help="Run records, and records of workers and host agents (JSON lines).",
    )


def run(arguments: argparse.Namespace) -> int:
    for path in arguments.records:
        try:
            found = _replay_member(path) if is_member_record(path) else _replay_run(path)
        except ReplayError as error:
            raise UserError(f"{path}: {error}") from error
        print(f"{path}: {found}")
    return 0


def _replay_run(path: Path) -> str:
    result = replay(read_record(path))
    same = (
        f"the same {result.commands} commands for {result.events} events"
        f" in {result.steps} steps ({result.lives} controller lives)"
    )
    if result.left_out:
        same += f"; {result.left_out} steps of a life that began in an earlier part were left out"
    return same


def _replay_member(path: Path) -> str:
    result = replay_member(read_member_record(path))
    return (
        f"the same {result.effects} effects for {result.inputs} inputs"
        f" in {result.steps} steps of {result.ref}"
    )
