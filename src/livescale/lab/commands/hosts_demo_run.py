"""The acts of the demo of several hosts: a head and hosts that are network namespaces, each with
nothing but the public commands in it, and a client beside the head.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from livescale.lab.bench.hosts.host_commands import ended_with
from livescale.lab.client.replay_process import ReplayJob
from livescale.lab.client.replayer import ReplayResult
from livescale.lab.commands.pool_watch import PoolWatch, Story
from livescale.lab.testbed.bed import Testbed
from livescale.values.units import NS_PER_S

_DRAIN_S = 60.0
# Between two acts, so that the picture shows them apart.
_BETWEEN_S = 2.0


@dataclass(slots=True)
class HostsStory(Story):
    """`joined_ns` is from each host's command to its
    first worker; `streams` are the requests that the lost host had when its links were cut."""

    joined_ns: dict[str, int] = field(default_factory=dict)
    scale_up_ns: int | None = None
    lost: str = ""
    cut_ns: int = 0
    noticed_ns: int | None = None
    streams: list[str] = field(default_factory=list)
    left: str = ""
    left_ns: int | None = None
    left_streams: int = 0
    results: list[ReplayResult] = field(default_factory=list)


class HostsDemo:
    """`play` on a testbed whose first host is the head. `folder` gets the record and the logs."""

    def __init__(self, bed: Testbed, folder: Path, flags: Sequence[str], patience_s: float) -> None:
        self.record = folder / "hosts.jsonl"
        self.story = HostsStory()
        self._bed = bed
        self._folder = folder
        self._flags = flags
        self._pool = PoolWatch(bed, self.record, patience_s)
        self._watch = self._pool.record
        self._commands = self._pool.commands

    @property
    def head(self) -> str:
        return self._bed.hosts[0].name

    @property
    def others(self) -> list[str]:
        return [host.name for host in self._bed.hosts[1:]]

    def play(self, model: Path, job: ReplayJob) -> HostsStory:
        """All acts, in order. Raises UserError where one of them does not come about."""
        with ended_with(self._commands, self.head, _DRAIN_S):
            self._start_head(model)
            self._let_join()
            with self._pool.client(self.head) as client:
                told = f"{len(job.rows)} requests begin, most of them in one burst"
                self.story.tell(told)
                client.send(msgspec.to_builtins(job))
                self._see_scale_up()
                self._lose_one()
                self._let_one_leave()
                self.story.results = self._pool.results(client, job)
            # What the head says does not reach it.
            self._commands[self.story.lost].process.kill()
        return self.story

    # -- the acts -------------------------------------------------------------------------------

    def _start_head(self, model: Path) -> None:
        self._pool.begin_head(str(model), "--workers", "0", *self._flags)
        self.story.tell(f"{self.head}: livescale serve --workers 0, the head")

    def _let_join(self) -> None:
        for host in self.others:
            self._pool.begin_host(host)
        waiting = dict.fromkeys(self.others)
        while waiting:
            self._pool.until(lambda: any(h in self._watch.joined_ns for h in waiting), "hosts join")
            for host in [h for h in waiting if h in self._watch.joined_ns]:
                del waiting[host]
                took_ns = self._watch.joined_ns[host] - self._commands[host].started_ns
                self.story.joined_ns[host] = took_ns
                took_s = took_ns / NS_PER_S
                self.story.tell(f"{host}: has joined {took_s:.1f} s after its livescale join")
        self._pool.until(lambda: bool(self._pool.serving_hosts()), "the first instance serves")
        self.story.tell(f"{self._pool.serving_hosts()[0]}: the first instance serves")

    def _see_scale_up(self) -> None:
        """One instance on each host that joined."""
        seen: dict[str, None] = dict.fromkeys(self._pool.serving_hosts())
        known = len(self._watch.decided)
        while len(seen) < len(self.others):
            self._pool.until(
                lambda: any(host not in seen for host in self._pool.serving_hosts()),
                "the burst scales over all hosts",
            )
            for host in self._pool.serving_hosts():
                if host not in seen:
                    seen[host] = None
                    self.story.tell(f"{host}: a further instance serves")
        ups = [(at, d) for at, d in self._watch.decided[known:] if d.to_instances > 1]
        if ups:
            self.story.scale_up_ns = time.monotonic_ns() - ups[0][0]

    def _lose_one(self) -> None:
        """The links of the host with the most requests carry nothing from now on."""
        story = self.story
        story.lost = self._pool.until_busy()
        story.cut_ns = time.monotonic_ns()
        self._bed.isolate(story.lost)
        self._watch.read()
        story.streams = self._watch.requests_on(story.lost)
        words = "its links are down, without a word"
        story.tell(f"{story.lost}: {words}; {len(story.streams)} streams")
        story.noticed_ns = self._pool.until_noticed(story.lost, story.cut_ns)
        took_s = (story.noticed_ns - story.cut_ns) / NS_PER_S
        story.tell(f"{story.lost}: noticed after {took_s:.1f} s; others go on with its streams")
        time.sleep(_BETWEEN_S)

    def _let_one_leave(self) -> None:
        """Ctrl-C at the host that has the most requests."""
        story = self.story
        story.left = self._pool.until_busy()
        story.left_streams = len(self._watch.requests_on(story.left))
        command = self._commands.pop(story.left)
        asked_ns = time.monotonic_ns()
        command.interrupt()
        story.tell(f"{story.left}: Ctrl-C, with {story.left_streams} streams")
        self._pool.until(lambda: command.process.poll() is not None, f"{story.left} leaves")
        if command.process.returncode != 0:
            command.check_runs()
        story.left_ns = time.monotonic_ns() - asked_ns
        story.tell(f"{story.left}: has left in order after {story.left_ns / NS_PER_S:.1f} s")
