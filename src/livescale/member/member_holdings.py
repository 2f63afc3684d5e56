"""The lives of models' bytes on a member: ordered, arriving, whole, a warm spare, gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from livescale.control.policy.residency import ResidentLayers
from livescale.member import effects
from livescale.member.memory_map import MemoryMap
from livescale.messages.commands import AmendHolding, ChangeDuty, StartHolding
from livescale.messages.events import FeedFailed, HoldingReport
from livescale.values.chunks import Feed
from livescale.values.types import HoldingId, PlanId


@dataclass(slots=True)
class ModelHolding:
    """The bytes that one order brings to a member, from `offset_bytes` of the memory on.

    Layers arrive in any order; all of the span below `watermark` are there.
    """

    #: as amended last, with the duty of now; without feeds when all is there
    order: StartHolding
    layer_bytes: tuple[int, ...]
    identity: str
    offset_bytes: int
    #: of feeds that have not been replaced: a new controller has to be told, too
    troubles: list[FeedFailed] = field(default_factory=list)
    arrived: dict[int, None] = field(default_factory=dict)
    watermark: int = field(init=False)
    #: by its order, as who moved them counted
    received_bytes: int = 0
    is_whole: bool = False
    #: whole, and no instance's any more
    is_spare: bool = False

    def __post_init__(self) -> None:
        self.watermark = self.order.span.start

    @property
    def id(self) -> HoldingId:
        return self.order.holding

    @property
    def size_bytes(self) -> int:
        return sum(self.layer_bytes)

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.size_bytes

    def take_layer(self, layer: int) -> None:
        """The layer is there."""
        self.arrived[layer] = None
        while self.watermark in self.arrived:
            self.watermark += 1

    @property
    def beyond(self) -> tuple[int, ...]:
        """Layers that are there behind one that is missing."""
        return tuple(sorted(layer for layer in self.arrived if layer > self.watermark))

    def amend(self, feeds: tuple[Feed, ...]) -> None:
        """What is missing comes by these feeds."""
        self.order, self.troubles = msgspec.structs.replace(self.order, feeds=feeds), []

    def complete(self) -> None:
        """All is there, and nothing more has to come."""
        self.amend(())
        self.is_whole = True

    @property
    def is_woken(self) -> bool:
        """It was made of a warm spare: everything was there when it was ordered."""
        return self.order.spare is not None

    def report(self) -> HoldingReport:
        """What a controller that knows nothing needs."""
        beyond = () if self.is_whole else self.beyond
        return HoldingReport(self.order, self.watermark, self.is_whole, self.is_spare, beyond)


class MemberHoldings:
    """All holdings of one member, which `memory_bytes` have room for, at offsets below
    `address_bytes`. The last `resident_bytes` keep first layers of models that were given up."""

    def __init__(
        self,
        memory_bytes: int,
        address_bytes: int,
        resident_bytes: int,
        emit: Callable[[effects.Effect], None],
    ) -> None:
        self._memory_bytes = memory_bytes
        self._regions = MemoryMap(address_bytes)
        self._residents_from = max(memory_bytes - resident_bytes, 0)
        self._residents = ResidentLayers(self._residents_from, memory_bytes)
        self._emit = emit
        self._of_plan: dict[PlanId, ModelHolding] = {}
        #: first byte and end of what was removed in this step
        self._removed: list[tuple[int, int]] = []
        #: what a controller that knows nothing needs; replaced, never changed
        self.reports: tuple[HoldingReport, ...] = ()

    @property
    def all(self) -> tuple[ModelHolding, ...]:
        return tuple(self._of_plan.values())

    def begin_step(self) -> None:
        """What may still be written of all that was removed before is known from now on, or is
        among the news of this step."""
        self._removed.clear()

    def get(self, plan: PlanId) -> ModelHolding | None:
        return self._of_plan.get(plan)

    def begin(self, order: StartHolding, layer_bytes: tuple[int, ...], identity: str) -> str:
        """Let the layers be fetched, or use those of a warm spare. Returns why not, if they do not
        fit or are not there."""
        if order.spare is not None:
            return self._take_up(order, identity)
        plan, size_bytes = order.holding.plan, sum(layer_bytes)
        assert plan not in self._of_plan, f"{self!r}: {order.model} by plan {plan}"
        free_bytes = self._memory_bytes - sum(held.size_bytes for held in self.all)
        offset_bytes = self._place(order, size_bytes) if size_bytes <= free_bytes else None
        if offset_bytes is None:
            return f"{size_bytes} bytes do not fit: {free_bytes} are free, {self._regions!r}"
        held = self._of_plan[plan] = ModelHolding(order, layer_bytes, identity, offset_bytes)
        resident = self._residents.find(identity)
        if order.duty is not None:
            self._residents.make_way(held.end_bytes)
        # At once, so that bytes move while the modules are built.
        self._emit(effects.Fetch(plan, offset_bytes, order, resident))
        self.update_reports()
        return ""

    def _place(self, order: StartHolding, size_bytes: int) -> int | None:
        """Where the bytes will lie: where the controller says, or an agent's own choice."""
        if order.duty is None:
            # Writes into what was removed in this step may still be under way, and only the next
            # step knows: another place is better. Where there is none the data plane decides.
            elsewhere = self._regions.allocate(size_bytes, self._removed)
            return self._regions.allocate(size_bytes) if elsewhere is None else elsewhere
        is_free = self._regions.take(order.offset_bytes, size_bytes)
        return order.offset_bytes if is_free else None

    def _take_up(self, order: StartHolding, identity: str) -> str:
        spare = self._of_plan.get(order.spare) if order.spare is not None else None
        if spare is None or not spare.is_spare:
            return f"there is no warm spare of plan {order.spare}"
        if spare.identity != identity:
            self.remove(spare)
            return f"the warm spare of plan {order.spare} has other bytes"
        del self._of_plan[spare.id.plan]
        self._emit(effects.TakeUp(order.holding.plan, spare.id.plan, order))
        spare.order, spare.is_spare, spare.is_whole = order, False, False
        spare.received_bytes = 0
        self._of_plan[order.holding.plan] = spare
        self.update_reports()
        return ""

    def keep(self, holding: ModelHolding) -> None:
        """A whole model serves no more: its bytes stay as a warm spare."""
        holding.is_spare = True
        self._emit(effects.Release(holding.id.plan))
        self.update_reports()

    def amend(self, command: AmendHolding) -> None:
        """Get what is missing of a holding by other feeds; nothing, if it is whole or gone."""
        holding = self.get(command.holding.plan)
        if holding is not None and not holding.is_whole:
            holding.amend(command.feeds)
            self._emit(effects.AmendFetch(command.holding.plan, command.feeds))
            self.update_reports()

    def change_duty(self, command: ChangeDuty) -> bool:
        """False if the instance's holding is gone."""
        holding = self.get(command.holding.plan)
        if holding is not None:
            holding.order = msgspec.structs.replace(holding.order, duty=command.duty)
            self.update_reports()
        return holding is not None

    def remove(self, holding: ModelHolding) -> None:
        """Its bytes may be overwritten."""
        del self._of_plan[holding.id.plan]
        self._regions.free(holding.offset_bytes)
        self._removed.append((holding.offset_bytes, holding.end_bytes))
        self._emit(effects.DropFetch(holding.id.plan))
        self.update_reports()

    def keep_from_others(self, plan: PlanId, ranges: tuple[tuple[int, int], ...]) -> None:
        """Nothing is placed in what may still be written for a plan that is gone."""
        self._regions.keep(plan, ranges)

    def keep_first_layers(self, holding: ModelHolding) -> None:
        """A whole model was given up: its first layers stay, if they are worth their place, and
        that is no other model's."""
        if all(held.end_bytes <= self._residents_from for held in (holding, *self.all)):
            kept = self._residents.keep(holding.identity, holding.layer_bytes)
            if kept is not None:
                self._emit(effects.KeepLayers(kept, holding.offset_bytes))

    def troubles(self) -> list[FeedFailed]:
        """Feeds that failed and have not been replaced, of all that is not whole."""
        return [trouble for held in self.all if not held.is_whole for trouble in held.troubles]

    def update_reports(self) -> None:
        """Something of a holding has changed."""
        self.reports = tuple(holding.report() for holding in self.all)

    def __repr__(self) -> str:
        models = ", ".join(held.order.model for held in self.all) or "nothing"
        return f"<MemberHoldings: {models}; {self._regions!r}>"
