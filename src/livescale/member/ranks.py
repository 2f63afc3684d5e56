"""What the ranks of an instance have: each tells rank 0, which runs the layers that all have."""

from __future__ import annotations

from collections.abc import Callable

from livescale.member import effects, inputs
from livescale.member.instance import HostedInstance


class RankWatermarks:
    """What other ranks have told this member, and what this member tells rank 0."""

    def __init__(self, emit: Callable[[effects.Effect], None]) -> None:
        self._emit = emit
        #: the latest message of every rank
        self._told: dict[int, inputs.RankLayers] = {}

    def has(self, instance: HostedInstance, watermark: int, beyond: tuple[int, ...] = ()) -> None:
        """This member's rank has so many layers, and those `beyond`."""
        rank, duty = instance.order.rank, instance.duty
        instance.layers.has(rank, watermark, beyond)
        if rank:
            layers = inputs.RankLayers(duty.instance, rank, watermark, beyond)
            self._emit(effects.TellPeer(duty.workers[0], layers))

    def hear(self, layers: inputs.RankLayers, instance: HostedInstance | None) -> None:
        """The message may come before the order for the instance."""
        self._told[layers.rank] = layers
        if instance is not None:
            self.tell(instance)

    def tell(self, instance: HostedInstance) -> None:
        """What other ranks of the instance have, as far as they have told."""
        for layers in self._told.values():
            if instance.duty.instance == layers.instance:
                instance.layers.has(layers.rank, layers.watermark, layers.beyond)
