"""Live pairs: which loading instance helps which overloaded one, and who gets requests meanwhile.

A pair begins with the load's order and lasts until the load is over (BlitzScale §5.2). From
LiveStarted on the target gets what the source would have got; the source pulls it from there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from livescale.control.multicast.planner import free_uplinks
from livescale.control.planning.planning import Planning
from livescale.control.planning.pool_knowledge import OfPool, PoolKnowledge
from livescale.control.requests import live_costs as costs
from livescale.control.state.config import ControllerConfig, PairRule
from livescale.control.state.instance import Instance
from livescale.control.state.model_state import PartState
from livescale.messages.commands import ChangeDuty
from livescale.messages.scale_plan import ScalePlan
from livescale.values.chunks import senders as senders_of
from livescale.values.routes import OVERLAP, Does, Hop, PairProgress, Partner, Route
from livescale.values.types import FromWorker, InstanceState, Part, Role, Value, WorkerRef
from livescale.values.units import NS_PER_MS, NS_PER_S

_PASSED_PART = 16
"""A target keeps its source once it has so many-th of its layers."""


class PairingChoice(Value, frozen=True):
    """How a new instance works before everything is there (without an order: not at all), to whom
    it gives requests, and why."""

    reason: str
    live_order: str | None = None
    gives_to: tuple[Partner, ...] = ()


class PairTerms(Value, frozen=True):
    """What decides whether pairs of a model pay: the rule, bytes of KV per token and rank, prompt
    tokens that one instance computes per second (None: not known), and by target and partner what
    the link between the two carries (bytes per second; left out: not known). A pair's part
    of the prompts that wait has `waiting_tokens`, and partners have `free_blocks` of KV (left out:
    not known)."""

    rule: PairRule
    kv_bytes_per_token: int
    tokens_per_s: int | None
    link_bytes_per_s: dict[tuple[WorkerRef, WorkerRef], int]
    waiting_tokens: int
    free_blocks: dict[WorkerRef, int]

    def against_load(self, load_ns: int | None) -> str:
        """Why a load that takes so long gets no partner; empty: nothing speaks against it."""
        least = self.rule.load_tokens_min
        if self.tokens_per_s is None or load_ns is None:
            return ""
        tokens = self.tokens_per_s * load_ns // NS_PER_S
        if tokens >= least:
            return ""
        took = f"{load_ns / NS_PER_MS:.0f} ms, {tokens} prompt tokens at {self.tokens_per_s}/s"
        return f"the load should take {took}: below {least} a pair does not pay"

    def against_pair(self, target: WorkerRef, partner: WorkerRef) -> str:
        """Why these two are no pair; empty: nothing speaks against it."""
        return self._against_memory(partner) or self._against_rate(target, partner)

    def _against_memory(self, partner: WorkerRef) -> str:
        blocks, block_tokens = self.free_blocks.get(partner), self.rule.block_tokens
        if blocks is None or block_tokens is None:
            return ""
        if self.waiting_tokens <= blocks * block_tokens:
            return ""
        room = f"{partner} has room for KV of {blocks * block_tokens} tokens"
        return f"{self.waiting_tokens} prompt tokens wait for a pair, and {room}"

    def _against_rate(self, target: WorkerRef, partner: WorkerRef) -> str:
        rate, most = self.link_bytes_per_s.get((target, partner)), self.rule.link_permille_max
        if self.tokens_per_s is None or rate is None or most is None:
            return ""
        permille = self.kv_bytes_per_token * self.tokens_per_s * 1000 // rate
        if permille <= most:
            return ""
        kv = f"{self.kv_bytes_per_token} bytes of KV per token x {self.tokens_per_s} tokens/s"
        share = f"{permille / 1000:.2f} of the link's {rate} bytes/s"
        return f"{kv} are {share}: above {most / 1000:g} a pair does not pay"


def choose_pairings(
    plan: ScalePlan,
    order: str,
    over_ns: int,
    overloaded: Sequence[Partner],
    terms: PairTerms | None = None,
    engines: Collection[WorkerRef] = (),
) -> list[PairingChoice]:
    """One choice for each of the plan's instances.

    `overloaded` are instances that may be helped, those that need it most first. Helpers are taken
    from the ends of chains (`live_order_of`). Loads that are predicted to take no longer than
    `over_ns` are waited for. Who gets no partner by `terms` (None: all may) works alone, as do
    workers that are `engines`, which pass nothing.
    """
    count = len(plan.instances)
    if plan.predicted_ns is not None and plan.predicted_ns <= over_ns:
        took, most = plan.predicted_ns / NS_PER_MS, over_ns / NS_PER_MS
        reason = f"the load should take {took:.1f} ms: up to {most:g} ms it is waited for"
        return [PairingChoice(reason)] * count
    reason = "every overloaded instance has a helper" if overloaded else "no instance is overloaded"
    if order == OVERLAP:
        overloaded, reason = (), "so it is configured"
    against = terms.against_load(plan.predicted_ns) if terms is not None and overloaded else ""
    if against:
        overloaded, reason = (), against
    chosen = [PairingChoice(f"alone: {reason}", order)] * count
    free, left = free_instances(plan), list(overloaded)
    for index in live_order_of(plan):
        if plan.instances[index][0] in engines:
            chosen[index] = PairingChoice("alone: its engine passes nothing", OVERLAP)
            continue
        partner, against = _first_that_pays(plan.instances[index][0], left, terms)
        if partner is not None:
            left.remove(partner)
            sends = "sends no parameters on" if index in free else "sends parameters on, too"
            reason = f"helps instance {partner.instance}, {sends}"
            chosen[index] = PairingChoice(reason, order, (partner,))
        elif against:
            chosen[index] = PairingChoice(f"alone: {against}", order)
    return chosen


def _first_that_pays(
    target: WorkerRef, partners: Sequence[Partner], terms: PairTerms | None
) -> tuple[Partner | None, str]:
    """The first partner that the target should help; if there is none, what speaks against the
    first one."""
    refused = ""
    for partner in partners:
        against = terms.against_pair(target, partner.worker) if terms is not None else ""
        if not against:
            return partner, ""
        refused = refused or against
    return None, refused


def live_order_of(plan: ScalePlan) -> list[int]:
    """The plan's instances by how well they can help: those whose uplinks are free of parameters
    first, as what they hand over meets nothing there (BlitzScale Figure 12); of these the farthest
    from who had the model before; then in the plan's order."""
    free, hops = free_instances(plan), _hops(plan)
    depths = [max(hops.get(worker, 0) for worker in workers) for workers in plan.instances]
    return sorted(range(len(plan.instances)), key=lambda i: (i not in free, -depths[i], i))


