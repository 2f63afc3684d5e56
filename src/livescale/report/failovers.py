"""Members that were lost in a run, what they held, and when others took their place.

Works on the lines of a record alone. The gateway is no member: a record does not tell its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from livescale.messages.commands import Dispatch, FailRequest, StartCopy, StartLoad
from livescale.messages.events import (
    AgentJoined,
    BatchTaken,
    CopyDropped,
    CopyFailed,
    LoadFailed,
    Released,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    WorkerJoined,
    WorkerLost,
)
from livescale.report.terminal import seconds
from livescale.telemetry.record import AnyLine, RequestLine, RunLine, StepLine
from livescale.types import RequestId, WorkerRef

FAILOVER_HEADER = ("at", "lost", "held", "requests", "reason", "replaced after")
_CONTROLLER = "controller"
_NS_PER_S = 1_000_000_000


@dataclass(slots=True)
class Failover:
    """A worker, host agent or controller that was lost, and its replacement.

    `held` are the models that were on it, loading ones included; `requests` those that it had been
    given and not ended. `back_ns` is when the next incarnation was there (None: never). A
    controller was lost some time between `at_ns`, the last line of its life, and `back_ns`.
    """

    at_ns: int
    member: str
    reason: str
    held: tuple[str, ...] = ()
    requests: int = 0
    back_ns: int | None = None


def failovers(lines: Iterable[AnyLine]) -> list[Failover]:
    """The losses of one start of a pool, in order."""
    reader = _Reader()
    for line in lines:
        if isinstance(line, RunLine):
            reader.begin(line)
        elif isinstance(line, StepLine):
            reader.step(line)
        elif isinstance(line, RequestLine):
            reader.running.pop(line.request, None)
    return reader.found


def failover_cells(loss: Failover, started_ns: int) -> tuple[str, ...]:
    """A row of words below FAILOVER_HEADER; times count from the start of the load."""
    back = "not"
    if loss.back_ns is not None:
        back = seconds((loss.back_ns - loss.at_ns) / _NS_PER_S)
        # Its end is not on record.
        back = f"at most {back}" if loss.member == _CONTROLLER else back
    return (
        f"{(loss.at_ns - started_ns) / _NS_PER_S:,.2f} s",
        loss.member,
        ", ".join(loss.held) or "-",
        str(loss.requests),
        loss.reason,
        back,
    )


# -- helpers --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Reader:
    found: list[Failover] = field(default_factory=list)
    #: members that are there, by number, and what is on them: (model, rank)
    there: dict[int, WorkerRef] = field(default_factory=dict)
    held: dict[WorkerRef, dict[tuple[str, int], None]] = field(default_factory=dict)
    #: where the ranks of instances are
    worker_of: dict[tuple[int, int], WorkerRef] = field(default_factory=dict)
    #: requests that were dispatched and have not ended
    running: dict[RequestId, WorkerRef] = field(default_factory=dict)
    #: losses that nothing has made good yet
    open: dict[int, Failover] = field(default_factory=dict)
    away: Failover | None = None
    last_ns: int | None = None

    def begin(self, line: RunLine) -> None:
        if self.last_ns is not None and not line.is_continued:
            self.away = Failover(self.last_ns, _CONTROLLER, "a further life of it began")
            self.found.append(self.away)

    def step(self, line: StepLine) -> None:
        if self.away is not None:
            self.away.back_ns, self.away = line.now_ns, None
        self.last_ns = line.done_ns
        for event in line.events:
            if isinstance(event, WorkerJoined):
                self._joined(line.now_ns, event.worker)
                if event.report is not None:
                    report = event.report
                    self._hold(event.worker, report.model, report.instance, report.rank)
            elif isinstance(event, AgentJoined):
                self._joined(line.now_ns, event.agent)
                copies = {(copy.model, copy.rank): None for copy in event.copies}
                self.held[event.agent] = copies
            elif isinstance(event, WorkerLost):
                self._lost(line.now_ns, event.worker, event.reason)
            elif isinstance(event, LoadFailed | Released):
                worker = self.worker_of.pop((event.instance, event.rank), None)
                if worker is not None:
                    self.held.pop(worker, None)
            elif isinstance(event, CopyDropped | CopyFailed):
                self.held.get(event.agent, {}).pop((event.model, event.rank), None)
            else:
                self._requests(event)
        for command in line.commands:
            if isinstance(command, StartLoad):
                self._hold(command.worker, command.model, command.instance, command.rank)
            elif isinstance(command, StartCopy):
                self.held.setdefault(command.agent, {})[command.model, command.rank] = None
            elif isinstance(command, Dispatch):
                self.running[command.request] = command.worker
            elif isinstance(command, FailRequest):
                self.running.pop(command.request, None)

    def _requests(self, event: object) -> None:
        if isinstance(event, RequestEnded | RequestCancelled):
            self.running.pop(event.request, None)
        elif isinstance(event, RequestArrived) and event.worker is not None:
            self.running[event.request] = event.worker
        elif isinstance(event, BatchTaken):
            for request, _ in event.requests:
                self.running[request] = event.worker

    def _hold(self, worker: WorkerRef, model: str, instance: int, rank: int) -> None:
        self.held[worker] = {(model, rank): None}
        self.worker_of[instance, rank] = worker

    def _joined(self, now_ns: int, ref: WorkerRef) -> None:
        before = self.there.get(ref.worker)
        if before is not None and before < ref:
            self._lost(now_ns, before, f"{ref} took its place")
        self.there[ref.worker] = ref
        loss = self.open.pop(ref.worker, None)
        if loss is not None:
            loss.back_ns = now_ns

    def _lost(self, now_ns: int, ref: WorkerRef, reason: str) -> None:
        if self.there.get(ref.worker) != ref:
            return  # its successor is there already, and told of it
        del self.there[ref.worker]
        models = dict.fromkeys(model for model, _ in self.held.pop(ref, {}))
        requests = [request for request, worker in self.running.items() if worker == ref]
        for request in requests:
            del self.running[request]
        name = f"{'host agent' if ref.is_agent else 'worker'} {ref}"
        loss = Failover(now_ns, name, reason, tuple(models), len(requests))
        self.open[ref.worker] = loss
        self.found.append(loss)
