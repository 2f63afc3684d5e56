"""What is kept of a simulated run: results for the caller, and the record if one is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from livescale.control.config import ControllerConfig
from livescale.control.controller import Controller
from livescale.control.fleet import Fleet
from livescale.messages.commands import AnyCommand
from livescale.messages.events import AnyEvent
from livescale.telemetry.record import AnyLine, RecordWriter, RequestLine, ScaleLine, TrafficLine
from livescale.types import InstanceState


@dataclass(frozen=True, slots=True)
class InstanceCount:
    """Living instances of a model from `now_ns` on, as the controller sees them."""

    now_ns: int
    model: str
    loading: int
    serving: int
    draining: int


class RunNotes:
    """Lines and counts in the order in which they came; nothing is decided here."""

    def __init__(self, record_file: IO[bytes] | None) -> None:
        self.requests: list[RequestLine] = []
        self.scales: list[ScaleLine] = []
        self.instances: list[InstanceCount] = []
        self._record = RecordWriter(record_file) if record_file is not None else None
        self._last_counts: dict[str, tuple[int, int, int]] = {}
        #: whose instances were counted last, and its version then
        self._seen: tuple[Fleet | None, int] = (None, 0)

    def begin(self, config: ControllerConfig, settings: dict[str, object]) -> None:
        """A life of the controller begins."""
        if self._record is not None:
            self._record.begin("sim", config, settings)

    def step(self, now_ns: int, events: Sequence[AnyEvent], commands: Sequence[AnyCommand]) -> None:
        if self._record is not None:
            self._record.step(now_ns, events, commands, now_ns)

    def request(self, line: RequestLine) -> None:
        self.requests.append(line)
        self._write(line)

    def traffic(self, now_ns: int, carried_bytes: dict[str, int]) -> None:
        """What links have carried by now."""
        self._write(TrafficLine(now_ns, carried_bytes))

    def scales_of(self, lines: Sequence[ScaleLine]) -> None:
        """Scale events that are finished."""
        for line in lines:
            self.scales.append(line)
            self._write(line)

    def count_instances(self, now_ns: int, controller: Controller) -> None:
        """Note the numbers of every model for which they changed."""
        seen = (controller.fleet, controller.fleet.version)
        if seen == self._seen:
            return
        self._seen = seen
        for model, state in controller.models.items():
            instances = controller.fleet.of_part(state.part)
            states = [instance.state for instance in instances]
            loading = sum(1 for instance in instances if instance.is_loading)
            serving = states.count(InstanceState.SERVING)
            draining = states.count(InstanceState.DRAINING)
            count = (loading, serving, draining)
            if self._last_counts.get(model) != count:
                self._last_counts[model] = count
                self.instances.append(InstanceCount(now_ns, model, *count))

    def _write(self, line: AnyLine) -> None:
        if self._record is not None:
            self._record.write(line)
