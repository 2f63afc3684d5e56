"""Figures of `bench live`: of single plays, and of orders over several plays, beside the twin's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import msgspec

from livescale.batching.contract.live_order import LIVE_ORDERS, ZIGZAG
from livescale.config.slo import percentile
from livescale.lab.bench.live.live_fleet import SOURCE
from livescale.lab.bench.live.live_models import PairSetting
from livescale.lab.bench.live.live_runs import PairPlay
from livescale.lab.bench.live.live_twin import TwinPlay, layer_ns
from livescale.lab.bench.live.live_worker import WorkItem
from livescale.messages.events import BatchTaken
from livescale.sim.pair.optimum import SolverMissingError, solve_split
from livescale.sim.pair.player import LivePlay, loaded_every, play
from livescale.values.units import NS_PER_S

_UNIT_NS = 1000


class BothWorlds(msgspec.Struct, frozen=True):
    """One figure: the median of what was measured, and of its simulations."""

    measured: float
    simulated: float

    @property
    def agreement(self) -> float:
        """Measured over simulated."""
        return self.measured / self.simulated

    def over(self, other: BothWorlds) -> BothWorlds:
        """The ratio to another figure, in both worlds."""
        return BothWorlds(self.measured / other.measured, self.simulated / other.simulated)

    def as_json(self) -> dict[str, float]:
        return {**msgspec.structs.asdict(self), "agreement": self.agreement}


@dataclass(frozen=True, slots=True)
class OrderRow:
    """An order on a kind of workers at a ratio: medians over `plays`. Seconds, from t = 0.

    `ratio` is what was wanted, `measured_ratio` a layer's time on the link over what it took.
    """

    kind: str
    ratio: int
    measured_ratio: float
    order: str
    queued: str
    plays: int
    layer_s: float
    load_s: float | None
    figures: dict[str, BothWorlds]

    def as_json(self) -> dict[str, object]:
        figures = {name: both.as_json() for name, both in self.figures.items()}
        return {**asdict(self), "figures": figures}


def order_row(
    setting: PairSetting, ratio: int, plays: Sequence[PairPlay], twins: Sequence[TwinPlay]
) -> OrderRow:
    """What several plays of one burst have in common."""
    first = plays[0]
    figures = {
        name: BothWorlds(
            median(find(play.ttft_ns) for play in plays) / NS_PER_S,
            median(find(twin.ttft_ns) for twin in twins) / NS_PER_S,
        )
        for name, find in _TTFT.items()
    }
    helps = [play.first_help_ns - play.zero_ns for play in plays if play.first_help_ns is not None]
    twin_helps = [twin.first_help_ns for twin in twins if twin.first_help_ns is not None]
    if first.burst.from_start and helps and twin_helps:
        figures["first_help_s"] = BothWorlds(
            median(helps) / NS_PER_S, median(twin_helps) / NS_PER_S
        )
    one_layer_ns = median(layer_ns(play, setting.batch_tokens) for play in plays)
    loads = [play.load_ns for play in plays if play.load_ns is not None]
    return OrderRow(
        kind=setting.kind,
        ratio=ratio,
        measured_ratio=setting.layer_load_ns / one_layer_ns,
        order=first.burst.order,
        queued=first.burst.queued,
        plays=len(plays),
        layer_s=one_layer_ns / NS_PER_S,
        load_s=median(loads) / NS_PER_S if loads else None,
        figures=figures,
    )


_TTFT: dict[str, Callable[[Sequence[int]], int]] = {
    "ttft_mean_s": lambda values: sum(values) // len(values),
    "ttft_p50_s": lambda values: percentile(values, 50),
    "ttft_p90_s": lambda values: percentile(values, 90),
    "ttft_last_s": max,
}


def source_idle_share(played: PairPlay) -> float:
    """The share of time in which the source ran nothing, from t = 0 for as long as the target had a
    batch that the source could have: one that was handed over in the end, one of several, or the
    only one while layers were missing."""
    handed = {
        request: report.at_ns
        for report in played.taken
        if isinstance(report.event, BatchTaken) and report.worker == SOURCE
        for request, *_ in report.event.requests
    }
    left = sorted(handed.get(asked.request, asked.token_ns[0]) for asked in played.requests)
    assert played.loaded_ns is not None, "a target was loaded"
    stop_ns = max([*handed.values(), *left[-2:-1], min(left[-1], played.loaded_ns)])
    busy_ns = sum(_overlap_ns(item, played.zero_ns, stop_ns) for item in played.source_work)
    return 1 - busy_ns / (stop_ns - played.zero_ns)


# -- throughput -----------------------------------------------------------------------------------


def throughput_curve(
    played: PairPlay, twin: TwinPlay, alone: PairPlay, layers: int
) -> list[tuple[float, float, float]]:
    """Prefill work per time over that of the source alone, while so much was loaded.

    (fraction of the decoder layers that can run, measured, simulated) for the time between one
    arrival and the next. Work is layers of batches, on whichever worker they were run.
    """
    curve = []
    for loaded in range(1, layers):
        both = _work_ratio(played, twin, alone, layers, _loaded_span(played, loaded, loaded))
        curve.append((loaded / layers, both.measured, both.simulated))
    return curve


def half_load_ratio(played: PairPlay, twin: TwinPlay, alone: PairPlay, layers: int) -> BothWorlds:
    """As `throughput_curve`, over the time from three to five eighths of the layers."""
    span = _loaded_span(played, 3 * layers // 8, 5 * layers // 8)
    return _work_ratio(played, twin, alone, layers, span)


def _work_ratio(
    played: PairPlay, twin: TwinPlay, alone: PairPlay, layers: int, span: tuple[int, int]
) -> BothWorlds:
    """Layers per time over those of the source alone. Workers that compute at once share memory:
    what a layer took more in this run is left out of the simulation, which was fed with it."""
    assert twin.run is not None, "a pair was played"
    slower = layer_ns(played, 1000) / layer_ns(alone, 1000)
    simulated = twin.run.rate(span[0] - played.zero_ns, span[1] - played.zero_ns) / slower
    return BothWorlds(_work_rate(played, *span) / _alone_rate(alone, layers), simulated)


def finished_at_half_load(played: PairPlay, alone: PairPlay, layers: int) -> float:
    """As `half_load_ratio`, but what counts are batches that were finished: one that ends in the
    middle of the time between two others' ends counts in equal parts all that time."""
    start_ns, stop_ns = _loaded_span(played, 3 * layers // 8, 5 * layers // 8)
    ends = sorted(at_ns + played.zero_ns for at_ns in played.ttft_ns)
    begins = [played.zero_ns, *ends[:-1]]
    finished = sum(
        max(0, min(end, stop_ns) - max(begin, start_ns)) / (end - begin)
        for begin, end in zip(begins, ends, strict=True)
    )
    return finished * layers / (stop_ns - start_ns) / _alone_rate(alone, layers)


def _loaded_span(played: PairPlay, first: int, last: int) -> tuple[int, int]:
    """From when `first` decoder layers could run until `last + 1` could, or everything."""
    arrived = played.arrived_ns
    layers = len(arrived) - 2
    # The last decoder layer runs with the head.
    return arrived[first], arrived[last + 1 if last + 1 < layers else layers + 1]


def _alone_rate(alone: PairPlay, layers: int) -> float:
    """Layers per ns of the source that has the queue to itself."""
    return len(alone.requests) * layers / max(alone.ttft_ns)


def _work_rate(played: PairPlay, start_ns: int, stop_ns: int) -> float:
    """Layers of batches per ns in this time. Of a Run that reaches beyond it a part counts."""
    items = [*played.source_work, *played.target_work]
    done = sum(
        item.layer_count * _overlap_ns(item, start_ns, stop_ns) / (item.stop_ns - item.start_ns)
        for item in items
        if item.requests
    )
    return done / (stop_ns - start_ns)


def _overlap_ns(item: WorkItem, start_ns: int, stop_ns: int) -> int:
    return max(0, min(item.stop_ns, stop_ns) - max(item.start_ns, start_ns))


# -- what would be best ---------------------------------------------------------------------------


def ideal_play(order: str, layers: int, batches: int, ratio: int) -> LivePlay:
    """The order on two machines that know everything at once (BlitzScale Figure 15's setting)."""
    loaded = loaded_every(ratio * _UNIT_NS, layers)
    return play(LIVE_ORDERS[order], layers, (_UNIT_NS,) * batches, loaded)


def ideal_last_to_stop(order: str, layers: int, batches: int, ratio: int) -> float:
    """Last TTFT of the order over that of stop-the-world."""
    stop = ideal_play("stop-the-world", layers, batches, ratio)
    return ideal_play(order, layers, batches, ratio).last_ns / stop.last_ns


def mean_to_optimum(layers: int, batches: int, ratio: int) -> float | None:
    """ZigZag's mean latency over that of the best split that there is. None without a solver, or
    when that ran out of time before it had proved which split is the best."""
    loaded = loaded_every(ratio * _UNIT_NS, layers)
    try:
        best = solve_split(layers, (_UNIT_NS,) * batches, loaded)
    except SolverMissingError:
        return None
    if not best.is_proved:
        return None
    return ideal_play(ZIGZAG.name, layers, batches, ratio).mean_ns / best.mean_ns
