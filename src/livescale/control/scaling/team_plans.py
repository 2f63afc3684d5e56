"""For each load: the chain whose instances work live, or the binomial pipeline whose instances form
teams.

Along a chain every new instance has its first layers at once, and computes what it was given as
layers come; its requests are done when the last layer is there. A team of several instances ends
requests long before that, but begins when its members have the model between them. Neither is
always better: with few sources teams begin late, and with a long queue no instance of a chain is
ever idle. Both are reckoned as fluids, in units of one instance's prefill work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from livescale.control.multicast.binomial import BLOCKS
from livescale.control.planning.planning import Planning
from livescale.control.planning.pool_knowledge import OfPool, PoolKnowledge
from livescale.control.requests import live_costs as costs
from livescale.control.state.model_state import PartState
from livescale.control.together.pairing import Pairings
from livescale.control.together.team_duties import sub_groups, upstreams_of
from livescale.control.together.team_spans import Loading, TeamModel
from livescale.control.together.teams import form_teams
from livescale.messages.scale_plan import ScalePlan
from livescale.values.bindings import Binding, LateBinding
from livescale.values.routes import Stage
from livescale.values.types import LayerSpan, Role, Value, WorkerRef
from livescale.values.units import NS_PER_S

_PERMILLE = 1000
_LINE_RUNS = 16
"""A loading instance computes no more than so many Runs for later: its line of batches is full
(`live_batches_max` as it is by default)."""
_AHEAD_RUNS = 2
"""The router gives an instance so many Runs of prompts ahead (`LateBinding`)."""
_HOPS_PERMILLE = 980
"""Of what its spans allow, what a team does (`bench teams`: 0.92 to 0.93 of 0.941)."""
_TIMES_MAX = 128
"""A plan is looked at so often for the times when its teams begin."""
_SLICES = 64
"""Of a load, in which a pair's rate is taken for constant."""


class Queue(Value, frozen=True):
    """`work_ns` of prompts, as one instance computes them, wait for `serving` instances. A
    Run of as many as fit into it takes `run_ns` (0: not known)."""

    work_ns: int
    serving: int
    run_ns: int


class PlannedTeam(Value, frozen=True):
    """A team that should begin at `ready_ns`, of so many members, which are as fast together as
    `rate_permille` of an instance."""

    ready_ns: int
    members: int
    rate_permille: int


