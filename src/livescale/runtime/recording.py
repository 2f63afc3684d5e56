"""The run record of one life of the controller: what is written, when, and in which part.

Lines are noted as things happen and written beside the event loop, so that no disk stops decisions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from livescale.control.controller import Controller
from livescale.messages.commands import AnyCommand
from livescale.messages.events import AnyEvent
from livescale.telemetry.members import opening_lines
from livescale.telemetry.record import RecordWriter, RequestLine
from livescale.telemetry.record_file import RecordFile
from livescale.telemetry.scale_events import ScaleTracker


class Recording:
    """Writes down what the controller is told and decides. A record that cannot be written is
    closed, and `problem` says why."""

    def __init__(
        self,
        path: Path,
        bytes_max: int | None,
        controller: Controller,
        settings: dict[str, object],
        start: str,
    ) -> None:
        """Begin a life; `start` names the start of the pool."""
        self._file = RecordFile(path, bytes_max)
        self._writer = RecordWriter(self._file)
        self._tracker = ScaleTracker()
        self._controller = controller
        self._settings = settings
        self._start = start
        self._writer.begin("real", controller.config, settings, start)

    @property
    def problem(self) -> str | None:
        """Why nothing is recorded any more (None: it is)."""
        return self._file.problem

    def step(self, now_ns: int, events: Sequence[AnyEvent], commands: Sequence[AnyCommand]) -> None:
        """A step whose commands have just been carried out, and the scale events it finished."""
        done_ns = time.monotonic_ns()
        self._writer.step(now_ns, events, commands, done_ns)
        for line in self._tracker.observe(now_ns, events, commands, done_ns):
            self._writer.write(line)

    def request(self, line: RequestLine) -> None:
        """A request is over."""
        self._writer.write(line)

    async def flush(self) -> None:
        """Let readers see what was noted, and begin the next part when this one is full."""
        if self._file.is_full:
            self._begin_part()
        await asyncio.to_thread(self._file.flush)

    def finish(self) -> None:
        """Write the scale events that were still under way, and everything else, and close."""
        for line in self._tracker.flush():
            self._writer.write(line)
        self._file.close()

    def _begin_part(self) -> None:
        self._file.begin_part()
        now_ns = time.monotonic_ns()
        known = opening_lines(self._controller, now_ns, "real", self._settings, self._start)
        for line in known:
            self._writer.write(line)
