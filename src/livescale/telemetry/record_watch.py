"""What a pool that runs has written to its record so far: which hosts are there, what serves on
them, and whose requests they have.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from livescale.messages.commands import ScaleDecided
from livescale.messages.events import AgentJoined, MembersLeave, WorkerJoined, WorkerLost
from livescale.telemetry.history.changes import Decided
from livescale.telemetry.history.follower import Follower
from livescale.telemetry.history.holding_history import InstanceHistory
from livescale.telemetry.record.record import AnyLine, RequestLine, RunLine, StepLine
from livescale.values.types import InstanceState, RequestId, WorkerRef


class RecordWatch:
    """Follows one plain record file while it grows; `read` takes in what is new. Times are the
    record's, which are CLOCK_MONOTONIC of the controller's machine.

    By name of the host: `joined_ns` is when its first worker was there, `lost_ns` when the
    controller gave a worker of it up, `leaves_ns` when it was known to leave. A host that comes
    back has the times of its last life.
    """

    def __init__(self, path: Path) -> None:
        self.joined_ns: dict[str, int] = {}
        self.lost_ns: dict[str, int] = {}
        self.leaves_ns: dict[str, int] = {}
        #: decisions, in order, with their times
        self.decided: list[tuple[int, ScaleDecided]] = []
        #: why members were lost, in order
        self.losses: list[WorkerLost] = []
        #: how often the controller began
        self.lives = 0
        self._path = path
        self._read_bytes = 0
        self._rest = b""
        self._decoder = msgspec.json.Decoder(AnyLine)
        self._follower = Follower()
        self._host_of: dict[WorkerRef, str] = {}

    def read(self) -> None:
        """Take in the lines that are new. Raises OSError, msgspec.DecodeError."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            piece = file.read()
        self._read_bytes += len(piece)
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            self._take(self._decoder.decode(line))

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts with a living worker, in the order of their names."""
        return tuple(sorted({self._host_of[ref] for ref in self._workers}))

    def serving_on(self, host: str) -> list[InstanceHistory]:
        """Instances that serve on the workers of a host."""
        return [
            instance
            for instance in self._follower.instances.values()
            if instance.state is InstanceState.SERVING
            and any(self._host_of.get(held.member) == host for held in instance.holdings)
        ]

    def requests_on(self, host: str) -> list[RequestId]:
        """Requests that were sent to workers of a host and have not ended."""
        running = self._follower.running.items()
        return [request for request, ref in running if self._host_of.get(ref) == host]

    # -- helpers --------------------------------------------------------------------------------

    @property
    def _workers(self) -> list[WorkerRef]:
        return [ref for ref in self._host_of if not ref.is_agent]

    def _take(self, line: AnyLine) -> None:
        if isinstance(line, RunLine):
            self.lives += 1
            self._follower.begin(line.config)
        elif isinstance(line, RequestLine):
            self._follower.running.pop(line.request, None)
        elif isinstance(line, StepLine):
            for event in line.events:
                self._note(line.now_ns, event)
            for change in self._follower.step(line.now_ns, line.events, line.commands):
                if isinstance(change, Decided):
                    self.decided.append((line.now_ns, change.decision))

    def _note(self, now_ns: int, event: object) -> None:
        if isinstance(event, WorkerJoined):
            host = event.device.host
            if not any(self._host_of[ref] == host for ref in self._workers):
                self.joined_ns[host] = now_ns
            self._host_of[event.worker] = host
        elif isinstance(event, AgentJoined):
            self._host_of[event.agent] = event.host.name
        elif isinstance(event, WorkerLost):
            self.losses.append(event)
            host_of_lost = self._host_of.pop(event.worker, None)
            if host_of_lost is not None and not event.worker.is_agent:
                self.lost_ns[host_of_lost] = now_ns
        elif isinstance(event, MembersLeave):
            for ref in event.members:
                if ref in self._host_of:
                    self.leaves_ns.setdefault(self._host_of[ref], now_ns)

    def __repr__(self) -> str:
        return f"<RecordWatch {self._path}: {', '.join(self.hosts) or 'no hosts'}>"
