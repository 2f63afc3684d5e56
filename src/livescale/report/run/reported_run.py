"""One run, real or simulated: its record, and what is derived from it once.

Works on the lines of a run record alone, so that both worlds are shown alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from livescale.config.slo import SloAbsolute
from livescale.report.run.live_loads import LoadStory, load_stories
from livescale.report.run.role_usage import RoleUsage, usage_by_role
from livescale.report.run.stage_usage import StageUsage, usage_by_stage
from livescale.report.run.summary import RunSummary
from livescale.report.run.usage import ModelUsage, usage_by_model
from livescale.report.run.where_time_went import device_figures, slow_figures
from livescale.telemetry.history.device_time import DeviceTime, device_time
from livescale.telemetry.history.reading import History, read_history
from livescale.telemetry.history.waiting import SlowRequests, slow_requests
from livescale.telemetry.record.record import AnyLine, ScaleLine, TrafficLine
from livescale.telemetry.timeline import (
    HostCopyUse,
    host_copy_use,
    instances_over_time,
    mean_until,
    since,
)
from livescale.values.types import Role
from livescale.values.units import NS_PER_S

PHASES = ("planned", "first byte", "first layer", "loaded", "first token")
LIVE_PHASES = ("planned", "first byte", "first layer", "first help", "loaded", "first token")


@dataclass(frozen=True)
class ReportedRun:
    """A run under the name by which a reader tells it from others, its strategy mostly.

    `trace` names the load, which began at `started_ns`; times of `lines` are absolute. `slo_rule`
    is the rule as the user wrote it, `slo` what requests are judged by in figures over time; runs
    that are compared have the same one. `device_dollars_per_hour` is the price of one device, where
    it is known.
    """

    name: str
    trace: str
    lines: Sequence[AnyLine]
    summary: RunSummary
    started_ns: int
    slo_rule: str
    slo: SloAbsolute | None = None
    cluster: str = ""
    device_dollars_per_hour: float | None = None

    @cached_property
    def history(self) -> History:
        return read_history(self.lines)

    @property
    def instances(self) -> list[tuple[int, int]]:
        """(ns since the load's start, serving instances), beginning at 0."""
        changes = instances_over_time(self.history)
        if self.history.is_cut:
            # The part of a record begins later than the first request that ends in it.
            changes = [(self.started_ns, count) for _, count in changes[:1]] + changes
        return since(changes, self.started_ns)

    @property
    def scale_events(self) -> list[ScaleLine]:
        """What was decided after the first instances were ordered, in order of decision."""
        events = [line for line in self.lines if isinstance(line, ScaleLine)]
        later = [e for e in events if e.from_instances > 0 or e.woken_by is not None]
        return sorted(later, key=lambda event: event.decided_ns)

    @cached_property
    def live_stories(self) -> list[LoadStory]:
        """The loads that were live and not over before the first request was due."""
        stories = load_stories(self.history, only_live=True)
        return [story for story in stories if story.end_ns > self.started_ns]

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
        loaded = [e for e in self.scale_ups if any(load.loaded_ns is not None for load in e.loads)]
        return max(loaded, key=lambda event: len(event.loads), default=None)

    @cached_property
    def usage(self) -> dict[str, ModelUsage]:
        """What each model was asked and what it took while the load went on, by name."""
        return usage_by_model(self.history, self.started_ns, self.started_ns + self.end_ns)

    @cached_property
    def by_role(self) -> dict[Role, RoleUsage]:
        """What instances with each role did; empty where all were unified."""
        return usage_by_role(self.history, self.started_ns, self.started_ns + self.end_ns)

    @cached_property
    def by_stage(self) -> dict[str, StageUsage]:
        """What the stages of models did while the load went on; empty without stages."""
        until_ns = self.started_ns + self.end_ns
        return usage_by_stage(self.history, self.scale_events, self.started_ns, until_ns)

    @property
    def device_s(self) -> float:
        """How long instances held devices while the load went on, loading included, summed up
        over the devices."""
        return sum(usage.device_ns for usage in self.usage.values()) / NS_PER_S

    @cached_property
    def device_time(self) -> DeviceTime:
        """What all devices did while the load went on."""
        return device_time(self.history, self.started_ns, self.started_ns + self.end_ns)

    @cached_property
    def slow_requests(self) -> SlowRequests:
        """The slowest requests, and why they waited."""
        return slow_requests(self.history)

    @property
    def starts(self) -> tuple[int, int]:
        """Instances that were started, and how many of them found their parameters in place."""
        uses = self.usage.values()
        return sum(use.starts for use in uses), sum(use.warm_starts for use in uses)

    @property
    def dollars(self) -> float | None:
        """What the device time costs."""
        if self.device_dollars_per_hour is None:
            return None
        return self.device_s / 3600 * self.device_dollars_per_hour

    @property
    def end_ns(self) -> int:
        """When the load was over, since its start: its last request's end, else the last step."""
        ends_ns = [line.finished_ns for line in self.history.requests]
        return max(max(ends_ns, default=self.history.end_ns) - self.started_ns, 0)

    @property
    def instances_mean(self) -> float | None:
        """Serving instances on average over the load; None if it took no time."""
        return mean_until(self.instances, self.end_ns) if self.end_ns else None

    @cached_property
    def traffic(self) -> list[tuple[int, dict[str, int]]]:
        """(now_ns, bytes of parameters that links have carried since the entry before, by kind of
        link). Counters that begin anew, as those of a new controller do, add up."""
        entries: list[tuple[int, dict[str, int]]] = []
        before: dict[str, int] = {}
        for line in self.lines:
            if isinstance(line, TrafficLine):
                counted = [(kind, n, before.get(kind, 0)) for kind, n in line.carried_bytes.items()]
                new = {kind: n - last if n >= last else n for kind, n, last in counted}
                entries.append((line.now_ns, new))
                before = line.carried_bytes
        return entries

    @cached_property
    def carried_bytes(self) -> dict[str, int]:
        """Parameters that links have carried, by kind of link; empty if the record does not say."""
        total: Counter[str] = Counter()
        for _, new_bytes in self.traffic:
            total.update(new_bytes)
        return dict(sorted(total.items()))

    @cached_property
    def figures(self) -> dict[str, object]:
        """The figures of the run by name, for other programs; what is not known is absent.

        To those of `as_json` come `name`, `cluster`, means and 90th percentiles of latencies,
        `instances_mean`, `device_seconds`, their price in `dollars`, all device time by use
        (`device_serve_s`, `device_spare_s` and so on), times of the slowest requests (`slow_ttft_s`
        and its parts), `starts` of instances, the share of them that found their parameters in
        place (`warm_hit_rate`), `loaded_bytes` to devices, and `carried_bytes` by kind of link.
        """
        starts, warm = self.starts
        named: dict[str, object | None] = {"name": self.name, "cluster": self.cluster or None}
        named |= self.as_json()
        for name in ("ttft", "tbt"):
            latency = getattr(self.summary, name)
            if latency is not None:
                named |= {f"{name}_mean_s": latency.mean_s, f"{name}_p90_s": latency.p90_s}
        named |= {
            "instances_mean": self.instances_mean,
            "device_seconds": self.device_s,
            "dollars": self.dollars,
            **device_figures(self.device_time),
            **slow_figures(self.slow_requests),
            "starts": starts,
            "warm_hit_rate": warm / starts if starts else None,
            "loaded_bytes": sum(usage.loaded_bytes for usage in self.usage.values()),
            "carried_bytes": self.carried_bytes or None,
        }
        return {name: value for name, value in named.items() if value is not None}

    def as_json(self) -> dict[str, object]:
        """The figures by name; one that could not be measured is absent.

        `bytes` is what each receiver of the largest scale-up got, `seconds` the time from its
        decision until its last receiver had everything. `first_help_s` is how long after its order
        the first live instance helped. With roles, `by_role` has figures of each, with
        stages `by_stage`.
        """
        own = {} if self.slo is None else self.slo.of_models
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
            "slo_of_models": {model: str(slo) for model, slo in own.items()} or None,
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
        if self.history.departures:
            figures["members_left"] = len(self.history.departures)
        live = self.live_stories
        if live:
            figures |= {
                "live_loads": len(live),
                "batches_handed_over": sum(len(story.taken) for story in live),
                "requests_handed_over": sum(story.requests_given for story in live),
                "first_help_s": live[0].help_s,
            }
        if self.by_role:
            roles = self.by_role.items()
            figures["by_role"] = {role.value: use.as_json(self.end_ns) for role, use in roles}
        if self.by_stage:
            figures["by_stage"] = {name: use.as_json() for name, use in self.by_stage.items()}
        largest = self.largest_scale_up
        if largest is not None:
            loaded = [load.loaded_ns for load in largest.loads if load.loaded_ns is not None]
            figures |= {
                "bytes": largest.bytes_per_target,
                "seconds": (max(loaded) - largest.decided_ns) / NS_PER_S,
                "receivers": len(loaded),
            }
        return {name: value for name, value in figures.items() if value is not None}
