"""The model that a worker has been given, and what the controller is told of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from livescale.batching.live_batcher import LiveBatcher
from livescale.batching.reports import load_report
from livescale.batching.run import Run
from livescale.chunks import Feed
from livescale.messages.commands import StartLoad
from livescale.messages.events import FeedFailed, InstanceReport, InstanceReported
from livescale.runtime.arrival import ModelArrival
from livescale.types import InstanceId, Manifest


@dataclass(slots=True)
class GivenModel:
    """One load order, and the instance that comes of it.

    Layers arrive in any order; those of the watermark are materialized.
    """

    order: StartLoad
    manifest: Manifest
    arrival: ModelArrival
    live: LiveBatcher
    feeds: tuple[Feed, ...]
    #: what was said of feeds that have not been replaced: a new controller must hear it, too
    troubles: list[FeedFailed] = field(default_factory=list)
    arrived: dict[int, None] = field(default_factory=dict)
    watermark: int = 0
    is_loaded: bool = False
    #: the rate of prefills was asked for and is not told yet
    owes_capacity: bool = False
    #: layers of live batches that were run here
    live_layers: int = 0
    #: batches that were taken over from loading instances
    handovers: int = 0

    @property
    def instance(self) -> InstanceId:
        return self.order.instance

    @property
    def attempt(self) -> int:
        return self.order.attempt

    @property
    def takes_requests(self) -> bool:
        """Runs may be made: everything is there, or the instance is live."""
        return self.is_loaded or self.order.pairing is not None

    def ran_live(self, run: Run) -> None:
        """A Run of a live batch is over."""
        head = self.manifest.span.stop - 1
        self.live_layers += min(run.span.stop, head) - max(run.span.start, 1)

    def report(self) -> InstanceReport:
        """What a restarted controller needs to know."""
        return InstanceReport(
            instance=self.instance,
            model=self.manifest.model,
            attempt=self.attempt,
            watermark=self.watermark,
            is_loaded=self.is_loaded,
            rank=self.order.rank,
            plan=self.order.plan,
            feeds=self.feeds,
            pairing=self.order.pairing,
        )

    def load_report(self, handover_bytes: int) -> InstanceReported:
        """Its load now. What was started since the last such report is in this one."""
        return load_report(
            self.instance,
            self.attempt,
            self.live.batcher,
            handovers=self.handovers,
            handover_bytes=handover_bytes,
        )
