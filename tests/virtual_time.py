"""A clock that a test drives, for code whose threads wait on a condition.

`run` lets one thread at a time go on, until it waits; a random number generator chooses among
those that may. When all wait, the clock goes to the earliest time that one of them waits for. So
nothing sleeps, a wait of an hour takes none, and the same generator gives the same order again.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

# Far from zero, where a bucket begins: a line that was never used has been idle for long.
_START_NS = 1_000_000_000_000
_S_NS = 1_000_000_000


class VirtualTime:
    def __init__(self, rng: random.Random | None = None, late_ns_max: int = 0) -> None:
        """A wait that ends by time ends late, by `late_ns_max` at most, as on a busy machine."""
        self._rng = rng or random.Random(0)
        self._late_ns_max = late_ns_max
        self._at_ns = _START_NS
        self._threads: list[_Thread] = []
        self._running: _Thread | None = None
        self._has_paused = threading.Semaphore(0)

    def now_ns(self) -> int:
        return self._at_ns

    def run(self, *bodies: Callable[[], object]) -> None:
        """Each in a thread of its own, until all have ended. Raises what one of them raised, and
        AssertionError when all that are left wait for one another."""
        self._threads = [_Thread(body, self._has_paused) for body in bodies]
        while alive := [thread for thread in self._threads if not thread.is_over]:
            ready = [thread for thread in alive if thread.is_ready]
            if not ready:
                self._pass(alive)
                continue
            self._running = self._rng.choice(ready)
            self._running.go_on()
            self._has_paused.acquire()
            error, self._running = self._running.error, None
            if error is not None:
                raise error

    def wait(self, changed: VirtualCondition, timeout_s: float | None) -> None:
        """By the thread that runs, which holds the condition. Outside of `run` there is no other
        thread: the time passes."""
        until_ns = None
        if timeout_s is not None:
            late_ns = self._rng.randint(0, self._late_ns_max)
            until_ns = self._at_ns + round(timeout_s * _S_NS) + late_ns
        if self._running is None:
            assert until_ns is not None, "nothing would end this wait"
            self._at_ns = until_ns
            return
        changed.release()
        self._running.pause(changed, until_ns)
        changed.acquire()

    def notify(self, changed: VirtualCondition) -> None:
        for thread in self._threads:
            thread.is_ready = thread.is_ready or thread.waits_on is changed

    def _pass(self, alive: list[_Thread]) -> None:
        ends_ns = [thread.until_ns for thread in alive if thread.until_ns is not None]
        assert ends_ns, "all threads wait for one another"
        self._at_ns = max(self._at_ns, min(ends_ns))
        for thread in alive:
            if thread.until_ns is not None and thread.until_ns <= self._at_ns:
                thread.is_ready = True


class VirtualCondition(threading.Condition):
    """Waits and wakes in virtual time. All that wait are woken, as a condition allows."""

    def __init__(self, time: VirtualTime) -> None:
        super().__init__()
        self._time = time

    def wait(self, timeout: float | None = None) -> bool:
        self._time.wait(self, timeout)
        return True

    def notify(self, n: int = 1) -> None:
        self._time.notify(self)

    def notify_all(self) -> None:
        self._time.notify(self)


class _Thread:
    """Runs only between `go_on` and its next `pause`, or its end."""

    def __init__(self, body: Callable[[], object], has_paused: threading.Semaphore) -> None:
        self.is_ready = True
        self.is_over = False
        self.waits_on: VirtualCondition | None = None
        self.until_ns: int | None = None
        self.error: BaseException | None = None
        self._body = body
        self._has_paused = has_paused
        self._turn = threading.Semaphore(0)
        threading.Thread(target=self._run, daemon=True).start()

    def go_on(self) -> None:
        self.is_ready, self.waits_on, self.until_ns = False, None, None
        self._turn.release()

    def pause(self, changed: VirtualCondition, until_ns: int | None) -> None:
        self.waits_on, self.until_ns = changed, until_ns
        self._has_paused.release()
        self._turn.acquire()

    def _run(self) -> None:
        self._turn.acquire()
        try:
            self._body()
        except BaseException as error:
            self.error = error
        finally:
            self.is_over = True
            self._has_paused.release()
