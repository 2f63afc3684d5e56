"""Replay: feed a run record to a fresh controller and demand the same commands, byte for byte."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from livescale.control.controller import Controller
from livescale.telemetry.record import AnyLine, RunLine, StepLine


class ReplayError(Exception):
    """The controller answered otherwise than the record says, or the record cannot be replayed."""


@dataclass(frozen=True, slots=True)
class ReplayCheck:
    """What was replayed: controller lives, steps, events and commands compared.

    `left_out` counts steps of a life that began in an earlier part, which was not there.
    """

    lives: int
    steps: int
    events: int
    commands: int
    left_out: int = 0


def replay(lines: Iterable[AnyLine]) -> ReplayCheck:
    """Replay every controller life that begins in a record. ReplayError at the first difference,
    or if there is none."""
    controller: Controller | None = None
    lives = steps = events = commands = left_out = 0
    is_continued = False
    for line in lines:
        if isinstance(line, RunLine):
            # Its state is not on record, only what members hold.
            is_continued = line.is_continued
            controller = None if is_continued else Controller(line.config)
            lives += not is_continued
        elif isinstance(line, StepLine):
            if is_continued:
                left_out += 1
                continue
            if controller is None:
                raise ReplayError("the record has a step before its first run line")
            _replay_step(controller, line, steps)
            steps += 1
            events += len(line.events)
            commands += len(line.commands)
    if not lives and left_out:
        raise ReplayError(
            "this part of a record goes on with a life that began in an earlier one:"
            " replay the whole record, by the name of its first part"
        )
    if not lives:
        raise ReplayError("the record has no run line: there is nothing to replay")
    return ReplayCheck(lives, steps, events, commands, left_out)


def _replay_step(controller: Controller, line: StepLine, number: int) -> None:
    given = controller.step(line.now_ns, line.events)
    for index in range(max(len(given), len(line.commands))):
        got = given[index] if index < len(given) else None
        recorded = line.commands[index] if index < len(line.commands) else None
        # Bytes, not values: the order inside a dict belongs to the answer too.
        if msgspec.json.encode(got) != msgspec.json.encode(recorded):
            raise ReplayError(
                f"step {number} at {line.now_ns} ns, command {index}:"
                f" recorded {recorded}, replayed {got}"
            )
