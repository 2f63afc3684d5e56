"""This process as a guest of a pool: it gets one model as all members do, gives its layers to who
computes here, and passes them on to others, for as long as it stays.

Three threads: the event loop with the wire to the head, the member's, and that of the member's
sockets. The data plane has its own. What a guest may have is decided in
`control/planning/guests.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from livescale import __version__
from livescale.common.errors import UserError
from livescale.config.pool import PoolConfig
from livescale.member.effects import DropFetch, Fetch
from livescale.member.guest_load import GuestLoad
from livescale.member.member import ADDRESS_SPACES, Member
from livescale.messages.events import AnyEvent
from livescale.runtime.join.head_talk import HeadAccess, HeadTalk
from livescale.runtime.layout.pool_layout import joined_seat
from livescale.runtime.member_process.member_process import (
    MemberSocket,
    close_loop,
    open_data_plane,
)
from livescale.runtime.member_process.member_thread import MemberThread
from livescale.runtime.supervisor.child_boots import other_heads
from livescale.runtime.supervisor.pool_claims import own_rate
from livescale.runtime.supervisor.pool_directory import PoolDirectory
from livescale.runtime.wire.boot import AgentBoot
from livescale.runtime.wire.joining import Farewell, HostHello, Welcome
from livescale.runtime.wire.news import News, PoolProgress
from livescale.runtime.wire.protocol import Address, Examined, ToHost
from livescale.runtime.wire.wire_channel import Wire
from livescale.transfer.memory.arena import Arena
from livescale.transfer.plane.data_plane import DataPlane
from livescale.values.types import Manifest, Value, agent_ref

if TYPE_CHECKING:
    from livescale.common.credentials import Credentials

_log = logging.getLogger(__name__)


class GuestError(UserError):
    """The model did not come; the message says why."""


class GuestAs(Value, frozen=True):
    """What the process wants, and what it is called and reached by in the pool. `settings` of its
    own replace the pool's here. With `reads_files` the models' directories are where the head has
    them. So long may the head be out of reach, and may no layer come: `patience_s`."""

    model: str
    name: str
    address: str
    settings: dict[str, str | int | None] = msgspec.field(default_factory=dict)
    patience_s: float = 300.0
    reads_files: bool = False
    rack: str = ""


class ArrivedLayer(NamedTuple):
    """A layer of the model, whose bytes lie from `offset_bytes` of the memory on."""

    manifest: Manifest
    offset_bytes: int
    number: int


class Guest:
    """`begin`, then take `layers`; the guest stays until `end`, or until the process ends."""

    def __init__(
        self, head: Address, secret: str, guest_as: GuestAs, tls: Credentials | None = None
    ) -> None:
        self._head = head
        self._secret = secret
        self._as = guest_as
        self._clock_ns = time.time_ns()
        self._load = _SharedLoad(guest_as.model)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="guest", daemon=True)
        self._talk = HeadTalk(HeadAccess(head, secret, tls, _tell, guest_as.patience_s), Welcome)
        self._is_leaving = asyncio.Event()
        #: how long readers have when it leaves
        self._leave_s = 0.0
        self._welcome: Welcome | None = None
        self._member: _RunningMember | None = None
        self._wire: Wire[ToHost] | None = None

    def begin(self) -> None:
        """Join the pool, which orders the load. Returns at once."""
        self._thread.start()

    def layers(self) -> Iterator[ArrivedLayer]:
        """Every layer in order, when it is there and verified. Its bytes stay until the next one
        is asked for. Blocks; raises GuestError."""
        return self._load.layers(self._as.patience_s)

    @property
    def memory(self) -> Arena:
        """Where layers arrive."""
        assert self._member is not None, f"{self!r} has not joined"
        return self._member.memory

    def end(self, patience_s: float = 0.0) -> None:
        """Leave: those who read from here have so long to get the rest."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._leave, patience_s)
        self._thread.join()

    # -- the guest's own thread -----------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._stay_joined())
            self._load.end("the pool has ended, or lets this guest go")
        except UserError as error:
            self._load.end(str(error))
        except Exception as error:
            # A bug must not leave who waits for layers alone.
            _log.exception("%r", self)
            self._load.end(repr(error))
        finally:
            close_loop(self._loop)

    async def _stay_joined(self) -> None:
        try:
            await self._talk.run(self._hello, self._stay, self._is_leaving.is_set)
        finally:
            if self._member is not None:
                await asyncio.to_thread(self._member.end)

    def _hello(self) -> HostHello:
        numbers = None if self._welcome is None else self._welcome.numbers
        wants = self._as.model
        return HostHello(
            __version__, self._as.name, 0, self._clock_ns, numbers=numbers, wants=wants
        )

    async def _stay(self, wire: Wire[ToHost], welcome: Welcome) -> bool:
        """Until the wire ends; True if this guest is to end."""
        before, self._welcome = self._welcome, welcome
        if before is None:
            self._member = await asyncio.to_thread(self._open, welcome)
            self._load.joined()
        elif (before.numbers, before.pool) != (welcome.numbers, welcome.pool):
            self._load.end("the pool was started anew")
            return True
        self._wire = wire
        if self._is_leaving.is_set():
            wire.send(Farewell(1))
        try:
            return await self._talk.hold(wire, self._has_left())
        finally:
            self._wire = None
            wire.close()

    def _open(self, welcome: Welcome) -> _RunningMember:
        """Raises UserError for settings that do not fit this machine."""
        config: PoolConfig = msgspec.structs.replace(
            welcome.pool, **{**self._as.settings, "workers": 0, "hosts": 1}
        )
        own = self._as
        seat = joined_seat(
            config,
            own.name,
            own.address,
            reads_files=own.reads_files,
            rack=own.rack,
            interface_bytes_per_s=own_rate(config, own.address, _tell),
        )
        (size_bytes,) = welcome.model_bytes
        place = msgspec.structs.replace(
            seat.host, memory_bytes=size_bytes, has_device_links=False, wants=own.model
        )
        directory = PoolDirectory()
        boot = AgentBoot(
            secret=self._secret,
            member=agent_ref(welcome.numbers.agent, welcome.numbers.first_life),
            pool=config,
            controller=self._head,
            other_controllers=other_heads(config, self._head),
            data_host=own.address,
            shm_directory=str(directory.path),
            storage_bytes_per_s=place.storage_bytes_per_s,
            place=place,
            touched_bytes=size_bytes,
        )
        try:
            return _RunningMember(boot, directory, self._load)
        except ValueError as error:
            directory.remove()
            raise GuestError(str(error)) from error

    def _leave(self, patience_s: float) -> None:
        self._leave_s = patience_s
        self._is_leaving.set()
        if self._wire is not None:
            self._wire.send(Farewell(1))

    async def _has_left(self) -> None:
        """The pool had its time for an answer."""
        await self._is_leaving.wait()
        await asyncio.sleep(self._leave_s)

    def __repr__(self) -> str:
        return f"<Guest {self._as.name}: {self._load!r}>"


