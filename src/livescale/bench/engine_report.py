"""What `bench engine` found: rows, ratios, a table for people and one object for machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median

from livescale.slo import percentile

HEADLINE_HIDDEN, HEADLINE_LAYERS, HEADLINE_DTYPE = 512, 8, "bfloat16"
HEADLINE_IN_FLIGHT = 8
"""The ratios at the top of the JSON object are those of this shape."""

_OURS = "livescale"
_BUSY_OTHERS = 0.05


@dataclass(frozen=True, slots=True)
class TokenCheck:
    """The judge's word on an engine's tokens: `wrong` in fp32, a shortfall in other dtypes."""

    tokens: int
    wrong: int | None = None
    shortfall_p99_stds: float | None = None

    def __str__(self) -> str:
        if self.shortfall_p99_stds is not None:
            return f"p99 {self.shortfall_p99_stds:.3f} std short"
        return f"{self.wrong} of {self.tokens} wrong"


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One engine with one number of requests in flight: a rate per repetition."""

    engine: str
    dtype: str
    hidden: int
    layers: int
    in_flight: int
    tokens_per_s: tuple[float, ...]
    ttft_ns: tuple[int, ...]
    settings: str
    token_check: TokenCheck
    cores_used: float
    others_cpu_max: float

    @property
    def rate(self) -> float:
        return median(self.tokens_per_s)

    @property
    def tokens_per_cpu_s(self) -> float:
        """What the engine makes of a CPU second: steadier than the rate on a busy machine."""
        return self.rate / max(self.cores_used, 1e-9)

    def as_json(self) -> dict[str, object]:
        fields: dict[str, object] = {
            "engine": self.engine,
            "dtype": self.dtype,
            "hidden": self.hidden,
            "layers": self.layers,
            "concurrency": self.in_flight,
            "tokens_per_s": {
                "median": self.rate,
                "min": min(self.tokens_per_s),
                "max": max(self.tokens_per_s),
            },
            "settings": self.settings,
            "token_check": {k: v for k, v in asdict(self.token_check).items() if v is not None},
            "cores_used": self.cores_used,
            "tokens_per_cpu_s": self.tokens_per_cpu_s,
            "others_cpu_max": self.others_cpu_max,
        }
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

    def ratios(self) -> Iterator[tuple[EngineRow, EngineRow, float]]:
        """(our row, another engine's row of the same kind, our rate over its rate)."""
        ours = {_kind(row): row for row in self.rows if row.engine == _OURS}
        for row in self.rows:
            if row.engine != _OURS and _kind(row) in ours:
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
        return figures

    def text(self) -> str:
        """A table: one line per row; the ratio is ours over the other engine's."""
        ratios = {id(other): ratio for _, other, ratio in self.ratios()}
        lines = [
            f"{self.prompt_tokens} tokens in, {self.output_tokens} out, greedy, EOS ignored,"
            f" {self.threads} threads; tokens/s: median (least-most)",
            f"{'engine':<22}{'shape':<9}{'dtype':<9} {'N':>3} {'tokens/s':>9} "
            f"{'(least-most)':<16}{'ours/it':>8} {'cores':>6} {'/CPU-s':>8}"
            f"  {'TTFT ms p50/p99':<16} tokens",
        ]
        lines += [self._line(row, ratios.get(id(row))) for row in self.rows]
        busiest = max((row.others_cpu_max for row in self.rows), default=0.0)
        if busiest > _BUSY_OTHERS:
            lines.append(
                f"Not alone: other programs took up to {busiest:.0%} of the machine's CPU time"
                " in a counted round."
            )
        return "\n".join(lines)

    def _line(self, row: EngineRow, ratio: float | None) -> str:
        spread = f"({min(row.tokens_per_s):.0f}-{max(row.tokens_per_s):.0f})"
        ttft = "-"
        if row.ttft_ns:
            ttft = (
                f"{percentile(row.ttft_ns, 50) / 1e6:.1f}/{percentile(row.ttft_ns, 99) / 1e6:.1f}"
            )
        shown = "" if ratio is None else f"{ratio:.2f}"
        return (
            f"{row.engine:<22}{f'{row.hidden}x{row.layers}':<9}{row.dtype:<9} {row.in_flight:>3}"
            f" {row.rate:>9.0f} {spread:<16}{shown:>8}"
            f" {row.cores_used:>6.2f} {row.tokens_per_cpu_s:>8.0f}  {ttft:<16} {row.token_check}"
        )


def _kind(row: EngineRow) -> tuple[int, int, str, int]:
    return row.hidden, row.layers, row.dtype, row.in_flight
