"""Policies: a load snapshot in, wanted instances out. They suggest; the controller decides.

BoundsPolicy follows BlitzScale §5.3 with its loads measured twice: the paper's windowed token
rate and KV in use, and the authors' code's seconds of queued prefill work per instance, each
against an upper and a lower bound. Requests are a load of their own: an instance has places for so
many, or KV for fewer, and long answers to short prompts take them without much prefill work.
TargetOngoingPolicy counts requests, as Ray Serve does. Both
count capacity that is still loading, so that a load is not ordered twice for one need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from livescale.policies import Bounds, ScalingPolicy, TargetOngoing

_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """Load of one (model, role) now.

    `instances` counts capacity that serves or is still loading. `window_tokens` are prompt tokens
    that arrived within `window_ns`; `queued_prefill_tokens` wait in the router and on instances;
    `requests` are all unfinished ones. Of these `left_waiting` were left without a place or KV: in
    the router, or on `full_instances`, which run `full_running` others. Besides `kv_blocks_used`,
    up to `kv_blocks_kept` are kept for running requests to grow. Rates, places and KV blocks are
    per instance; None means not known yet.
    """

    instances: int
    window_tokens: int
    window_ns: int
    queued_prefill_tokens: int
    kv_blocks_used: int
    prefill_tokens_per_s: int | None
    kv_blocks: int | None
    requests: int = 0
    places: int | None = None
    left_waiting: int = 0
    full_instances: int = 0
    full_running: int = 0
    kv_blocks_kept: int = 0

    @property
    def waiting_requests(self) -> int:
        """Requests that have no place or no KV: as many as were left, or more than all places."""
        if self.places is None:
            return self.left_waiting
        return max(self.left_waiting, self.requests - self.places * self.instances)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """How many instances the load needs at the upper (`at_least`) and lower bounds (`at_most`)."""

    at_least: int
    at_most: int
    reason: str
    values: dict[str, int]


class Policy(Protocol):
    """What the autoscaler asks."""

    def suggest(self, load: LoadSnapshot) -> Suggestion:
        """How many instances this load needs."""


def make_policy(scaling: ScalingPolicy) -> Policy:
    """The policy of a configuration value."""
    if isinstance(scaling, TargetOngoing):
        return TargetOngoingPolicy(scaling)
    return BoundsPolicy(scaling)


class TargetOngoingPolicy:
    """Instances such that each has so many unfinished requests."""

    def __init__(self, target: TargetOngoing) -> None:
        self._target = target

    def suggest(self, load: LoadSnapshot) -> Suggestion:
        """`at_most` is where the lower edge of the band would be reached."""
        permille = load.requests * 1000
        at_least = -(-permille // self._target.target_permille)
        lower = self._target.target_permille * self._target.lower_permille
        at_most = -(-permille * 1000 // lower)
        values = {
            "instances": load.instances,
            "requests": load.requests,
            "target_permille": self._target.target_permille,
            "at_least": at_least,
            "at_most": at_most,
        }
        return Suggestion(at_least, at_most, "ongoing_requests", values)


class BoundsPolicy:
    """Instances such that every load lies between its bounds."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds

    def suggest(self, load: LoadSnapshot) -> Suggestion:
        """The largest need over all loads; `reason` names the load that asks for most."""
        needs = [
            (name, *self._need(used, upper, lower))
            for name, used, upper, lower in self._loads(load)
        ]
        needs += self._needs_of_room(load)
        reason, at_least, _ = max(
            needs, key=lambda need: (need[1], need[2]), default=("idle", 0, 0)
        )
        at_most = max((need[2] for need in needs), default=0)
        if load.requests and not at_least:
            # Nothing is known of the model yet, or its rates hide one request: one instance.
            reason, at_least, at_most = "requests", 1, max(at_most, 1)
        values = {
            "instances": load.instances,
            "window_tokens": load.window_tokens,
            "queued_prefill_tokens": load.queued_prefill_tokens,
            "kv_blocks_used": load.kv_blocks_used,
            "prefill_tokens_per_s": load.prefill_tokens_per_s or 0,
            "kv_blocks": load.kv_blocks or 0,
            "requests": load.requests,
            "places": load.places or 0,
            "waiting_requests": load.waiting_requests,
            "full_instances": load.full_instances,
            "full_running": load.full_running,
            "kv_blocks_kept": load.kv_blocks_kept,
            "at_least": at_least,
            "at_most": at_most,
        }
        return Suggestion(at_least, at_most, reason, values)

    def _needs_of_room(self, load: LoadSnapshot) -> list[tuple[str, int, int]]:
        """(name, instances at least, at most) such that all requests have places and KV."""
        bounds, needs = self._bounds, []
        if load.places and load.requests:
            upper = _share(load.places, bounds.requests_upper_permille)
            lower = _share(load.places, bounds.requests_lower_permille)
            name = "waiting_requests" if load.waiting_requests else "requests"
            needs.append((name, *self._need(load.requests, upper, lower)))
        if load.waiting_requests:
            # What full instances run is what fits, whether places or KV are short. While requests
            # wait, nothing goes: still more would wait.
            fitting, _ = self._need(load.requests * load.full_instances, load.full_running, 1)
            needs.append(("waiting_requests", fitting, max(fitting, load.instances)))
        if load.kv_blocks:
            # Blocks that are kept for growth are no reason to grow, but without them requests
            # would wait on fewer instances.
            room = (load.kv_blocks_used + load.kv_blocks_kept) * 1000
            _, most = self._need(room, 1, load.kv_blocks * bounds.kv_lower_permille)
            needs.append(("kv_in_use", 0, most))
        return needs

    def _loads(self, load: LoadSnapshot) -> list[tuple[str, int, int, int]]:
        """(name, amount in use, amount of one instance at the upper, at the lower bound).

        All amounts of one row share a unit: token-nanoseconds, or blocks per mille.
        """
        bounds = self._bounds
        rows = []
        if load.prefill_tokens_per_s:
            per_window = load.prefill_tokens_per_s * load.window_ns
            rows.append(
                (
                    "token_rate",
                    load.window_tokens * _NS_PER_S * 1000,
                    per_window * bounds.token_rate_upper_permille,
                    per_window * bounds.token_rate_lower_permille,
                )
            )
            rows.append(
                (
                    "prefill_backlog",
                    load.queued_prefill_tokens * _NS_PER_S,
                    load.prefill_tokens_per_s * bounds.backlog_upper_ns,
                    load.prefill_tokens_per_s * bounds.backlog_lower_ns,
                )
            )
        if load.kv_blocks:
            rows.append(
                (
                    "kv_in_use",
                    load.kv_blocks_used * 1000,
                    load.kv_blocks * bounds.kv_upper_permille,
                    load.kv_blocks * bounds.kv_lower_permille,
                )
            )
        return rows

    @staticmethod
    def _need(used: int, upper: int, lower: int) -> tuple[int, int]:
        return -(-used // max(upper, 1)), -(-used // max(lower, 1))


def _share(places: int, permille: int) -> int:
    """So many of an instance's places, one at least."""
    return max(-(-places * permille // 1000), 1)
