"""A policy for all parts of a model at once: what one needs depends on the others.

Unified instances are judged by the configured policy. With roles (BlitzScale §5.3) prefill is
judged by that policy, but for places and KV: requests that wait there with their KV wait for decode
instances. Decode is judged by places and KV, of those requests too, which will be there in a
moment; and when prefill grows, decode grows with it, by as much (pre-scaling). Both also have to
carry the KV that goes from one to the other.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from livescale.control.policy.load_snapshot import LoadSnapshot, Suggestion
from livescale.control.policy.policy import DecayingFloor, Policy, make_policy, need_of_kv_rate
from livescale.values.scaling_policies import Bounds, ScalingPolicy, SloAim, TargetOngoing
from livescale.values.types import Part, Role

_AHEAD_MAX = 2
"""Decode grows with prefill to what at most so many times its own load needs."""


class PartPolicies:
    """What one model's parts need."""

    def __init__(self, scaling: ScalingPolicy) -> None:
        self._policy = make_policy(scaling)
        self._room = _room_of(scaling)
        self._decode: Policy = make_policy(
            scaling if isinstance(scaling, TargetOngoing) else self._room
        )
        decay_ns = scaling.floor_decay_ns if isinstance(scaling, SloAim) else 0
        #: of decode's need, as SloPolicy has one of prefill's: bursts come again
        self._floor = DecayingFloor(decay_ns)

    def asks_for_load_time(self, part: Part, load: LoadSnapshot) -> bool:
        """What is suggested for this load depends on `LoadSnapshot.load_ns`, which takes a plan to
        know."""
        return part.role is not Role.DECODE and self._policy.asks_for_load_time(load)

    def suggest(self, loads: Mapping[Part, LoadSnapshot]) -> dict[Part, Suggestion]:
        """How many instances of each part these loads need."""
        by_role = {part.role: part for part in loads}
        if Role.DECODE not in by_role:
            return {part: self._policy.suggest(load) for part, load in loads.items()}
        prefill, decode = by_role[Role.PREFILL], by_role[Role.DECODE]
        first = self._of_prefill(loads[prefill])
        then = self._of_decode(loads[decode], loads[prefill], first)
        return {prefill: first, decode: self._held(loads[decode], then)}

    def deadlines_ns(self, now_ns: int) -> list[int]:
        """When another number would be suggested of the same loads."""
        own_ns = self._floor.falls_ns(now_ns)
        return self._policy.deadlines_ns(now_ns) + self._decode.deadlines_ns(now_ns) + own_ns

    # -- helpers, in the order used -------------------------------------------------------------

    def _of_prefill(self, load: LoadSnapshot) -> Suggestion:
        own = replace(
            load,
            kv_blocks=None,
            places=None,
            left_waiting=0,
            full_instances=0,
            full_running=0,
            kv_blocks_kept=0,
        )
        return self._with_kv_rate(self._policy.suggest(own), load)

    def _of_decode(
        self, load: LoadSnapshot, prefill: LoadSnapshot, first: Suggestion
    ) -> Suggestion:
        coming = min(prefill.requests, (prefill.places or 0) * max(prefill.instances, 1))
        own = replace(
            load,
            window_tokens=0,
            queued_prefill_tokens=0,
            prefill_tokens_per_s=None,
            service_tokens_per_s=None,
            kv_blocks_used=load.kv_blocks_used + prefill.kv_blocks_used,
            requests=load.requests + coming,
        )
        found = self._with_kv_rate(self._decode.suggest(own), prefill)
        if not prefill.instances or first.at_least <= prefill.instances:
            return found
        grown = min(first.at_least, _AHEAD_MAX * prefill.instances)
        return self._ahead(found, _times(own, grown, prefill.instances))

    def _ahead(self, found: Suggestion, later: LoadSnapshot) -> Suggestion:
        """Decode's need when prefill has grown to what was suggested for it. What is there for that
        does not go because of a low load, but prefill may have it."""
        ahead = self._decode.suggest(later).at_least
        if ahead <= found.at_least:
            return found
        floor = max(found.floor, ahead)
        return replace(found, at_least=ahead, floor=floor, reason="prefill_grows")

    def _held(self, load: LoadSnapshot, found: Suggestion) -> Suggestion:
        """What was needed lately stays for a while."""
        need = found.at_least
        if load.instances_max is not None:
            need = min(need, load.instances_max)
        return replace(found, floor=max(found.floor, self._floor.after(load.now_ns, need)))

    def _with_kv_rate(self, found: Suggestion, load: LoadSnapshot) -> Suggestion:
        """At least as many as carry the KV of prompts that arrive as they do in this load."""
        if not load.kv_tokens_per_s:
            return found
        name, at_least, at_most = need_of_kv_rate(load, self._room, load.kv_tokens_per_s)
        reason = name if at_least > found.at_least else found.reason
        return replace(
            found,
            at_least=max(found.at_least, at_least),
            at_most=max(found.at_most, at_most),
            reason=reason,
        )


def _times(load: LoadSnapshot, factor: int, divisor: int) -> LoadSnapshot:
    """The load with as many times the requests, and their KV. What instances have room for is the
    load's: rounding up instances instead would ask for more than comes."""
    return replace(
        load,
        requests=-(-load.requests * factor // divisor),
        kv_blocks_used=-(-load.kv_blocks_used * factor // divisor),
    )


def _room_of(scaling: ScalingPolicy) -> Bounds:
    """The bounds on places, KV and what links carry."""
    if isinstance(scaling, Bounds):
        return scaling
    return scaling.room if isinstance(scaling, SloAim) else Bounds()
