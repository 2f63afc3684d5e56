"""Policies: a load snapshot in, wanted instances out. They suggest; the controller decides.

BoundsPolicy follows BlitzScale §5.3 with its loads measured twice: the paper's windowed token
rate and KV in use, and the authors' code's seconds of queued prefill work per instance, each
against an upper and a lower bound. Requests are a load of their own: an instance has places for so
many, or KV for fewer, and long answers to short prompts take them without much prefill work.
TargetOngoingPolicy counts requests, as Ray Serve does. SloPolicy derives its bounds from an aim for
the time to the first token, from what instances are measured to do, and from what a load takes. All
count capacity that is still loading, so that a load is not ordered twice for one need.
"""

from __future__ import annotations

from typing import Protocol

from livescale.control.policy.load_snapshot import LoadSnapshot, Suggestion
from livescale.values.scaling_policies import (
    Bounds,
    LinePolicy,
    ScalingPolicy,
    SloAim,
    TargetOngoing,
)
from livescale.values.units import NS_PER_MS, NS_PER_S

_QUEUE_LOWER_PERMILLE = 600
"""Of the time that the aim allows in the queue: below, an instance fewer would do."""
_SPREAD_PART = 8
"""Of the aim, for which prompts may queue while there are workers that need no load."""
_LEAST_WAIT_NS = 20_000_000
"""A queue that is over sooner is over before an answer to it could be there."""


class Policy(Protocol):
    """What the autoscaler asks."""

    def asks_for_load_time(self, load: LoadSnapshot) -> bool:
        """What it suggests for this load depends on `LoadSnapshot.load_ns`, which takes a plan to
        know."""
        return False

    def suggest(self, load: LoadSnapshot) -> Suggestion:
        """How many instances this load needs."""

    def deadlines_ns(self, now_ns: int) -> list[int]:
        """When it would suggest another number of the same load."""
        return []


def make_policy(scaling: ScalingPolicy) -> Policy:
    """The policy of a configuration value."""
    if isinstance(scaling, TargetOngoing):
        return TargetOngoingPolicy(scaling)
    if isinstance(scaling, SloAim):
        return SloPolicy(scaling)
    if isinstance(scaling, LinePolicy):  # of a model without stages
        return BoundsPolicy(Bounds())
    return BoundsPolicy(scaling)


