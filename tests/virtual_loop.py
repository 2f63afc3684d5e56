"""An event loop whose time a test drives: it goes on when nothing is left to do, to the next timer.

A timer of a minute takes no time. Nothing that runs in the loop may wait for anything else: for a
socket, a thread or a process it would wait for ever, which is an error here.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.at_s = 1000.0
        #: how often all that was ready got to run
        self.turns = 0
        super().__init__(_Timers(self))

    def time(self) -> float:
        return self.at_s


class _Timers(selectors.SelectSelector):
    """Where a loop waits for what comes next, no longer than until its next timer."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing that the loop knows of would go on"
        self._loop.turns += 1
        self._loop.at_s += max(0.0, timeout)
        return super().select(0)


def run(story: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(story)


async def passes(seconds: float) -> None:
    """So much time has passed, and all that was due by then is done."""
    loop = asyncio.get_running_loop()
    is_over = loop.create_future()
    loop.call_later(seconds, is_over.set_result, None)
    await is_over


async def settled() -> None:
    """All is done that needs no more time."""
    await passes(1e-6)
