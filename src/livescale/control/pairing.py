"""Live pairs: which loading instance helps which overloaded one, and who gets requests meanwhile.

A pair begins with the load's order and lasts until the load is over (BlitzScale §5.2). From
LiveStarted on the target gets what the source would have got; the source pulls it from there.
"""

from __future__ import annotations

from collections.abc import Sequence

from livescale.control.config import ControllerConfig
from livescale.control.fleet import Fleet
from livescale.control.instance import Instance
from livescale.control.model_state import ModelState
from livescale.control.multicast.planner import free_uplinks
from livescale.control.router import Router
from livescale.plans import ScalePlan, pair_rate
from livescale.routes import Does, Hop, Partner, Route
from livescale.types import FromWorker, InstanceState, Part, Value, WorkerRef

_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000
# More than anybody has: what is loading for an unknown time comes after all that serve.
_UNKNOWN_LAG_TOKENS = 1 << 40


class PairingChoice(Value, frozen=True):
    """How a new instance works before everything is there (without an order: not at all), to whom
    it gives requests, and why."""

    reason: str
    live_order: str | None = None
    gives_to: tuple[Partner, ...] = ()


def choose_pairings(
    plan: ScalePlan, order: str, over_ns: int, overloaded: Sequence[Partner]
) -> list[PairingChoice]:
    """One choice for each of the plan's instances.

    `overloaded` are instances that may be helped, those that need it most first. Helpers are taken
    from the ends of chains (`live_order_of`). Loads that are predicted to take no longer than
    `over_ns` are waited for.
    """
    count = len(plan.instances)
    if plan.predicted_ns is not None and plan.predicted_ns <= over_ns:
        took, most = plan.predicted_ns / _NS_PER_MS, over_ns / _NS_PER_MS
        reason = f"the load should take {took:.1f} ms: up to {most:g} ms it is waited for"
        return [PairingChoice(reason)] * count
    reason = "every overloaded instance has a helper" if overloaded else "nobody is overloaded"
    if order == "overlap":
        overloaded, reason = (), "so it is configured"
    chosen = [PairingChoice(f"alone: {reason}", order)] * count
    free = free_instances(plan)
    for index, partner in zip(live_order_of(plan), overloaded, strict=False):
        sends = "sends no parameters on" if index in free else "sends parameters on, too"
        reason = f"helps instance {partner.instance}, {sends}"
        chosen[index] = PairingChoice(reason, order, (partner,))
    return chosen


def live_order_of(plan: ScalePlan) -> list[int]:
    """The plan's instances by how well they can help: those whose uplinks are free of parameters
    first, as what they hand over meets nothing there (BlitzScale Figure 12); of these the farthest
    from who had the model before; then in the plan's order."""
    free, hops = free_instances(plan), _hops(plan)
    depths = [max(hops.get(worker, 0) for worker in workers) for workers in plan.instances]
    return sorted(range(len(plan.instances)), key=lambda i: (i not in free, -depths[i], i))


def free_instances(plan: ScalePlan) -> list[int]:
    """Which of the plan's instances send no parameters over their NICs."""
    free = dict.fromkeys(free_uplinks(plan))
    return [i for i, workers in enumerate(plan.instances) if all(w in free for w in workers)]


def _hops(plan: ScalePlan) -> dict[WorkerRef, int]:
    """For each receiver, the shortest way from somebody who gets nothing by the plan."""
    receivers = {load.receiver: None for load in plan.loads}
    upstreams = {
        load.receiver: [f.upstream.worker for f in load.feeds if isinstance(f.upstream, FromWorker)]
        for load in plan.loads
    }
    hops: dict[WorkerRef, int] = {}
    reached = {r: None for r, ups in upstreams.items() if any(u not in receivers for u in ups)}
    reached.update((load.receiver, None) for load in plan.loads if not upstreams[load.receiver])
    distance = 0
    while reached:
        distance += 1
        hops.update(dict.fromkeys(reached, distance))
        reached = {
            r: None
            for r, ups in upstreams.items()
            if r not in hops and any(up in reached for up in ups)
        }
    return hops


