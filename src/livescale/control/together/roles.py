"""Roles: which instances compute prompts and which decode, of models that keep the two apart.

Prefill instances are told to whom they give requests with their first token: to any of the model's
decode instances that serve (BlitzScale §2.1). Where one kind is missing the other does both, so
that no request waits for an instance that may never come. An instance changes its role without a
load (mutation, BlitzScale §5.4).
"""

from __future__ import annotations

import msgspec

from livescale.control.planning.pool_knowledge import OfPool, PoolKnowledge
from livescale.control.state.instance import Instance
from livescale.control.state.model_state import ModelState, PartState
from livescale.control.together.pairing import Pairings
from livescale.messages.commands import ChangeDuty
from livescale.values.routes import Does, Duty, Hop, Partner, Route
from livescale.values.types import InstanceState, Part, Role

_DECODES_AT_MAX = 16
"""Every offer goes to all of them."""


class Roles(OfPool):
    """Keeps the duties of instances that have a role, and says where requests of such models go."""

    def __init__(self, known: PoolKnowledge, pairings: Pairings) -> None:
        super().__init__(known)
        self._pairings = pairings
        #: of the fleet, when duties were last compared with it
        self._version = -1

    def decide(self) -> list[ChangeDuty]:
        """Orders to instances whose duty is another now."""
        if self._version == self._fleet.version:
            return []
        self._version = self._fleet.version
        strangers, self._fleet.strangers = self._fleet.strangers, {}
        found = list(strangers.values())
        for model in self._states.values():
            if model.has_roles:
                # Decode instances first: they take nothing before they know what they are.
                found += self._fleet.of_parts(reversed(model.keys))
        orders = []
        for instance in found:
            if instance.id not in self._fleet.instances or instance.is_released:
                continue
            duty = self._duty(instance)
            if duty != instance.duty:
                orders.append(instance.change(duty))
        return orders

    def routes(self, now_ns: int, state: PartState) -> list[Route]:
        """Where requests that come to the model may go, and where these decode."""
        routes = self._pairings.routes(now_ns, state)
        model = state.model
        if not model.has_roles:
            return routes
        decode = model.of_role(Role.DECODE).part
        if not routes:
            return self._fleet.serving(decode)
        others = tuple(route.first for route in self._fleet.serving(decode))
        if not others:
            return routes
        return [_then_decoding(route, Hop(others, decode.span, Does.DECODE)) for route in routes]

    def mutate(self, instance: Instance, part: Part) -> None:
        """The instance serves another part of its model from now on."""
        self._fleet.change_part(instance, part)
        self._router.worker_serves(instance.worker, part)

    # -- helpers, in the order used -------------------------------------------------------------

    def _duty(self, instance: Instance) -> Duty:
        """With the part's role, and with those that it gives requests to."""
        duty, role = instance.duty, instance.part.role
        decodes_at: tuple[Partner, ...] = ()
        if role is Role.PREFILL:
            decodes_at = self._decoders(duty, self._states[instance.model])
        return msgspec.structs.replace(duty, role=role, decodes_at=decodes_at)

    def _decoders(self, duty: Duty, model: ModelState) -> tuple[Partner, ...]:
        """Those that it knows and that still serve; then the others, the emptiest first."""
        part = model.of_role(Role.DECODE).part
        serving = {
            other.id: other
            for other in self._fleet.of_part(part)
            if other.state is InstanceState.SERVING
        }
        known = [partner for partner in duty.decodes_at if partner.instance in serving]
        for partner in known:
            del serving[partner.instance]
        others = sorted(serving.values(), key=lambda other: (other.kv_blocks_used, other.id))
        return (*known, *(other.partner for other in others))[:_DECODES_AT_MAX]


def _then_decoding(route: Route, decode: Hop) -> Route:
    """The route, but for the last of its hops: that computes prompts only."""
    *before, last = route.hops
    last = msgspec.structs.replace(last, does=Does.PREFILL)
    return msgspec.structs.replace(route, hops=(*before, last, decode))
