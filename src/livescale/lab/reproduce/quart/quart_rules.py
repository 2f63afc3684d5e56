"""QUART's formulas, as printed and as the controller uses them (§5.1, §5.2, §6.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from livescale.control.stages.corrector import Corrector, CorrectorSettings
from livescale.control.stages.formulas.graph import line
from livescale.control.stages.formulas.pid import Gains, Pid
from livescale.control.stages.formulas.smoother import smooth
from livescale.control.stages.formulas.spreading import descend, kl_divergence
from livescale.control.stages.formulas.stage_load import StageLoad
from livescale.lab.reproduce.base.claim import Conditions, Curve, Measured, Picture, claim

_S = 1_000_000_000
_SERVICE_NS = _S // 10
_TARGET_NS = 2 * _SERVICE_NS
_BEFORE_PER_S, _AFTER_PER_S = 22.0, 44.0
_PERIODS = 40
_LATE_MAX = 4.0
_ROOM = 60


@claim(
    id="Q14",
    judges="arithmetic",
    corrected="the error is T - T_target, whole replicas, no windup, R_total",
    setup="a stage of 100 ms whose load doubles, in periods of 1 s: replicas by Eqs 2 and 3",
    paper="with e = T_target - T, as printed, the queue is kept short",
    tolerance="as corrected: on target within 10 periods, and stays; as printed: no replica is"
    " left",
    ours="on target after {settled:.0f} periods with {corrected:.0f} replicas; as printed"
    " {printed:.0f}, and {printed_waiting:.0f} requests wait",
    is_within=lambda f: f["settled"] <= 10 and f["corrected"] >= 5 and f["printed"] == 0,
    note="a late stage has a negative error as printed, so that it loses replicas",
)
def pid_step(conditions: Conditions) -> Measured:
    """QUART §5.1, Eqs 2 and 3. A fluid queue, replicas are there one period after the order."""
    stage, corrector = _Stage(), Corrector(CorrectorSettings(period_ns=_S))
    printed, pid = _Stage(), Pid(Gains())
    counts, printed_counts, late = [], [], []
    for period in range(2 * _PERIODS):
        is_doubled = period >= _PERIODS
        stage.rate = _AFTER_PER_S if is_doubled else _BEFORE_PER_S
        if not is_doubled:
            printed.replicas = stage.replicas
        load = stage.load()
        late.append(load.sojourn_ns(load.replicas) > _TARGET_NS)
        counts.append(stage.replicas)
        printed_counts.append(printed.replicas)
        (its,) = corrector.step(period * _S, [load], [_TARGET_NS], _ROOM)
        stage.after(its.to_replicas)
        if is_doubled:
            printed.rate = _AFTER_PER_S
            printed.after(_as_printed(printed, pid))
    settled = next(n for n in range(_PERIODS + 1) if not any(late[_PERIODS + n :]))
    curves = tuple(
        Curve(label, tuple((float(n), float(count)) for n, count in enumerate(its)), True)
        for label, its in (("corrected", counts), ("printed", printed_counts))
    )
    picture = Picture("Replicas when the load doubles", "period", "replicas", curves)
    figures = {
        "settled": float(settled),
        "corrected": float(stage.replicas),
        "printed": float(printed.replicas),
        "printed_waiting": printed.waiting,
    }
    return Measured(figures, picture)


@claim(
    id="Q15",
    judges="arithmetic",
    corrected="Eq. 7 only reclaims; each step of Eq. 10 is projected back onto probabilities",
    setup="a line of 1, 4, 1 replicas with even arrivals; a key stage on 12 hosts, Q uniform",
    paper="Eq. 7 gives back what is not needed; Eqs 8 to 10 spread key stages",
    tolerance="Eq. 7 as printed needs more than there are, reclaimed no more; the descent ends at"
    " the most even spread (1 in 1,000), and one printed step is no distribution",
    ours="printed {printed_sum:.0f} of {replicas:.0f} replicas, ours {ours_sum:.0f}; KL"
    " {divergence:.1e}, largest entry {largest:.4f} (1/12 = {even:.4f}); one printed step sums to"
    " {printed_total:.1f}",
    is_within=lambda f: (
        f["printed_sum"] > f["replicas"] >= f["ours_sum"]
        and abs(f["largest"] - f["even"]) <= 0.001
        and abs(f["printed_total"] - 1) > 0.5
    ),
    note="with Q uniform the optimum is known without a descent. The threshold of 85 % and the"
    " order of eviction are rules of the pool, not of this claim",
)
def smoothing_and_spread(conditions: Conditions) -> Measured:
    """QUART §5.2, Eq. 7, and §6.2, Eqs 8 to 10."""
    replicas = (1, 4, 1)
    smoothed = smooth(line(3), replicas, (0.0,) * 3, (1,) * 3)
    hosts = 12
    start = [0.7, 0.2, 0.1, *[0.0] * (hosts - 3)]
    uniform = [1 / hosts] * hosts
    ended = descend(start, uniform)
    positive = [max(p, 1e-9) for p in start]
    stepped = [p - (1 + math.log(p / q)) for p, q in zip(positive, uniform, strict=True)]
    return Measured(
        {
            "replicas": float(sum(replicas)),
            "printed_sum": sum(its.smooth for its in smoothed),
            "ours_sum": float(sum(its.to_replicas for its in smoothed)),
            "divergence": kl_divergence(ended, uniform),
            "largest": max(ended),
            "even": 1 / hosts,
            "printed_total": sum(stepped),
        }
    )


# -- helpers --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Stage:
    """A fluid queue before replicas that are there a period after they were ordered."""

    rate: float = _BEFORE_PER_S
    replicas: int = 3
    waiting: float = 0.0

    def load(self) -> StageLoad:
        return StageLoad(0, self.replicas, self.rate, _SERVICE_NS, int(self.waiting))

    def after(self, ordered: int) -> None:
        """A period passes."""
        served = self.replicas * _S / _SERVICE_NS
        self.waiting = max(self.waiting + self.rate - served, 0.0)
        self.replicas = ordered


def _as_printed(stage: _Stage, pid: Pid) -> int:
    """Replicas by Eqs 2 and 3 as they are, with errors in targets, at most four."""
    load = stage.load()
    sojourn_ns = load.sojourn_ns(load.replicas) if load.replicas else math.inf
    error = max(-_LATE_MAX, min((_TARGET_NS - sojourn_ns) / _TARGET_NS, _LATE_MAX))
    wanted = stage.replicas + math.trunc(pid.step(error, 1.0).replicas)
    return max(0, min(wanted, _ROOM))
