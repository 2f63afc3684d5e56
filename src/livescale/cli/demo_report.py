"""What `livescale demo` shows when it is over: figures of one run, for people and as JSON."""

from __future__ import annotations

from dataclasses import dataclass

from livescale.report.summary import Latency, RunSummary
from livescale.report.terminal import seconds, step_chart, table
from livescale.telemetry.record import AnyLine, LoadPhases, ScaleLine
from livescale.telemetry.timeline import instances_over_time

_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class DemoFigures:
    """One run of the demo. Times of `lines` are absolute, `started_ns` is the replay's start."""

    trace: str
    summary: RunSummary
    lines: list[AnyLine]
    started_ns: int
    tokens: int
    token_mismatches: int
    near_ties: int
    slo_rule: str
    record: str

    @property
    def instances(self) -> list[tuple[int, int]]:
        """(ns since the replay's start, serving instances), beginning at 0."""
        changes = instances_over_time(self.lines)
        before = [count for at_ns, count in changes if at_ns <= self.started_ns]
        after = [(t - self.started_ns, count) for t, count in changes if t > self.started_ns]
        return [(0, before[-1] if before else 0), *after]

    @property
    def scale_events(self) -> list[ScaleLine]:
        """What was decided after the first instance was there, in order of decision."""
        events = [line for line in self.lines if isinstance(line, ScaleLine)]
        later = [event for event in events if event.from_instances > 0]
        return sorted(later, key=lambda event: event.decided_ns)

    @property
    def scale_ups(self) -> list[ScaleLine]:
        return [e for e in self.scale_events if e.to_instances > e.from_instances]

    @property
    def largest_scale_up(self) -> ScaleLine | None:
        """The one with the most instances loaded, the first of equals."""
        loaded = [e for e in self.scale_ups if any(_is_loaded(load) for load in e.loads)]
        return max(loaded, key=lambda event: len(event.loads), default=None)

    @property
    def is_good(self) -> bool:
        return (
            self.summary.failed == 0 and self.token_mismatches == 0 and self.instances[-1][1] == 1
        )

    def as_json(self) -> dict[str, object]:
        """The figures by name. `bytes` is what each receiver of the largest scale-up got,
        `seconds` the time from its decision until its last receiver had everything."""
        s = self.summary
        figures: dict[str, object] = {
            "trace": self.trace,
            "requests": s.requests,
            "failed": s.failed,
            "tokens": self.tokens,
            "token_mismatches": self.token_mismatches,
            "near_ties": self.near_ties,
            "max_instances": max(count for _, count in self.instances),
            "final_instances": self.instances[-1][1],
            "scale_ups": len(self.scale_ups),
            "scale_downs": len(self.scale_events) - len(self.scale_ups),
            "goodput_per_s": s.goodput_per_s,
            "slo": str(s.slo) if s.slo is not None else None,
            "slo_attainment": s.slo_attainment,
            "record": self.record,
        }
        for name, latency in (("ttft", s.ttft), ("tbt", s.tbt)):
            if latency is not None:
                figures |= {f"{name}_p50_s": latency.p50_s, f"{name}_p99_s": latency.p99_s}
        largest = self.largest_scale_up
        if largest is not None:
            figures |= {
                "bytes": largest.bytes_per_target,
                "seconds": _load_seconds(largest),
                "receivers": sum(1 for load in largest.loads if _is_loaded(load)),
            }
        return {name: value for name, value in figures.items() if value is not None}


def print_report(figures: DemoFigures) -> None:
    """Everything that a user wants to see, on standard output."""
    s = figures.summary
    steps = figures.instances
    until_ns = max(steps[-1][0], int((s.duration_s or 0) * _NS_PER_S)) + _NS_PER_S
    print()
    print(step_chart("instances that serve", steps, until_ns))
    print()
    print(_scale_table(figures))
    print()
    print(_latency_table(s))
    print()
    print(f"goodput   {_goodput(figures)}")
    print(f"requests  {s.requests}, failed: {s.failed}")
    print(
        f"tokens    {figures.tokens} checked against transformers, wrong:"
        f" {figures.token_mismatches} (near ties: {figures.near_ties})"
    )
    peak = max(count for _, count in steps)
    print(f"scaling   {steps[0][1]} -> {peak} -> {steps[-1][1]} instances")
    print(f"record    {figures.record} (check it with: livescale replay {figures.record})")


def _goodput(figures: DemoFigures) -> str:
    s = figures.summary
    if s.slo is None or s.goodput_per_s is None or s.slo_attainment is None:
        return "- (no request ended well)"
    tbt = "any" if s.slo.tbt_ns is None else seconds(s.slo.tbt_ns / _NS_PER_S)
    return (
        f"{s.goodput_per_s:.2f} requests/s ({100 * s.slo_attainment:.1f} %) within the SLO"
        f" {figures.slo_rule}: TTFT up to {seconds(s.slo.ttft_ns / _NS_PER_S)}, TBT up to {tbt}"
    )


def _scale_table(figures: DemoFigures) -> str:
    """One row per scale event and instance; phases count from the decision."""
    rows: list[list[object]] = []
    for event in figures.scale_events:
        at = seconds((event.decided_ns - figures.started_ns) / _NS_PER_S)
        change = f"{event.from_instances} -> {event.to_instances}"
        head: list[object] = [at, change, event.reason]
        for load in event.loads:
            rows.append([*head, f"{load.upstream} -> {load.worker}", *_phases(event, load)])
            head = ["", "", ""]
        for released_ns in event.released_ns.values():
            freed = seconds((released_ns - event.decided_ns) / _NS_PER_S)
            rows.append([*head, f"released after {freed}", *[""] * 5])
        if not event.loads and not event.released_ns:
            rows.append([*head, "resumed" if event in figures.scale_ups else "", *[""] * 5])
    header = ["at", "change", "reason", "how", "planned", "1st byte", "1st layer", "loaded"]
    return table([*header, "1st token"], rows)


def _phases(event: ScaleLine, load: LoadPhases) -> list[str]:
    times = (
        event.planned_ns,
        load.first_byte_ns,
        load.first_layer_ns,
        load.loaded_ns,
        load.first_token_ns,
    )
    return [seconds((t - event.decided_ns) / _NS_PER_S if t is not None else None) for t in times]


def _latency_table(s: RunSummary) -> str:
    rows = [[name, *_percentiles(latency)] for name, latency in (("TTFT", s.ttft), ("TBT", s.tbt))]
    return table(["", "mean", "p50", "p90", "p99"], rows)


def _percentiles(latency: Latency | None) -> list[str]:
    if latency is None:
        return ["-"] * 4
    return [seconds(v) for v in (latency.mean_s, latency.p50_s, latency.p90_s, latency.p99_s)]


def _is_loaded(load: LoadPhases) -> bool:
    return load.loaded_ns is not None


def _load_seconds(event: ScaleLine) -> float:
    loaded = [load.loaded_ns for load in event.loads if load.loaded_ns is not None]
    return (max(loaded) - event.decided_ns) / _NS_PER_S
