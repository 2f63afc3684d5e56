"""What every part wants: its load, compared with its capacity.

Only parts of which something changed are looked at: a pool may serve thousands of models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from livescale.control.planning.planning import Planning
from livescale.control.planning.pool_knowledge import OfPool, PoolKnowledge
from livescale.control.policy.autoscaler import SPREAD
from livescale.control.policy.load_snapshot import LoadSnapshot, Suggestion
from livescale.control.scaling.stage_lines import StageLines
from livescale.control.state.model_state import ModelState, PartState
from livescale.messages.commands import ScaleDecided
from livescale.values.stages import stage_name
from livescale.values.types import Part, WorkerRef


@dataclass(frozen=True, slots=True)
class Wish:
    """What one part wants now."""

    state: PartState
    capacity: int
    wanted: int
    reason: str
    suggestion: Suggestion
    least: int
    most: int

    @property
    def part(self) -> Part:
        return self.state.part

    @property
    def priority(self) -> int:
        """Of its model."""
        return self.state.model.policy.priority

    @property
    def need_permille(self) -> int:
        """How many times its capacity it wants: what starves most comes first of equals."""
        return 1000 * self.wanted // max(self.capacity, 1) if self.capacity else 1 << 30

    @property
    def needed(self) -> int:
        """Instances that are worth a load, or a worker of another model."""
        return self.capacity if self.reason == SPREAD else self.wanted

    @property
    def at_once(self) -> int:
        """Instances that would be of use if all were there at once."""
        found = self.suggestion.at_once
        return self.suggestion.at_least if found is None else found

    @property
    def spare_instances(self) -> int:
        """Instances that its load does not need now, whatever its hysteresis waits for."""
        return self.capacity - self.kept

    @property
    def kept(self) -> int:
        """Instances that its load needs. What decode has for a prefill that grows counts: the part
        would ask for that again at once."""
        return max(self.suggestion.at_most, self.suggestion.at_least, self.least)

    @property
    def workers(self) -> int:
        """Workers that its load needs, whether they are there or not. Instances beyond the need,
        such as those that are loaded ahead, do not count."""
        kept = max(self.suggestion.at_most, self.suggestion.floor, self.least, 1)
        wanted = self.needed if self.needed > self.capacity else min(self.needed, kept)
        return self.state.spec.tp_size * wanted

    def notice(self, before: int, after: int, reason: str) -> ScaleDecided:
        """The number of its instances changes, for this reason."""
        part, values = self.part, self.suggestion.explain()
        return ScaleDecided(part.model, part.role, before, after, reason, values)


class Wishes(OfPool):
    """Each part's wish as of the last time that something of the part changed."""

    def __init__(self, known: PoolKnowledge, planning: Planning) -> None:
        super().__init__(known)
        self._planning = planning
        self.lines = StageLines(known.fleet, known.router, known.pool.schedule)
        #: grows when the limits of a part are others than before
        self.limits_version = 0
        #: as of the last look at each part
        self.by_part: dict[Part, Wish] = {}
        #: models that were looked at
        self._known: dict[str, None] = {}
        #: parts that are looked at again though nothing happens to them, and others from when on
        self._restless: dict[Part, None] = {}
        self._due_ns: dict[Part, int] = {}

    def look(self, now_ns: int, wall_zero_ns: int, states: Mapping[str, ModelState]) -> list[Wish]:
        """The wishes that may be others than last time, in the order of their models.
        `wall_zero_ns` is the wall clock at time 0."""
        parts = {**self._fleet.touched, **self._router.touched, **self._restless}
        self._fleet.touched, self._router.touched = {}, {}
        names = {**dict.fromkeys(part.model for part in parts), **self._pool.take_changed_spares()}
        names.update((p.model, None) for p, due_ns in self._due_ns.items() if due_ns <= now_ns)
        if len(self._known) < len(states):
            names.update((name, None) for name in states if name not in self._known)
        names |= _siblings(names, states)
        stages = self.lines.look(now_ns, wall_zero_ns + now_ns, states, names)
        names.update(dict.fromkeys(stages))
        changed = [states[name] for name in names if name in states]
        changed.sort(key=lambda model: model.number)
        for model in changed:
            model.note_requests(now_ns, self.requests_of(model, states))
        found = (self._look_at(now_ns, wall_zero_ns, model) for model in changed)
        return [wish for wishes in found for wish in wishes]

    def look_again(self, model: ModelState) -> None:
        """Something that its wishes depend on has changed, besides its instances and requests."""
        self._restless[model.entry.part] = None

    def may_be_met_now(self) -> bool:
        """Instances began, or end, or are warm spares from now on, and some part has not got what
        it wants: the next decision may do more for it, without any further event.

        Where a decision has changed nothing the next one would change nothing either: an event or
        a deadline comes first. So what cannot be met now does not wake the controller for ever.
        """
        return bool(self._fleet.touched) and any(map(self._is_unmet, self._restless))

    def _is_unmet(self, part: Part) -> bool:
        """It lacks instances, or has too many; or one of several went, and others may follow."""
        wish = self.by_part[part]
        return wish.wanted < wish.capacity or self._fleet.tally(part).capacity < wish.wanted

    def forget_model(self, model: ModelState) -> None:
        """The model leaves the pool."""
        self._known.pop(model.name, None)
        self.lines.forget(model)
        for part in model.parts:
            self.by_part.pop(part.part, None)
            self._restless.pop(part.part, None)
            self._due_ns.pop(part.part, None)
            self._router.forget_part(part.part)

    def deadline_ns(self) -> int | None:
        """When some part's wish changes by time alone."""
        line_ns = self.lines.deadline_ns()
        due_ns = min(self._due_ns.values(), default=None)
        return min((at_ns for at_ns in (line_ns, due_ns) if at_ns is not None), default=None)

    def requests_of(self, model: ModelState, states: Mapping[str, ModelState]) -> int:
        """That need instances of the model. Those of a model with stages are at the first one."""
        stage = model.spec.stage
        first = model if stage is None else states.get(stage_name(stage.model, 0))
        keys = () if first is None else first.keys
        return sum(self._router.unfinished(part) for part in keys)

    def _look_at(self, now_ns: int, wall_zero_ns: int, model: ModelState) -> list[Wish]:
        """What the model's parts want now, in their order."""
        self._known[model.name] = None
        wishes = self._wishes_of(now_ns, wall_zero_ns + now_ns, model)
        for wish in wishes:
            self._keep(now_ns, wall_zero_ns, wish)
        model.lately.after(now_ns, sum(wish.at_once for wish in wishes))
        return wishes

    def _keep(self, now_ns: int, wall_zero_ns: int, wish: Wish) -> None:
        """Also sets when the part must be looked at again."""
        state, part = wish.state, wish.part
        before = self.by_part.get(part)
        if before is None or (before.least, before.most) != (wish.least, wish.most):
            self.limits_version += 1
        self.by_part[part] = wish
        if wish.wanted != wish.capacity or state.changes_by_itself():
            self._restless[part] = None
        else:
            self._restless.pop(part, None)
        future = [t for t in state.deadlines_ns(now_ns, wall_zero_ns) if t > now_ns]
        if future:
            self._due_ns[part] = min(future)
        else:
            self._due_ns.pop(part, None)

    def _wishes_of(self, now_ns: int, wall_ns: int, model: ModelState) -> list[Wish]:
        line = self.lines.of(model)
        kv_tokens_per_s = self._kv_tokens_per_s(model) if model.has_roles else None
        loads: dict[Part, LoadSnapshot] = {}
        for state in model.parts:
            state.window.forget_old(now_ns)
            load = self._snapshot(now_ns, state, state.limits(wall_ns)[1], kv_tokens_per_s)
            if model.scaling.asks_for_load_time(state.part, load):
                load = msgspec.structs.replace(load, load_ns=self._planning.load_ns(model))
            loads[state.part] = load
        if line is not None and model.spec.stage is not None:
            suggestions = dict.fromkeys(loads, line.suggestion(model.spec.stage.number))
        else:
            suggestions = model.scaling.suggest(loads)
        return [
            self._wish(now_ns, wall_ns, state, suggestions[state.part]) for state in model.parts
        ]

    def _wish(self, now_ns: int, wall_ns: int, state: PartState, suggestion: Suggestion) -> Wish:
        capacity, limits = self._fleet.tally(state.part).capacity, state.limits(wall_ns)
        wanted, reason = state.autoscaler.wanted(
            now_ns, capacity, suggestion, limits, state.model.idle_since_ns
        )
        return Wish(state, capacity, wanted, reason, suggestion, *limits)

    def _kv_tokens_per_s(self, model: ModelState) -> int | None:
        """What the link between a prefill and a decode instance carries (None: not known)."""
        sender, receiver = (self._worker_of(state.part) for state in model.parts)
        if sender is None or receiver is None:
            return None
        rate = self._planning.cluster.link_bytes_per_s(sender, receiver)
        return rate // max(model.spec.kv_bytes_per_token, 1) if rate is not None else None

    def _worker_of(self, part: Part) -> WorkerRef | None:
        """One that gets requests of the part. (Released instances may have lost theirs.)"""
        workers = (instance.worker for instance in self._fleet.of_part(part))
        return next(filter(self._fleet.is_alive, workers), None)

    def _idle_spares(self, model: str) -> int:
        """Warm spares that could be instances at once."""
        spares = self._pool.iter_idle_spares(model)
        return sum(not self._fleet.is_leaving(spare.members) for spare in spares)

    def _snapshot(
        self, now_ns: int, state: PartState, most: int, kv_tokens_per_s: int | None
    ) -> LoadSnapshot:
        part, model = state.part, state.model
        tally = self._fleet.tally(part)
        return LoadSnapshot(
            instances=tally.capacity,
            window_tokens=state.window.tokens,
            window_ns=state.window.window_ns,
            queued_prefill_tokens=self._router.waiting_tokens(part) + tally.queued_prefill_tokens,
            kv_blocks_used=tally.kv_blocks_used,
            prefill_tokens_per_s=model.prefill_tokens_per_s,
            kv_blocks=model.kv_blocks,
            requests=self._router.unfinished(part),
            places=state.places,
            left_waiting=self._router.left_over(part) + tally.left_out,
            full_instances=tally.full,
            full_running=tally.full_running,
            kv_blocks_kept=tally.kv_blocks_kept,
            now_ns=now_ns,
            serving=len(self._fleet.serving(part)),
            resumable=self._fleet.resumable(part) + self._idle_spares(part.model),
            service_tokens_per_s=model.service.tokens_per_s,
            instances_max=most,
            kv_tokens_per_s=kv_tokens_per_s,
        )


def _siblings(names: Mapping[str, None], states: Mapping[str, ModelState]) -> dict[str, None]:
    """The other stages of models with stages: requests of the first one are theirs, too."""
    specs = (states[name].spec for name in names if name in states)
    stages = {s.stage.model: s.stage.count for s in specs if s.stage is not None}
    return {stage_name(m, number): None for m, count in stages.items() for number in range(count)}
