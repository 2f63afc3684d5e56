"""Loads of one model that fail in a row: when the next one is tried, and from when on the model
counts as one that cannot be loaded.

A load that fails for good has no holder left to ask and cannot read the model's files either: a
sender that dies is replaced (`repairs.py`) and is no failure of the load.
"""

from __future__ import annotations

from livescale.control.config import ControllerConfig
from livescale.types import PlanId


class LoadFailures:
    """The failures since the last load that ended well. Each waits twice as long as the last."""

    def __init__(self, config: ControllerConfig) -> None:
        self._config = config
        #: in a row, and all
        self.in_a_row = 0
        self.total = 0
        #: no load is ordered before this time
        self.blocked_until_ns = 0
        self._reason = ""
        self._newest: PlanId = 0

    def failed(self, now_ns: int, plan: PlanId, newest: PlanId, reason: str) -> None:
        """A load of the plan failed; `newest` is the last plan that was made for any model.

        Loads that were under way together count as one: they failed for one reason.
        """
        self.total += 1
        self._reason = reason
        if plan <= self._newest:
            return
        self._newest = newest
        pause_ns = self._config.load_retry_ns << min(self.in_a_row, 32)
        self.blocked_until_ns = now_ns + min(pause_ns, self._config.load_retry_ns_max)
        self.in_a_row += 1

    def ended_well(self) -> None:
        """There is a load that did not fail, or a reason to try at once."""
        self.in_a_row = 0
        self.blocked_until_ns = 0

    @property
    def problem(self) -> str | None:
        """Why the model cannot be loaded now (None: it can, as far as is known)."""
        return self._reason if self.in_a_row >= self._config.load_failures_max else None

    def __repr__(self) -> str:
        return f"<LoadFailures {self.in_a_row} in a row, {self.total} in all: {self._reason}>"
