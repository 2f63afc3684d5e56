"""All latency models there are, as one type that can be written down and read again; and what a
worker adds to its accelerator's time, which is measured on a pool and part of no model.
"""

from __future__ import annotations

from livescale.latency.roofline import RooflineLatency
from livescale.latency.table import TableLatency
from livescale.latency.work import LinearLatency, RunWork
from livescale.values.types import Value


class OverheadLatency(Value, frozen=True, tag="overhead"):
    """Another model's time, and for every Run a fixed time and a time per token computed more."""

    bare: LinearLatency | RooflineLatency | TableLatency
    base_ns: int = 0
    per_token_ns: int = 0

    def run_ns(self, work: RunWork) -> int:
        return self.bare.run_ns(work) + self.base_ns + self.per_token_ns * work.token_count

    def decode_ns(self, decodes: int, context_tokens: int, steps: int) -> list[int]:
        more_ns = self.base_ns + self.per_token_ns * decodes
        return [ns + more_ns for ns in self.bare.decode_ns(decodes, context_tokens, steps)]


AnyLatency = LinearLatency | RooflineLatency | TableLatency | OverheadLatency
