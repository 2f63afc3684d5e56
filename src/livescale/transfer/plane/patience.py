"""What takes too long: feeds that bring nothing, wants and feeds whose other side does not come.

Only the waiting lives here; what is told to whom is in the reception and the store of copies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from livescale.transfer.plane.reception import Reception
from livescale.transfer.plane.store import Store
from livescale.values.types import WorkerRef

_TICKS_PER_WAIT = 8


class Patience:
    """One thread that looks at what waits, and sleeps while nothing does."""

    def __init__(
        self,
        receptions: Callable[[], list[Reception]],
        store: Store,
        is_introduced: Callable[[WorkerRef], bool],
        *,
        stall_ns: int,
        order_wait_ns: int,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._receptions = receptions
        self._store = store
        self._is_introduced = is_introduced
        self._stall_ns = stall_ns
        self._order_wait_ns = order_wait_ns
        self._now_ns = now_ns
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self, name: str) -> None:
        """With a thread of this name."""
        self._thread.name = name
        self._thread.start()

    def wake(self) -> None:
        """There may be something that waits."""
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        """The thread is gone. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def look(self) -> None:
        """What has waited for too long by now is reported."""
        now_ns = self._now_ns()
        self._store.expire(now_ns - self._order_wait_ns)
        for reception in self._receptions():
            reception.check_stalls(now_ns, self._stall_ns)
            for peer in reception.unconnected(now_ns - self._order_wait_ns):
                if not self._is_introduced(peer):
                    reception.unreachable(peer, f"{peer} was not introduced")

    def _run(self) -> None:
        tick_s = min(self._stall_ns, self._order_wait_ns) / 1e9 / _TICKS_PER_WAIT
        while True:
            with self._changed:
                if self._is_closed:
                    return
                is_needed = self._receptions() or self._store.has_early_wants
                self._changed.wait(tick_s if is_needed else None)
            self.look()
