"""This machine as a host of a pool that runs elsewhere: it joins, and its supervisor keeps its
workers and its agent alive until the pool ends or the host leaves.

One wire to the controller says who is there; numbers and settings come back. The processes connect
to the controller themselves, and serve on while it is away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from livescale import __version__
from livescale.common.errors import UserError
from livescale.config.pool import PoolConfig
from livescale.runtime.children.kept_children import ChildCare
from livescale.runtime.children.pool_process import Child
from livescale.runtime.children.restarts import Restarts
from livescale.runtime.join.head_talk import HeadAccess, HeadTalk
from livescale.runtime.layout.pool_layout import PoolLayout, joined_seat
from livescale.runtime.layout.vllm_python import check_vllm
from livescale.runtime.models.catalog import with_host_memory
from livescale.runtime.models.timed_latency import latency
from livescale.runtime.supervisor.child_boots import MemberBoots
from livescale.runtime.supervisor.host_supervisor import HostSupervisor, fork_server
from livescale.runtime.supervisor.pool_claims import own_rate
from livescale.runtime.supervisor.pool_directory import PoolDirectory
from livescale.runtime.wire.boot import Status
from livescale.runtime.wire.joining import Farewell, HostHello, Welcome
from livescale.runtime.wire.news import News, PoolProgress
from livescale.runtime.wire.protocol import ToHost
from livescale.runtime.wire.wire_channel import Wire
from livescale.values.types import Value


class JoinedAs(Value, frozen=True):
    """What the machine brings: a name, the address that others reach it at, and `settings` of its
    own, which replace the pool's here. With `reads_files` the models' directories are where the
    head has them. It hangs on the leaf switch `rack` (empty: as the pool says)."""

    name: str
    address: str
    workers: int
    settings: dict[str, str | int | None] = msgspec.field(default_factory=dict)
    reads_files: bool = False
    rack: str = ""


class JoinedHost:
    """`run` until the pool ends, or `leave` or `kill` was called."""

    def __init__(self, access: HeadAccess, joined_as: JoinedAs) -> None:
        self._access = access
        self._as = joined_as
        self._tell = access.tell
        self._clock_ns = time.time_ns()
        self._directory = PoolDirectory()
        self._talk = HeadTalk(access, Welcome)
        self._welcome: Welcome | None = None
        self._running: _RunningHost | None = None
        self._wire: Wire[ToHost] | None = None
        self._is_leaving = asyncio.Event()

    async def run(self) -> None:
        """Raises JoinError where the head cannot be reached, refuses this host, or is none, and
        UserError where the host's processes cannot run."""
        try:
            await self._talk.run(self._hello, self._stay, self._is_leaving.is_set)
        finally:
            if self._running is not None:
                await self._running.end()
            self._directory.remove()

    def leave(self) -> None:
        """Leave in order: the pool is asked first, and has the drain timeout for its answer."""
        self._is_leaving.set()
        if self._wire is not None:
            self._wire.send(self._farewell())

    def kill(self) -> None:
        """End everything at once."""
        self._is_leaving.set()
        if self._running is not None:
            self._running.kill()
        if self._wire is not None:
            self._wire.close()

    def pids(self) -> dict[str, int]:
        """Process ids of the living children by name."""
        return {} if self._running is None else self._running.supervisor.pids()

    # -- helpers, in the order used -------------------------------------------------------------

    def _hello(self) -> HostHello:
        kv_bytes = self._as.settings.get("kv_bytes")
        return HostHello(
            __version__,
            self._as.name,
            self._as.workers,
            self._clock_ns,
            kv_bytes if isinstance(kv_bytes, int) else None,
            None if self._welcome is None else self._welcome.numbers,
        )

    async def _take(self, welcome: Welcome) -> None:
        """Start what belongs here, or let it serve on where nothing has changed."""
        before, self._welcome = self._welcome, welcome
        if before is not None and self._running is not None:
            if (before.numbers, before.pool) == (welcome.numbers, welcome.pool):
                self._tell(News("connected to the controller again"))
                return
            self._tell(News("the pool restarted; the processes of this node restart"))
            await self._running.end()
        self._running = _RunningHost(self._supervisor_of(welcome), self._tell)
        self._running.begin()

    def _supervisor_of(self, welcome: Welcome) -> Callable[[ChildCare], HostSupervisor]:
        """What makes the host's supervisor, given who cares for its children. Raises UserError for
        settings that do not fit this machine."""
        own = {**self._as.settings, "workers": self._as.workers, "hosts": 1}
        config: PoolConfig = msgspec.structs.replace(welcome.pool, **own)
        check_vllm(config, ())
        sizes = {str(number): size for number, size in enumerate(welcome.model_bytes)}
        seat = joined_seat(
            config,
            self._as.name,
            self._as.address,
            reads_files=self._as.reads_files,
            rack=self._as.rack,
            interface_bytes_per_s=own_rate(config, self._as.address, self._tell),
        )
        seat = with_host_memory(PoolLayout((seat,)), config, sizes).hosts[0]
        access = self._access
        boots = MemberBoots(
            config, access.secret, access.head, self._directory.path, latency(config)
        )
        forks = fork_server(config, seat.prefix)
        return lambda care: HostSupervisor(config, seat, welcome.numbers, boots, forks, care)

    async def _stay(self, wire: Wire[ToHost], welcome: Welcome) -> bool:
        """Until the wire ends; True if this host is to end. Raises UserError where its processes
        cannot run any more."""
        await self._take(welcome)
        assert self._running is not None
        self._wire = wire
        if self._is_leaving.is_set():
            wire.send(self._farewell())
        try:
            has_left = self._has_left(welcome.pool.drain_timeout_s)
            return await self._talk.hold(wire, has_left, self._running.failure)
        finally:
            self._wire = None
            wire.close()

    def _farewell(self) -> Farewell:
        assert self._running is not None
        return Farewell(self._running.begin_no_more())

    async def _has_left(self, timeout_s: float) -> None:
        """The pool had its time for an answer."""
        await self._is_leaving.wait()
        await asyncio.sleep(timeout_s)

    def __repr__(self) -> str:
        return f"<JoinedHost {self._as.name} at {self._access.head}>"


