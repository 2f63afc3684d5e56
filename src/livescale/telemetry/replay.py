"""Replay: feed a record to a fresh Controller or Member; the answers must be the same bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from livescale.common.errors import UserError
from livescale.control.controller import Controller
from livescale.member.member import Member
from livescale.telemetry.member_record import (
    AnyMemberLine,
    MemberLine,
    MemberStepLine,
    ShortenLine,
    encode_effect,
    error_text,
)
from livescale.telemetry.record.record import AnyLine, RunLine, StepLine
from livescale.values.types import WorkerRef

_SHOWN = 60
"""Characters of an answer that are shown: of its beginning, and on each side of the difference."""


class ReplayError(UserError):
    """The answers are not those of the record, or the record cannot be replayed."""


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


@dataclass(frozen=True, slots=True)
class MemberReplayCheck:
    """What was replayed of one life of a member: steps, inputs, and effects compared."""

    ref: WorkerRef
    steps: int
    inputs: int
    effects: int


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
            given = controller.step(line.now_ns, line.events)
            # Bytes, not values: the order inside a dict belongs to the answer too.
            _compare(
                f"step {steps} at {line.now_ns} ns, command",
                [msgspec.json.encode(command) for command in line.commands],
                [msgspec.json.encode(command) for command in given],
            )
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


def replay_member(lines: Iterable[AnyMemberLine]) -> MemberReplayCheck:
    """Replay the life of a member. ReplayError at the first difference, or for lines that are no
    such life."""
    member: Member | None = None
    steps = inputs = effects = 0
    for line in lines:
        if isinstance(line, MemberLine):
            if member is not None:
                raise ReplayError(
                    f"a second worker or agent begins after {steps} steps of {member.ref}"
                )
            member = Member(
                line.ref, line.memory_bytes, line.limits, address_bytes=line.address_bytes
            )
        elif member is None:
            raise ReplayError("the record has a step before its first line")
        elif isinstance(line, ShortenLine):
            member.shorten(line.steps)
        else:
            _replay_step(member, line, f"{member.ref}, step {steps} at {line.now_ns} ns")
            steps += 1
            inputs += len(line.inputs)
            effects += len(line.effects)
    if member is None:
        raise ReplayError("the record has no lines: there is nothing to replay")
    return MemberReplayCheck(member.ref, steps, inputs, effects)


def _replay_step(member: Member, line: MemberStepLine, where: str) -> None:
    given: list[bytes] = []
    error = ""
    try:
        given = [encode_effect(e) for e in member.step(line.now_ns, line.inputs, line.steps_max)]
    except Exception as raised:
        error = error_text(raised)
    if error != line.error:
        shown = (line.error or "no error", error or "no error")
        raise ReplayError(f"{where}: recorded {shown[0]}, replayed {shown[1]}")
    _compare(f"{where}, effect", [bytes(effect) for effect in line.effects], given)


def _compare(where: str, recorded: Sequence[bytes], given: Sequence[bytes]) -> None:
    """ReplayError for the first of the encoded answers that differs, or that only one side has."""
    for index in range(max(len(recorded), len(given))):
        sides = [
            answers[index].decode() if index < len(answers) else "nothing"
            for answers in (recorded, given)
        ]
        if sides[0] != sides[1]:
            pairs = zip(*sides, strict=False)
            at = next((n for n, (a, b) in enumerate(pairs) if a != b), min(map(len, sides)))
            shown = [_shortened(side, at) for side in sides]
            raise ReplayError(f"{where} {index}: recorded {shown[0]}, replayed {shown[1]}")


def _shortened(text: str, at: int) -> str:
    """The beginning of the text, and what surrounds its character `at`."""
    if len(text) <= 4 * _SHOWN:
        return text
    first = max(at - _SHOWN, _SHOWN)
    gap = " … " if first > _SHOWN else ""
    last = at + _SHOWN
    return f"{text[:_SHOWN]}{gap}{text[first:last]}{' …' if last < len(text) else ''}"
