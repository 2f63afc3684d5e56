"""What `bench engine` found: rows, ratios, a table for people and one object for machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

from livescale.config.slo import percentile
from livescale.report.run.terminal import table

HEADLINE_HIDDEN, HEADLINE_LAYERS, HEADLINE_DTYPE = 512, 8, "bfloat16"
HEADLINE_IN_FLIGHT = 8
"""The ratios at the top of the JSON object are those of this shape."""

OURS = "livescale"
_BUSY_OTHERS = 0.05
# A token in bf16 may differ from fp32's; more than rounding explains is a wrong engine: twice the
# 0.1 standard deviations within which 99 % of the logits must stay.
_SHORTFALL_P99_STDS_MAX = 0.2


def spread(values: Sequence[float]) -> dict[str, float]:
    """Of a figure that was taken several times, as JSON."""
    return {"median": median(values), "min": min(values), "max": max(values)}


@dataclass(frozen=True, slots=True)
class TokenCheck:
    """The judge's verdict on an engine's tokens: `wrong` in fp32, a shortfall in other dtypes."""

    tokens: int
    wrong: int | None = None
    shortfall_p99_stds: float | None = None

    @property
    def is_right(self) -> bool:
        if self.shortfall_p99_stds is not None:
            return self.shortfall_p99_stds <= _SHORTFALL_P99_STDS_MAX
        return self.wrong == 0

    def __str__(self) -> str:
        if self.shortfall_p99_stds is not None:
            return f"p99 {self.shortfall_p99_stds:.3f} std short"
        return f"{self.wrong} of {self.tokens} wrong"


@dataclass(slots=True)
class EngineRow:
    """One engine with one number of requests in flight: the lists have an entry per counted round,
    `ttft_ns` one per request."""

    engine: str
    dtype: str
    hidden: int
    layers: int
    in_flight: int
    settings: str
    token_check: TokenCheck
    tokens_per_s: list[float] = field(default_factory=list)
    ttft_ns: list[int] = field(default_factory=list)
    cores_used: list[float] = field(default_factory=list)
    others_cpu: list[float] = field(default_factory=list)
    #: of a decode step of ours, what is neither a product nor attention; None where not measured
    outside_share: float | None = None

    @property
    def rate(self) -> float:
        return median(self.tokens_per_s)

    @property
    def tokens_per_cpu_s(self) -> float:
        """What the engine makes of a CPU second: steadier than the rate on a busy machine."""
        return self.rate / max(median(self.cores_used), 1e-9)

    def as_json(self) -> dict[str, object]:
        fields: dict[str, object] = {
            "engine": self.engine,
            "dtype": self.dtype,
            "hidden": self.hidden,
            "layers": self.layers,
            "concurrency": self.in_flight,
            "tokens_per_s": spread(self.tokens_per_s),
            "settings": self.settings,
            "token_check": {k: v for k, v in asdict(self.token_check).items() if v is not None},
            "cores_used": median(self.cores_used),
            "tokens_per_cpu_s": self.tokens_per_cpu_s,
            "others_cpu_max": max(self.others_cpu),
        }
        if self.outside_share is not None:
            fields["outside_share"] = self.outside_share
        if self.ttft_ns:
            fields["ttft_ms"] = {
                "p50": percentile(self.ttft_ns, 50) / 1e6,
                "p99": percentile(self.ttft_ns, 99) / 1e6,
            }
        return fields


@dataclass(frozen=True, slots=True)
class EngineReport:
    """All rows of a run."""

    rows: tuple[EngineRow, ...]
    prompt_tokens: int
    output_tokens: int
    threads: int
    instructions: str = "native"

    def ratios(self) -> Iterator[tuple[EngineRow, EngineRow, float]]:
        """(our row, another engine's row of the same kind, our rate over its rate)."""
        ours = {_kind(row): row for row in self.rows if row.engine == OURS}
        for row in self.rows:
            if row.engine != OURS and _kind(row) in ours:
                yield ours[_kind(row)], row, ours[_kind(row)].rate / row.rate

    def as_json(self) -> dict[str, object]:
        headline = ("transformers_cb", "vllm_cpu")
        kind = (HEADLINE_HIDDEN, HEADLINE_LAYERS, HEADLINE_DTYPE, HEADLINE_IN_FLIGHT)
        figures: dict[str, object] = {
            f"throughput_ratio_to_{other.engine}_at_{HEADLINE_IN_FLIGHT}": ratio
            for _, other, ratio in self.ratios()
            if other.engine in headline and _kind(other) == kind
        }
        figures["ratios"] = [
            {
                "to": other.engine,
                "dtype": other.dtype,
                "hidden": other.hidden,
                "layers": other.layers,
                "concurrency": other.in_flight,
                "throughput_ratio": ratio,
                "cpu_time_ratio": ours.tokens_per_cpu_s / other.tokens_per_cpu_s,
            }
            for ours, other, ratio in self.ratios()
        ]
        figures["rows"] = [row.as_json() for row in self.rows]
        figures["prompt_tokens"] = self.prompt_tokens
        figures["output_tokens"] = self.output_tokens
        figures["threads"] = self.threads
        figures["instructions"] = self.instructions
        return figures

    def text(self) -> str:
        """A table: one line per row; the ratio is ours over the other engine's."""
        ratios = {id(other): ratio for _, other, ratio in self.ratios()}
        lines = [
            f"{self.prompt_tokens} tokens in, {self.output_tokens} out, greedy, EOS ignored,"
            f" {self.threads} threads, {self.instructions} instructions; tokens/s: median"
            " (least-most)",
            table(_HEADER, [self._cells(row, ratios.get(id(row))) for row in self.rows]),
        ]
        lines += [
            f"{row.hidden}x{row.layers} {row.dtype}, N = {row.in_flight}: {row.outside_share:.1%}"
            " of a decode step is neither a product nor attention."
            for row in self.rows
            if row.outside_share is not None
        ]
        busiest = max((max(row.others_cpu) for row in self.rows), default=0.0)
        if busiest > _BUSY_OTHERS:
            lines.append(
                f"Not alone: other programs took up to {busiest:.0%} of the machine's CPU time"
                " in a counted round."
            )
        return "\n".join(lines)

    def _cells(self, row: EngineRow, ratio: float | None) -> list[object]:
        ttfts = [f"{percentile(row.ttft_ns, q) / 1e6:.1f}" for q in (50, 99) if row.ttft_ns]
        return [
            *(row.engine, f"{row.hidden}x{row.layers}", row.dtype, row.in_flight, round(row.rate)),
            *(f"{min(row.tokens_per_s):.0f}-{max(row.tokens_per_s):.0f}", ratio),
            *(median(row.cores_used), round(row.tokens_per_cpu_s), "/".join(ttfts) or None),
            str(row.token_check),
        ]


_HEADER = ["engine", "shape", "dtype", "N", "tokens/s", "least-most", "ours/it", "cores", "/CPU-s"]
_HEADER += ["TTFT ms p50/p99", "tokens"]


def _kind(row: EngineRow) -> tuple[int, int, str, int]:
    return row.hidden, row.layers, row.dtype, row.in_flight
