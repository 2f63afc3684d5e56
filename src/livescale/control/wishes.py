"""What every part wants: its load, compared with its capacity.

Only parts of which something changed are looked at: a pool may serve thousands of models.
"""

from __future__ import annotations

from collections.abc import Mapping, ValuesView
from dataclasses import dataclass

from livescale.control.fleet import Fleet
from livescale.control.load_snapshot import LoadSnapshot, Suggestion
from livescale.control.model_state import ModelState
from livescale.control.planning import Planning
from livescale.control.pool import ParameterPool
from livescale.control.router import Router
from livescale.messages.commands import ScaleDecided
from livescale.types import Part


@dataclass(frozen=True, slots=True)
class Wish:
    """What one part wants now."""

    state: ModelState
    capacity: int
    wanted: int
    reason: str
    suggestion: Suggestion
    least: int

    @property
    def part(self) -> Part:
        return self.state.part

    @property
    def need_permille(self) -> int:
        """How many times its capacity it wants: what starves most comes first of equals."""
        return 1000 * self.wanted // max(self.capacity, 1) if self.capacity else 1 << 30

    @property
    def spare_instances(self) -> int:
        """Instances that its load does not need now, whatever its hysteresis waits for."""
        return self.capacity - max(self.suggestion.at_most, self.least)

    @property
    def workers(self) -> int:
        """Workers that its load needs, whether they are there or not. Instances beyond the need,
        such as those that are loaded ahead, do not count."""
        kept = max(self.suggestion.at_most, self.suggestion.floor, self.least, 1)
        wanted = self.wanted if self.wanted > self.capacity else min(self.wanted, kept)
        return self.state.spec.tp_size * wanted

    def notice(self, before: int, after: int, reason: str) -> ScaleDecided:
        """The number of its instances changes, for this reason."""
        part, values = self.part, self.suggestion.explain()
        return ScaleDecided(part.model, part.role, before, after, reason, values)


class Wishes:
    """Each part's wish as of the last time that something of the part changed."""

    def __init__(
        self, fleet: Fleet, pool: ParameterPool, router: Router, planning: Planning
    ) -> None:
        self._fleet = fleet
        self._pool = pool
        self._planning = planning
        self._router = router
        self._wishes: dict[Part, Wish] = {}
        #: parts that are looked at again though nothing happens to them, and others from when on
        self._restless: dict[Part, None] = {}
        self._due_ns: dict[Part, int] = {}

    def known(self) -> ValuesView[Wish]:
        """The wishes of all parts."""
        return self._wishes.values()

    def of(self, part: Part) -> Wish | None:
        """The part's wish as of the last look (None: it was not looked at yet)."""
        return self._wishes.get(part)

    def look(self, now_ns: int, wall_zero_ns: int, states: Mapping[str, ModelState]) -> list[Wish]:
        """The wishes that may be others than last time, in the order of their models.
        `wall_zero_ns` is the wall clock at time 0."""
        parts = {**self._fleet.touched, **self._router.touched, **self._restless}
        self._fleet.touched, self._router.touched = {}, {}
        spares = self._pool.take_changed_spares()
        parts.update((states[model].part, None) for model in spares if model in states)
        parts.update((part, None) for part, due_ns in self._due_ns.items() if due_ns <= now_ns)
        if len(self._wishes) < len(states):
            known = (state.part for state in states.values())
            parts.update((part, None) for part in known if part not in self._wishes)
        changed = [states[part.model] for part in parts if part.model in states]
        changed.sort(key=lambda state: state.number)
        return [self._look_at(now_ns, wall_zero_ns, state) for state in changed]

    def look_again(self, part: Part) -> None:
        """Something that its wish depends on has changed, besides its instances and requests."""
        self._restless[part] = None

    def forget_part(self, part: Part) -> None:
        """The part leaves the pool."""
        self._wishes.pop(part, None)
        self._restless.pop(part, None)
        self._due_ns.pop(part, None)

    def deadline_ns(self) -> int | None:
        """When some part's wish changes by time alone."""
        return min(self._due_ns.values(), default=None)

    def _look_at(self, now_ns: int, wall_zero_ns: int, state: ModelState) -> Wish:
        """The part's wish now; also sets when the part must be looked at again."""
        part = state.part
        wish = self._wishes[part] = self._wish(now_ns, wall_zero_ns + now_ns, state)
        if wish.wanted != wish.capacity or state.changes_by_itself():
            self._restless[part] = None
        else:
            self._restless.pop(part, None)
        future = [t for t in state.deadlines_ns(now_ns, wall_zero_ns) if t > now_ns]
        if future:
            self._due_ns[part] = min(future)
        else:
            self._due_ns.pop(part, None)
        return wish

    def _wish(self, now_ns: int, wall_ns: int, state: ModelState) -> Wish:
        state.window.forget_old(now_ns)
        state.note_requests(now_ns, self._router.unfinished(state.part))
        capacity = self._fleet.tally(state.part).capacity
        limits = state.limits(wall_ns)
        suggestion = state.scaling.suggest(self._snapshot(now_ns, state, limits[1]))
        wanted, reason = state.autoscaler.wanted(
            now_ns, capacity, suggestion, limits, state.idle_since_ns
        )
        return Wish(state, capacity, wanted, reason, suggestion, limits[0])

    def _idle_spares(self, model: str) -> int:
        """Warm spares that could be instances at once."""
        spares = self._pool.idle_spares(model)
        return sum(not self._fleet.is_leaving(spare.members) for spare in spares)

    def _snapshot(self, now_ns: int, state: ModelState, most: int) -> LoadSnapshot:
        part = state.part
        tally = self._fleet.tally(part)
        queued = self._router.waiting_tokens(part) + tally.queued_prefill_tokens
        asks = queued and state.scaling.asks_for_load_time
        return LoadSnapshot(
            instances=tally.capacity,
            window_tokens=state.window.tokens,
            window_ns=state.window.window_ns,
            queued_prefill_tokens=queued,
            kv_blocks_used=tally.kv_blocks_used,
            prefill_tokens_per_s=state.prefill_tokens_per_s,
            kv_blocks=state.kv_blocks,
            requests=self._router.unfinished(part),
            places=state.places,
            left_waiting=self._router.left_over(part) + tally.left_out,
            full_instances=tally.full,
            full_running=tally.full_running,
            kv_blocks_kept=tally.kv_blocks_kept,
            now_ns=now_ns,
            serving=len(self._fleet.serving(part)),
            resumable=self._fleet.resumable(part) + self._idle_spares(part.model),
            service_tokens_per_s=state.service.tokens_per_s,
            load_ns=self._planning.load_ns(state) if asks else None,
            instances_max=most,
        )
