"""The plainest latency model: a fixed cost, a cost per token and a cost per token attended to."""

from __future__ import annotations

from livescale.latency.work import RunWork
from livescale.types import Value


class LinearLatency(Value, frozen=True, tag="linear"):
    """A fixed cost per Run, a cost per token computed, and a cost per token a decode attends to."""

    base_ns: int
    per_token_ns: int
    per_context_token_ns: int = 0

    def run_ns(self, work: RunWork) -> int:
        """Time of one Run over all layers."""
        return (
            self.base_ns
            + self.per_token_ns * work.token_count
            + self.per_context_token_ns * work.decode_context_tokens
        )

    def decode_ns(self, decodes: int, context_tokens: int, steps: int) -> list[int]:
        """Times of `steps` Runs of the same decodes, whose context grows."""
        first = self.base_ns + self.per_token_ns * decodes
        first += self.per_context_token_ns * context_tokens
        more = self.per_context_token_ns * decodes
        return [first + more * step for step in range(steps)]
