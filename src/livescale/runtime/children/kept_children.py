"""Children that are kept: started, watched, and started again when they end, until they are told to
end. Whose children they are, and which of them can stand in for one another, the owner decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from livescale.common.stopping import unless_stopped
from livescale.config.pool import PoolConfig
from livescale.runtime.children.pool_process import Child, watch_children
from livescale.runtime.children.restarts import Restarts, give_up_reason
from livescale.runtime.wire.boot import Status
from livescale.runtime.wire.news import News

_log = logging.getLogger(__name__)
# What a process has to end that began while the children were let go: it has served no request yet.
_LATE_END_S = 5.0


@dataclass(frozen=True, slots=True)
class ChildCare:
    """What their owner has to do with children. `heed` gets every word of a child; `peers` are all
    that can do the work of a child; `was_ready` says whether all of it was ready once; `failed` is
    called with the reason when a child is not started again."""

    heed: Callable[[Child, Status], None]
    peers: Callable[[Child], list[Restarts]]
    was_ready: Callable[[], bool]
    tell: Callable[[News], None]
    failed: Callable[[str], None]


class KeptChildren:
    """Those of one owner."""

    def __init__(self, config: PoolConfig, children: Sequence[Child], care: ChildCare) -> None:
        self.children = list(children)
        self._config = config
        self._care = care
        for child in self.children:
            child.heed = partial(care.heed, child)
        self._stopping = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._keeping: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all of them, in order."""
        watch = watch_children(self.children, self._config.lost_after_ms)
        self._watching = asyncio.create_task(watch)
        for child in self.children:
            await child.start(self._config)
            self._keeping.append(asyncio.create_task(self._keep(child)))

    def let_go(self) -> None:
        """From now on nothing is started again."""
        self._stopping.set()

    async def end(self, children: Sequence[Child], timeout_s: float) -> None:
        """These of them end within the timeout, or are killed. To be let go first."""
        for child in children:
            child.end()
        waits = [child.process.wait() for child in children if child.process is not None]
        try:
            await asyncio.wait_for(asyncio.gather(*waits), timeout_s)
        except TimeoutError:
            for child in children:
                if child.is_alive:
                    _log.warning("%s exceeded its time to end; the supervisor kills it", child.name)
                    child.signal(signal.SIGKILL)

    async def close(self) -> None:
        """Stop watching the children, which have ended."""
        self._stop_watching()
        await asyncio.gather(*self._keeping, return_exceptions=True)

    def kill(self) -> None:
        """End all of them at once."""
        self._stopping.set()
        self._stop_watching()
        for child in self.children:
            child.signal(signal.SIGKILL)

    def pids(self) -> dict[str, int]:
        """Process ids of the living children by name."""
        return {
            child.name: child.process.pid
            for child in self.children
            if child.process is not None and child.is_alive
        }

    # -- helpers --------------------------------------------------------------------------------

    def _stop_watching(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    async def _keep(self, child: Child) -> None:
        await child.watch()
        while not self._stopping.is_set():
            reason = give_up_reason(child.restarts, self._care.peers(child), self._care.was_ready())
            if reason is not None:
                self._care.failed(reason)
                return
            self._care.tell(_end_in_words(child))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), child.restarts.pause_s)
            if await self._start_again(child):
                await child.watch()

    async def _start_again(self, child: Child) -> bool:
        """False if there is no new process. Where the system gave none it is a failed start like
        any other: memory, descriptors or the interpreter may be back later."""
        if self._stopping.is_set():
            return False
        try:
            # A fork server may take minutes, and a stop does not wait for it.
            if not await unless_stopped(child.start(self._config), self._stopping):
                return False
        except OSError as error:
            child.restarts.could_not_begin(f"{type(error).__name__}: {error}")
            return False
        if self._stopping.is_set():
            # Who let the children go has looked for those that live already.
            await self.end([child], _LATE_END_S)
        return True

    def __repr__(self) -> str:
        return f"<KeptChildren {', '.join(child.name for child in self.children)}>"


def _end_in_words(child: Child) -> News:
    restarts = child.restarts
    if restarts.exit_status is None:
        when = "could not be started"
    else:
        when = "died before it was ready" if restarts.failed_starts else "ended"
    return News(
        f"{child.name} {when} ({restarts.how_it_ended()});"
        f" it is started again in {restarts.pause_s:.3g} s",
        is_problem=True,
    )
