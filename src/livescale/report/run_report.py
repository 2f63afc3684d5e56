"""One run as text for a terminal: instances over time, scale events, latencies, goodput."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from livescale.report.run.live_loads import live_text
from livescale.report.run.reported_run import LIVE_PHASES, ReportedRun
from livescale.report.run.role_usage import role_text
from livescale.report.run.stage_usage import stage_text
from livescale.report.run.summary import Latency, RunSummary
from livescale.report.run.terminal import seconds, slo_of_models, step_chart, table
from livescale.report.run.usage import ModelUsage, usage_by_model
from livescale.report.run.where_time_went import device_text, slow_text
from livescale.telemetry.history.reading import CONTROLLER, Departure, Loss
from livescale.telemetry.history.waiting import SLOWEST_PERCENT
from livescale.telemetry.record.record import LoadPhases, ScaleLine
from livescale.values.types import Role
from livescale.values.units import NS_PER_S

MUTATION = "mutation"
"""The reason of decisions that move instances from one role to another."""
FAILOVER_HEADER = ("at", "lost", "held", "requests", "reason", "replaced after")
DEPARTURE_HEADER = ("at", "left", "held", "back after")


def run_text(run: ReportedRun) -> str:
    """Chart, tables and goodput for a terminal."""
    steps = run.instances
    until_ns = max(steps[-1][0], int((run.summary.duration_s or 0) * NS_PER_S)) + NS_PER_S
    usage = usage_by_model(run.history)
    parts = [
        role_text(run.by_role, run.end_ns) or step_chart("instances that serve", steps, until_ns),
        stage_text(run.by_stage, run.end_ns),
        _scale_table(run) if run.scale_events else "the pool was never scaled",
        live_text(run.live_stories, run.started_ns),
        failover_text(run),
        _latency_table(run.summary),
        _usage_table(usage) if len(usage) > 1 else "",
        _closing_lines(run),
    ]
    return "\n\n".join(part for part in parts if part)


def change_text(event: ScaleLine) -> str:
    """ "1 -> 2", or "prefill 1 -> 2"."""
    change = f"{event.from_instances} -> {event.to_instances}"
    return change if event.role is Role.UNIFIED else f"{event.role} {change}"


def failover_text(run: ReportedRun) -> str:
    """Losses and replacements, then departures; empty without any."""
    lost = [failover_cells(loss, run.started_ns) for loss in run.history.losses]
    left = [departure_cells(one, run.started_ns) for one in run.history.departures]
    tables = [(FAILOVER_HEADER, lost), (DEPARTURE_HEADER, left)]
    return "\n\n".join(table(header, rows) for header, rows in tables if rows)


def event_stories(
    event: ScaleLine, how: Callable[[LoadPhases], str], released: str = "released"
) -> list[tuple[str, LoadPhases | None]]:
    """How each instance came or went, in words, with the phases of its load. `how` tells of a load;
    in `released`, {} is the instance's number."""
    stories: list[tuple[str, LoadPhases | None]] = [(how(load), load) for load in event.loads]
    for instance, released_ns in event.released_ns.items():
        after = seconds((released_ns - event.decided_ns) / NS_PER_S)
        stories.append((f"{released.format(instance)} after {after}", None))
    if not stories and event.reason == MUTATION:
        stories.append(("by another role, without a load", None))
    elif not stories:
        is_up = event.to_instances > event.from_instances
        stories.append(("a draining one serves on" if is_up else "taken back", None))
    return stories


def phases_s(event: ScaleLine, load: LoadPhases, names: Sequence[str]) -> list[float | None]:
    """Seconds from the decision to these phases of LIVE_PHASES (None: not known, or not yet)."""
    times = (
        event.planned_ns,
        load.first_byte_ns,
        load.first_layer_ns,
        load.first_help_ns,
        load.loaded_ns,
        load.first_token_ns,
    )
    shown = [at for name, at in zip(LIVE_PHASES, times, strict=True) if name in names]
    return [None if at is None else (at - event.decided_ns) / NS_PER_S for at in shown]


def failover_cells(loss: Loss, started_ns: int) -> tuple[str, ...]:
    """A row of words below FAILOVER_HEADER; times count from the start of the load."""
    back = "not"
    if loss.back_ns is not None:
        back = seconds((loss.back_ns - loss.at_ns) / NS_PER_S)
        # Its end is not on record.
        back = f"at most {back}" if loss.member == CONTROLLER else back
    at, held = _at(loss.at_ns, started_ns), ", ".join(loss.held) or "-"
    return (at, loss.member, held, str(loss.requests), loss.reason, back)


