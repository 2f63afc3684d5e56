"""What `bench live` found: one object for machines, a table and a few lines for a person."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from livescale.batching.contract.live_order import ZIGZAG
from livescale.lab.bench.live.live_models import PairSetting
from livescale.lab.bench.live.live_runs import (
    ALONE,
    AT_FIRST_LAYER,
    AT_START,
    OVERLAP,
    STOP,
    PairPlay,
)
from livescale.lab.bench.live.play_figures import BothWorlds, OrderRow, ideal_last_to_stop
from livescale.report.run.terminal import table

_ZERO = (
    "t = 0 is when the embedding and the first decoder layer are there, and all batches are queued"
    " (layer k is there at Time_l (k - 1)); or when the load is ordered, where the row says so"
)
_LATE = 0.05


@dataclass(slots=True)
class KindFigures:
    """What is measured once per kind of workers, at the headline's ratio.

    `throughput` lists (fraction loaded, measured, simulated) over the source alone. First help is
    counted from the order to load, as a fraction of the load; `first_help_limit` is the bytes of
    embedding and first layer over the link, and 5 % of the load.
    """

    half_load: BothWorlds | None = None
    finished_at_half_load: float | None = None
    throughput: list[tuple[float, float, float]] = field(default_factory=list)
    first_help: float | None = None
    first_help_limit: float | None = None
    tbt_p99_s: dict[str, BothWorlds] = field(default_factory=dict)
    #: of every play of ZigZag on links where rows and KV weigh
    source_idle_shares: list[float] = field(default_factory=list)

    def set_first_help(self, play: PairPlay, setting: PairSetting) -> None:
        """From a play whose batches were queued at the start of the load."""
        if play.first_help_ns is not None and play.load_ns is not None:
            self.first_help = (play.first_help_ns - play.began_ns) / play.load_ns
            self.first_help_limit = setting.first_layers_ns / play.load_ns + _LATE

    @property
    def source_idle_share(self) -> float | None:
        return median(self.source_idle_shares) if self.source_idle_shares else None

    @property
    def tbt_ratio(self) -> BothWorlds | None:
        """p99 TBT at the source with help over that without."""
        helped, alone = self.tbt_p99_s.get(ZIGZAG.name), self.tbt_p99_s.get(ALONE)
        return None if helped is None or alone is None else helped.over(alone)

    def as_json(self) -> dict[str, object]:
        figures: dict[str, object] = {
            "throughput_ratio_at_half_load": _pair(self.half_load),
            "finished_ratio_at_half_load": self.finished_at_half_load,
            "first_help_fraction_of_load": self.first_help,
            "first_help_limit": self.first_help_limit,
            "tbt_p99_ratio_to_no_scaling": _pair(self.tbt_ratio),
            "tbt_p99_s": {order: _pair(both) for order, both in self.tbt_p99_s.items()},
            "throughput": [
                {"fraction_loaded": fraction, "measured": measured, "simulated": simulated}
                for fraction, measured, simulated in self.throughput
            ],
            "source_idle_share": self.source_idle_share,
            "source_idle_shares": self.source_idle_shares,
        }
        return {name: value for name, value in figures.items() if value}


@dataclass(slots=True)
class LiveReport:
    """Everything. `headline` says which kind and ratio the figures at the top are of."""

    layers: int
    batches: int
    headline_ratio: int
    rows: list[OrderRow] = field(default_factory=list)
    kinds: dict[str, KindFigures] = field(default_factory=dict)
    tokens: int = 0
    token_mismatches: int = 0
    mean_to_optimum: float | None = None
    others_share: list[float] = field(default_factory=list)

    def of_kind(self, kind: str) -> KindFigures:
        return self.kinds.setdefault(kind, KindFigures())

    def last_to_stop(self, row: OrderRow) -> BothWorlds | None:
        """Last TTFT over that of stop-the-world, of the same workers, ratio and queue."""
        key = (row.kind, row.ratio, row.queued)
        for other in self.rows:
            if other.order == STOP and (other.kind, other.ratio, other.queued) == key:
                return row.figures["ttft_last_s"].over(other.figures["ttft_last_s"])
        return None

    def worst_agreement(self, kind: str) -> tuple[float, str] | None:
        """The figure that differs most from its simulation, as |measured / simulated - 1|."""
        found = [
            (abs(both.agreement - 1), f"{name} of {row.order} at ratio {row.ratio}")
            for row in self.rows
            for name, both in row.figures.items()
            if row.kind == kind and row.queued == AT_FIRST_LAYER
        ]
        return max(found, default=None)

    def as_json(self) -> dict[str, object]:
        timed = self.kinds.get("timed", KindFigures())
        zigzag = [
            row
            for row in self.rows
            if (row.kind, row.ratio, row.order, row.queued)
            == ("timed", self.headline_ratio, ZIGZAG.name, AT_FIRST_LAYER)
        ]
        last = self.last_to_stop(zigzag[0]) if zigzag else None
        figures: dict[str, object | None] = {
            "last_ttft_ratio_to_stop": last.measured if last else None,
            "first_help_fraction_of_load": timed.first_help,
            "first_help_limit": timed.first_help_limit,
            "throughput_ratio_at_half_load": timed.half_load.measured if timed.half_load else None,
            "tbt_p99_ratio_to_no_scaling": timed.tbt_ratio.measured if timed.tbt_ratio else None,
            "mean_latency_ratio_to_optimum": self.mean_to_optimum,
            "source_idle_share": timed.source_idle_share,
        }
        return {
            **{name: value for name, value in figures.items() if value is not None},
            "token_mismatches": self.token_mismatches,
            "tokens": self.tokens,
            "zero": _ZERO,
            "others_share": self.others_share,
            "kinds": {kind: found.as_json() for kind, found in self.kinds.items()},
            "rows": [self._row(row) for row in self.rows],
        }

    def _row(self, row: OrderRow) -> dict[str, object]:
        last = self.last_to_stop(row)
        ideal = self._ideal(row)
        more: dict[str, object] = {}
        if last is not None:
            more["last_ttft_ratio_to_stop"] = _pair(last)
        if ideal is not None:
            more["last_ttft_ratio_to_stop_ideal"] = ideal
        return {**row.as_json(), **more}

    def _ideal(self, row: OrderRow) -> float | None:
        if row.order in (STOP, OVERLAP, ALONE) or row.queued != AT_FIRST_LAYER:
            return None
        return ideal_last_to_stop(row.order, self.layers, self.batches, row.ratio)

    def text(self) -> str:
        header = ["workers", "ratio", "order", "mean TTFT s", "last TTFT s"]
        header += ["last/stop", "simulated", "ideal", "off by %"]
        lines = [table(header, [self._cells(row) for row in self.rows]), _ZERO]
        for kind, found in self.kinds.items():
            lines += [f"{kind}: {line}" for line in _kind_lines(found)]
            worst = self.worst_agreement(kind)
            if worst is not None:
                lines.append(f"{kind}: farthest from its simulation: {worst[1]}, {worst[0]:.1%}")
        if self.mean_to_optimum is not None:
            lines.append(f"mean latency over the optimum, virtual: {self.mean_to_optimum:.4f}")
        lines.append(f"{self.token_mismatches} wrong of {self.tokens} tokens")
        if self.others_share:
            lines.append(f"other programs took up to {max(self.others_share):.0%} of the CPU time")
        return "\n".join(lines)

    def _cells(self, row: OrderRow) -> list[object]:
        last, ideal = self.last_to_stop(row), self._ideal(row)
        off = max(abs(both.agreement - 1) for both in row.figures.values())
        return [
            row.kind,
            row.ratio,
            row.order if row.queued == AT_FIRST_LAYER else f"{row.order}, {AT_START}",
            row.figures["ttft_mean_s"].measured,
            row.figures["ttft_last_s"].measured,
            last.measured if last else None,
            last.simulated if last else None,
            ideal,
            100 * off,
        ]


def _pair(both: BothWorlds | None) -> dict[str, float] | None:
    return None if both is None else both.as_json()


def _kind_lines(found: KindFigures) -> list[str]:
    lines = []
    if found.half_load is not None:
        lines.append(
            f"prefill work at half load {found.half_load.measured:.2f} x the source alone"
            f" (simulated {found.half_load.simulated:.2f}; batches finished"
            f" {found.finished_at_half_load or 0:.2f} x)"
        )
        shown = found.throughput[:: max(1, len(found.throughput) // 5)]
        curve = ", ".join(f"{fraction:.0%} {measured:.2f}" for fraction, measured, _ in shown)
        lines.append(f"by fraction loaded: {curve}")
    if found.first_help is not None and found.first_help_limit is not None:
        lines.append(
            f"first help after {found.first_help:.1%} of the load"
            f" (limit {found.first_help_limit:.1%})"
        )
    if found.tbt_ratio is not None:
        helped, alone = found.tbt_p99_s[ZIGZAG.name], found.tbt_p99_s[ALONE]
        lines.append(
            f"p99 TBT at the source {1e3 * helped.measured:.0f} ms, without scaling"
            f" {1e3 * alone.measured:.0f} ms: {found.tbt_ratio.measured:.2f}"
        )
    if found.source_idle_share is not None:
        shares = ", ".join(f"{share:.1%}" for share in found.source_idle_shares)
        lines.append(f"source idle {found.source_idle_share:.1%} of the time ({shares})")
    return lines