class _SharedLoad:
    """The load as two threads see it: the member's, and that of who takes the layers."""

    def __init__(self, model: str) -> None:
        #: while a layer is read its bytes stay
        self.reading = threading.Lock()
        self._changed = threading.Condition()
        self._load = GuestLoad(model)
        self._has_joined = False
        self._manifest: Manifest | None = None
        self._offset_bytes = 0

    def joined(self) -> None:
        """The pool is asked from now on."""
        with self._changed:
            self._has_joined = True
            self._changed.notify_all()

    def begin(self, manifest: Manifest, offset_bytes: int) -> None:
        with self._changed:
            self._manifest, self._offset_bytes = manifest, offset_bytes
            checksums = "".join(entry.checksum for entry in manifest.layers)
            self._load.begin(len(manifest.layers), f"{manifest.id}-{checksums}")
            self._changed.notify_all()

    def absorb(self, event: AnyEvent) -> None:
        with self._changed:
            self._load.absorb(event)
            self._changed.notify_all()

    def end(self, reason: str) -> None:
        with self._changed:
            self._load.end(reason)
            self._changed.notify_all()

    def layers(self, patience_s: float) -> Iterator[ArrivedLayer]:
        with self._changed:
            # To join takes no longer than its own patience.
            self._changed.wait_for(lambda: self._has_joined or self._load.problem)
            self._load.rewind()
        while True:
            with self._changed:
                if self._load.is_over:
                    return
                self._wait(lambda: self._load.next_layer is not None, patience_s)
            with self.reading:
                with self._changed:
                    layer, manifest = self._load.next_layer, self._manifest
                    if layer is None or manifest is None:
                        continue  # the load failed meanwhile
                    self._load.take()
                    arrived = ArrivedLayer(manifest, self._offset_bytes, layer)
                yield arrived

    def _wait(self, is_there: Callable[[], bool], patience_s: float) -> None:
        """Raises GuestError."""
        came = self._changed.wait_for(lambda: is_there() or self._load.problem, patience_s)
        if not is_there():
            assert not came or self._load.problem is not None
            raise GuestError(self._load.problem or self._load.late(patience_s))

    def __repr__(self) -> str:
        return repr(self._load)


