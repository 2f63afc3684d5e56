"""How much load a pool can take, and how small a pool a load can do with.

Both are searches over whole simulations; these write no records.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from livescale.common.errors import UserError
from livescale.config.slo import TIME, exact_ns, percentile
from livescale.load.traces import TraceRow, upscale
from livescale.sim.base.config import SimConfig
from livescale.sim.pools.runs import Loads, PoolRun, lead_ns, run_pool
from livescale.values.types import Outcome, Value
from livescale.values.units import NS_PER_S

UNLOADED_MULTIPLE = 5
"""TTFT of a pool that keeps up is below so many times the unloaded one (BlitzScale's 5x rule)."""
FINISHED_PERMILLE = 980
"""Of the requests, so many have to end well in a pool that keeps up."""
_SAMPLE = 100
_SAMPLE_GAP_NS = 20 * NS_PER_S
_STEPS_MAX = 24
_TOLERANCE_PERCENT = 2


class CapacityError(UserError):
    """No capacity can be measured, or a bound cannot be read; the message says why."""


class PercentileBound(Value, frozen=True):
    """At least `percent` of the TTFTs ("ttft") or gaps between tokens ("tbt") are that short."""

    metric: str
    percent: int
    limit_ns: int

    def __str__(self) -> str:
        return f"{self.metric}_p{self.percent}"


_BOUND = re.compile(rf"(ttft|tbt)_p(\d{{1,3}})={TIME}")


def parse_bounds(text: str) -> tuple[PercentileBound, ...]:
    """The bounds of "ttft_p99=450ms,tbt_p99=150ms". Raises CapacityError."""
    bounds: list[PercentileBound] = []
    for part in text.split(","):
        found = _BOUND.fullmatch(part.strip())
        if found is None:
            raise CapacityError(
                f"'{part.strip()}' is no bound: write ttft_p99=450ms or tbt_p50=20ms (s, ms, us)"
            )
        percent = int(found[2])
        if not 1 <= percent <= 100:
            raise CapacityError(f"'{part.strip()}': a percentile is 1 to 100")
        bounds.append(PercentileBound(found[1], percent, exact_ns(found[3], found[4])))
    names = [str(bound) for bound in bounds]
    for name in names:
        if names.count(name) > 1:
            raise CapacityError(f"{name} is bounded twice")
    return tuple(bounds)


def percentiles(run: PoolRun, bounds: Sequence[PercentileBound]) -> dict[str, int | None]:
    """What was measured of each bound. None: a request failed, which is never in time, or there
    is nothing of the kind."""
    values: dict[str, list[int]] = {}
    if not run.failed:
        lines = run.result.requests
        values["ttft"] = [line.token_ns[0] - line.queued_ns for line in lines]
        if any(bound.metric == "tbt" for bound in bounds):
            values["tbt"] = [b - a for line in lines for a, b in pairwise(line.token_ns)]
    return {
        str(bound): percentile(values[bound.metric], bound.percent)
        if values.get(bound.metric)
        else None
        for bound in bounds
    }


def is_within(run: PoolRun, bounds: Sequence[PercentileBound]) -> bool:
    """Every request ended well, and every bound holds; answers of one token have no gaps."""
    found = percentiles(run, bounds)
    return not run.failed and all(
        (measured := found[str(bound)]) is None or measured <= bound.limit_ns for bound in bounds
    )


# -- how much load a pool can take ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServingCapacity:
    """The most of a load that a pool keeps up with.

    `factor` is TraceUpscaler's; `requests_per_s` the mean rate that it gives. The pool kept up at
    `factor` and no more at `factor_failed`.
    """

    factor: float
    factor_failed: float
    requests_per_s: float
    simulations: int


def measure_capacity(loads: Loads, config: SimConfig, seed: int) -> ServingCapacity:
    """The highest rate of these loads that the pool keeps up with, to two percent.

    A pool keeps up if 98 % of the requests end well and no queue is left growing: the 90th
    percentile of TTFT over requests of the load's last third stays below five times the one of
    requests that are alone in the pool. Found by bisection of TraceUpscaler's factor, which
    assumes that more load is never easier. Raises CapacityError.
    """
    duration_ns = max((rows[-1].arrival_ns for rows in loads.values() if rows), default=0)
    count = sum(map(len, loads.values()))
    if count < 2 or not duration_ns:
        raise CapacityError("a load of one moment has no rate, and so no capacity")
    start_ns = lead_ns(config)
    unloaded_ns = _ttft_p90(run_pool(config, _alone(loads), start_ns, seed), 0)
    if unloaded_ns is None:
        raise CapacityError("not even single requests end well in this pool")
    limit_ns = UNLOADED_MULTIPLE * unloaded_ns

    tried: list[float] = []

    def keeps_up(factor: float) -> bool:
        tried.append(factor)
        scaled = scale_loads(loads, factor, seed)
        if not any(scaled.values()):
            return True
        run = run_pool(config, scaled, start_ns, seed)
        requests = len(run.result.requests)
        ttft_ns = _ttft_p90(run, start_ns + duration_ns * 2 // 3)
        is_late = ttft_ns is not None and ttft_ns > limit_ns
        return not is_late and (requests - run.failed) * 1000 >= requests * FINISHED_PERMILLE

    # A factor that holds and one of twice that does not, then between the two.
    low = 1.0
    rises = keeps_up(low)
    step = 2.0 if rises else 0.5
    while keeps_up(low * step) == rises:
        low *= step
        if len(tried) >= _STEPS_MAX and rises:
            raise CapacityError(f"the pool keeps up with {low:g} times this load")
        if len(tried) >= _STEPS_MAX:
            raise CapacityError("the pool does not keep up with any part of this load")
    low, high = sorted((low, low * step))
    while high > low * (1 + _TOLERANCE_PERCENT / 100) and len(tried) < _STEPS_MAX:
        middle = (low + high) / 2
        if keeps_up(middle):
            low = middle
        else:
            high = middle
    scaled_count = sum(map(len, scale_loads(loads, low, seed).values()))
    rate = scaled_count * NS_PER_S / duration_ns
    return ServingCapacity(low, high, rate, len(tried) + 1)


def scale_loads(loads: Loads, factor: float, seed: int) -> dict[str, list[TraceRow]]:
    """Every model's load by the same factor (TraceUpscaler's rule)."""
    return {model: upscale(rows, factor, seed) for model, rows in loads.items()}


# -- how small a pool a load can do with ----------------------------------------------------------


@dataclass(slots=True)
class PoolSearch:
    """The smallest of the sizes 1 to `largest` that will do.

    `tried` holds every size that was tried. `answer` is None if not even the largest will do;
    `is_monotone` is False where a neighbour of the answer contradicts the search's assumption that
    a larger pool is never worse.
    """

    largest: int
    tried: dict[int, bool] = field(default_factory=dict)
    answer: int | None = None
    is_monotone: bool = True


def smallest_pool(largest: int, will_do: Callable[[int], bool]) -> PoolSearch:
    """Bisection between 0 and `largest`, then a look at the answer's neighbours.

    Where a smaller neighbour will do after all, it is taken, and its neighbour is tried in turn.
    """
    search = PoolSearch(largest)

    def holds(size: int) -> bool:
        if size not in search.tried:
            search.tried[size] = will_do(size)
        return search.tried[size]

    if not holds(largest):
        return search
    fails, does = 0, largest
    while does - fails > 1:
        middle = (fails + does) // 2
        fails, does = (fails, middle) if holds(middle) else (middle, does)
    while (smaller := _smaller(does, holds)) is not None:
        does, search.is_monotone = smaller, False
    if does < largest and not holds(does + 1):
        search.is_monotone = False
    search.answer = does
    return search


# -- helpers --------------------------------------------------------------------------------------


def _smaller(answer: int, holds: Callable[[int], bool]) -> int | None:
    """One of the two next smaller sizes that will do after all."""
    near = (size for size in (answer - 1, answer - 2) if size >= 1)
    return next((size for size in near if holds(size)), None)


def _alone(loads: Loads) -> dict[str, list[TraceRow]]:
    """A sample of the requests, each long after the one before it."""
    rows = [(model, row) for model, load in loads.items() for row in load]
    chosen = rows[:: max(len(rows) // _SAMPLE, 1)]
    sample: dict[str, list[TraceRow]] = {}
    for number, (model, row) in enumerate(chosen):
        sample.setdefault(model, []).append(row.at(number * _SAMPLE_GAP_NS))
    return sample


def _ttft_p90(run: PoolRun, from_ns: int) -> int | None:
    """Of the requests that came from then on and ended well."""
    ttfts = [
        line.token_ns[0] - line.queued_ns
        for line in run.result.requests
        if line.outcome is Outcome.FINISHED and line.queued_ns >= from_ns
    ]
    return percentile(ttfts, 90) if ttfts else None
