"""Which news of an instance's load is worth a message. Values only; nothing is sent here."""

from __future__ import annotations

import msgspec

from livescale.messages.events import InstanceReported

REPORT_GAP_NS = 500_000_000
"""Mere progress is reported this often: twice a second is as good as every token."""


class ReportPace:
    """Everything is reported at once, but mere progress (tokens, and the KV that they take) only
    every `gap_ns`: the controller would learn nothing from it that a moment later would not do."""

    def __init__(self, gap_ns: int) -> None:
        self._gap_ns = gap_ns
        self._last: InstanceReported | None = None
        self._last_ns = 0
        #: the load is another one than was reported last
        self.is_behind = False

    @property
    def has_reported(self) -> bool:
        """The reader knows of a load."""
        return self._last is not None

    @property
    def progress_due_ns(self) -> int:
        """From then on progress is worth a report."""
        return self._last_ns + self._gap_ns

    def is_due(self, now_ns: int, report: InstanceReported) -> bool:
        """Whether to send this report now; if so, it is the last one that was sent."""
        last = self._last
        if report == last or (
            last is not None and now_ns < self.progress_due_ns and _is_progress(last, report)
        ):
            self.is_behind = report != last
            return False
        self._last, self._last_ns, self.is_behind = report, now_ns, False
        return True

    def forget(self) -> None:
        """The reader of the reports may be new: the next one is due whatever it says."""
        self._last, self.is_behind = None, False


def _is_progress(last: InstanceReported, report: InstanceReported) -> bool:
    """Only more tokens and their blocks; in a stage, more visits and their rows.

    The first token is more than progress, but in a stage, where that is told as started or is
    another instance's.
    """
    is_stage = last.stage is not None
    if report.started or report.admitted or not (last.emitted_tokens or is_stage):
        return False
    return report == msgspec.structs.replace(
        last,
        started=(),
        admitted=(),
        emitted_tokens=report.emitted_tokens,
        kv_blocks_used=report.kv_blocks_used,
        kv_blocks_kept=report.kv_blocks_kept,
        prefill_tokens=report.prefill_tokens,
        prefill_ns=report.prefill_ns,
        handover_bytes=report.handover_bytes if is_stage else last.handover_bytes,
        stage=report.stage,
    )
