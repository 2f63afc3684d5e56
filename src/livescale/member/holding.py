"""One life of a model's bytes on a member: ordered, arriving, whole, gone."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from livescale.chunks import Feed
from livescale.messages.commands import StartHolding
from livescale.messages.events import FeedFailed, HoldingReport
from livescale.types import HoldingId


@dataclass(slots=True)
class ModelHolding:
    """The bytes that one order brings to a member, from `offset_bytes` of the memory on.

    Layers arrive in any order; all of the span below `watermark` are there.
    """

    #: as amended last; without feeds when all is there
    order: StartHolding
    layer_bytes: tuple[int, ...]
    identity: str
    offset_bytes: int
    #: of feeds that have not been replaced: a new controller has to be told, too
    troubles: list[FeedFailed] = field(default_factory=list)
    arrived: dict[int, None] = field(default_factory=dict)
    watermark: int = field(init=False)
    is_whole: bool = False

    def __post_init__(self) -> None:
        self.watermark = self.order.span.start

    @property
    def id(self) -> HoldingId:
        return self.order.holding

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
        self.order, self.troubles = msgspec.structs.replace(self.order, feeds=feeds), []

    def complete(self) -> None:
        """All is there, and nothing more has to come."""
        self.amend(())
        self.is_whole = True

    def report(self) -> HoldingReport:
        """What a controller that knows nothing needs."""
        return HoldingReport(self.order, self.watermark, self.is_whole)
