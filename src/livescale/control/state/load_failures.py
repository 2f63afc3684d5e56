"""Loads of one model that fail in a row: when the next one is tried, and from when on the model
counts as one that cannot be loaded.

A load that fails for good has no holder left to ask and cannot read the model's files either: a
sender that dies is replaced (`repairs.py`) and is no failure of the load. A worker that dies while
it loads may have died of the model: the next one is tried at once, a third one is not.
"""

from __future__ import annotations

from livescale.control.state.config import ControllerConfig
from livescale.values.types import IDS_PER_EPOCH, PlanId

#: workers that died one after the other while they loaded a model: that many it may cost at once
DEATHS_MAX = 2


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
        #: in a row, of workers, and of loads while there was a copy
        self._deaths = self._with_copy = 0

    def failed(
        self, now_ns: int, plan: PlanId, newest: PlanId, reason: str, *, has_copy: bool
    ) -> None:
        """A load of the plan failed, while there was a copy in memory or not; `newest` is the last
        plan that was made for any model.

        Loads that were under way together count as one: they failed for one reason. Of a load that
        another life of the controller ordered it is not known whether it was: a pause follows it,
        counted or not.
        """
        is_counted = self._counts(plan, newest, reason)
        if is_counted:
            self.in_a_row += 1
            self._with_copy += has_copy
        if is_counted or not self._is_own(plan):
            self._block(now_ns)

    def died(self, now_ns: int, plan: PlanId, newest: PlanId, reason: str) -> None:
        """A worker was lost while it loaded. One such death may be no fault of the model: the next
        worker is tried at once. After a second the model cannot be loaded."""
        if not self._counts(plan, newest, reason):
            if not self._is_own(plan):
                self._block(now_ns)
            return
        self._deaths += 1
        if self._deaths >= DEATHS_MAX:
            self.in_a_row = max(self.in_a_row + 1, self._config.load_failures_max)
            self._block(now_ns)

    def ended_well(self) -> None:
        """There is a load that did not fail, or a reason to try at once."""
        self.in_a_row = self._deaths = self._with_copy = 0
        self.blocked_until_ns = 0

    @property
    def problem(self) -> str | None:
        """Why the model cannot be loaded now (None: it can, as far as is known)."""
        return self._reason if self.in_a_row >= self._config.load_failures_max else None

    @property
    def is_of_copies(self) -> bool:
        """Copies in memory cannot be loaded either. The first load that failed beside one may have
        been reading the files; those after it do not."""
        return self._deaths >= DEATHS_MAX or self._with_copy > 1

    def _counts(self, plan: PlanId, newest: PlanId, reason: str) -> bool:
        self.total += 1
        self._reason = reason
        is_first = plan > self._newest
        if is_first:
            self._newest = newest
        return is_first

    def _is_own(self, plan: PlanId) -> bool:
        return plan // IDS_PER_EPOCH == self._config.epoch

    def _block(self, now_ns: int) -> None:
        pause_ns = self._config.load_retry_ns << min(max(self.in_a_row, 1) - 1, 32)
        self.blocked_until_ns = now_ns + min(pause_ns, self._config.load_retry_ns_max)

    def __repr__(self) -> str:
        return f"<LoadFailures {self.in_a_row} in a row, {self.total} in all: {self._reason}>"
