"""One run, real or simulated, as text: instances over time, scale events, latencies, goodput.

Works on the lines of a run record alone, so that both worlds are shown alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from livescale.report.live_loads import LoadStory, live_stories, live_text
from livescale.report.summary import Latency, RunSummary
from livescale.report.terminal import seconds, step_chart, table
from livescale.report.usage import ModelUsage, usage_by_model
from livescale.telemetry.history.reading import CONTROLLER, History, Loss, read_history
from livescale.telemetry.host_memory import HostCopyUse, host_copy_use
from livescale.telemetry.record import AnyLine, LoadPhases, ScaleLine
from livescale.telemetry.timeline import instances_over_time

_NS_PER_S = 1_000_000_000


@dataclass(frozen=True)
class RunReport:
    """A run's record and summary. Times of `lines` are absolute; the load began at `started_ns`.

    `trace` names the load, `slo_rule` the rule as the user wrote it.
    """

    trace: str
    lines: Sequence[AnyLine]
    summary: RunSummary
    started_ns: int
    slo_rule: str

    @property
    def instances(self) -> list[tuple[int, int]]:
        """(ns since the load's start, serving instances), beginning at 0."""
        changes = instances_over_time(self.history)
        before = [count for at_ns, count in changes if at_ns <= self.started_ns]
        if self.history.is_cut and changes and not before:
            # The part of a record begins later than the first request that ends in it.
            before = [changes[0][1]]
        after = [(t - self.started_ns, count) for t, count in changes if t > self.started_ns]
        return [(0, before[-1] if before else 0), *after]

    @property
    def scale_events(self) -> list[ScaleLine]:
        """What was decided after the first instances were ordered, in order of decision."""
        events = [line for line in self.lines if isinstance(line, ScaleLine)]
        later = [e for e in events if e.from_instances > 0 or e.woken_by is not None]
        return sorted(later, key=lambda event: event.decided_ns)

    @cached_property
    def history(self) -> History:
        return read_history(self.lines)

    @cached_property
    def live_stories(self) -> list[LoadStory]:
        """The loads that were live and not over before the first request was due."""
        stories = live_stories(self.history)
        return [story for story in stories if story.end_ns > self.started_ns]

    @property
    def live_text(self) -> str:
        """Live loads for a terminal; empty without any."""
        return live_text(self.live_stories, self.started_ns) if self.live_stories else ""

    @property
    def failover_text(self) -> str:
        """Losses and replacements for a terminal; empty without any."""
        rows = [failover_cells(loss, self.started_ns) for loss in self.history.losses]
        return table(FAILOVER_HEADER, rows) if rows else ""

    @property
    def phase_names(self) -> tuple[str, ...]:
        """The phases of loads that are shown: first help only where some load was live."""
        is_live = any(load.live_ns is not None for e in self.scale_events for load in e.loads)
        return LIVE_PHASES if is_live else PHASES

    @property
    def host_copies(self) -> dict[str, HostCopyUse]:
        """Copies in host memory, of the models that had any."""
        uses = host_copy_use(self.history)
        return {model: use for model, use in uses.items() if use.copies_max}

    @property
    def strategies(self) -> dict[str, int]:
        """How often each multicast strategy was used to add instances."""
        names = [e.strategy for e in self.scale_events if e.strategy]
        return {name: names.count(name) for name in sorted(set(names))}

    @property
    def scale_ups(self) -> list[ScaleLine]:
        return [e for e in self.scale_events if e.to_instances > e.from_instances]

    @property
    def largest_scale_up(self) -> ScaleLine | None:
        """The one with the most instances loaded, the first of equals."""
        loaded = [e for e in self.scale_ups if any(_is_loaded(load) for load in e.loads)]
        return max(loaded, key=lambda event: len(event.loads), default=None)

    def as_json(self) -> dict[str, object]:
        """The figures by name; one that could not be measured is absent.

        `bytes` is what each receiver of the largest scale-up got, `seconds` the time from its
        decision until its last receiver had everything. `first_help_s` is how long after its order
        the first live instance helped.
        """
        s, counts = self.summary, [count for _, count in self.instances]
        figures: dict[str, object] = {
            "trace": self.trace,
            "requests": s.requests,
            "failed": s.failed,
            "max_instances": max(counts),
            "final_instances": counts[-1],
            "scale_ups": len(self.scale_ups),
            "scale_downs": len(self.scale_events) - len(self.scale_ups),
            "goodput_per_s": s.goodput_per_s,
            "slo": self.slo_rule,
            "slo_attainment": s.slo_attainment,
        }
        for name, latency in (("ttft", s.ttft), ("tbt", s.tbt)):
            if latency is not None:
                figures |= {f"{name}_p50_s": latency.p50_s, f"{name}_p99_s": latency.p99_s}
        if self.strategies:
            figures["strategies"] = self.strategies
            figures["amendments"] = sum(len(event.amendments) for event in self.scale_events)
        uses = self.host_copies.values()
        if uses:
            figures |= {
                "host_copies_per_model_mean": sum(use.copies_mean for use in uses) / len(uses),
                "host_copies_per_model_max": max(use.copies_max for use in uses),
                "host_bytes_mean": sum(use.bytes_mean for use in uses),
            }
        losses = self.history.losses
        if losses:
            back = [loss for loss in losses if loss.back_ns is not None]
            figures |= {"members_lost": len(losses), "members_replaced": len(back)}
        live = self.live_stories
        if live:
            figures |= {
                "live_loads": len(live),
                "batches_handed_over": sum(len(story.taken) for story in live),
                "requests_handed_over": sum(story.requests_given for story in live),
                "first_help_s": live[0].help_s,
            }
        largest = self.largest_scale_up
        if largest is not None:
            loaded = [load.loaded_ns for load in largest.loads if load.loaded_ns is not None]
            figures |= {
                "bytes": largest.bytes_per_target,
                "seconds": (max(loaded) - largest.decided_ns) / _NS_PER_S,
                "receivers": len(loaded),
            }
        return {name: value for name, value in figures.items() if value is not None}

    def text(self) -> str:
        """Chart, tables and goodput for a terminal."""
        steps = self.instances
        until_ns = max(steps[-1][0], int((self.summary.duration_s or 0) * _NS_PER_S)) + _NS_PER_S
        parts = [
            step_chart("instances that serve", steps, until_ns),
            self._scale_table() if self.scale_events else "the pool was never scaled",
            *([self.live_text] if self.live_stories else []),
            *([self.failover_text] if self.history.losses else []),
            _latency_table(self.summary),
        ]
        usage = usage_by_model(self.history)
        if len(usage) > 1:
            parts.append(_usage_table(usage))
        parts.append(self._closing_lines())
        return "\n\n".join(parts)

    def _closing_lines(self) -> str:
        s, counts = self.summary, [count for _, count in self.instances]
        lines = [
            f"goodput   {self._goodput()}",
            f"requests  {s.requests}, failed: {s.failed}",
            f"scaling   {counts[0]} -> {max(counts)} -> {counts[-1]} instances",
        ]
        if self.strategies:
            used = ", ".join(f"{name} {count}x" for name, count in self.strategies.items())
            amended = sum(len(event.amendments) for event in self.scale_events)
            lines.append(f"multicast {used}" + (f", amended {amended}x" if amended else ""))
        for model, use in self.host_copies.items():
            lines.append(
                f"host mem. {model}: {use.copies_mean:.2f} copies on average, at most"
                f" {use.copies_max}; {use.bytes_mean / 1e9:.2f} GB on average"
            )
        return "\n".join(lines)

    def _goodput(self) -> str:
        s = self.summary
        if s.slo is None or s.goodput_per_s is None or s.slo_attainment is None:
            return "- (no request ended well)"
        tbt = "any" if s.slo.tbt_ns is None else seconds(s.slo.tbt_ns / _NS_PER_S)
        return (
            f"{s.goodput_per_s:.2f} requests/s ({100 * s.slo_attainment:.1f} %) within the SLO"
            f" {self.slo_rule}: TTFT up to {seconds(s.slo.ttft_ns / _NS_PER_S)}, TBT up to {tbt}"
        )

    def _scale_table(self) -> str:
        """One row per scale event and instance; phases count from the decision."""
        rows: list[list[object]] = []
        names = self.phase_names
        has_several = len({event.model for event in self.scale_events}) > 1
        for event in self.scale_events:
            at = seconds((event.decided_ns - self.started_ns) / _NS_PER_S)
            change = f"{event.from_instances} -> {event.to_instances}"
            reason = f"{event.model}: {event.reason}" if has_several else event.reason
            head: list[object] = [at, change, reason]
            for load in event.loads:
                rows.append(
                    [
                        *head,
                        f"{load.upstream} -> {load.worker}",
                        *map(seconds, phases_s(event, load, names)),
                    ]
                )
                head = ["", "", ""]
            for released_ns in event.released_ns.values():
                freed = seconds((released_ns - event.decided_ns) / _NS_PER_S)
                rows.append([*head, f"released after {freed}", *[""] * len(names)])
            if not event.loads and not event.released_ns:
                is_up = event.to_instances > event.from_instances
                story = "a draining one serves on" if is_up else "taken back"
                rows.append([*head, story, *[""] * len(names)])
        header = ["at", "change", "reason", "how"]
        return table([*header, *(name.replace("first", "1st") for name in names)], rows)


PHASES = ("planned", "first byte", "first layer", "loaded", "first token")
LIVE_PHASES = ("planned", "first byte", "first layer", "first help", "loaded", "first token")


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
    return [None if at is None else (at - event.decided_ns) / _NS_PER_S for at in shown]


FAILOVER_HEADER = ("at", "lost", "held", "requests", "reason", "replaced after")


def failover_cells(loss: Loss, started_ns: int) -> tuple[str, ...]:
    """A row of words below FAILOVER_HEADER; times count from the start of the load."""
    back = "not"
    if loss.back_ns is not None:
        back = seconds((loss.back_ns - loss.at_ns) / _NS_PER_S)
        # Its end is not on record.
        back = f"at most {back}" if loss.member == CONTROLLER else back
    return (
        f"{(loss.at_ns - started_ns) / _NS_PER_S:,.2f} s",
        loss.member,
        ", ".join(loss.held) or "-",
        str(loss.requests),
        loss.reason,
        back,
    )


# -- helpers, in the order used -------------------------------------------------------------------


def _is_loaded(load: LoadPhases) -> bool:
    return load.loaded_ns is not None


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
            round(u.device_ns / _NS_PER_S, 1),
        ]
        for model, u in usage.items()
    ]
    header = ["model", "requests", "within SLO", "prompt tokens", "generated tokens"]
    return table([*header, "device s"], rows)