class _RunningHost:
    """The processes of the host with their supervisor; `failure` is set when they cannot run."""

    def __init__(
        self,
        make: Callable[[ChildCare], HostSupervisor],
        tell: Callable[[News | PoolProgress], None],
    ) -> None:
        self._tell = tell
        self._was_ready = False
        self._began_s = time.monotonic()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.supervisor = make(
            ChildCare(self._heed, self._peers, lambda: self._was_ready, tell, self._fail)
        )

    def begin(self) -> None:
        """Start the processes without a wait: at first that takes minutes, in which this
        host may be told to leave."""
        self._starting = asyncio.create_task(self.supervisor.start())
        self._starting.add_done_callback(self._has_started)

    def begin_no_more(self) -> int:
        """What has not begun by now never does. Returns how many have."""
        self._starting.cancel()
        return sum(child.process is not None for child in self.supervisor.children)

    async def end(self) -> None:
        self._starting.cancel()
        await asyncio.wait({self._starting})
        await self.supervisor.end()
        await self.supervisor.end_forks()
        self.failure.cancel()

    def kill(self) -> None:
        self._starting.cancel()
        self.supervisor.kill()

    def _has_started(self, starting: asyncio.Task[None]) -> None:
        error = None if starting.cancelled() else starting.exception()
        if error is not None and not self.failure.done():
            self.failure.set_exception(error)

    def _heed(self, child: Child, status: Status) -> None:
        for news in status.news:
            self._tell(news)
        if not status.is_ready:
            return
        children = self.supervisor.children
        ready = sum(child.is_ready.is_set() for child in children)
        self._tell(PoolProgress(ready, len(children), ()))
        if ready == len(children):
            again = " again" if self._was_ready else ""
            took_s = time.monotonic() - (child.started_s if self._was_ready else self._began_s)
            self._was_ready = True
            self._tell(News(f"{len(children)} processes are ready{again} after {took_s:.1f} s"))

    def _peers(self, child: Child) -> list[Restarts]:
        able = [
            c for c in self.supervisor.children if child.kind == "agent" or c.kind == child.kind
        ]
        return [other.restarts for other in able]

    def _fail(self, reason: str) -> None:
        self.supervisor.let_go()
        if not self.failure.done():
            self.failure.set_exception(UserError(reason))
