"""The wire to the head that acts, of what joins a pool from another machine: a host, or a gateway.

One wire after the other, for as long as the head is away; what joined works on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from livescale.common.errors import UserError
from livescale.config.pool import PoolConfig
from livescale.member.fence import Fence
from livescale.messages.epochs import ControllerEpoch
from livescale.runtime.supervisor.child_boots import other_heads
from livescale.runtime.wire.acting import met_on
from livescale.runtime.wire.doors import CONTROLLER_DOOR, OutcastError, StrangerError
from livescale.runtime.wire.heartbeat import Heartbeats
from livescale.runtime.wire.joining import (
    Farewell,
    GatewayJoins,
    GatewayWelcome,
    HostHello,
    RevokedMembers,
    Welcome,
)
from livescale.runtime.wire.news import News, PoolProgress, log_news
from livescale.runtime.wire.protocol import Address, Refused, ToHost
from livescale.runtime.wire.wire_channel import Wire, open_wire

if TYPE_CHECKING:
    from livescale.common.credentials import Credentials

_PAUSE_S_MIN, _PAUSE_S_MAX = 0.05, 1.0
# A controller that answers says at once which it is.
_PRESENT_S = 10.0
AnyWelcome = TypeVar("AnyWelcome", Welcome, GatewayWelcome)


class JoinError(UserError):
    """This machine cannot join the pool; the message says why."""

    exit_status = 2


@dataclass(frozen=True, slots=True)
class HeadAccess:
    """Where the head is, what opens its door (`tls`: own certificate, in a pool that has them), how
    long it may be out of reach before this side has joined, and who is told of that."""

    head: Address
    secret: str
    tls: Credentials | None = None
    tell: Callable[[News | PoolProgress], None] = log_news
    patience_s: float = 60.0


class HeadTalk(Generic[AnyWelcome]):
    """`run` until this side is to end."""

    def __init__(self, access: HeadAccess, kind: type[AnyWelcome]) -> None:
        """The head welcomes this side by a message of this `kind`."""
        self._access = access
        self._kind: type[AnyWelcome] = kind
        self._patience = _Patience(access)
        self._fence = Fence()
        self._trials = -1
        #: of the pool that was joined (None: none was yet)
        self._pool: PoolConfig | None = None

    async def run(
        self,
        hello: Callable[[], HostHello | GatewayJoins],
        stay: Callable[[Wire[ToHost], AnyWelcome], Awaitable[bool]],
        is_leaving: Callable[[], bool],
    ) -> None:
        """Present this side by `hello`; `stay` holds the wire of a head that has welcomed it, and
        says in the end whether all is over. Raises JoinError where the head cannot be reached,
        refuses this side, or is none."""
        tls = self._access.tls
        watching = None if tls is None else asyncio.create_task(tls.run())
        try:
            await self._talk(hello, stay, is_leaving)
        finally:
            if watching is not None:
                watching.cancel()

    async def hold(
        self,
        wire: Wire[ToHost],
        leaving: Coroutine[Any, Any, object],
        failure: asyncio.Future[None] | None = None,
    ) -> bool:
        """True when this side is to end: the controller has let it go, or `leaving` is over. False
        if the wire ended before. Raises what `failure` is set to. The wire stays open: as long as
        it is, this side is there."""
        listening = asyncio.create_task(self._has_farewell(wire))
        left = asyncio.create_task(leaving)
        parts: list[asyncio.Future[Any]] = [listening, left]
        if failure is not None:
            parts.append(failure)
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            if failure is not None and failure.done():
                failure.result()
            return left.done() or listening.result()
        finally:
            for task in (listening, left):
                task.cancel()

    # -- helpers, in the order used -------------------------------------------------------------

    async def _has_farewell(self, wire: Wire[ToHost]) -> bool:
        """Whether the controller lets this side go, or the wire ends without a word."""
        while (message := await wire.receive()) is not None:
            if isinstance(message, Farewell):
                return True
            if isinstance(message, RevokedMembers) and self._access.tls is not None:
                self._access.tls.keep(message.listed)
        return False

    async def _talk(
        self,
        hello: Callable[[], HostHello | GatewayJoins],
        stay: Callable[[Wire[ToHost], AnyWelcome], Awaitable[bool]],
        is_leaving: Callable[[], bool],
    ) -> None:
        patience = self._patience
        while not is_leaving():
            try:
                wire: Wire[ToHost] = await open_wire(
                    self._next_head(),
                    ToHost,
                    secret=self._access.secret,
                    door=CONTROLLER_DOOR,
                    tls=self._access.tls,
                )
                answer = await self._present(wire, hello())
            except OutcastError as error:
                await patience.suffer(str(error), is_hopeless=True)
            except StrangerError as error:
                reason = f"{error}. Check that the token file is of this pool and current"
                await patience.suffer(reason, is_hopeless=self._pool is None)
            except TimeoutError:
                reason = (
                    "no answer within the timeout. Check the firewall between this machine "
                    "and the head node"
                )
                await patience.suffer(reason, is_endless=self._pool is not None)
            except OSError as error:
                await patience.suffer(_reason(error), is_endless=self._pool is not None)
            else:
                if isinstance(answer, Refused):
                    wire.close()
                    await patience.suffer(answer.reason, is_hopeless=not answer.may_pass)
                    continue
                self._pool = answer.pool
                if await _while_beating(wire, answer.pool.lost_after_ms, stay(wire, answer)):
                    return
                self._access.tell(
                    News(
                        f"the controller is disconnected ({wire.error}); connecting again",
                        is_problem=True,
                    )
                )
                patience.begin()

    def _next_head(self) -> Address:
        """One head after the other: one of them acts."""
        others: tuple[Address, ...] = ()
        if self._pool is not None:
            others = other_heads(self._pool, self._access.head)
        self._trials += 1
        return (self._access.head, *others)[self._trials % (1 + len(others))]

    async def _present(
        self, wire: Wire[ToHost], hello: HostHello | GatewayJoins
    ) -> AnyWelcome | Refused:
        """Say who this is; the answer. Raises OSError where none comes."""
        if await _in_time(met_on(wire, self._fence)) is None:
            wire.close()
            raise ConnectionError(wire.error or "the controller sent no epoch")
        wire.send(hello)
        answer = await wire.hello()
        if isinstance(answer, Refused | self._kind):
            return answer
        wire.close()
        raise ConnectionError(wire.error or "the controller sent no answer")

    def __repr__(self) -> str:
        return f"<HeadTalk with {self._access.head}>"


def way_to(head: tuple[str, int]) -> str:
    """The own address on the way to the head. Raises JoinError."""
    try:
        family, _, _, _, where = socket.getaddrinfo(*head, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise JoinError(
            f"the head node {head[0]} is unreachable: {error.strerror}. Check the address "
            "and the network"
        ) from error


def _reason(error: OSError) -> str:
    """In words, without the address, which stands before them."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error) or type(error).__name__


async def _while_beating(wire: Wire[ToHost], lost_after_ms: int, stay: Awaitable[bool]) -> bool:
    """What `stay` says in the end. Meanwhile the wire shows that this side works, as often as the
    pool expects, and is broken off when the head is silent for as long as the pool allows."""
    heartbeats = Heartbeats(lost_after_ms)
    heartbeats.add(wire)
    beating = asyncio.create_task(heartbeats.run())
    try:
        return await stay
    finally:
        beating.cancel()


async def _in_time(meeting: Awaitable[ControllerEpoch | None]) -> ControllerEpoch | None:
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(meeting, _PRESENT_S)
    return None


class _Patience:
    """How long a head may be out of reach: for ever once this side has joined."""

    def __init__(self, access: HeadAccess) -> None:
        self._head = str(access.head)
        self._patience_s = access.patience_s
        self._tell = access.tell
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
            self._tell(News(f"{self._head}: {reason}; retrying{until}", is_problem=True))
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _PAUSE_S_MAX)
