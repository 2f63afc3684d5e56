"""Stages of models that scale by themselves: once per period, all of a model's together.

What instances report becomes loads of stages (`stages/line_window.py`), these become decisions
(`stages/line_strategies.py`), and those are suggested for each stage's part until the next period;
cores are ordered by them (`core_orders.py`). A line without requests whose stages have their least
numbers rests: nothing wakes the controller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from livescale.control.policy.load_snapshot import Suggestion
from livescale.control.requests.router import Router
from livescale.control.scaling.core_orders import CoreLevel, CoreOrders
from livescale.control.stages.corrector import StageDecision
from livescale.control.stages.key_stages import KeyStage
from livescale.control.stages.line_strategies import line_strategy
from livescale.control.stages.line_window import LineSeen, LineWindow, StageSeen
from livescale.control.state.fleet import Fleet
from livescale.control.state.model_state import ModelState
from livescale.control.state.stage_schedule import StageSchedule
from livescale.messages.commands import AnyCommand, CoresDecided
from livescale.messages.events import CoresChanged
from livescale.values.scaling_policies import LinePolicy
from livescale.values.stages import stage_name
from livescale.values.types import Part

Limits = Sequence[tuple[int, int]]


class StageLines:
    """All lines whose stages scale by queues. Reads the fleet and the router."""

    def __init__(self, fleet: Fleet, router: Router, schedule: StageSchedule) -> None:
        """Key stages are written into the `schedule`."""
        self._fleet = fleet
        self._router = router
        self._schedule = schedule
        self._lines: dict[str, StageLine] = {}
        self._cores = CoreOrders(fleet)
        #: grows when a line decided, began or ended
        self._decisions = 0
        #: of cores, for the record
        self._notices: list[CoresDecided] = []

    def look(
        self, now_ns: int, wall_ns: int, states: Mapping[str, ModelState], names: Iterable[str]
    ) -> list[str]:
        """Something happened to models with these names. Returns the stages whose wishes may be
        others now: all of a line together."""
        lines = dict.fromkeys(name for name, line in self._lines.items() if line.is_due(now_ns))
        for name in names:
            stage = states[name].spec.stage if name in states else None
            if stage is not None:
                lines[stage.model] = None
        found: list[str] = []
        for name in lines:
            stages = _stages(name, states)
            policy = stages[0].line_policy if stages else None
            if policy is None:
                self._end(name)
                continue
            line = self._lines.get(name)
            if line is None or line.policy != policy:
                self._end(name)
                line = self._lines[name] = StageLine(name, policy)
            line.parts = [state.entry.part for state in stages]
            line.requests = sum(self._router.unfinished(part) for part in stages[0].keys)
            total = policy.replicas_total or len(self._fleet.workers)
            limits = [state.limits(wall_ns) for state in stages]
            notices = line.look(now_ns, self._seen(line), limits, total)
            for number, state in enumerate(stages):
                self._schedule.mark(now_ns, state.name, line.key_stages.get(number))
            if notices is not None:
                self._decisions += 1
                self._notices += notices
            found += [state.name for state in stages]
        return found

    def order_cores(self) -> list[AnyCommand]:
        """What workers are to have by the decisions, and these."""
        notices, self._notices = self._notices, []
        return [*notices, *self._cores.decide(self._decisions, self._lines.values())]

    def cores_changed(self, event: CoresChanged, _now_ns: int) -> bool:
        """A worker has other cores: replicas that they make up for may go now."""
        is_news = self._fleet.cores.changed(event)
        instance = self._fleet.instance_on(event.worker)
        if is_news and instance is not None:
            self._fleet.touched[instance.part] = None
        return is_news

    def of(self, model: ModelState) -> StageLine | None:
        """The line that it is a stage of."""
        stage = model.spec.stage
        if stage is None or model.line_policy is None:
            return None
        return self._lines.get(stage.model)

    def forget(self, model: ModelState) -> None:
        """The model leaves the pool: the line is over, if it is a stage of one."""
        if model.spec.stage is not None:
            self._end(model.spec.stage.model)

    def _end(self, name: str) -> None:
        self._lines.pop(name, None)
        self._decisions += 1

    def deadline_ns(self) -> int | None:
        """When the next period of a line is over."""
        due_ns = [line.due_ns for line in self._lines.values() if line.due_ns is not None]
        return min(due_ns, default=None)

    def _seen(self, line: StageLine) -> LineSeen:
        first = line.parts[0]
        queued = self._router.waiting_tokens(first) + self._fleet.tally(first).queued_prefill_tokens
        cores = self._cores.seen(line.parts, line.policy)
        return LineSeen(queued, tuple(map(self._stage_seen, line.parts)), cores)

    def _stage_seen(self, part: Part) -> StageSeen:
        counts = {
            instance.id: instance.stage_counts
            for instance in self._fleet.of_part(part)
            if instance.stage_counts is not None
        }
        tally, serving = self._fleet.tally(part), self._fleet.serving(part)
        return StageSeen(tally.capacity, len(serving), counts)


class StageLine:
    """One line: its windows, and what was decided last."""

    def __init__(self, name: str, policy: LinePolicy) -> None:
        self.policy = policy
        self._name = name
        #: what its stages' instances serve
        self.parts: Sequence[Part] = ()
        #: unfinished ones
        self.requests = 0
        #: when the window is over (None: the line rests)
        self.due_ns: int | None = None
        self._scaling = line_strategy(policy)
        self._window = LineWindow()
        self._decided: Sequence[StageDecision] = ()
        #: cores that each stage is to have now (None: they are left alone)
        self.levels: Sequence[CoreLevel] | None = None
        #: replicas that each stage is to have now
        self._counts: Sequence[int] = ()

    def is_due(self, now_ns: int) -> bool:
        """The window is over."""
        return self.due_ns is not None and now_ns >= self.due_ns

    def look(
        self, now_ns: int, seen: LineSeen, limits: Limits, total: int
    ) -> list[CoresDecided] | None:
        """This is the line now. Returns what was decided of cores (None: nothing was decided)."""
        notices = None
        if self.is_due(now_ns):
            notices = self._step(now_ns, seen, limits, total)
        elif self.due_ns is not None:
            self._window.note(now_ns, seen.queued_tokens)
        elif self.requests:
            self._window.begin(now_ns, seen)
            self.due_ns = now_ns + self.policy.period_ns
        self._counts = self._allotted(seen, limits, total)
        return notices

    @property
    def key_stages(self) -> Mapping[int, KeyStage]:
        """By number, as of the last window."""
        return self._scaling.key_stages

    def suggestion(self, number: int) -> Suggestion:
        """For the stage with this number."""
        count = self._counts[number]
        # Of the last replica the autoscaler decides, by how long there has been no request.
        wanted = count if self.requests or count > 1 else 0
        decision = self._decided[number] if self._decided else None
        if decision is None:
            return Suggestion(wanted, wanted, "requests", lambda: {"requests": self.requests})
        is_key = decision.key_reason is not None
        values = {**decision.values, "to_replicas": decision.to_replicas, "is_key": int(is_key)}
        reason = decision.reason
        return Suggestion(wanted, wanted, reason, lambda: values, low_reason=reason)

    def _step(self, now_ns: int, seen: LineSeen, limits: Limits, total: int) -> list[CoresDecided]:
        """The window is over, and the next one begins, unless there is nothing to wait for."""
        loads = self._window.end(now_ns, seen)
        if loads is not None:
            self._decided = self._scaling.step(now_ns, loads, limits, total, seen.cores)
            self.levels = _levels(self._decided)
        arrives = loads is not None and any(load.arrivals_per_s for load in loads)
        idle = self._scaling.idle_counts
        is_least = all(
            stage.replicas <= max(least, idle.get(number, 1))
            for number, (stage, (least, _)) in enumerate(zip(seen.stages, limits, strict=True))
        )
        is_over = not self.requests and not arrives and (is_least or loads is None)
        self.due_ns = None if is_over else now_ns + self.policy.period_ns
        if is_over:
            self.levels = None
            self._decided = self._decided if is_least else ()
            return self._given_back(seen)
        return [] if loads is None else self._changed_cores()

    def _changed_cores(self) -> list[CoresDecided]:
        """What was decided of the stages whose cores change."""
        return [
            CoresDecided(
                stage_name(self._name, its.stage),
                its.from_cores,
                its.to_cores,
                its.cores_reason,
                {**its.values, "to_replicas": its.to_replicas},
            )
            for its in self._decided
            if its.from_cores is not None
            and its.to_cores is not None
            and its.from_cores != its.to_cores
        ]

    def _given_back(self, seen: LineSeen) -> list[CoresDecided]:
        """The line rests: all have what they began with."""
        stages = seen.cores.stages if seen.cores is not None else ()
        return [
            CoresDecided(stage_name(self._name, number), its.level, its.own, "no_requests", {})
            for number, its in enumerate(stages)
            if its.level > its.own
        ]

    def _ready(self, its: StageDecision, seen: LineSeen) -> int:
        """What was decided; replicas that cores make up for stay until their workers have told."""
        have = seen.stages[its.stage].replicas
        if seen.cores is None or its.to_cores is None or its.to_replicas >= have:
            return its.to_replicas
        instances = seen.cores.stages[its.stage].instances
        told = sum(one.cores >= its.to_cores for one in instances)
        is_awaited = its.to_cores > (its.from_cores or 0) and told < its.to_replicas
        return have if is_awaited else its.to_replicas

    def _allotted(self, seen: LineSeen, limits: Limits, total: int) -> list[int]:
        """What was decided, as far as the total allows it while others still have what they are to
        give up. Before the first decision: what is there, and one of each for requests; without
        requests the least."""
        have = [stage.replicas for stage in seen.stages]
        if self._decided:
            wanted = [self._ready(its, seen) for its in self._decided]
        else:
            leasts = [max(least, 1) for least, _ in limits]
            pairs = zip(have, leasts, strict=True)
            wanted = [max(n, 1) if self.requests else min(n, least) for n, least in pairs]
        # What lacks of the least numbers comes whatever is suggested.
        lacking = [max(least - n, 0) for n, (least, _) in zip(have, limits, strict=True)]
        free = max(total - sum(have) - sum(lacking), 0)
        found = []
        for count, n, comes in zip(wanted, have, lacking, strict=True):
            more = min(max(count - n - comes, 0), free)
            free -= more
            found.append(n + comes + more if count > n else count)
        return found


def _levels(decided: Sequence[StageDecision]) -> list[CoreLevel] | None:
    found = [
        CoreLevel(its.to_replicas, its.to_cores) for its in decided if its.to_cores is not None
    ]
    return found if len(found) == len(decided) else None


def _stages(model: str, states: Mapping[str, ModelState]) -> list[ModelState]:
    """All of a model's stages, in order (none: some are not there)."""
    first = states.get(stage_name(model, 0))
    stage = first.spec.stage if first is not None else None
    if stage is None:
        return []
    names = [stage_name(model, number) for number in range(stage.count)]
    return [states[name] for name in names] if all(name in states for name in names) else []
