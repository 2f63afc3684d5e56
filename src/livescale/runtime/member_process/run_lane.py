"""Runs that follow one another without a pause, carried out by a thread of their own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class RunLane(Generic[Result]):
    """Methods are called on one thread. The lane's own begins with the first Run."""

    def __init__(self) -> None:
        self._runs: queue.SimpleQueue[Callable[[], Result] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Result | BaseException] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._in_flight = 0

    @property
    def is_busy(self) -> bool:
        """There are Runs whose results were not taken."""
        return self._in_flight > 0

    def put(self, run: Callable[[], Result]) -> None:
        """Carry it out behind those that were put before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._carry_out, name="runs", daemon=True)
            self._thread.start()
        self._in_flight += 1
        self._runs.put(run)

    def take(self) -> Result:
        """Wait for the result of the earliest Run. Raises what that, or one before it, raised."""
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        self._in_flight -= 1
        return result

    def close(self) -> None:
        """Wait for the end of those in flight. Nothing may be put any more."""
        if self._thread is not None:
            self._runs.put(None)
            self._thread.join()

    def _carry_out(self) -> None:
        while (run := self._runs.get()) is not None:
            try:
                self._results.put(run())
            except BaseException as error:
                self._results.put(error)
                return