class TargetOngoingPolicy(Policy):
    """Instances such that each has so many unfinished requests."""

    def __init__(self, target: TargetOngoing) -> None:
        self._target = target

    def suggest(self, load: LoadSnapshot) -> Suggestion:
        """`at_most` is where the lower edge of the band would be reached."""
        permille = load.requests * 1000
        at_least = -(-permille // self._target.target_permille)
        lower = self._target.target_permille * self._target.lower_permille
        at_most = -(-permille * 1000 // lower)

        def explain() -> dict[str, int]:
            return {
                "instances": load.instances,
                "requests": load.requests,
                "target_permille": self._target.target_permille,
                "at_least": at_least,
                "at_most": at_most,
            }

        return Suggestion(at_least, at_most, "ongoing_requests", explain)


class BoundsPolicy(Policy):
    """Instances such that every load lies between its bounds."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds

    def suggest(self, load: LoadSnapshot) -> Suggestion:
        """The largest need over all loads; `reason` names the load that asks for most."""
        bounds, rate, needs = self._bounds, load.prefill_tokens_per_s, []
        if rate:
            queued = load.queued_prefill_tokens * NS_PER_S
            upper, lower = rate * bounds.backlog_upper_ns, rate * bounds.backlog_lower_ns
            needs.append(need_of_rate(load, bounds, rate))
            needs.append(("prefill_backlog", *_need(queued, upper, lower)))
        needs += needs_of_room(load, bounds)
        reason, at_least, _ = max(needs, key=lambda need: need[1:], default=("idle", 0, 0))
        at_most = max([need[2] for need in needs], default=0)
        if load.requests and not at_least:
            # Nothing is known of the model yet, or its rates hide one request: one instance.
            reason, at_least, at_most = "requests", 1, max(at_most, 1)
        return Suggestion(at_least, at_most, reason, lambda: _explain(load, at_least, at_most))


class SloPolicy(Policy):
    """Instances such that prompts wait no longer than the aim for their first token allows.

    Half of the aim may pass in the queue; without an aim, two thirds of a Run. A queue that is
    longer asks for as many instances as compute it within that time. If they have to be loaded
    first, then only when the queue, with what arrives meanwhile at the present rate, does not end
    before they would be there: with an aim for what is left by that time, too, without one for
    what the bounds' longest queue leaves. What instances are measured to do counts, before what is
    configured. A prompt is not divided: there is no need for more instances than requests.
    """

    def __init__(self, aim: SloAim) -> None:
        self._aim = aim
        self._floor = DecayingFloor(aim.floor_decay_ns)

    def asks_for_load_time(self, load: LoadSnapshot) -> bool:
        """Where the queue needs more instances than there are, or would be at once."""
        rate = _rate(load)
        return bool(rate) and self._need_of_queue(load, rate) > load.instances + load.resumable

    def suggest(self, load: LoadSnapshot) -> Suggestion:
        """The largest need over queue, rate of arrivals and room; `floor` falls from the last
        peak of `at_least`."""
        rate = _rate(load)
        needs = needs_of_room(load, self._aim.room)
        if rate:
            name, arriving, most = need_of_rate(load, self._aim.room, rate)
            # A promise is kept or broken by the queue: a burst that this computes in time is worth
            # no load, and no device of another model.
            needs.append((name, 0 if self._aim.ttft_ns is not None else arriving, most))
            needs.append(("ttft_aim", *self._needs_of_queue(load, rate)))
        reason, at_least, _ = max(needs, key=lambda need: need[1:], default=("idle", 0, 0))
        at_most = max([at_least, *(need[2] for need in needs)])
        if load.requests and not at_least:
            reason, at_least, at_most = "requests", 1, max(at_most, 1)
        most = at_least if load.instances_max is None else load.instances_max
        floor = self._floor.after(load.now_ns, min(at_least, most))

        def explain() -> dict[str, int]:
            derived = {
                "ttft_aim_ms": 2 * self._wait_ns(rate) // NS_PER_MS if rate else 0,
                "service_tokens_per_s": rate,
                "load_ms": (load.load_ns or 0) // NS_PER_MS,
                "serving": load.serving,
                "resumable": load.resumable,
                "left_after_load": self._left_after_load(load, rate) // NS_PER_S,
                "floor": floor,
            }
            return _explain(load, at_least, at_most) | derived

        of_use = min(self._need_of_queue(load, rate), load.requests) if rate else 0
        at_once = min(max(at_least, of_use), most)
        spread = self._spread(load, rate)
        return Suggestion(at_least, at_most, reason, explain, at_least, floor, at_once, spread)

    def deadlines_ns(self, now_ns: int) -> list[int]:
        return self._floor.falls_ns(now_ns)

    def _wait_ns(self, rate: int) -> int:
        """How long prompts may queue."""
        if self._aim.wait_ns is not None:
            return self._aim.wait_ns
        return max(2 * self._aim.run_tokens_max * NS_PER_S // (3 * rate), _LEAST_WAIT_NS)

    def _needs_of_queue(self, load: LoadSnapshot, rate: int) -> tuple[int, int]:
        """Instances at least, and at most."""
        queued = load.queued_prefill_tokens * NS_PER_S
        within_aim = rate * self._wait_ns(rate)
        need = self._need_of_queue(load, rate)
        ready = load.instances + load.resumable
        if need > ready:
            need = max(ready, self._need_of_loads(load, rate, within_aim))
        _, most = _need(queued * 1000, 1, within_aim * _QUEUE_LOWER_PERMILLE)
        return min(need, load.requests), min(most, load.requests)

    def _spread(self, load: LoadSnapshot, rate: int) -> int:
        """Instances that start and resume without a load and shorten the queue: where an aim is
        promised, workers that are there anyway are worth nothing else."""
        if self._aim.ttft_ns is None or not rate:
            return 0
        queued = load.queued_prefill_tokens * NS_PER_S
        of_use = _need(queued, rate * self._aim.ttft_ns // _SPREAD_PART, 1)[0]
        there = load.instances + load.resumable
        most = there if load.instances_max is None else min(there, load.instances_max)
        return min(of_use, load.requests, most)

    def _need_of_queue(self, load: LoadSnapshot, rate: int) -> int:
        """Instances that compute the queue in time, if all are there at once."""
        queued = load.queued_prefill_tokens * NS_PER_S
        return _need(queued, rate * self._wait_ns(rate), 1)[0]

    def _need_of_loads(self, load: LoadSnapshot, rate: int, within_aim: int) -> int:
        """Instances, if all that are not there have to be loaded. Without an
        aim as many as a longer queue is worth: a load takes links, and perhaps the memory of other
        models' spares."""
        queued, left = load.queued_prefill_tokens * NS_PER_S, self._left_after_load(load, rate)
        if left <= 0:
            return 0
        if self._aim.ttft_ns is None:
            return _need(queued, rate * self._aim.room.backlog_upper_ns, 1)[0]
        return _need(max(queued, left), within_aim, 1)[0]

    @staticmethod
    def _left_after_load(load: LoadSnapshot, rate: int) -> int:
        """Token-nanoseconds per second that will be queued when one more instance could be there;
        nothing or less if the queue ends before."""
        load_ns = load.load_ns or 0
        arriving = load.window_tokens * NS_PER_S * load_ns // load.window_ns
        computed = (load.serving + load.resumable) * rate * load_ns
        return load.queued_prefill_tokens * NS_PER_S + arriving - computed


class DecayingFloor:
    """A number of instances that falls from its last peak to nothing, as straight as a line."""

    def __init__(self, decay_ns: int) -> None:
        self._decay_ns = decay_ns
        self._peak = 0
        self._peak_ns = 0

    def after(self, now_ns: int, need: int) -> int:
        """The floor now, when so many are needed: a need that is no lower is a new peak."""
        if need >= self.at(now_ns):
            self._peak, self._peak_ns = need, now_ns
        return self.at(now_ns)

    def falls_ns(self, now_ns: int) -> list[int]:
        """When it falls by one, if there is anything left to fall."""
        floor = self.at(now_ns)
        if not floor or not self._decay_ns:
            return []
        return [self._peak_ns + self._decay_ns - (floor - 1) * self._decay_ns // self._peak]

    def at(self, now_ns: int) -> int:
        """The floor at that time, if no need comes before."""
        left_ns = max(self._decay_ns - (now_ns - self._peak_ns), 0)
        return -(-self._peak * left_ns // self._decay_ns) if self._decay_ns else 0


def needs_of_room(load: LoadSnapshot, bounds: Bounds) -> list[tuple[str, int, int]]:
    """(name, instances at least, at most) such that all requests have places and KV."""
    waiting, needs = load.waiting_requests, []
    kv_lower = (load.kv_blocks or 0) * bounds.kv_lower_permille
    if load.kv_blocks:
        kv_upper = load.kv_blocks * bounds.kv_upper_permille
        needs.append(("kv_in_use", *_need(load.kv_blocks_used * 1000, kv_upper, kv_lower)))
    if load.places and load.requests:
        upper = _share(load.places, bounds.requests_upper_permille)
        lower = _share(load.places, bounds.requests_lower_permille)
        name = "waiting_requests" if waiting else "requests"
        needs.append((name, *_need(load.requests, upper, lower)))
    if waiting:
        # What full instances run is what fits, whether places or KV are short. While requests
        # wait, nothing goes: still more would wait.
        fitting, _ = _need(load.requests * load.full_instances, load.full_running, 1)
        needs.append(("waiting_requests", fitting, max(fitting, load.instances)))
    if load.kv_blocks:
        # Blocks that are kept for growth are no reason to grow, but without them requests
        # would wait on fewer instances.
        room = (load.kv_blocks_used + load.kv_blocks_kept) * 1000
        needs.append(("kv_in_use", 0, _need(room, 1, kv_lower)[1]))
    return needs


def need_of_rate(load: LoadSnapshot, bounds: Bounds, tokens_per_s: int) -> tuple[str, int, int]:
    """(name, instances at least, at most) such that prompts are computed as fast as they come."""
    upper, lower = bounds.token_rate_upper_permille, bounds.token_rate_lower_permille
    return ("token_rate", *_need_of_arrivals(load, tokens_per_s, upper, lower))


def need_of_kv_rate(load: LoadSnapshot, bounds: Bounds, tokens_per_s: int) -> tuple[str, int, int]:
    """(name, instances at least, at most) such that their links carry the KV of prompts as fast as
    these come: that of `tokens_per_s` each."""
    upper, lower = bounds.kv_rate_upper_permille, bounds.kv_rate_lower_permille
    return ("kv_rate", *_need_of_arrivals(load, tokens_per_s, upper, lower))


def _need_of_arrivals(
    load: LoadSnapshot, tokens_per_s: int, upper_permille: int, lower_permille: int
) -> tuple[int, int]:
    arriving, per_window = load.window_tokens * NS_PER_S * 1000, tokens_per_s * load.window_ns
    return _need(arriving, per_window * upper_permille, per_window * lower_permille)


def _rate(load: LoadSnapshot) -> int:
    """Prompt tokens per second of an instance, as measured before as configured (0: not known)."""
    return load.service_tokens_per_s or load.prefill_tokens_per_s or 0


def _need(used: int, upper: int, lower: int) -> tuple[int, int]:
    return -(-used // max(upper, 1)), -(-used // max(lower, 1))


def _explain(load: LoadSnapshot, at_least: int, at_most: int) -> dict[str, int]:
    return {
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


def _share(places: int, permille: int) -> int:
    """So many of an instance's places, one at least."""
    return max(-(-places * permille // 1000), 1)
