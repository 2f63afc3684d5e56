"""The records of one life of the controller and of one life of a member: what is written when, and
in which part.

Lines are noted as things happen and written by other threads, so that no disk stops decisions.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from livescale.control.state.config import ControllerConfig
from livescale.member.member import Member
from livescale.messages.commands import AnyCommand
from livescale.messages.events import AnyEvent
from livescale.telemetry.history.changes import Change
from livescale.telemetry.history.follower import Follower
from livescale.telemetry.member_record import RecordedMember
from livescale.telemetry.record.record import (
    RECORD_VERSION,
    AnyLine,
    RequestLine,
    RunLine,
    StepLine,
    encode_line,
)
from livescale.telemetry.record.record_file import RecordFile
from livescale.telemetry.scale_events import ScaleTracker
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.types import WorkerRef

FLUSH_S = 0.2
"""What was noted is written within this time."""


class Recording:
    """Writes down what the controller is told and decides. A record that cannot be written is
    closed, and `problem` says why."""

    def __init__(
        self,
        path: Path,
        bytes_max: int | None,
        config: ControllerConfig,
        follower: Follower,
        settings: dict[str, object],
        start: str,
    ) -> None:
        """Begin a life; `start` names the start of the pool. `follower` follows the controller."""
        self._file = RecordFile(path, bytes_max)
        self._tracker = ScaleTracker()
        self._config = config
        self._follower = follower
        self._settings = settings
        self._start = start
        self._write(RunLine(RECORD_VERSION, "real", config, settings, start))

    @property
    def problem(self) -> str | None:
        """Why nothing is recorded any more (None: it is)."""
        return self._file.problem

    def step(
        self,
        now_ns: int,
        events: Sequence[AnyEvent],
        commands: Sequence[AnyCommand],
        changes: Sequence[Change],
    ) -> None:
        """A step whose commands have just been carried out, what it changed, and the scale events
        that it finished."""
        done_ns = time.monotonic_ns()
        self._write(StepLine(now_ns, tuple(events), tuple(commands), done_ns))
        for line in self._tracker.observe(now_ns, changes, done_ns):
            self._write(line)

    def request(self, line: RequestLine) -> None:
        """A request is over."""
        self._write(line)

    async def flush(self, models: Iterable[ModelPolicy]) -> None:
        """Let readers see what was noted, and begin the next part when this one is full; `models`
        are those that the controller has now."""
        if self._file.is_full:
            self._begin_part(msgspec.structs.replace(self._config, models=tuple(models)))
        await asyncio.to_thread(self._file.flush)

    def finish(self) -> None:
        """Write the scale events that were still under way, and everything else, and close."""
        for line in self._tracker.flush():
            self._write(line)
        self._file.close()

    def _begin_part(self, config: ControllerConfig) -> None:
        self._file.begin_part()
        settings, start = self._settings, self._start
        self._write(RunLine(RECORD_VERSION, "real", config, settings, start, is_continued=True))
        received, ordered = self._follower.opening()
        now_ns = time.monotonic_ns()
        self._write(StepLine(now_ns, tuple(received), tuple(ordered), now_ns))

    def _write(self, line: AnyLine) -> None:
        self._file.write(encode_line(line))


@contextmanager
def member_maker(directory: str | None, ref: WorkerRef) -> Iterator[Callable[..., Member]]:
    """What makes the Member of this process, to be given the arguments of a Member: one that is
    recorded in a file of the directory, or is not recorded (None)."""
    if directory is None:
        yield Member
        return
    file = RecordFile(Path(directory) / f"{ref}.jsonl")
    is_over = threading.Event()

    def write() -> None:
        while not is_over.wait(FLUSH_S):
            file.flush()
        file.close()

    def begin(*arguments: Any, **named: Any) -> Member:
        member = RecordedMember(file, *arguments, **named)
        # The record of a process that is killed at once says whose it is.
        file.flush()
        return member

    writer = threading.Thread(target=write, name="record", daemon=True)
    writer.start()
    try:
        yield begin
    finally:
        is_over.set()
        writer.join()
