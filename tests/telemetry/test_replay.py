"""Replay: the same events give the same commands, and any other answer is refused by name."""

from __future__ import annotations

import io
import random
from pathlib import Path

import msgspec
import pytest

from livescale.latency.shapes import LLAMA_3_8B
from livescale.load.traces import TraceRow as Row
from livescale.messages.commands import Dispatch, ScaleDecided
from livescale.sim.base.config import SimConfig
from livescale.sim.world.simulate import simulate
from livescale.telemetry.record.record import AnyLine, StepLine, read_record
from livescale.telemetry.replay import ReplayError, replay


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[AnyLine]:
    """The record of a small burst."""
    rng = random.Random(5)
    rows = [Row(20_000_000_000 + rng.randrange(500_000_000), 800, 5) for _ in range(40)]
    file = io.BytesIO()
    simulate(rows, SimConfig.default(LLAMA_3_8B, workers=3), 5, file)
    path: Path = tmp_path_factory.mktemp("records") / "burst.jsonl"
    path.write_bytes(file.getvalue())
    return list(read_record(path))


def altered(lines: list[AnyLine], kind: type, **values: object) -> tuple[int, list[AnyLine]]:
    """The record with one command of that kind changed, and the number of its step."""
    steps = -1
    changed: list[AnyLine] = []
    found = -1
    for line in lines:
        if isinstance(line, StepLine):
            steps += 1
            if found < 0 and any(isinstance(c, kind) for c in line.commands):
                found = steps
                commands = tuple(
                    msgspec.structs.replace(c, **values) if isinstance(c, kind) else c
                    for c in line.commands
                )
                line = msgspec.structs.replace(line, commands=commands)
        changed.append(line)
    assert found >= 0, kind
    return found, changed


def test_an_untouched_record_replays(lines: list[AnyLine]) -> None:
    result = replay(lines)
    steps = [line for line in lines if isinstance(line, StepLine)]
    assert result.lives == 1
    assert result.steps == len(steps)
    assert result.events == sum(len(step.events) for step in steps)
    assert result.commands == sum(len(step.commands) for step in steps)


def test_an_altered_command_is_refused_and_its_step_named(lines: list[AnyLine]) -> None:
    step, changed = altered(lines, Dispatch, attempt=7)
    with pytest.raises(
        ReplayError, match=rf"^step {step} at \d+ ns, command \d+: recorded .*Dispatch"
    ):
        replay(changed)


def test_a_missing_command_is_refused(lines: list[AnyLine]) -> None:
    changed: list[AnyLine] = []
    for line in lines:
        if isinstance(line, StepLine) and line.commands:
            line = msgspec.structs.replace(line, commands=line.commands[:-1])
        changed.append(line)
    with pytest.raises(ReplayError, match="recorded nothing, replayed"):
        replay(changed)


def test_values_in_another_order_are_another_answer(lines: list[AnyLine]) -> None:
    first = next(
        c
        for line in lines
        if isinstance(line, StepLine)
        for c in line.commands
        if isinstance(c, ScaleDecided)
    )
    turned = dict(reversed(first.values.items()))
    _, changed = altered(lines, ScaleDecided, values=turned)
    with pytest.raises(ReplayError, match=r"recorded .*ScaleDecided"):
        replay(changed)


def test_a_record_without_a_beginning_is_refused(lines: list[AnyLine]) -> None:
    with pytest.raises(ReplayError, match="before its first run line"):
        replay(lines[1:])
    with pytest.raises(ReplayError, match="nothing to replay"):
        replay([])
