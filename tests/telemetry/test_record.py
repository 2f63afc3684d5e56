"""Run records: what is written is read again, and damage is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from livescale.clusters.topology import Device
from livescale.control.state.config import ControllerConfig
from livescale.messages.commands import StartHolding
from livescale.messages.events import Tick, WorkerJoined
from livescale.telemetry.record.record import (
    RECORD_VERSION,
    AnyLine,
    LoadPhases,
    RequestLine,
    RunLine,
    ScaleLine,
    StepLine,
    read_record,
    write_record,
)
from livescale.telemetry.record.record_parts import RecordError
from livescale.values.chunks import ChunkRange, Feed
from livescale.values.routes import Duty
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.types import (
    FromWorker,
    HoldingId,
    LayerSpan,
    ModelSpec,
    Outcome,
    WorkerRef,
    agent_ref,
)

DEVICE = Device("cpu", "host", "leaf", 1000, 1000)
CONFIG = ControllerConfig((ModelPolicy(ModelSpec("m", (1, 2, 3), 1, 10), 1, 2),), 2)
FEEDS = (Feed(FromWorker(WorkerRef(0, 3)), (ChunkRange(0, 3, 2),), window=4),)
SPAN = LayerSpan(0, 3)
LOAD = StartHolding(
    HoldingId(2, WorkerRef(1)), "m", SPAN, FEEDS, 1, duty=Duty(1, (WorkerRef(1),)),
    measure_capacity=True,
)  # fmt: skip
COPY = StartHolding(HoldingId(3, agent_ref(0)), "m", SPAN, FEEDS, 1, reason="spread")
LINES: list[AnyLine] = [
    RunLine(RECORD_VERSION, "sim", CONFIG, {"a": 1}),
    StepLine(5, (WorkerJoined(WorkerRef(0), DEVICE), Tick()), (LOAD, COPY), 6),
    RequestLine("r", "m", 3, 4, 1, 9, Outcome.FINISHED, 1, 0, 2, 2, (5, 9), worker=WorkerRef(0)),
    ScaleLine(
        "m", 0, 2, "requests", {"at_least": 2}, 1, 2, 3, 6, "chain", ("w0.0 -> w1.0",), 7,
        (LoadPhases(1, WorkerRef(1), "w0.0", first_byte_ns=3),), {8: 9},
        ("w1.0 from storage",), "r", 1,
    ),
]  # fmt: skip


def test_lines_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    write_record(path, LINES)
    assert list(read_record(path)) == LINES


def test_a_truncated_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    write_record(path, LINES)
    whole = path.read_bytes()
    last_begins = whole.rstrip(b"\n").rindex(b"\n") + 1
    for length in (len(whole) - 1, last_begins + 1, last_begins):
        path.write_bytes(whole[:length])
        assert list(read_record(path)) == LINES[:-1]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    write_record(path, LINES)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"kind":"step","now_ns":"soon"}\n' + lines[2])
    with pytest.raises(RecordError, match=r"record\.jsonl:2: not a line of a run record"):
        list(read_record(path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"none\.jsonl: No such file"):
        list(read_record(tmp_path / "none.jsonl"))
