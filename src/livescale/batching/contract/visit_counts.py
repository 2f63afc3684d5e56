"""What came to an instance of a stage, and how long that took: sums that only grow.

The unit is a leader's Run, also where several are carried out as one: all stages then count alike,
and what a Run takes is what the device takes for it at this load. Merging makes that shorter as
more come, so a stage that has time left is judged too busy rather than too idle.

Figures of a window are differences of two reports. Squares are summed up exactly, and given in
nanoseconds times seconds: an integer of 64 bits is enough for years of them.
"""

from __future__ import annotations

from collections.abc import Callable

from livescale.batching.runs.run import BatchKey, Run, RunPart
from livescale.messages.events import StageCounts
from livescale.values.units import NS_PER_S

_GAP_MAX_NS = 10 * NS_PER_S
"""A longer pause is no gap between arrivals of one load."""


class VisitCounts:
    """Of one instance. The time is known when `look` is called: what came and ended since the last
    look did so now."""

    def __init__(self) -> None:
        self._came = self._done = self._merged = 0
        self._gaps_ns = self._gaps_squared = 0
        self._busy_ns = self._busy_squared = 0
        self._waited_ns = 0
        self._prompt_tokens = self._prompt_ns = 0
        self._last_ns: int | None = None
        #: visits that are not done, and when they came (None: since the last look)
        self._came_ns: dict[BatchKey, int | None] = {}
        self._ended: list[tuple[int, int]] = []

    def came(self, key: BatchKey) -> None:
        """A visit is in line."""
        self._came += 1
        self._came_ns[key] = None

    def done(self, run: Run, elapsed_ns: int) -> None:
        """The Run of a visit, or of several, is over, after so long on the device. Each of several
        has its part of that, by its positions."""
        parts = run.parts
        self._merged += len(parts) - 1
        left_tokens, left_ns = run.token_count, elapsed_ns
        for part in parts:
            own_ns = left_ns * part.token_count // left_tokens
            left_tokens, left_ns = left_tokens - part.token_count, left_ns - own_ns
            self._ran(part, own_ns)
            came_ns = self._came_ns.pop(part.key, None)
            if came_ns is not None:
                self._ended.append((came_ns, elapsed_ns))

    def _ran(self, part: RunPart, own_ns: int) -> None:
        self._done += 1
        self._busy_ns += own_ns
        self._busy_squared += own_ns * own_ns
        if part.prefill_tokens:
            self._prompt_tokens += part.prefill_tokens
            self._prompt_ns += own_ns

    def look(self, now_ns: int) -> None:
        """It is now."""
        for key, came_ns in self._came_ns.items():
            if came_ns is None:
                self._came_ns[key] = now_ns
                gap_ns = 0 if self._last_ns is None else now_ns - self._last_ns
                gap_ns = min(max(gap_ns, 0), _GAP_MAX_NS)
                self._gaps_ns += gap_ns
                self._gaps_squared += gap_ns * gap_ns
                self._last_ns = now_ns
        for came_ns, elapsed_ns in self._ended:
            self._waited_ns += max(now_ns - came_ns - elapsed_ns, 0)
        self._ended.clear()

    def keep(self, holds: Callable[[BatchKey], bool]) -> None:
        """Visits that are not there any more are forgotten."""
        self._came_ns = {key: at_ns for key, at_ns in self._came_ns.items() if holds(key)}

    def counts(self) -> StageCounts:
        """All until the last look."""
        return StageCounts(
            came=self._came,
            done=self._done,
            gaps_ns=self._gaps_ns,
            gaps_squared_ns_s=self._gaps_squared // NS_PER_S,
            busy_ns=self._busy_ns,
            busy_squared_ns_s=self._busy_squared // NS_PER_S,
            waited_ns=self._waited_ns,
            prompt_tokens=self._prompt_tokens,
            prompt_ns=self._prompt_ns,
            merged=self._merged,
        )
