"""The acts of `livescale bench ray`: a pool on a Ray cluster in namespaces, loads through HTTP, and
beneath each of them something is lost, of which Ray's own view is watched, too.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypedDict

import msgspec
import psutil

from livescale.common.errors import UserError
from livescale.common.interpreter import module_words
from livescale.lab.bench.base.line_process import LineProcess, bench_process
from livescale.lab.bench.hosts.host_commands import HostCommand
from livescale.lab.client.replay_process import ReplayJob
from livescale.lab.client.replayer import ReplayResult
from livescale.lab.commands.pool_watch import HTTP_PORT, PoolWatch, Story
from livescale.lab.testbed.bed import CONTROL
from livescale.lab.testbed.ray_cluster import RayCluster
from livescale.messages.commands import Dispatch
from livescale.telemetry.record.record import StepLine, read_record
from livescale.values.units import NS_PER_S

_LOOK_S = 0.02
_ANSWER_S = 60.0
_END_S = 60.0


class StateChange(TypedDict):
    """One of Ray's tables, as `lab/bench/peers/ray_states.py` tells it."""

    at_ns: int
    kind: str
    address: str
    state: str


@dataclass(frozen=True, slots=True)
class LossKind:
    """How a host is lost. `aim` finds what is struck, and gives the deed; afterwards Ray's tables
    must change for these (`ray_states`: "actor", "node"). With `is_at_once` the pool's processes
    there serve no more; else they do until Ray ends the actor. With `comes_back` the host is there
    again, by itself or after `ray start`."""

    name: str
    words: str
    aim: Callable[[RayCluster, str], Callable[[], object]]
    ray_states: tuple[str, ...]
    is_at_once: bool = True
    comes_back: bool = True


LOSSES = (
    LossKind(
        "actor_killed",
        "its Host actor is killed",
        lambda cluster, host: cluster.actor(host).kill,
        ("actor",),
    ),
    LossKind(
        "raylet_killed",
        "its raylet is killed",
        lambda cluster, host: cluster.raylet(host).kill,
        ("actor", "node"),
        is_at_once=False,
    ),
    LossKind(
        "node_silent",
        "its links are down, without a word",
        lambda cluster, host: partial(cluster.bed.isolate, host),
        ("actor", "node"),
        comes_back=False,
    ),
)
"""In this order."""


@dataclass(slots=True)
class LossStory:
    """One loss, in ns of CLOCK_MONOTONIC. `streams` are the requests that the host had then; by
    kind of state, `ray_ns` is when Ray knew. `back_ns`: its worker was in the pool again."""

    kind: LossKind
    host: str = ""
    struck_ns: int = 0
    noticed_ns: int = 0
    back_ns: int | None = None
    streams: list[str] = field(default_factory=list)
    ray_ns: dict[str, int] = field(default_factory=dict)
    results: list[ReplayResult] = field(default_factory=list)

    def healed_ns(self, record: Path) -> list[int]:
        """For each stream that was sent elsewhere and ended well, from the loss to its first token
        from there."""
        moved = self._moved_ns(record)
        healed = []
        for result in self._own_results():
            since_ns = moved.get(result.request_id or "")
            if since_ns is not None and result.ok:
                later = [at_ns for at_ns in result.token_ns if at_ns > since_ns]
                healed += [at_ns - self.struck_ns for at_ns in later[:1]]
        return healed

    def longest_pause_ns(self) -> int | None:
        """The longest time that one of the streams had no token, after the loss."""
        pauses = [
            after_ns - before_ns
            for result in self._own_results()
            for before_ns, after_ns in pairwise(
                [max(result.sent_ns, self.struck_ns), *result.token_ns]
            )
            if after_ns > self.struck_ns
        ]
        return max(pauses, default=None)

    def _own_results(self) -> list[ReplayResult]:
        return [result for result in self.results if result.request_id in self.streams]

    def _moved_ns(self, record: Path) -> dict[str, int]:
        """When streams were sent elsewhere, if they were."""
        moved: dict[str, int] = {}
        for line in read_record(record):
            if isinstance(line, StepLine) and line.now_ns > self.struck_ns:
                for command in line.commands:
                    if isinstance(command, Dispatch) and command.request in self.streams:
                        moved.setdefault(command.request, line.now_ns)
        return moved


