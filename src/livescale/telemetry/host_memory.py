"""What a run record says of host memory: how many copies of each model lay in it, how long.

A copy takes memory from its order on until its agent says that it is gone. Nothing is decided or
drawn here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from livescale.messages.commands import AnyCommand, StartCopy
from livescale.messages.events import (
    AgentJoined,
    AnyEvent,
    CopyDropped,
    CopyFailed,
    ModelAdded,
    WorkerLost,
)
from livescale.telemetry.record import AnyLine, RunLine, StepLine
from livescale.types import WorkerRef


@dataclass(frozen=True, slots=True)
class HostCopyUse:
    """Copies and bytes of one model in the memory of all hosts: averages over time, and maxima."""

    copies_mean: float
    copies_max: int
    bytes_mean: float
    bytes_max: int


def host_copy_use(lines: Iterable[AnyLine]) -> dict[str, HostCopyUse]:
    """Per model of the record, in the order in which they appear (BlitzScale, Figure 19).

    Averages go over the time of all lives of the controller, from the first step to the last. A
    controller that begins anew knows of no copy until the agents have joined it.
    """
    watch = _watched(lines)
    return {model: watch.use_of(model) for model in watch.rank_bytes}


def copies_over_time(lines: Iterable[AnyLine]) -> dict[str, list[tuple[int, int]]]:
    """(now_ns, copies from then on) of every model that ever had a copy, one entry per change."""
    return _watched(lines).changes


# -- helpers --------------------------------------------------------------------------------------


def _watched(lines: Iterable[AnyLine]) -> _Watch:
    watch = _Watch()
    for line in lines:
        if isinstance(line, RunLine):
            watch.begin({p.spec.name: p.spec.size_bytes for p in line.config.models})
        elif isinstance(line, StepLine):
            watch.step(line.now_ns, line.events, line.commands)
    return watch


@dataclass(slots=True)
class _Use:
    """Sums so far; `copies` and `bytes` hold since the last step."""

    copies: int = 0
    bytes: int = 0
    copies_ns: int = 0
    bytes_ns: int = 0
    copies_max: int = 0
    bytes_max: int = 0


@dataclass(slots=True)
class _Watch:
    rank_bytes: dict[str, int] = field(default_factory=dict)
    changes: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    _held: dict[tuple[str, WorkerRef, int], None] = field(default_factory=dict)
    _counted: dict[tuple[str, WorkerRef, int], None] = field(default_factory=dict)
    _uses: dict[str, _Use] = field(default_factory=dict)
    _last_ns: int | None = None
    _span_ns: int = 0

    def begin(self, rank_bytes: dict[str, int]) -> None:
        self.rank_bytes |= rank_bytes
        self._held = {}

    def step(self, now_ns: int, events: Sequence[AnyEvent], commands: Sequence[AnyCommand]) -> None:
        self._pass_time(now_ns)
        for event in events:
            self._absorb(event)
        for command in commands:
            if isinstance(command, StartCopy):
                self._held[command.model, command.agent, command.rank] = None
        if self._counted != self._held:
            self._counted = dict(self._held)
            self._count(now_ns)

    def use_of(self, model: str) -> HostCopyUse:
        use = self._uses.get(model, _Use())
        span_ns = max(self._span_ns, 1)
        return HostCopyUse(
            use.copies_ns / span_ns, use.copies_max, use.bytes_ns / span_ns, use.bytes_max
        )

    def _pass_time(self, now_ns: int) -> None:
        # Clocks of several lives go on; one that begins anew adds nothing.
        passed_ns = max(now_ns - self._last_ns, 0) if self._last_ns is not None else 0
        self._last_ns = now_ns
        self._span_ns += passed_ns
        for use in self._uses.values():
            use.copies_ns += use.copies * passed_ns
            use.bytes_ns += use.bytes * passed_ns

    def _absorb(self, event: AnyEvent) -> None:
        if isinstance(event, CopyDropped | CopyFailed):
            self._held.pop((event.model, event.agent, event.rank), None)
        elif isinstance(event, AgentJoined):
            self._forget(event.agent.worker)
            for report in event.copies:
                self._held[report.model, event.agent, report.rank] = None
        elif isinstance(event, WorkerLost) and event.worker.is_agent:
            self._forget(event.worker.worker)
        elif isinstance(event, ModelAdded):
            self.rank_bytes[event.policy.spec.name] = event.policy.spec.size_bytes

    def _forget(self, number: int) -> None:
        """Nothing is held any more by the agent of that number, in whichever life."""
        for key in [key for key in self._held if key[1].worker == number]:
            del self._held[key]

    def _count(self, now_ns: int) -> None:
        for use in self._uses.values():
            use.copies = use.bytes = 0
        agents: dict[str, dict[WorkerRef, None]] = {}
        for model, agent, _ in self._held:
            agents.setdefault(model, {})[agent] = None
            use = self._uses.setdefault(model, _Use())
            use.copies = len(agents[model])
            use.bytes += self.rank_bytes.get(model, 0)
        for model, use in self._uses.items():
            changes = self.changes.setdefault(model, [])
            if not changes or changes[-1][1] != use.copies:
                changes.append((now_ns, use.copies))
            use.copies_max = max(use.copies_max, use.copies)
            use.bytes_max = max(use.bytes_max, use.bytes)
