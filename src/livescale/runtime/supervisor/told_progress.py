"""What a supervisor tells people of its pool: which processes are ready, and how far loads are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from livescale.runtime.children.pool_process import Child
from livescale.runtime.wire.boot import Status
from livescale.runtime.wire.news import LoadProgress, News, PoolProgress


class ToldProgress:
    """`tell` is called with news, and must not block."""

    def __init__(self, tell: Callable[[News | PoolProgress], None]) -> None:
        self.tell = tell
        #: all gateways were ready at one time, and so all of the pool
        self.was_ready = False
        self._loads: tuple[LoadProgress, ...] = ()

    def heed(self, child: Child, status: Status, children: Sequence[Child]) -> None:
        """Tell what is new with the `child`, one of the pool's `children`."""
        for news in status.news:
            self.tell(news)
        if status.is_ready:
            gateways = [other for other in children if other.kind == "gateway"]
            self.was_ready = self.was_ready or all(one.is_ready.is_set() for one in gateways)
            again = " again" if child.life else ""
            took_s = time.monotonic() - child.started_s
            self.tell(News(f"{child.name} is ready{again} after {took_s:.1f} s"))
        if status.loads is not None or (status.is_ready and child.kind == "controller"):
            self._loads = status.loads or ()
        if status.is_ready or status.loads is not None:
            ready = sum(child.is_ready.is_set() for child in children)
            self.tell(PoolProgress(ready, len(children), self._loads))

    def __repr__(self) -> str:
        return f"<ToldProgress of {len(self._loads)} loads, was_ready={self.was_ready}>"
