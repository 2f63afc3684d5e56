"""One life of a model's bytes on a member: ordered, arriving, whole, gone.

A worker's load and a host's copy live the same life; what the controller is told of them has two
families of events, which differ here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from livescale.chunks import Feed
from livescale.messages.commands import StartCopy, StartLoad
from livescale.messages.events import (
    CopyCompleted,
    CopyFailed,
    CopyLayerArrived,
    CopyReport,
    FeedFailed,
    InstanceReport,
    LayerArrived,
    LoadCompleted,
    LoadFailed,
)
from livescale.types import WorkerRef


@dataclass(slots=True)
class ModelHolding:
    """The bytes that one order brings to `member`, from `offset_bytes` of the memory on.

    Layers arrive in any order; `watermark` is the length of the prefix that is there.
    """

    number: int
    member: WorkerRef
    order: StartLoad | StartCopy
    layer_bytes: tuple[int, ...]
    identity: str
    offset_bytes: int
    feeds: tuple[Feed, ...]
    #: of feeds that have not been replaced: a new controller has to be told, too
    troubles: list[FeedFailed] = field(default_factory=list)
    arrived: dict[int, None] = field(default_factory=dict)
    watermark: int = 0
    is_whole: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(self.layer_bytes)

    def take_layer(self, layer: int) -> range:
        """The layer is there. Returns the layers that the prefix has grown by."""
        self.arrived[layer] = None
        before = self.watermark
        while self.watermark in self.arrived:
            self.watermark += 1
        return range(before, self.watermark)

    def amend(self, feeds: tuple[Feed, ...]) -> None:
        """What is missing comes by these feeds."""
        self.feeds, self.troubles = feeds, []

    def feed_failed(self, upstream: WorkerRef, reason: str, is_stalled: bool) -> FeedFailed:
        """The event for a feed that has failed or stalled, which is remembered."""
        trouble = FeedFailed(self.order.plan, self.member, upstream, reason, is_stalled)
        self.troubles.append(trouble)
        return trouble

    # -- what the controller is told --------------------------------------------------------------

    def layer_arrived(self, layer: int, live_layers: int) -> LayerArrived | CopyLayerArrived:
        order = self.order
        if isinstance(order, StartCopy):
            return CopyLayerArrived(order.model, self.member, order.plan, layer, order.rank)
        return LayerArrived(
            instance=order.instance,
            attempt=order.attempt,
            watermark=self.watermark,
            rank=order.rank,
            layer=layer,
            live_layers=live_layers,
        )

    def completed(self) -> LoadCompleted | CopyCompleted:
        order, size_bytes = self.order, self.size_bytes
        if isinstance(order, StartCopy):
            return CopyCompleted(order.model, self.member, order.plan, size_bytes, order.rank)
        return LoadCompleted(order.instance, order.attempt, size_bytes, order.rank)

    def failed(self, reason: str) -> LoadFailed | CopyFailed:
        return failure_of(self.order, self.member, reason)

    def report(self) -> InstanceReport | CopyReport:
        """What a controller that knows nothing needs."""
        order, feeds = self.order, () if self.is_whole else self.feeds
        if isinstance(order, StartCopy):
            return CopyReport(order.model, order.plan, self.is_whole, order.rank, feeds)
        return InstanceReport(
            instance=order.instance,
            model=order.model,
            attempt=order.attempt,
            watermark=self.watermark,
            is_loaded=self.is_whole,
            rank=order.rank,
            plan=order.plan,
            feeds=feeds,
            pairing=order.pairing,
        )


def failure_of(
    order: StartLoad | StartCopy, member: WorkerRef, reason: str
) -> LoadFailed | CopyFailed:
    """The event for an order of which nothing is left."""
    if isinstance(order, StartCopy):
        return CopyFailed(order.model, member, order.plan, reason, order.rank)
    return LoadFailed(order.instance, order.attempt, reason, order.rank)
