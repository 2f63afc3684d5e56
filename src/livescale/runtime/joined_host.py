"""This machine as a host of a pool that runs elsewhere: it joins, and its supervisor keeps its
workers and its agent alive until the pool ends or the host leaves.

One wire to the controller says who is there; numbers and settings come back. The processes connect
to the controller themselves, and serve on while it is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from livescale import __version__
from livescale.common.addresses import address_text
from livescale.common.errors import UserError
from livescale.config.pool import PoolConfig
from livescale.member.fence import Fence
from livescale.messages.epochs import ControllerEpoch
from livescale.runtime.acting import met_on
from livescale.runtime.boot import Status
from livescale.runtime.catalog import latency, with_host_memory
from livescale.runtime.child_boots import MemberBoots, other_heads
from livescale.runtime.doors import CONTROLLER_DOOR, OutcastError, StrangerError
from livescale.runtime.heartbeat import Heartbeats
from livescale.runtime.host_supervisor import HostSupervisor, fork_server
from livescale.runtime.news import News, PoolProgress
from livescale.runtime.pool_directory import PoolDirectory
from livescale.runtime.pool_layout import PoolLayout, joined_seat
from livescale.runtime.pool_process import Child
from livescale.runtime.protocol import (
    Address,
    Farewell,
    HostHello,
    Refused,
    RevokedMembers,
    ToHost,
    Welcome,
)
from livescale.runtime.restarts import Restarts
from livescale.runtime.wire_channel import Wire, open_wire
from livescale.types import Value

if TYPE_CHECKING:
    from livescale.common.credentials import Credentials

_PAUSE_S_MIN, _PAUSE_S_MAX = 0.05, 1.0
_LOST_AFTER_MS = 5000
# A controller that answers says at once which it is.
_PRESENT_S = 10.0


class JoinError(UserError):
    """This machine is no host of the pool; the message says why."""

    exit_status = 2


class JoinedAs(Value, frozen=True):
    """What the machine brings: a name, the address that others reach it at, and `settings` of its
    own, which replace the pool's here. With `reads_files` the models' directories are where the
    head has them. `patience_s` is how long a head may be out of reach before
    the machine has joined. It hangs on the leaf switch `rack` (empty: on that of the head)."""

    name: str
    address: str
    workers: int
    settings: dict[str, str | int | None] = msgspec.field(default_factory=dict)
    patience_s: float = 60.0
    reads_files: bool = False
    rack: str = ""


class JoinedHost:
    """`run` until the pool ends, or `leave` or `kill` was called."""

    def __init__(
        self,
        head: Address,
        secret: str,
        joined_as: JoinedAs,
        tell: Callable[[News | PoolProgress], None],
        tls: Credentials | None = None,
    ) -> None:
        self._head = head
        self._secret = secret
        self._tls = tls
        self._as = joined_as
        self._tell = tell
        self._clock_ns = time.time_ns()
        self._directory = PoolDirectory()
        self._patience = _Patience(head, joined_as.patience_s, tell)
        self._welcome: Welcome | None = None
        self._running: _RunningHost | None = None
        self._wire: Wire[ToHost] | None = None
        self._heartbeats = Heartbeats(_LOST_AFTER_MS)
        self._is_leaving = asyncio.Event()
        self._fence = Fence()
        self._trials = -1

    async def run(self) -> None:
        """Raises JoinError where the head cannot be reached, refuses this host, or is none, and
        UserError where the host's processes cannot run."""
        beside = [asyncio.create_task(self._heartbeats.run())]
        if self._tls is not None:
            beside.append(asyncio.create_task(self._tls.run()))
        try:
            await self._talk()
        finally:
            for task in beside:
                task.cancel()
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

    async def _talk(self) -> None:
        """One wire after the other, until this host is to end."""
        patience = self._patience
        while not self._is_leaving.is_set():
            try:
                wire: Wire[ToHost] = await open_wire(
                    self._next_head(),
                    ToHost,
                    secret=self._secret,
                    door=CONTROLLER_DOOR,
                    tls=self._tls,
                )
                answer = await self._present(wire)
            except OutcastError as error:
                await patience.suffer(str(error), is_hopeless=True)
            except StrangerError as error:
                reason = f"{error} (another pool, or an old token file?)"
                await patience.suffer(reason, is_hopeless=self._welcome is None)
            except TimeoutError:
                reason = "no answer (does a firewall on the way drop what is sent?)"
                await patience.suffer(reason, is_endless=self._welcome is not None)
            except OSError as error:
                reason = str(error) or type(error).__name__
                await patience.suffer(reason, is_endless=self._welcome is not None)
            else:
                if isinstance(answer, Refused):
                    await patience.suffer(answer.reason, is_hopeless=not answer.may_pass)
                    continue
                await self._take(answer)
                if await self._stay(wire):
                    return
                self._tell(News(f"the controller is away ({wire.error})", is_problem=True))
                patience.begin()

    def _next_head(self) -> Address:
        """One head after the other: one of them acts."""
        others = () if self._welcome is None else other_heads(self._welcome.pool, self._head)
        self._trials += 1
        return (self._head, *others)[self._trials % (1 + len(others))]

    async def _present(self, wire: Wire[ToHost]) -> Welcome | Refused:
        """Say who this is; the answer. Raises OSError where none comes."""
        if await _in_time(met_on(wire, self._fence)) is None:
            wire.close()
            raise ConnectionError(wire.error or "the controller did not say which it is")
        kv_bytes = self._as.settings.get("kv_bytes")
        wire.send(
            HostHello(
                __version__,
                self._as.name,
                self._as.workers,
                self._clock_ns,
                kv_bytes if isinstance(kv_bytes, int) else None,
                None if self._welcome is None else self._welcome.numbers,
            )
        )
        answer = await wire.hello()
        if isinstance(answer, Welcome | Refused):
            return answer
        wire.close()
        raise ConnectionError(wire.error or "the controller gave no answer")

    async def _take(self, welcome: Welcome) -> None:
        """Start what belongs here, or let it serve on where nothing has changed."""
        before, self._welcome = self._welcome, welcome
        if before is not None and self._running is not None:
            if (before.numbers, before.pool) == (welcome.numbers, welcome.pool):
                self._tell(News("the controller is back"))
                return
            self._tell(News("the pool was started anew: this host's processes are, too"))
            await self._running.end()
        self._running = _RunningHost(self._supervisor_of(welcome), self._tell)
        await self._running.start()

    def _supervisor_of(self, welcome: Welcome) -> Callable[[dict[str, Any]], HostSupervisor]:
        """What makes the host's supervisor, given who cares for its children. Raises UserError for
        settings that do not fit this machine."""
        own = {**self._as.settings, "workers": self._as.workers, "hosts": 1}
        config: PoolConfig = msgspec.structs.replace(welcome.pool, **own)
        sizes = {str(number): size for number, size in enumerate(welcome.model_bytes)}
        seat = joined_seat(
            config,
            self._as.name,
            self._as.address,
            reads_files=self._as.reads_files,
            rack=self._as.rack,
        )
        seat = with_host_memory(PoolLayout((seat,)), config, sizes).hosts[0]
        boots = MemberBoots(config, self._secret, self._head, self._directory.path, latency(config))
        forks = fork_server(config, seat.prefix)
        return lambda cares: HostSupervisor(config, seat, welcome.numbers, boots, forks, **cares)

    async def _stay(self, wire: Wire[ToHost]) -> bool:
        """Until the wire ends; True if this host is to end. Raises UserError where its processes
        cannot run any more."""
        assert self._running is not None
        assert self._welcome is not None
        self._heartbeats.add(wire)
        self._wire = wire
        if self._is_leaving.is_set():
            wire.send(self._farewell())
        listening = asyncio.create_task(self._is_farewell(wire))
        leaving = asyncio.create_task(self._has_left(self._welcome.pool.drain_timeout_s))
        parts: set[asyncio.Future[Any]] = {listening, leaving, self._running.failure}
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            if self._running.failure.done():
                self._running.failure.result()
            return leaving.done() or listening.result()
        finally:
            self._wire = None
            for task in (listening, leaving):
                task.cancel()
            wire.close()

    def _farewell(self) -> Farewell:
        assert self._running is not None
        return Farewell(len(self._running.supervisor.children))

    async def _has_left(self, timeout_s: float) -> None:
        """The pool had its time for an answer."""
        await self._is_leaving.wait()
        await asyncio.sleep(timeout_s)

    async def _is_farewell(self, wire: Wire[ToHost]) -> bool:
        """Whether the controller lets this host go, or the wire ends without a word."""
        async for message in wire:
            if isinstance(message, Farewell):
                return True
            if isinstance(message, RevokedMembers) and self._tls is not None:
                self._tls.keep(message.listed)
        return False

    def __repr__(self) -> str:
        return f"<JoinedHost {self._as.name} at {address_text(self._head.host, self._head.port)}>"