class Pairings:
    """The live pairs of all models. Reads fleet and router; changes neither."""

    def __init__(self, config: ControllerConfig, fleet: Fleet, router: Router) -> None:
        self._config = config
        self._fleet = fleet
        self._router = router

    @property
    def is_live(self) -> bool:
        """Loading instances may take requests at all."""
        return self._config.live_order != "stop-the-world"

    def of_plan(self, state: ModelState, plan: ScalePlan) -> list[PairingChoice]:
        """One choice for each of the plan's instances."""
        config = self._config
        if not self.is_live:
            return [PairingChoice("so it is configured")] * len(plan.instances)
        overloaded = self._overloaded(state.part)
        return choose_pairings(plan, config.live_order, config.live_over_ns, overloaded)

    def unpaired(self, part: Part) -> list[Instance]:
        """Serving instances that no loading one helps: the others are not to go."""
        instances = self._fleet.of_part(part)
        loading = [i for i in instances if i.is_loading]
        helped = {partner.instance: None for i in loading for partner in i.duty.gives_to}
        return [i for i in instances if i.state is InstanceState.SERVING and i.id not in helped]

    def routes(self, now_ns: int, state: ModelState) -> list[Route]:
        """Where the model's requests may go: to serving instances, but for those that pull from
        live ones, and to live ones."""
        serving = self._fleet.serving(state.part)
        live = [self._live(now_ns, state, i) for i in self._fleet.live(state.part)]
        if not live:
            return serving
        pulling = {worker: None for route in live for worker in route.workers[1:]}
        return [route for route in serving if route.first.worker not in pulling] + live

    # -- helpers ------------------------------------------------------------------------------

    def _overloaded(self, part: Part) -> list[Partner]:
        """Who may be helped, the most outstanding prompt tokens first. What waits in the queue is
        everybody's."""
        has_queue = self._router.waiting_tokens(part) > 0
        found = [(self._router.outstanding_tokens(i.worker), i) for i in self.unpaired(part)]
        found = [(tokens, i) for tokens, i in found if tokens or has_queue]
        found.sort(key=lambda entry: (-entry[0], entry[1].id))
        return [i.partner for _, i in found]

    def _live(self, now_ns: int, state: ModelState, target: Instance) -> Route:
        """To a loading instance, and from there to those that pull, if there are any."""
        sources = self._fleet.sources_of(target)
        if not sources:
            alone = Hop((target.partner,), None)
            return Route((alone,), lag_tokens=_lag_tokens(now_ns, state, target))
        hops = (Hop((target.partner,), None, Does.PREFILL), Hop(sources, None))
        return Route(hops, _cost_permille(target))


def _cost_permille(target: Instance) -> int:
    """What a prompt costs a pair, of what it costs one instance."""
    layers = max(target.part.span.stop - 2, 1)
    rate, cost = pair_rate(min(max(target.watermark - 1, 0), layers), layers)
    return cost * 1000 // rate


def lag_tokens(
    *,
    now_ns: int,
    layer_bytes: Sequence[int],
    watermark: int,
    first_byte_ns: int | None,
    predicted_ns: int | None,
    tokens_per_s: int | None,
) -> int:
    """Prompt tokens that an instance computes, `tokens_per_s`, while what a target misses is on its
    way.

    The target has `watermark` of the model's layers. What it misses comes as fast as what it has,
    since `first_byte_ns`, or as was predicted for the whole load while it has nothing.
    """
    there, missing = sum(layer_bytes[:watermark]), sum(layer_bytes[watermark:])
    if there and first_byte_ns is not None:
        left_ns = (now_ns - first_byte_ns) * missing // there
    elif predicted_ns is not None:
        left_ns = predicted_ns * missing // (there + missing)
    else:
        return _UNKNOWN_LAG_TOKENS
    if tokens_per_s is None:
        return _UNKNOWN_LAG_TOKENS
    return max(left_ns * tokens_per_s // _NS_PER_S, 1)


def _lag_tokens(now_ns: int, state: ModelState, target: Instance) -> int:
    return lag_tokens(
        now_ns=now_ns,
        layer_bytes=state.spec.layer_bytes,
        watermark=target.watermark,
        first_byte_ns=target.first_byte_ns,
        predicted_ns=target.predicted_ns,
        tokens_per_s=state.prefill_tokens_per_s,
    )
