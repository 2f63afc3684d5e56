"""What is kept of a simulated run: results for the caller, and the record if one is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO

from livescale.control.controller import Controller
from livescale.control.state.config import ControllerConfig
from livescale.control.state.fleet import Fleet
from livescale.messages.commands import AnyCommand
from livescale.messages.events import AnyEvent
from livescale.telemetry.history.follower import Follower
from livescale.telemetry.record.record import (
    RECORD_VERSION,
    AnyLine,
    RequestLine,
    RunLine,
    ScaleLine,
    StepLine,
    TrafficLine,
    encode_line,
)
from livescale.telemetry.scale_events import ScaleTracker
from livescale.values.types import InstanceState, Role


@dataclass(frozen=True, slots=True)
class InstanceCount:
    """Living instances of a model from `now_ns` on, as the controller sees them: by what they do,
    and how many of them all have the role decode."""

    now_ns: int
    model: str
    loading: int
    serving: int
    draining: int
    decode: int = 0

    @property
    def living(self) -> int:
        return self.loading + self.serving + self.draining


@dataclass(slots=True)
class SimResult:
    """What came of a run. Times are nanoseconds of virtual time since its start.

    Request lines come in the order in which requests ended, scale lines in order of completion;
    `instances` has one entry for every change of a model's counts.
    """

    requests: list[RequestLine] = field(default_factory=list)
    scales: list[ScaleLine] = field(default_factory=list)
    instances: list[InstanceCount] = field(default_factory=list)
    steps: int = 0
    stale_events: int = 0
    actions: int = 0
    end_ns: int = 0


class RunNotes:
    """Lines and counts in the order in which they came; nothing is decided here."""

    def __init__(self, record_file: IO[bytes] | None, settings: dict[str, object]) -> None:
        self.result = SimResult()
        self._file = record_file
        self._settings = settings
        self._last_counts: dict[str, tuple[int, int, int, int]] = {}
        #: whose instances were counted last, and its version then
        self._seen: tuple[Fleet | None, int] = (None, 0)

    def begin(self, config: ControllerConfig) -> None:
        """A life of the controller begins."""
        self._follower, self._tracker = Follower(), ScaleTracker()
        self._follower.begin(config)
        self._write(RunLine(RECORD_VERSION, "sim", config, self._settings))

    def step(
        self,
        now_ns: int,
        events: Sequence[AnyEvent],
        commands: Sequence[AnyCommand],
        controller: Controller,
    ) -> None:
        """The controller, which has received these events, orders these commands."""
        self.result.steps += 1
        self._write(StepLine(now_ns, tuple(events), tuple(commands), now_ns))
        changes = self._follower.step(now_ns, events, commands)
        self._scales(self._tracker.observe(now_ns, changes, now_ns))
        self._count_instances(now_ns, controller)

    def end(self, controller: Controller) -> None:
        """The life of the controller is over."""
        self.result.stale_events += controller.stale_events
        self._scales(self._tracker.flush())

    def request(self, line: RequestLine) -> None:
        self.result.requests.append(line)
        self._write(line)

    def traffic(self, now_ns: int, carried_bytes: dict[str, int]) -> None:
        """What links have carried by now."""
        self._write(TrafficLine(now_ns, carried_bytes))

    # -- helpers --------------------------------------------------------------------------------

    def _scales(self, lines: Sequence[ScaleLine]) -> None:
        """Scale events that are finished."""
        for line in lines:
            self.result.scales.append(line)
            self._write(line)

    def _count_instances(self, now_ns: int, controller: Controller) -> None:
        """Note the numbers of every model for which they changed."""
        seen = (controller.fleet, controller.fleet.version)
        if seen == self._seen:
            return
        self._seen = seen
        for model, state in controller.models.items():
            instances = controller.fleet.of_parts(state.keys)
            states = [instance.state for instance in instances]
            loading = sum(1 for instance in instances if instance.is_loading)
            serving = states.count(InstanceState.SERVING)
            draining = states.count(InstanceState.DRAINING)
            decode = sum(instance.part.role is Role.DECODE for instance in instances)
            count = (loading, serving, draining, decode)
            if self._last_counts.get(model) != count:
                self._last_counts[model] = count
                self.result.instances.append(InstanceCount(now_ns, model, *count))

    def _write(self, line: AnyLine) -> None:
        if self._file is not None:
            self._file.write(encode_line(line))