async def _in_time(meeting: Awaitable[ControllerEpoch | None]) -> ControllerEpoch | None:
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(meeting, _PRESENT_S)
    return None


class _RunningHost:
    """The processes of the host with their supervisor; `failure` is set when they cannot run."""

    def __init__(
        self,
        make: Callable[[dict[str, Any]], HostSupervisor],
        tell: Callable[[News | PoolProgress], None],
    ) -> None:
        self._tell = tell
        self._was_ready = False
        self._began_s = time.monotonic()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.supervisor = make(
            {
                "heed": self._heed,
                "peers": self._peers,
                "was_ready": lambda: self._was_ready,
                "tell": tell,
                "failed": self._fail,
            }
        )

    async def start(self) -> None:
        await self.supervisor.start()

    async def end(self) -> None:
        await self.supervisor.end()
        await self.supervisor.end_forks()
        self.failure.cancel()

    def kill(self) -> None:
        self.supervisor.kill()

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


class _Patience:
    """How long a head may be out of reach: for ever once the host has joined."""

    def __init__(
        self, head: Address, patience_s: float, tell: Callable[[News | PoolProgress], None]
    ) -> None:
        self._head = address_text(head.host, head.port)
        self._patience_s = patience_s
        self._tell = tell
        self.begin()

    def begin(self) -> None:
        """The head was there until now."""
        self._since_s = time.monotonic()
        self._pause_s = _PAUSE_S_MIN
        self._told = ""

    async def suffer(
        self, reason: str, *, is_hopeless: bool = False, is_endless: bool = False
    ) -> None:
        """Wait before the next trial. Raises JoinError where none would help, or there were enough
        of them."""
        left_s = self._since_s + self._patience_s - time.monotonic()
        if is_hopeless or (left_s <= 0 and not is_endless):
            raise JoinError(f"{self._head}: {reason}")
        if reason != self._told:
            self._told = reason
            until = "" if is_endless else f" for {max(left_s, 0):.0f} s"
            self._tell(News(f"{self._head}: {reason}; trying again{until}", is_problem=True))
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _PAUSE_S_MAX)
