"""One run in a few numbers: latencies, failures, SLO attainment and goodput.

Pure arithmetic on what was measured. A figure that could not be measured is None. Rendering lives
in `terminal.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from livescale.config.slo import RequestTiming, SloAbsolute, SloError, SloRule, percentile
from livescale.values.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class Latency:
    """Mean and nearest-rank percentiles of one latency, in seconds."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run's requests against an SLO.

    Latencies are those of requests that ended well: `ttft` over requests, `tbt` over all gaps
    between tokens. `duration_s` runs from the first scheduled time to the last end. `goodput_per_s`
    is SLO-met requests per second of it, `slo_attainment` their part of all requests, failed ones
    included. `slo` has the bounds that the rule came to; None if no request ended well.
    """

    requests: int
    failed: int
    slo_met: int
    duration_s: float | None
    ttft: Latency | None
    tbt: Latency | None
    slo: SloAbsolute | None
    slo_attainment: float | None
    goodput_per_s: float | None

    def latencies(self) -> dict[str, float | None]:
        """Means and 99th percentiles, such as `ttft_mean_s`; None where no request ended well."""
        return {
            f"{name}_{figure}": getattr(latency, figure, None)
            for name, latency in (("ttft", self.ttft), ("tbt", self.tbt))
            for figure in ("mean_s", "p99_s")
        }


def summarize(timings: Sequence[RequestTiming], rule: SloRule) -> RunSummary:
    """The summary of a run; `rule` is resolved against these very timings.

    For runs that are compared, resolve the rule once and pass the absolute SLO to all of them.
    """
    good = [timing for timing in timings if timing.ok]
    try:
        slo = rule.resolve(timings)
    except SloError:
        slo = None  # nothing ended well, so there is no mean and nothing that meets it
    met = sum(slo.is_met(timing) for timing in timings) if slo else 0
    duration_ns = _duration_ns(timings)
    return RunSummary(
        requests=len(timings),
        failed=len(timings) - len(good),
        slo_met=met,
        duration_s=duration_ns / NS_PER_S if duration_ns else None,
        ttft=_latency([t.ttft_ns for t in good if t.ttft_ns is not None]),
        tbt=_latency([gap for t in good for gap in t.tbt_ns]),
        slo=slo,
        slo_attainment=met / len(timings) if timings else None,
        goodput_per_s=met * NS_PER_S / duration_ns if duration_ns else None,
    )


def _duration_ns(timings: Sequence[RequestTiming]) -> int | None:
    if not timings:
        return None
    return max(t.finished_ns for t in timings) - min(t.scheduled_ns for t in timings)


def _latency(values_ns: list[int]) -> Latency | None:
    if not values_ns:
        return None
    p50, p90, p99 = (percentile(values_ns, q) / NS_PER_S for q in (50, 90, 99))
    return Latency(sum(values_ns) / len(values_ns) / NS_PER_S, p50, p90, p99)
