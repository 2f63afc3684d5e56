"""A layer counts only when it is whole: what members say of it against the bytes that came.

Members are heard at their mouth, before anything they say is late or lost on its way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from livescale.messages.commands import AnyCommand, StartLoad
from livescale.messages.events import (
    AnyEvent,
    CopyCompleted,
    CopyLayerArrived,
    LayerArrived,
    LoadCompleted,
)
from livescale.sim.checkers.invariants import require
from livescale.types import InstanceId, ModelSpec, PlanId, WorkerRef

_LoadKey = tuple[WorkerRef, str, int]


class Missing(Protocol):
    """How many bytes of a layer a member still lacks of its rank of a model."""

    def __call__(self, member: WorkerRef, model: str, rank: int, layer: int) -> int: ...


class LayerChecker:
    """Loads over all lives of the controller."""

    def __init__(self, specs: Mapping[str, ModelSpec], missing: Missing) -> None:
        self._specs = specs
        self._missing = missing
        self._models: dict[InstanceId, str] = {}
        #: the order that a member follows, and the layers that it said were there
        self._loads: dict[_LoadKey, InstanceId | PlanId] = {}
        self._arrived: dict[_LoadKey, dict[int, None]] = {}

    def ordered(self, commands: Sequence[AnyCommand]) -> None:
        for command in commands:
            if isinstance(command, StartLoad):
                self._models[command.instance] = command.model

    def says(self, member: WorkerRef, event: AnyEvent) -> None:
        """The member is about to say this to the controller."""
        if isinstance(event, LayerArrived | LoadCompleted):
            key = (member, self._models[event.instance], event.rank)
            arrived = self._of_load(key, event.instance)
        elif isinstance(event, CopyLayerArrived | CopyCompleted):
            key = (member, event.model, event.rank)
            arrived = self._of_load(key, event.plan)
        else:
            return
        if isinstance(event, LayerArrived | CopyLayerArrived):
            require(event.layer not in arrived, "a layer arrives once", member, event)
            self._require_whole(key, event.layer, event)
            arrived[event.layer] = None
            if isinstance(event, LayerArrived):
                is_prefix = all(layer in arrived for layer in range(event.watermark))
                is_all = is_prefix and event.watermark not in arrived
                require(is_all, "the watermark is the prefix", member, event)
        else:
            spec = self._specs[key[1]]
            for layer in range(spec.layers):
                self._require_whole(key, layer, event)
            require(event.received_bytes == spec.size_bytes, "all bytes arrived", member, event)

    # -- helpers --------------------------------------------------------------------------------

    def _of_load(self, key: _LoadKey, order: InstanceId | PlanId) -> dict[int, None]:
        """Layers of this order; another order to the same member begins anew."""
        if self._loads.get(key) != order:
            self._loads[key], self._arrived[key] = order, {}
        return self._arrived[key]

    def _require_whole(self, key: _LoadKey, layer: int, event: AnyEvent) -> None:
        missing_bytes = self._missing(*key, layer)
        require(missing_bytes == 0, "a layer counts when it is whole", key, event, missing_bytes)
