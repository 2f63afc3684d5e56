"""Virtual time: one heap of actions. Nothing here knows what the actions do."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]

#: a Run is over before what arrives at the same instant
COMMIT_PRIORITY = -1
#: the controller steps after everything else of the same instant was delivered
STEP_PRIORITY = 1


class Clock:
    """Runs actions in order of (time, priority, order of scheduling)."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.actions_run = 0
        self._heap: list[tuple[int, int, int, Action]] = []
        self._sequence = 0
        self._cancelled: set[int] = set()

    def at(self, time_ns: int, action: Action, priority: int = 0) -> int:
        """Run the action at that time, which must not lie in the past. Returns a ticket with
        which it can be cancelled."""
        assert time_ns >= self.now_ns, f"{time_ns} lies before {self!r}"
        self._sequence += 1
        heapq.heappush(self._heap, (time_ns, priority, self._sequence, action))
        return self._sequence

    def cancel(self, ticket: int) -> None:
        """The action, which has not run, never will. Time does not move to it."""
        self._cancelled.add(ticket)

    def after(self, delay_ns: int, action: Action) -> None:
        """Run the action `delay_ns` from now."""
        self.at(self.now_ns + delay_ns, action)

    def run_next(self) -> bool:
        """Move to the next action's time and run it. False when nothing is left."""
        if self.is_empty():
            return False
        self.now_ns, _, _, action = heapq.heappop(self._heap)
        self.actions_run += 1
        action()
        return True

    def is_empty(self) -> bool:
        """Nothing is left to run."""
        while self._heap and self._heap[0][2] in self._cancelled:
            self._cancelled.discard(heapq.heappop(self._heap)[2])
        return not self._heap

    def __repr__(self) -> str:
        return f"<Clock {self.now_ns} ns, {len(self._heap)} actions ahead>"
