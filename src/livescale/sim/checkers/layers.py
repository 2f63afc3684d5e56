"""A layer counts only when it is whole: what members say of it against the bytes that came.

Members are heard at their mouth, before anything they say is late or lost on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from livescale.messages.commands import AnyCommand, StartHolding
from livescale.messages.events import AnyEvent, HoldingCompleted, LayerArrived
from livescale.sim.checkers.invariants import require
from livescale.types import HoldingId, ModelSpec, WorkerRef

Missing = Callable[[WorkerRef, str, int, int], int]
"""How many bytes a member (of a model, a rank and a layer) still lacks."""


class LayerChecker:
    """Holdings over all lives of the controller."""

    def __init__(self, specs: Mapping[str, ModelSpec], missing: Missing) -> None:
        self._specs = specs
        self._missing = missing
        self._orders: dict[HoldingId, StartHolding] = {}
        #: layers that their members said were there
        self._arrived: dict[HoldingId, dict[int, None]] = {}

    def ordered(self, commands: Sequence[AnyCommand]) -> None:
        for command in commands:
            if isinstance(command, StartHolding):
                self._orders[command.holding] = command

    def says(self, member: WorkerRef, event: AnyEvent) -> None:
        """The member is about to say this to the controller."""
        if not isinstance(event, LayerArrived | HoldingCompleted):
            return
        require(event.holding.member == member, "members speak for themselves", member, event)
        order = self._orders[event.holding]
        if isinstance(event, LayerArrived):
            arrived = self._arrived.setdefault(event.holding, {})
            require(event.layer not in arrived, "a layer arrives once", event)
            self._require_whole(order, event.layer)
            arrived[event.layer] = None
            is_prefix = all(layer in arrived for layer in range(order.span.start, event.watermark))
            is_all = is_prefix and event.watermark not in arrived
            require(is_all, "the watermark is the prefix", event)
        else:
            spec = self._specs[order.model]
            for layer in range(spec.layers):
                self._require_whole(order, layer)
            require(event.received_bytes == spec.size_bytes, "all bytes arrived", event)

    # -- helpers --------------------------------------------------------------------------------

    def _require_whole(self, order: StartHolding, layer: int) -> None:
        missing_bytes = self._missing(order.holding.member, order.model, order.rank, layer)
        require(missing_bytes == 0, "a layer counts when it is whole", order, layer, missing_bytes)