def departure_cells(departure: Departure, started_ns: int) -> tuple[str, ...]:
    """A row of words below DEPARTURE_HEADER; times count from the start of the load."""
    back = "not"
    if departure.back_ns is not None:
        back = seconds((departure.back_ns - departure.at_ns) / NS_PER_S)
    held = ", ".join(departure.held) or "-"
    return (_at(departure.at_ns, started_ns), departure.member, held, back)


# -- helpers, in the order used -------------------------------------------------------------------


def _at(at_ns: int, started_ns: int) -> str:
    return f"{(at_ns - started_ns) / NS_PER_S:,.2f} s"


def _scale_table(run: ReportedRun) -> str:
    """One row per scale event and instance; phases count from the decision."""
    rows: list[list[str]] = []
    names = run.phase_names
    has_several = len({event.model for event in run.scale_events}) > 1
    for event in run.scale_events:
        at = seconds((event.decided_ns - run.started_ns) / NS_PER_S)
        change = change_text(event)
        reason = f"{event.model}: {event.reason}" if has_several else event.reason
        head = [at, change, reason]
        for story, load in event_stories(event, lambda load: f"{load.upstream} -> {load.worker}"):
            phases = map(seconds, phases_s(event, load, names)) if load else [""] * len(names)
            rows.append([*head, story, *phases])
            head = ["", "", ""]
    header = ["at", "change", "reason", "how"]
    return table([*header, *(name.replace("first", "1st") for name in names)], rows)


def _latency_table(s: RunSummary) -> str:
    rows = [[name, *_percentiles(latency)] for name, latency in (("TTFT", s.ttft), ("TBT", s.tbt))]
    return table(["", "mean", "p50", "p90", "p99"], rows)


def _percentiles(latency: Latency | None) -> list[str]:
    if latency is None:
        return ["-"] * 4
    return [seconds(v) for v in (latency.mean_s, latency.p50_s, latency.p90_s, latency.p99_s)]


def _usage_table(usage: dict[str, ModelUsage]) -> str:
    rows = [
        [
            *(model, u.requests, u.slo_met, u.prompt_tokens, u.generated_tokens),
            round(u.device_ns / NS_PER_S, 1),
            round(u.spare_ns / NS_PER_S, 1),
        ]
        for model, u in usage.items()
    ]
    header = ["model", "requests", "within SLO", "prompt tokens", "generated tokens"]
    return table([*header, "device s", "spare s"], rows)


def _closing_lines(run: ReportedRun) -> str:
    s, counts = run.summary, [count for _, count in run.instances]
    lines = [
        f"goodput   {_goodput(run)}",
        f"requests  {s.requests}, failed: {s.failed}",
        f"scaling   {counts[0]} -> {max(counts)} -> {counts[-1]} instances",
    ]
    slow = slow_text(run.slow_requests)
    if slow:
        lines.append(f"slowest   {SLOWEST_PERCENT} %: {slow}")
    lines.append(f"devices   {device_text(run.device_time)}")
    starts, warm = run.starts
    if warm:
        lines.append(f"spares    {warm} warm starts in {starts} instance starts")
    if run.strategies:
        used = ", ".join(f"{name} {count}x" for name, count in run.strategies.items())
        amended = sum(len(event.amendments) for event in run.scale_events)
        lines.append(f"multicast {used}" + (f", amended {amended}x" if amended else ""))
    for model, use in run.host_copies.items():
        lines.append(
            f"host mem. {model}: {use.copies_mean:.2f} copies on average, at most"
            f" {use.copies_max}; {use.bytes_mean / 1e9:.2f} GB on average"
        )
    return "\n".join(lines)


def _goodput(run: ReportedRun) -> str:
    s = run.summary
    if s.slo is None or s.goodput_per_s is None or s.slo_attainment is None:
        return "- (no request ended well)"
    tbt = "any" if s.slo.tbt_ns is None else seconds(s.slo.tbt_ns / NS_PER_S)
    return (
        f"{s.goodput_per_s:.2f} requests/s ({100 * s.slo_attainment:.1f} %) within the SLO"
        f" {run.slo_rule}: TTFT up to {seconds(s.slo.ttft_ns / NS_PER_S)}, TBT up to {tbt}"
        + slo_of_models(s.slo)
    )