class _GuestThread(MemberThread):
    """What comes is told here, too, and bytes that are read here stay until they were."""

    def __init__(
        self,
        boot: AgentBoot,
        member: Member,
        memory: Arena,
        data_plane: DataPlane,
        tell_pool: Callable[[AnyEvent | Examined], None],
        load: _SharedLoad,
    ) -> None:
        def report(event: AnyEvent | Examined) -> None:
            if not isinstance(event, Examined):
                load.absorb(event)
            tell_pool(event)

        super().__init__(boot, member, memory, data_plane, report)
        self._load = load

    def _fetch(self, effect: Fetch) -> None:
        manifest, _ = self._materials[effect.plan]
        self._load.begin(manifest, effect.offset_bytes)
        super()._fetch(effect)

    def _drop(self, effect: DropFetch) -> None:
        with self._load.reading:
            super()._drop(effect)


class _RunningMember:
    """Memory, data plane and threads of the member, until `end`."""

    def __init__(self, boot: AgentBoot, directory: PoolDirectory, load: _SharedLoad) -> None:
        """Raises ValueError where there is too little memory."""
        self._directory = directory
        size_bytes = boot.place.memory_bytes
        # A load that failed may leave reads behind: the next one comes to another place.
        spaces = 1 if boot.pool.carrier == "nixl" else ADDRESS_SPACES
        #: where layers arrive
        self.memory = Arena(spaces * size_bytes, boot.touched_bytes)
        self._data_plane = open_data_plane(boot, self.memory)
        self._socket = MemberSocket(boot, self._data_plane)
        member = Member(boot.member, size_bytes, address_bytes=self.memory.size_bytes)
        self._thread = _GuestThread(
            boot, member, self.memory, self._data_plane, self._socket.to_controller, load
        )
        self._load = load
        self._runner = threading.Thread(target=self._run, name="guest member", daemon=True)
        self._socket.begin(self._thread)
        self._runner.start()

    def _run(self) -> None:
        try:
            self._thread.run()
        finally:
            self._load.end("the pool gave this guest up")

    def end(self) -> None:
        """Nothing is received or passed on when this returns."""
        self._thread.stop()
        self._runner.join()
        self._socket.end()
        self._data_plane.close()
        self.memory.close()
        self._directory.remove()


def _tell(news: News | PoolProgress) -> None:
    if isinstance(news, News):
        (_log.warning if news.is_problem else _log.info)("%s", news.text)
