"""How much was needed lately: what is given up only when it was not needed for a while."""

from __future__ import annotations

from collections import deque


class RecentNeed:
    """The most of a number that was needed within a time."""

    def __init__(self) -> None:
        self._needs: deque[tuple[int, int]] = deque()

    @property
    def is_empty(self) -> bool:
        """Nothing is known yet."""
        return not self._needs

    def after(self, now_ns: int, timeout_ns: int, count: int) -> int:
        """The most that was needed since `timeout_ns` ago; now it is `count`."""
        self._needs.append((now_ns, count))
        while self._needs[0][0] < now_ns - timeout_ns:
            self._needs.popleft()
        return max(need for _, need in self._needs)
