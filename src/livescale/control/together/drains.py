"""Draining instances, and to whom they pass their requests.

What only finishes long answers holds a device that others could use. So a draining instance is told
whom its requests may move to: instances of its part that serve and belong to no live pair. It is
told again when these change, and when it is wanted again. Instances with several ranks finish what
they have.
"""

from __future__ import annotations

import msgspec

from livescale.control.planning.planning import Planning
from livescale.control.planning.pool_knowledge import OfPool, PoolKnowledge
from livescale.control.state.instance import Instance
from livescale.control.together.pairing import Pairings
from livescale.messages.commands import ChangeDuty
from livescale.values.routes import Taker
from livescale.values.types import InstanceState

_TAKERS_MAX = 4
_PS_PER_S = 1_000_000_000_000


class Drains(OfPool):
    """Keeps the duties of instances that drain, or did."""

    def __init__(self, known: PoolKnowledge, planning: Planning, pairings: Pairings) -> None:
        super().__init__(known)
        self._is_moving = known.config.drain == "move"
        self._planning = planning
        self._pairings = pairings
        #: of the fleet, when duties were last compared with it
        self._version = -1

    def decide(self) -> list[ChangeDuty]:
        """Orders to those whose takers are others than they know. One that has them serves on
        without: also one of an earlier life of the controller, which counts as serving."""
        if not self._is_moving or self._version == self._fleet.version:
            return []
        self._version = self._fleet.version
        orders: list[ChangeDuty] = []
        for _, instance in sorted(self._fleet.instances.items()):
            is_draining = instance.state is InstanceState.DRAINING
            if instance.is_released or not (is_draining or instance.duty.drains_to):
                continue
            takers = self._takers(instance) if is_draining else ()
            known = [taker.partner for taker in instance.duty.drains_to]
            if [taker.partner for taker in takers] != known:
                duty = msgspec.structs.replace(instance.duty, drains_to=takers)
                orders.append(instance.change(duty))
        return orders

    # -- helpers, in the order used -------------------------------------------------------------

    def _takers(self, instance: Instance) -> tuple[Taker, ...]:
        """Those that it knows and that still serve; then near ones, and of these those with the
        fewest requests."""
        if len(instance.workers) > 1:
            return ()
        serving = {other.id: other for other in self._pairings.unpaired(instance.part)}
        known = [t for t in instance.duty.drains_to if t.partner.instance in serving]
        for taker in known:
            del serving[taker.partner.instance]
        near = [(self._taker(instance, other), other) for other in serving.values()]
        near.sort(key=lambda pair: (pair[0].kv_token_ps, pair[1].running, pair[1].id))
        return (*known, *(taker for taker, _ in near))[:_TAKERS_MAX]

    def _taker(self, instance: Instance, other: Instance) -> Taker:
        """With what the slowest link on the way there carries."""
        rate = self._planning.cluster.link_bytes_per_s(instance.worker, other.worker)
        kv_bytes = self._states[instance.model].spec.kv_bytes_per_token
        return Taker(other.partner, kv_bytes * _PS_PER_S // rate if rate else 0)
