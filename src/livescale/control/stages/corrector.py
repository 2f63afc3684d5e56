"""The Corrector (QUART §5.1, Algorithm 1): how many replicas each stage should have, and why.

What the paper leaves open or prints wrong is decided so: the error is positive where requests wait
too long; T_i is Erlang's; R_total holds for the sum over all stages; the PID says how fast replicas
come and go, the formula for T_i how many are enough, so that whole replicas do not go to and fro.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from livescale.control.stages.formulas.pid import Gains, Pid, PidTerms
from livescale.control.stages.formulas.shares import StageWish, share_out
from livescale.control.stages.formulas.stage_load import StageLoad
from livescale.control.stages.formulas.targets import wait_allowed_ns
from livescale.control.stages.key_stages import KeyStage, KeyStages
from livescale.control.stages.recent_need import RecentNeed
from livescale.values.types import Value


class CorrectorSettings(Value, frozen=True):
    """How a Corrector behaves.

    `replicas_min` is r_min of every stage. The error is at most `error_max` waits that the target
    allows. A replica goes when for the scale-down timeout the others would have kept requests below
    `lower_permille` of that wait. What waits beyond it should be served within a period.
    """

    period_ns: int = 1_000_000_000
    scale_down_timeout_ns: int = 3_000_000_000
    replicas_min: int = 1
    gains: Gains = Gains()
    error_max: float = 4.0
    lower_permille: int = 800

    def __post_init__(self) -> None:
        if self.period_ns <= 0 or self.replicas_min < 1 or self.error_max <= 0:
            raise ValueError(f"settings that cannot be: {self}")


class StageDecision(Value, frozen=True):
    """What becomes of a stage: equal numbers where nothing changes.

    `reason` is one of `overloaded` (requests come at least as fast as they are served),
    `over_target`, `below_min`, `over_total`, `surplus`, and without a change `no_room` (R_total),
    `backlog` (requests wait too long, and what was ordered serves them within a period),
    `within_target`, `surplus_waits` (for the scale-down timeout), `small_surplus` (of which the PID
    does not make a whole replica yet). `key_reason` is None for a stage
    that is no key stage. `values` are the figures behind it; `sojourn_ns` is missing where there is
    no steady state. Each replica has `from_cores`, and is to have `to_cores` for `cores_reason`
    (None: they are left alone); where these are more, replicas go when others have them.
    """

    stage: int
    from_replicas: int
    to_replicas: int
    reason: str
    key_reason: str | None
    values: dict[str, int]
    from_cores: int | None = None
    to_cores: int | None = None
    cores_reason: str = ""


@dataclass(slots=True)
class _StageState:
    pid: Pid
    #: sign of the change that was asked for and could not be made
    held: int = 0
    #: how many replicas were needed within the scale-down timeout
    need: RecentNeed = field(default_factory=RecentNeed)


@dataclass(slots=True)
class Corrector:
    """Corrects the stages of one model once per period."""

    settings: CorrectorSettings
    _states: dict[int, _StageState] = field(default_factory=dict)
    _keys: KeyStages | None = None
    _last_ns: int | None = None

    def step(
        self,
        now_ns: int,
        loads: Sequence[StageLoad],
        targets_ns: Sequence[int],
        replicas_total: int,
    ) -> list[StageDecision]:
        """A decision per stage, in the order of `loads`. `targets_ns[i]` belongs to `loads[i]`.

        After it all stages have at most `replicas_total` replicas together, and each at least
        `replicas_min` where that fits into it.
        """
        if len({load.stage for load in loads}) < len(loads):
            raise ValueError("a stage has two loads")
        periods = 1.0
        if self._last_ns is not None:
            periods = max(now_ns - self._last_ns, 0) / self.settings.period_ns
        self._last_ns = now_ns
        known, gains = self._states, self.settings.gains
        stages = [load.stage for load in loads]
        self._states = {s: known.get(s) or _StageState(Pid(gains)) for s in stages}
        seen = [
            self._look(now_ns, load, target_ns, replicas_total, periods)
            for load, target_ns in zip(loads, targets_ns, strict=True)
        ]
        granted = share_out([its.wish for its in seen], self.settings.replicas_min, replicas_total)
        if self._keys is None:
            self._keys = KeyStages(self.settings.scale_down_timeout_ns)
        self._keys.step(now_ns, loads, [its.error > 0 for its in seen])
        keys = {stage: key.reason for stage, key in self._keys.listed.items()}
        return [
            self._decide(now_ns, its, count, keys.get(its.wish.load.stage), replicas_total)
            for its, count in zip(seen, granted, strict=True)
        ]

    @property
    def key_stages(self) -> dict[int, KeyStage]:
        """Of the last step, in order."""
        return {} if self._keys is None else self._keys.listed

    def _look(
        self, now_ns: int, load: StageLoad, target_ns: int, most: int, periods: float
    ) -> _Seen:
        """What the stage should have if it were alone."""
        state = self._states[load.stage]
        allowed_ns = wait_allowed_ns(target_ns, load.service_ns)
        # In units of the wait that is allowed, not of T_target: a target little above the service
        # time would make too many replicas look like a small error for ever.
        late = (load.wait_ns(load.replicas) - allowed_ns) / allowed_ns
        error = min(late, self.settings.error_max)
        terms = state.pid.step(error, periods, held=state.held)
        if error > 0:
            count, reason = self._larger(load, allowed_ns, most, terms)
            # What is there and on its way was needed, too, or it goes before the queue is gone.
            self._floor(now_ns, state, count)
        else:
            count, reason = self._smaller(now_ns, state, load, allowed_ns, terms)
        if count < self.settings.replicas_min:
            count, reason = self.settings.replicas_min, "below_min"
        return _Seen(StageWish(load, allowed_ns, count), reason, error, terms)

    def _larger(
        self, load: StageLoad, allowed_ns: int, most: int, terms: PidTerms
    ) -> tuple[int, str]:
        steps = load.replicas + max(1, math.ceil(terms.replicas))
        enough = load.replicas_needed(allowed_ns, self.settings.period_ns, most)
        count = steps if enough is None else min(steps, max(enough, load.replicas))
        if load.replicas < load.least_stable:
            return max(count, load.least_stable), "overloaded"
        return count, "over_target" if count > load.replicas else "backlog"

    def _smaller(
        self,
        now_ns: int,
        state: _StageState,
        load: StageLoad,
        allowed_ns: int,
        terms: PidTerms,
    ) -> tuple[int, str]:
        edge_ns = max(allowed_ns * self.settings.lower_permille // 1000, 1)
        enough = load.replicas_needed(edge_ns, self.settings.period_ns, load.replicas)
        least = max(enough or load.replicas, self.settings.replicas_min)
        if state.need.is_empty:
            # As long as nothing else is known, what is there has been needed until now.
            self._floor(now_ns, state, load.replicas)
        floor = self._floor(now_ns, state, least)
        if floor >= load.replicas:
            return load.replicas, "surplus_waits" if least < load.replicas else "within_target"
        fewer = math.floor(-terms.replicas)
        if fewer < 1:
            return load.replicas, "small_surplus"
        return max(load.replicas - fewer, floor), "surplus"

    def _floor(self, now_ns: int, state: _StageState, replicas: int) -> int:
        return state.need.after(now_ns, self.settings.scale_down_timeout_ns, replicas)

    def _decide(
        self, now_ns: int, seen: _Seen, count: int, key_reason: str | None, most: int
    ) -> StageDecision:
        load, reason = seen.wish.load, seen.reason
        if count < min(seen.wish.count, load.replicas):
            reason = "over_total"
        elif count == load.replicas < seen.wish.count:
            reason = "no_room"
        state = self._states[load.stage]
        state.held = _held(seen, count)
        return StageDecision(
            load.stage, load.replicas, count, reason, key_reason, _values(seen, most)
        )


@dataclass(slots=True)
class _Seen:
    wish: StageWish
    reason: str
    error: float
    terms: PidTerms


def _held(seen: _Seen, count: int) -> int:
    """The sign of a change that the error asks for and that was not made."""
    if seen.error > 0:
        return 1 if count < seen.wish.count or count == seen.wish.load.replicas else 0
    is_adding_up = seen.reason == "small_surplus"
    return 0 if count < seen.wish.load.replicas or is_adding_up else -1


def _values(seen: _Seen, replicas_total: int) -> dict[str, int]:
    load = seen.wish.load
    sojourn_ns = load.sojourn_ns(load.replicas)
    steady = {} if sojourn_ns == math.inf else {"sojourn_ns": round(sojourn_ns)}
    return steady | {
        "arrivals_per_1000_s": round(1000 * load.arrivals_per_s),
        "served_per_1000_s": round(1000 * load.served_per_s),
        "waiting": load.waiting,
        "variability_permille": round(1000 * load.variability),
        "least_stable": load.least_stable,
        "target_ns": load.service_ns + seen.wish.allowed_ns,
        "error_permille": round(1000 * seen.error),
        "proportional_permille": round(1000 * seen.terms.proportional),
        "integral_permille": round(1000 * seen.terms.integral),
        "derivative_permille": round(1000 * seen.terms.derivative),
        "wanted": seen.wish.count,
        "replicas_total": replicas_total,
    }
