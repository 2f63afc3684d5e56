"""The autoscaler: from suggestions to a wanted number of instances, with hysteresis in time.

Growing is immediate and may add several instances; shrinking waits for a sub-second timeout and
sheds one instance at a time (BlitzScale §5.3; step sizes from the authors' planner).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from livescale.control.config import Bounds
from livescale.control.policy import Suggestion


class TokenWindow:
    """Prompt tokens that arrived within the last `window_ns`."""

    def __init__(self, window_ns: int) -> None:
        self.window_ns = window_ns
        self.tokens = 0
        self._arrivals: deque[tuple[int, int]] = deque()

    def add(self, now_ns: int, tokens: int) -> None:
        self._arrivals.append((now_ns, tokens))
        self.tokens += tokens

    def forget_old(self, now_ns: int) -> None:
        while self._arrivals and self._arrivals[0][0] <= now_ns - self.window_ns:
            self.tokens -= self._arrivals.popleft()[1]


@dataclass(slots=True)
class Autoscaler:
    """Hysteresis of one model."""

    bounds: Bounds
    instances_min: int
    instances_max: int
    #: since when the load has been below every lower bound (None: it is not)
    below_since_ns: int | None = None

    def wanted(self, now_ns: int, instances: int, suggestion: Suggestion) -> tuple[int, str]:
        """Instances wanted now and why; equal to `instances` when nothing should change."""
        if instances < self.instances_min:
            return self.instances_min, "below_min"
        if instances > self.instances_max:
            return instances - 1, "above_max"
        if suggestion.at_least > instances:
            self.below_since_ns = None
            middle = (suggestion.at_least + suggestion.at_most + 1) // 2
            return min(max(middle, suggestion.at_least), self.instances_max), suggestion.reason
        if max(suggestion.at_most, self.instances_min) >= instances:
            self.below_since_ns = None
            return instances, "within_bounds"
        if self.below_since_ns is None:
            self.below_since_ns = now_ns
        if now_ns < self.below_since_ns + self.bounds.scale_down_timeout_ns:
            return instances, "below_lower_bound"
        self.below_since_ns = now_ns
        return instances - 1, "idle"

    def deadline_ns(self) -> int | None:
        """When a pending scale-down is due."""
        if self.below_since_ns is None:
            return None
        return self.below_since_ns + self.bounds.scale_down_timeout_ns