def waits_for_teams(config: ControllerConfig, plan: ScalePlan) -> bool:
    """The plan was chosen for the teams that its instances form: before these begin, most have no
    first layers."""
    is_chosen = config.teams is not None and config.multicast == "auto"
    return is_chosen and plan.strategy == "binomial"


def free_instances(plan: ScalePlan) -> list[int]:
    """Which of the plan's instances send no parameters over their NICs."""
    free = dict.fromkeys(free_uplinks(plan))
    return [i for i, workers in enumerate(plan.instances) if all(w in free for w in workers)]


def _hops(plan: ScalePlan) -> dict[WorkerRef, int]:
    """For each receiver, the shortest way from a member that gets nothing by the plan."""
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


class Pairings(OfPool):
    """The live pairs of all models. Reads fleet, router and links; changes none."""

    def __init__(self, known: PoolKnowledge, planning: Planning) -> None:
        super().__init__(known)
        self._planning = planning
        #: of the fleet, when duties were last compared with it
        self._version = -1

    @property
    def is_live(self) -> bool:
        """Loading instances may take requests at all."""
        return self._config.live_order != "stop-the-world"

    def of_plan(self, state: PartState, plan: ScalePlan) -> list[PairingChoice]:
        """One choice for each of the plan's instances."""
        config = self._config
        if not self.is_live:
            return [PairingChoice("so it is configured")] * len(plan.instances)
        if waits_for_teams(config, plan):
            return [PairingChoice("it waits for its team")] * len(plan.instances)
        if state.part.role is Role.DECODE:
            return [PairingChoice("it computes no prompts")] * len(plan.instances)
        overloaded = self._overloaded(state.part, plan)
        terms = self._terms(state, plan, overloaded)
        engines = [w for workers in plan.instances for w in workers if self._fleet.is_engine(w)]
        return choose_pairings(
            plan, config.live_order, config.live_over_ns, overloaded, terms, engines
        )

    def decide(self) -> list[ChangeDuty]:
        """Orders to targets of which a later one has taken the source over, and takes requests."""
        if self._version == self._fleet.version:
            return []
        self._version = self._fleet.version
        orders = []
        for _, target in sorted(self._fleet.instances.items()):
            heir = self._heir(target) if target.state is InstanceState.LIVE else None
            if heir is not None and heir.state is InstanceState.LIVE:
                duty = msgspec.structs.replace(target.duty, gives_to=())
                orders.append(target.change(duty))
        return orders

    def unpaired(self, part: Part) -> list[Instance]:
        """Serving instances that no loading one helps: the others are not to go."""
        instances = self._fleet.of_part(part)
        loading = [i for i in instances if i.is_loading]
        helped = {partner.instance: None for i in loading for partner in i.duty.gives_to}
        serving = [i for i in instances if i.state is InstanceState.SERVING and i.id not in helped]
        return [instance for instance in serving if instance.duty.team is None]

    def routes(self, now_ns: int, state: PartState) -> list[Route]:
        """Where the model's requests may go: to serving instances, but for those that pull from
        live ones, and to live ones."""
        serving = self._fleet.serving(state.part)
        live = [self._live(now_ns, state, i) for i in self._fleet.live(state.part)]
        if not live:
            return serving
        pulling = {worker: None for route in live for worker in route.workers[1:]}
        return [route for route in serving if route.first.worker not in pulling] + live

    # -- helpers ------------------------------------------------------------------------------

    def _overloaded(self, part: Part, plan: ScalePlan) -> list[Partner]:
        """Who may be helped, the most outstanding prompt tokens first. What waits in the queue is
        everybody's."""
        has_queue = self._router.waiting_tokens(part) > 0
        free = [*self.unpaired(part), *self._to_pass_on(part, plan)]
        free = [instance for instance in free if not self._fleet.is_engine(instance.worker)]
        found = [(self._router.outstanding_tokens(i.worker), i) for i in free]
        found = [(tokens, i) for tokens, i in found if tokens or has_queue]
        found.sort(key=lambda entry: (-entry[0], entry[1].id))
        return [i.partner for _, i in found]

    def _to_pass_on(self, part: Part, plan: ScalePlan) -> list[Instance]:
        """Sources whose targets would forward the plan's parameters from now on: the new instances
        had better help them (BlitzScale Figure 12), unless the target has run much already."""
        if self._config.pairs is None:
            return []
        senders = dict.fromkeys(
            upstream for load in plan.loads for upstream in senders_of(load.feeds)
        )
        found = []
        for target in self._fleet.of_part(part):
            is_asked = any(FromWorker(worker) in senders for worker in target.workers)
            loaded, layers = costs.decoder_layers(target)
            if not target.is_loading or not is_asked or loaded * _PASSED_PART >= layers:
                continue
            found += [self._fleet.instances[s.instance] for s in self._sources_of(target)]
        return found

    def _sources_of(self, target: Instance) -> tuple[Partner, ...]:
        """Those that pull from a loading instance, and will go on doing so."""
        return () if self._heir(target) is not None else self._fleet.sources_of(target)

    def _heir(self, target: Instance) -> Instance | None:
        """The later target that helps the source of this one."""
        for other in self._fleet.of_part(target.part) if target.duty.gives_to else ():
            is_same = other.is_loading and other.duty.gives_to == target.duty.gives_to
            if is_same and other.id > target.id:
                return other
        return None

    def _terms(
        self, state: PartState, plan: ScalePlan, overloaded: Sequence[Partner]
    ) -> PairTerms | None:
        if self._config.pairs is None:
            return None
        targets = [workers[0] for workers in plan.instances]
        pairs = [(target, partner.worker) for target in targets for partner in overloaded]
        rates = {pair: self._planning.cluster.link_bytes_per_s(*pair) for pair in pairs}
        known = {pair: rate for pair, rate in rates.items() if rate is not None}
        kv_bytes = state.spec.kv_bytes_per_token
        helped = [self._fleet.instances[partner.instance] for partner in overloaded]
        # Those that load later get their part, too: it does not come to the source.
        count = self._fleet.tally(state.part).capacity + len(plan.instances)
        return PairTerms(
            self._config.pairs,
            kv_bytes,
            costs.tokens_per_s(state.model),
            known,
            self._router.waiting_tokens(state.part) * 2 // max(count, 2),
            {i.worker: i.kv_blocks - i.kv_blocks_used for i in helped if i.kv_blocks},
        )

    def _live(self, now_ns: int, state: PartState, target: Instance) -> Route:
        """To a loading instance, and from there to those that pull, if there are any."""
        sources = self._sources_of(target)
        is_timed = self._config.pairs is not None
        lag_tokens = costs.lag_tokens(now_ns, state.model, target, is_timed=is_timed)
        ahead = lag_tokens if is_timed and lag_tokens != costs.UNKNOWN_LAG_TOKENS else None
        if not sources:
            alone = Hop((target.partner,), None)
            return Route((alone,), lag_tokens=lag_tokens, ahead_tokens=ahead)
        hops = (Hop((target.partner,), None, Does.PREFILL), Hop(sources, None))
        if ahead is None:
            return Route(hops, costs.pair_permille(target))
        load = PairProgress(*costs.decoder_layers(target), lag_tokens)
        return Route(hops, pair=load, ahead_tokens=ahead)