def mean_live_ns(queue: Queue, loading: int, load_ns: int, pairs: int) -> int:
    """When a prompt has its first token on average, if `loading` instances work live along a chain
    until all have everything after `load_ns`: `pairs` of them with a source, the others alone.

    As the router deals prompts out: one that works alone gets what would wait longer elsewhere,
    up to its line. A pair is given all at once that one instance computes during the load, and two
    instances hold ahead; those that serve alone take of what is left. So these may be idle behind
    a short queue while pairs are not.
    """
    work_ns, load_ns = queue.work_ns, max(load_ns, 1)
    ahead_ns = _AHEAD_RUNS * queue.run_ns
    singles = queue.serving - pairs
    kept_ns = max(work_ns - (queue.serving + pairs) * load_ns, 0)
    line_ns = min(_LINE_RUNS * queue.run_ns or load_ns, load_ns)
    kept_ns = min(kept_ns, (loading - pairs) * line_ns)
    left = _Moments(work_ns - kept_ns)
    held_ns = min(singles * ahead_ns, left.work_ns * singles // queue.serving)
    paired_ns = 0
    for start_ns, stop_ns, done_ns in _slices(load_ns):
        room_ns = pairs * (load_ns - start_ns + 2 * ahead_ns) - paired_ns
        paired_ns += min(max(room_ns, 0), left.work_ns - paired_ns - held_ns)
        pair_ns, single_ns = pairs * done_ns, singles * (stop_ns - start_ns)
        paired_ns -= left.do(min(paired_ns, pair_ns), pair_ns, start_ns, stop_ns)
        left.do(min(left.work_ns - paired_ns, single_ns), single_ns, start_ns, stop_ns)
        held_ns = min(held_ns, left.work_ns - paired_ns)
    left.moment += kept_ns * load_ns
    left.finish(load_ns, queue.serving + loading)
    return left.moment // work_ns


def mean_teams_ns(
    queue: Queue, loading: int, load_ns: int, teams: Sequence[PlannedTeam] = ()
) -> int:
    """As `mean_live_ns`, if the instances wait but for `teams`. A team's first Run goes through
    all of its members before there is a first token."""
    rates = [(0, queue.serving * _PERMILLE)]
    begins = []
    for team in teams:
        filling_ns = queue.run_ns - queue.run_ns * _PERMILLE // team.rate_permille
        begins.append((min(team.ready_ns + filling_ns, load_ns), team.rate_permille))
    for begin_ns, rate_permille in sorted(begins):
        rates.append((begin_ns, rates[-1][1] + rate_permille))
    left = _Moments(queue.work_ns)
    stops = [at_ns for at_ns, _ in rates[1:]] + [load_ns]
    for (from_ns, rate), stop_ns in zip(rates, stops, strict=True):
        most_ns = (stop_ns - from_ns) * rate // _PERMILLE
        left.do(min(left.work_ns, most_ns), most_ns, from_ns, stop_ns)
    left.finish(load_ns, queue.serving + loading)
    return left.moment // queue.work_ns


def teams_of(plan: ScalePlan, strategy: str, model: TeamModel) -> list[PlannedTeam]:
    """When the teams of the instances of a binomial plan should begin. No teams where some rate is
    not known.

    A pipeline of blocks is predicted in steps, and forwards each chunk at once. So those that get
    their parameters from one source all have its first blocks as fast as these come from there,
    and what comes later in their own orders.
    """
    if not all(load.layer_ns for load in plan.loads):
        return []
    of_worker = {load.receiver: load for load in plan.loads}
    receivers = {
        number: (workers, upstreams_of(of_worker[worker].feeds for worker in workers))
        for number, workers in enumerate(plan.instances)
    }
    groups = sub_groups(receivers)
    nodes = max(Counter(groups.values()).values()) + 1
    ends_ns = max(load.completed_ns or 0 for load in plan.loads)
    copy_ns = ends_ns * BLOCKS // (BLOCKS + (nodes - 1).bit_length() - 1)
    steps = {
        number: _latest(of_worker[worker].layer_ns for worker in workers)
        for number, workers in enumerate(plan.instances)
    }
    first = {
        group: [
            min(of) for of in zip(*(steps[n] for n in groups if groups[n] == group), strict=True)
        ]
        for group in groups.values()
    }
    times = {
        number: [
            min(of)
            for of in zip(
                _evenly(own, ends_ns), _evenly(first[groups[number]], copy_ns), strict=True
            )
        ]
        for number, own in steps.items()
    }
    found: list[PlannedTeam] = []
    for at_ns in _moments(times.values()):
        loading = [
            Loading(n, groups[n], frozenset(k for k, ns in enumerate(of) if ns <= at_ns))
            for n, of in times.items()
        ]
        for stages in form_teams(strategy, loading, model):
            found.append(_planned(at_ns, stages, model))
            for number, _ in stages:
                del times[number]
    return found


class TeamPlans(OfPool):
    """Makes the plans of new instances where teams are on."""

    def __init__(self, known: PoolKnowledge, planning: Planning, pairings: Pairings) -> None:
        super().__init__(known)
        self._planning = planning
        self._pairings = pairings

    def plan(
        self,
        part: PartState,
        count: int,
        spare: tuple[WorkerRef, ...],
        targets: tuple[tuple[WorkerRef, ...], ...] | None,
    ) -> ScalePlan | None:
        """A plan for new instances. With `multicast` "auto" that with the shorter wait for first
        tokens, by what is queued now."""
        plan = self._planning.plan_instances(part.model, count, spare, targets)
        strategy = self._config.teams
        if strategy is None or self._config.multicast != "auto" or plan is None:
            return plan
        queue = self._queue(part)
        if part.part.role is not Role.UNIFIED or queue is None or len(plan.instances) < 2:
            return plan
        other = self._planning.plan_instances(
            part.model, count, spare, plan.instances, strategy="binomial"
        )
        if other is None or plan.predicted_ns is None or other.predicted_ns is None:
            return plan
        count = len(plan.instances)
        model = TeamModel(part.model.spec.layers - 2, part.model.spec.is_tied)
        if self._pairings.is_live:
            pairs = sum(bool(choice.gives_to) for choice in self._pairings.of_plan(part, plan))
            chain_ns = mean_live_ns(queue, count, plan.predicted_ns, pairs)
        else:  # its instances wait for the end of the load
            chain_ns = mean_teams_ns(queue, count, plan.predicted_ns)
        teams_ns = mean_teams_ns(queue, count, other.predicted_ns, teams_of(other, strategy, model))
        return other if teams_ns < chain_ns else plan

    def _queue(self, part: PartState) -> Queue | None:
        """What waits for the part's instances; None if none serves, nothing waits, or their rate is
        not known."""
        serving = len(self._fleet.serving(part.part))
        rate = costs.tokens_per_s(part.model)
        waiting = self._router.waiting_tokens(part.part)
        tokens = waiting + self._fleet.tally(part.part).queued_prefill_tokens
        if not serving or not tokens or rate is None:
            return None
        prompt_tokens = waiting // max(self._router.waiting(part.part), 1)
        run_tokens = max(_run_tokens(self._config.binding) // max(prompt_tokens, 1), 1)
        run_tokens *= prompt_tokens
        return Queue(tokens * NS_PER_S // rate, serving, run_tokens * NS_PER_S // rate)


# -- helpers, in the order used -------------------------------------------------------------------


class _Moments:
    """Work that is left, and the sum of what is done times when."""

    def __init__(self, work_ns: int) -> None:
        self.work_ns = work_ns
        self.moment = 0

    def do(self, done_ns: int, most_ns: int, start_ns: int, stop_ns: int) -> int:
        """So much is done from `start_ns` on, at a rate by which `most_ns` were until `stop_ns`."""
        took_ns = (stop_ns - start_ns) * done_ns // most_ns if most_ns else 0
        self.moment += done_ns * (2 * start_ns + took_ns) // 2
        self.work_ns -= done_ns
        return done_ns

    def finish(self, from_ns: int, instances: int) -> None:
        """All that is left is done by so many."""
        self.do(self.work_ns, self.work_ns, from_ns, from_ns + self.work_ns // instances)


def _slices(load_ns: int) -> Iterator[tuple[int, int, int]]:
    """Of a load: when each begins and ends, and what a pair does in it (`pair_until`). The source
    passes what its target has, and runs the rest; both together do no more than two instances."""
    alone_ns = done_ns = start_ns = 0
    for number in range(1, _SLICES + 1):
        stop_ns = load_ns * number // _SLICES
        alone_ns += load_ns * 2 // (2 * (_SLICES - number) + 1)
        now_ns = min(alone_ns, 2 * stop_ns)
        yield start_ns, stop_ns, now_ns - done_ns
        start_ns, done_ns = stop_ns, now_ns


def _run_tokens(binding: Binding) -> int:
    return binding.run_tokens_max if isinstance(binding, LateBinding) else 1


def _planned(at_ns: int, stages: Sequence[Stage], model: TeamModel) -> PlannedTeam:
    """The slowest member is as slow as its decoder layers are many."""
    most = max(_decoders(span, model) for _, span in stages)
    rate_permille = _HOPS_PERMILLE * model.layers // most
    return PlannedTeam(at_ns, len(stages), max(rate_permille, _PERMILLE))


def _decoders(span: LayerSpan, model: TeamModel) -> int:
    return min(span.stop, model.layers + 1) - max(span.start, 1)


def _latest(layer_ns: Iterable[Sequence[int]]) -> list[int]:
    """An instance has a layer with the last of its ranks."""
    return [max(of) for of in zip(*layer_ns, strict=True)]


def _evenly(layer_ns: Sequence[int], whole_ns: int) -> list[int]:
    """When layers should come at the latest: as predicted, or in that order at one rate."""
    order = sorted(range(len(layer_ns)), key=lambda layer: (layer_ns[layer], layer))
    found = list(layer_ns)
    for place, layer in enumerate(order, 1):
        found[layer] = min(layer_ns[layer], whole_ns * place // len(order))
    return found


def _moments(times: Iterable[Sequence[int]]) -> list[int]:
    """Some of the times at which layers come, in order."""
    found = sorted({ns for of in times for ns in of})
    step = -(-len(found) // _TIMES_MAX)
    return found[step - 1 :: step]
