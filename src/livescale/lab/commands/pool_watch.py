"""A pool of commands in namespaces, for demos of several hosts: its hosts and its client, and what
is waited for, seen through its run record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from livescale.common.errors import UserError
from livescale.common.interpreter import module_words
from livescale.lab.bench.base.line_process import LineProcess
from livescale.lab.bench.hosts.host_commands import HostCommand
from livescale.lab.client.replay_process import ReplayJob
from livescale.lab.client.replayer import ReplayResult
from livescale.lab.testbed.bed import Testbed
from livescale.telemetry.record_watch import RecordWatch
from livescale.values.units import NS_PER_S

_JOIN_PORT, HTTP_PORT = 7000, 8000
_BIND = "d0"
_LOOK_S = 0.02


@dataclass(slots=True)
class Story:
    """What happened, in ns of the monotonic clock, told while it does."""

    began_ns: int = field(default_factory=time.monotonic_ns)

    def tell(self, text: str) -> None:
        """A line of the story, with the time since its beginning."""
        elapsed_s = (time.monotonic_ns() - self.began_ns) / NS_PER_S
        print(f"{elapsed_s:7.1f} s  {text}", flush=True)


class PoolWatch:
    """`commands` are those that must run, by host; hosts are named as in the record."""

    def __init__(self, bed: Testbed, record: Path, patience_s: float) -> None:
        self.record = RecordWatch(record)
        self.commands: dict[str, HostCommand] = {}
        self._bed = bed
        self._record = record
        self._address = f"{bed.hosts[0].devices[0].address}:{_JOIN_PORT}"
        self._token = str(record.parent / "pool.token")
        self._patience_s = patience_s
        self._folder = record.parent

    def begin(self, host: str, words: Sequence[str]) -> None:
        """Start `livescale …` in a host, its log beside the record."""
        inside = self._bed.inside(host)
        self.commands[host] = HostCommand.begin(host, self._folder, words, inside=inside)

    def begin_head(self, *words: str) -> None:
        """Start `serve` with these words, too, in the first host. Raises UserError."""
        own = ["--listen", self._address, "--port", str(HTTP_PORT), "--token-file", self._token]
        own += ["--record", str(self._record)]
        self.begin(self._bed.hosts[0].name, ["serve", *words, *own])
        self.until(Path(self._token).exists, "the head has its token file")

    def begin_host(self, host: str, *words: str) -> None:
        """Start `join` with these words, too. Everything goes over the host's first link."""
        own = ["--token-file", self._token, "--name", host, "--interface", _BIND]
        self.begin(host, ["join", self._address, *own, *words])

    def client(self, place: str) -> LineProcess:
        """A replayer in a host, or in "control", to be sent a ReplayJob."""
        words = [*self._bed.inside(place), *module_words("livescale.lab.client.replay_process")]
        return LineProcess("the client", words, {})

    def results(self, client: LineProcess, job: ReplayJob) -> list[ReplayResult]:
        """What came of a job that was sent. Raises BenchError when that takes too long."""
        last_s = job.rows[-1].arrival_ns / NS_PER_S
        answer = client.receive(last_s + job.drain_s + self._patience_s)
        return msgspec.convert(answer["results"], list[ReplayResult])

    def serving_hosts(self) -> list[str]:
        return [host for host in self.record.hosts if self.record.serving_on(host)]

    def busiest(self) -> str | None:
        """The host whose instance has the most requests; None: none has any."""
        counts = {h: len(self.record.requests_on(h)) for h in self.serving_hosts()}
        busy = [host for host, count in counts.items() if count]
        return max(busy, key=lambda host: (counts[host], host), default=None)

    def until_busy(self) -> str:
        """The busiest host, when there is one. Raises UserError."""
        self.until(lambda: self.busiest() is not None, "a host has streams")
        return self.busiest() or ""

    def until_noticed(self, host: str, since_ns: int) -> int:
        """When the loss of the host was noticed, which happened then. Raises UserError."""
        lost_ns = self.record.lost_ns
        self.until(lambda: lost_ns.get(host, 0) > since_ns, "the loss is noticed")
        return lost_ns[host]

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        """Read the record until this is so. Raises UserError after the patience, and when a command
        has ended that should run."""
        deadline_s = time.monotonic() + self._patience_s
        while True:
            self.record.read()
            if is_so():
                return
            for command in self.commands.values():
                command.check_runs()
            if time.monotonic() > deadline_s:
                raise UserError(
                    f"this did not come about within {self._patience_s:.0f} s: {what}"
                    f" (logs are in {self._folder})"
                )
            time.sleep(_LOOK_S)
