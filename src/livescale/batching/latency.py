"""Latency models: how long a Run takes. Integers in, nanoseconds out; nothing waits here.

The simulator and the timed executor share them.
"""

from __future__ import annotations

from livescale.batching.run import Run
from livescale.types import Value


class LinearLatency(Value, frozen=True):
    """A fixed cost per Run, a cost per token computed, and a cost per token a decode attends to."""

    base_ns: int
    per_token_ns: int
    per_context_token_ns: int = 0

    def run_ns(self, run: Run) -> int:
        """Time of one Run."""
        context_tokens = sum(
            segment.context_tokens
            for segment in run.segments
            if segment.samples and segment.token_count == 1
        )
        return (
            self.base_ns
            + self.per_token_ns * run.token_count
            + self.per_context_token_ns * context_tokens
        )
