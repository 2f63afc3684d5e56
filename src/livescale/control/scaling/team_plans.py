"""For each load: the chain whose instances work live, or the binomial pipeline whose instances form
teams.

Along a chain every new instance has its first layers at once, and computes what it was given as
layers come; its requests are done when the last layer is there. A team of several instances ends
requests long before that, but begins when its members have the model between them. Neither is
always better: with few sources teams begin late, and with a long queue no instance of a chain is
ever idle. Both are reckoned as fluids, in units of one instance's prefill work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from livescale.control.planning.planning import Planning
from livescale.control.planning.pool_knowledge import OfPool, PoolKnowledge
from livescale.control.requests import live_costs as costs
from livescale.control.state.model_state import PartState
from livescale.control.together.pairing import Pairings
from livescale.control.together.team_duties import sub_groups, upstreams_of
from livescale.control.together.team_spans import Loading, TeamModel
from livescale.control.together.teams import FormedTeam, form_teams
from livescale.messages.scale_plan import ScalePlan
from livescale.values.types import Role, Value, WorkerRef
from livescale.values.units import NS_PER_S

_PERMILLE = 1000
_LINE_PROMPTS = 16
"""A loading instance computes no more than so many prompts for later: its line of batches is full.
(That is `live_batches_max` as it is by default. Short prompts share batches: then this is too few,
and the chain is better than it looks.)"""
_TEAM_PERMILLE = 900
"""Of what its members would compute alone, what a team does (`bench teams`: 0.92)."""
_TIMES_MAX = 128
"""A plan is looked at so often for the times when its teams begin."""
_PAIR_PERMILLE = ((0, 151), (250, 622), (500, 1000))
"""What a target adds to its source (`pair_rate`), from which part of its load on: x / (1 - x), on
average over the first and the second quarter, and all that an instance does in the second half."""


class Queue(Value, frozen=True):
    """`work_ns` of prompts, as one instance computes them, wait for `serving` instances; each takes
    `prompt_ns` on average (0: not known)."""

    work_ns: int
    serving: int
    prompt_ns: int


def mean_live_ns(queue: Queue, loading: int, load_ns: int, pairs: int) -> int:
    """When a prompt has its first token on average, if `loading` instances work live along a chain
    until all have everything after `load_ns`: `pairs` of them with a source, the others alone, if
    these are given anything."""
    return min(_live_ns(queue, loading, load_ns, pairs, alone) for alone in (0, loading - pairs))


def mean_teams_ns(
    queue: Queue, loading: int, load_ns: int, teams: Sequence[tuple[int, int]]
) -> int:
    """As `mean_live_ns`, if the instances wait but for `teams`: (when each begins, its members). A
    team lacks the time of a prompt at its beginning and at its end, when some members have none."""
    rate = queue.serving * _PERMILLE
    rates = [(0, rate)]
    for ready_ns, members in sorted(teams):
        rate += members * _TEAM_PERMILLE
        rates.append((min(ready_ns + 2 * queue.prompt_ns, load_ns), rate))
    return _mean_ns(queue, load_ns, rates, 0, loading)


def teams_of(plan: ScalePlan, strategy: str, model: TeamModel) -> list[tuple[int, int]]:
    """When the teams of the plan's instances should begin, and how many members each has. No teams
    where some rate is not known."""
    if not all(load.layer_ns for load in plan.loads):
        return []
    of_worker = {load.receiver: load for load in plan.loads}
    receivers = {
        number: (workers, upstreams_of(of_worker[worker].feeds for worker in workers))
        for number, workers in enumerate(plan.instances)
    }
    groups = sub_groups(receivers)
    times = {}
    for number, workers in enumerate(plan.instances):
        ranks = [_evenly(of_worker[worker].layer_ns) for worker in workers]
        times[number] = [max(of) for of in zip(*ranks, strict=True)]
    teams: list[FormedTeam] = []
    found: list[tuple[int, int]] = []
    for at_ns in _moments(times.values()):
        loading = [
            Loading(n, groups[n], frozenset(k for k, ns in enumerate(of) if ns <= at_ns))
            for n, of in times.items()
        ]
        known = len(teams)
        # They have requests from their beginning on.
        fixed = [FormedTeam(team.stages, has_kv=True) for team in teams]
        teams = form_teams(strategy, loading, model, fixed)
        found += [(at_ns, len(team.stages)) for team in teams[known:]]
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
            chain_ns = mean_teams_ns(queue, count, plan.predicted_ns, ())
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
        return Queue(tokens * NS_PER_S // rate, serving, prompt_tokens * NS_PER_S // rate)


# -- helpers, in the order used -------------------------------------------------------------------


def _live_ns(queue: Queue, loading: int, load_ns: int, pairs: int, alone: int) -> int:
    """A source pulls from its target when no prompts wait any more: until then targets compute for
    later what they were given."""
    work_ns, serving = queue.work_ns, queue.serving
    line_ns = _LINE_PROMPTS * queue.prompt_ns or load_ns
    share_ns = min(work_ns // (serving + pairs + alone), load_ns, line_ns)
    own_ns = min((work_ns - (pairs + alone) * share_ns) // serving, load_ns)
    rates = [(0, serving * _PERMILLE)]
    for part, more in _PAIR_PERMILLE:
        from_ns = max(own_ns, load_ns * part // _PERMILLE)
        rates.append((from_ns, serving * _PERMILLE + pairs * more))
    waiting = alone + (pairs if own_ns == load_ns else 0)
    kept_ns = waiting * share_ns
    return _mean_ns(queue, load_ns, rates, kept_ns, loading)


def _mean_ns(
    queue: Queue, load_ns: int, rates: Sequence[tuple[int, int]], kept_ns: int, loading: int
) -> int:
    """Work is done at these rates (permille of an instance, from a time on), then `kept_ns` of it
    at the end of the load, and what is left by all instances."""
    left, moment = queue.work_ns, 0
    stops = [at_ns for at_ns, _ in rates[1:]] + [load_ns]
    for (from_ns, rate), stop_ns in zip(rates, stops, strict=True):
        done = min(left, (stop_ns - from_ns) * rate // _PERMILLE)
        until_ns = from_ns + done * _PERMILLE // rate
        moment += done * (from_ns + until_ns) // 2
        left -= done
    kept_ns = min(kept_ns, left)
    moment += kept_ns * load_ns
    left -= kept_ns
    last_ns = load_ns + left // (queue.serving + loading)
    moment += left * (load_ns + last_ns) // 2
    return moment // queue.work_ns


def _evenly(layer_ns: Sequence[int]) -> list[int]:
    """When layers should come at the latest: as predicted, or as if bytes came at one rate from the
    beginning on. A pipeline of blocks is predicted in steps, and forwards each chunk at once."""
    order = sorted(range(len(layer_ns)), key=lambda layer: (layer_ns[layer], layer))
    whole_ns, found = max(layer_ns), list(layer_ns)
    for place, layer in enumerate(order, 1):
        found[layer] = min(layer_ns[layer], whole_ns * place // len(order))
    return found


def _moments(times: Iterable[Sequence[int]]) -> list[int]:
    """Some of the times at which layers come, in order."""
    found = sorted({ns for of in times for ns in of})
    step = -(-len(found) // _TIMES_MAX)
    return found[step - 1 :: step]