@dataclass(slots=True)
class RayStory(Story):
    """`joined_ns` is from the pool's command to each host's first worker; `left` are
    processes of the pool that were still there after its end."""

    joined_ns: dict[str, int] = field(default_factory=dict)
    scale_up_ns: int | None = None
    losses: list[LossStory] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def results(self) -> list[ReplayResult]:
        return [result for loss in self.losses for result in loss.results]


class RayBenchRun:
    """`play` on a cluster that is up. `folder` gets the record and the pool's log."""

    def __init__(
        self,
        cluster: RayCluster,
        folder: Path,
        flags: Sequence[str],
        patience_s: float,
        ray_patience_s: float,
    ) -> None:
        """`ray_patience_s` is how long Ray has to notice a loss."""
        self.record = folder / "ray.jsonl"
        self.story = RayStory()
        self._cluster = cluster
        self._folder = folder
        self._flags = flags
        self._ray_patience_s = ray_patience_s
        self._pool = PoolWatch(cluster.bed, self.record, patience_s)
        self._watch = self._pool.record
        self._names = {host.control_address: host.name for host in cluster.bed.hosts}
        self._addresses = {name: address for address, name in self._names.items()}

    def play(self, model: Path, jobs: Sequence[ReplayJob]) -> RayStory:
        """One loss under each job. Raises UserError where something does not come about."""
        with self._pool_of(model):
            self._let_join()
            words = self._cluster.bed.inside(CONTROL)
            with bench_process(
                "Ray's driver",
                "peers.ray_states",
                self._cluster.gcs,
                before=words,
                environ=self._cluster.environ,
            ) as states:
                states.receive(_ANSWER_S)
                for kind, job in zip(LOSSES, jobs, strict=True):
                    self._lose(kind, job, states)
        return self.story

    # -- the acts -------------------------------------------------------------------------------

    def _let_join(self) -> None:
        story = self.story
        self._pool.until(lambda: len(self._watch.hosts) == len(self._names), "the hosts join")
        began_ns = self._pool.commands[CONTROL].started_ns
        for name, joined_ns in self._watch.joined_ns.items():
            story.joined_ns[self._host_of(name)] = joined_ns - began_ns
        slowest_s = max(story.joined_ns.values()) / NS_PER_S
        story.tell(
            f"{len(self._names)} hosts have joined, {slowest_s:.1f} s after livescale serve --ray"
        )
        self._pool.until(lambda: bool(self._pool.serving_hosts()), "the first instance serves")

    def _lose(self, kind: LossKind, job: ReplayJob, states: LineProcess) -> None:
        story, loss = self.story, LossStory(kind)
        story.losses.append(loss)
        # Found before the load: a look at all processes takes a while.
        strikes = {host: kind.aim(self._cluster, host) for host in self._addresses}
        with self._pool.client(CONTROL) as client:
            client.send(msgspec.to_builtins(job))
            story.tell(f"{len(job.rows)} requests begin, most of them in one burst")
            self._see_burst(job)
            self._strike(loss, strikes)
            loss.results = self._pool.results(client, job)
        self._see_ray(loss, states)
        if not kind.comes_back:
            self._cluster.bed.rejoin(loss.host)
            return
        if "node" in kind.ray_states:
            self._cluster.start_node(loss.host)
        self._see_back(loss)

    def _see_burst(self, job: ReplayJob) -> None:
        """All hosts serve, the first time; later, half of it was sent."""
        if len(self.story.losses) == 1:
            known = len(self._watch.decided)
            self._pool.until(
                lambda: len(self._pool.serving_hosts()) == len(self._names),
                "the burst scales over all hosts",
            )
            ups = [at for at, decided in self._watch.decided[known:] if decided.to_instances > 1]
            if ups:
                self.story.scale_up_ns = time.monotonic_ns() - ups[0]
            self.story.tell(f"an instance serves on each of {len(self._names)} hosts")
        else:
            middle_ns = time.monotonic_ns() + job.rows[len(job.rows) // 2].arrival_ns
            self._pool.until(lambda: time.monotonic_ns() > middle_ns, "the burst is sent")

    def _strike(self, loss: LossStory, strikes: Mapping[str, Callable[[], object]]) -> None:
        """The host with the most requests is lost."""
        name = self._pool.until_busy()
        loss.host = self._host_of(name)
        loss.streams = self._watch.requests_on(name)
        loss.struck_ns = time.monotonic_ns()
        strikes[loss.host]()
        self.story.tell(f"{loss.host}: {loss.kind.words}; {len(loss.streams)} streams")
        loss.noticed_ns = self._pool.until_noticed(name, loss.struck_ns)
        took_s = (loss.noticed_ns - loss.struck_ns) / NS_PER_S
        self.story.tell(f"{loss.host}: noticed after {took_s:.2f} s; others go on with its streams")

    def _see_ray(self, loss: LossStory, states: LineProcess) -> None:
        """When Ray knew, of each of the states that must change; after its patience it did not."""
        deadline_ns = loss.struck_ns + int(self._ray_patience_s * NS_PER_S)
        while True:
            found: list[StateChange] = states.ask({}, _ANSWER_S)["changes"]
            for state in loss.kind.ray_states:
                ends = [c["at_ns"] for c in found if self._is_end_of(c, state, loss)]
                if ends:
                    loss.ray_ns.setdefault(state, ends[0])
            if len(loss.ray_ns) == len(loss.kind.ray_states):
                break
            if time.monotonic_ns() > deadline_ns:
                break
            time.sleep(_LOOK_S)
        told = [f"{k} {(at - loss.struck_ns) / NS_PER_S:.2f} s" for k, at in loss.ray_ns.items()]
        self.story.tell(f"{loss.host}: Ray's own tables: {', '.join(told) or 'nothing noticed'}")

    def _is_end_of(self, change: StateChange, state: str, loss: LossStory) -> bool:
        is_of_it = (change["kind"], change["address"]) == (state, self._addresses[loss.host])
        return is_of_it and change["at_ns"] > loss.struck_ns and change["state"] != "ALIVE"

    def _see_back(self, loss: LossStory) -> None:
        self._pool.until(lambda: bool(self._came_back_ns(loss)), f"{loss.host} is back")
        loss.back_ns = self._came_back_ns(loss)[0]
        took_s = (loss.back_ns - loss.struck_ns) / NS_PER_S
        self.story.tell(f"{loss.host}: its worker is back {took_s:.1f} s after the loss")

    def _came_back_ns(self, loss: LossStory) -> list[int]:
        joined_ns = self._watch.joined_ns.items()
        own_ns = [at for name, at in joined_ns if self._host_of(name) == loss.host]
        return [at_ns for at_ns in own_ns if at_ns > loss.struck_ns]

    def _host_of(self, name: str) -> str:
        """The testbed's name of a host of the pool. A raylet that comes back before Ray has given
        up the one before is a second node of that address: its host's name has an end of its own
        (`HostActor.name`)."""
        return self._names[name.partition("-")[0]]

    # -- helpers, in the order used -------------------------------------------------------------

    @contextlib.contextmanager
    def _pool_of(self, model: Path) -> Iterator[None]:
        """`livescale serve --ray` beside the head of the cluster; Ctrl-C ends it."""
        words = [
            *("serve", str(model), "--ray", self._cluster.gcs, "--port", str(HTTP_PORT)),
            *("--record", str(self.record), *self._flags),
        ]
        log = self._folder / "pool.log"
        with log.open("wb") as file:
            started_ns = time.monotonic_ns()
            process = self._cluster.bed.exec(
                CONTROL,
                module_words("livescale.main", *words),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self._cluster.environ,
                start_new_session=True,
            )
        pool = HostCommand("livescale serve --ray", log, process, started_ns)
        self._pool.commands[CONTROL] = pool
        try:
            yield
            pool.check_runs()
        except BaseException:
            process.kill()
            process.wait()
            raise
        pool.interrupt()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            raise UserError(f"the pool did not end within {_END_S:.0f} s ({log})") from None
        _, alive = psutil.wait_procs(self._cluster.pool_processes(), _END_S)
        self.story.left = [_described(process) for process in alive]
        self.story.tell(f"the pool has ended; processes of it that are left: {len(alive)}")


def _described(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return f"{process.pid} {' '.join(process.cmdline()) or process.name()}"
    return f"{process.pid}"
