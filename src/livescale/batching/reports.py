"""Which news of an instance's load is worth a message. Values only; nobody sends anything here."""

from __future__ import annotations

import msgspec

from livescale.batching.batcher import Batcher
from livescale.messages.events import InstanceReported
from livescale.types import InstanceId

REPORT_GAP_NS = 500_000_000
"""Mere progress is told this often: twice a second is as good as every token."""


def load_report(
    instance: InstanceId,
    batcher: Batcher,
    *,
    handovers: int = 0,
    handover_bytes: int = 0,
) -> InstanceReported:
    """The instance's load now. What was started since the last such report is in this one.

    `handovers` live batches were taken over so far, with `handover_bytes` of rows and KV.
    """
    return InstanceReported(
        instance=instance,
        started=batcher.lines.take_started(),
        running=batcher.running,
        queued_prefill_tokens=batcher.queued_prefill_tokens,
        kv_blocks_used=batcher.pool.used,
        kv_blocks=batcher.pool.blocks,
        emitted_tokens=batcher.emitted_tokens,
        left_out=batcher.left_out,
        kv_blocks_kept=batcher.room.growth_blocks,
        preemptions=batcher.room.preemptions,
        prefix_lookup_tokens=batcher.room.prefix_lookup_tokens,
        reused_tokens=batcher.room.reused_tokens,
        handovers=handovers,
        handover_bytes=handover_bytes,
    )


class ReportPace:
    """Says everything at once, but mere progress (tokens, and the KV that they take) only every
    `gap_ns`: the controller would learn nothing from it that a moment later would not do."""

    def __init__(self, gap_ns: int) -> None:
        self._gap_ns = gap_ns
        self._last: InstanceReported | None = None
        self._last_ns = 0
        #: the load is another one than was reported last
        self.is_behind = False

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
        """Whoever reads the reports may be new: the next one is due whatever it says."""
        self._last = None


def _is_progress(last: InstanceReported, report: InstanceReported) -> bool:
    """Only more tokens and their blocks. The first token is more than progress."""
    return last.emitted_tokens > 0 and report == msgspec.structs.replace(
        last,
        emitted_tokens=report.emitted_tokens,
        kv_blocks_used=report.kv_blocks_used,
        kv_blocks_kept=report.kv_blocks_kept,
    )
