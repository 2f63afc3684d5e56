"""The autoscaler: from suggestions to a wanted number of instances, with hysteresis in time.

Growing is immediate and may add several instances; shrinking for a low load waits for a sub-second
timeout and sheds one instance at a time (BlitzScale §5.3; step sizes from the authors' planner).
Limits hold at once, in both directions.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from livescale.control.policy.load_snapshot import Suggestion

SPREAD = "spare_workers"
"""The reason of growth without a load, and without workers of other models."""


class TokenWindow:
    """Prompt tokens that arrived within the last `window_ns`."""

    def __init__(self, window_ns: int) -> None:
        self.window_ns = window_ns
        self.tokens = 0
        self._arrivals: deque[tuple[int, int]] = deque()

    def add(self, now_ns: int, tokens: int) -> None:
        self._arrivals.append((now_ns, tokens))
        self.tokens += tokens

    @property
    def oldest_leaves_ns(self) -> int | None:
        """When it has fewer tokens (None: it has none)."""
        return self._arrivals[0][0] + self.window_ns if self._arrivals else None

    def forget_old(self, now_ns: int) -> None:
        while self._arrivals and self._arrivals[0][0] <= now_ns - self.window_ns:
            self.tokens -= self._arrivals.popleft()[1]


@dataclass(slots=True)
class Autoscaler:
    """Hysteresis of one model."""

    scale_down_timeout_ns: int
    #: how long a model must have been without requests before its last instance goes
    idle_ns: int
    #: since when the load has been below every lower bound (None: it is not)
    below_since_ns: int | None = None

    def wanted(
        self,
        now_ns: int,
        instances: int,
        suggestion: Suggestion,
        limits: tuple[int, int],
        idle_since_ns: int | None,
    ) -> tuple[int, str]:
        """Instances wanted now and why; equal to `instances` when nothing should change.

        `limits` are the least and the largest number now; `idle_since_ns` is when the model's last
        request ended (None: it has some).
        """
        least, most = limits
        if instances < least:
            return least, "below_min"
        if instances > most:
            return most, "above_max"
        if suggestion.at_least > instances and instances < most:
            self.below_since_ns = None
            return min(suggestion.grow_to, most), suggestion.reason
        if suggestion.spread > instances and instances < most:
            self.below_since_ns = None
            return min(suggestion.spread, most), SPREAD
        kept = (suggestion.at_most, suggestion.floor, suggestion.spread, least)
        if max(kept) >= instances:
            self.below_since_ns = None
            return instances, "within_bounds"
        if self.below_since_ns is None:
            self.below_since_ns = now_ns
        if instances == 1:
            return self._wanted_of_last(now_ns, idle_since_ns)
        if now_ns < self.below_since_ns + self.scale_down_timeout_ns:
            return instances, "below_lower_bound"
        self.below_since_ns = now_ns
        return instances - 1, suggestion.low_reason

    def _wanted_of_last(self, now_ns: int, idle_since_ns: int | None) -> tuple[int, str]:
        if idle_since_ns is None or now_ns < idle_since_ns + self.idle_ns:
            return 1, "kept_warm"
        return 0, "unused"

    def deadlines_ns(self, idle_since_ns: int | None) -> list[int]:
        """When a pending scale-down is due."""
        if self.below_since_ns is None:
            return []
        due = [self.below_since_ns + self.scale_down_timeout_ns]
        return due if idle_since_ns is None else [*due, idle_since_ns + self.idle_ns]
