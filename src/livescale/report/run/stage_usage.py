"""What stages of models did in a run: what came, how unevenly, what was served and what waited, how
busy their instances were, and why each has as many of them as it has (QUART §4).

From sums that instances report. A window's figures are differences of two of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from livescale.messages.events import StageCounts
from livescale.messages.stage_windows import cv_of_gaps, differences
from livescale.report.run.terminal import charts_and_table, seconds
from livescale.telemetry.history.holding_history import InstanceHistory
from livescale.telemetry.history.reading import History
from livescale.telemetry.record.record import ScaleLine
from livescale.telemetry.timeline import instances_by_model, since
from livescale.values.types import InstanceState
from livescale.values.units import NS_PER_S

_WINDOWS = 10
_AT_WORK = (InstanceState.SERVING, InstanceState.DRAINING)
STAGE_HEADER = (
    *("stage", "instances", "Runs", "arrivals/s", "CV of gaps", "served/s", "service"),
    *("waiting", "utilisation", "busiest tenth", "last decision"),
)


@dataclass(frozen=True, slots=True)
class StageFigures:
    """Of one stage in a window of `elapsed_ns`, in which its instances were there for `served_ns`
    in all. `parts` are what each of them counted."""

    elapsed_ns: int
    served_ns: int
    parts: tuple[StageCounts, ...]

    def total(self, name: str) -> int:
        """Of a field of StageCounts."""
        return sum(getattr(part, name) for part in self.parts)

    @property
    def arrivals_per_s(self) -> float | None:
        return self.total("came") * NS_PER_S / self.elapsed_ns if self.elapsed_ns else None

    @property
    def served_per_s(self) -> float | None:
        """Runs that one instance would do per second if it had always one."""
        return self.total("done") * NS_PER_S / busy if (busy := self.total("busy_ns")) else None

    @property
    def service_s(self) -> float | None:
        """What a Run took on the device."""
        return self.total("busy_ns") / done / NS_PER_S if (done := self.total("done")) else None

    @property
    def waiting(self) -> float | None:
        """Runs in line, on average (Little)."""
        return self.total("waited_ns") / self.elapsed_ns if self.elapsed_ns else None

    @property
    def utilisation(self) -> float | None:
        """The busy part of its instances' time."""
        return self.total("busy_ns") / self.served_ns if self.served_ns else None

    def as_json(self) -> dict[str, object]:
        """By name; what was not measured is absent."""
        figures = {
            "runs": self.total("done"),
            "arrivals_per_s": self.arrivals_per_s,
            "gap_cv": cv_of_gaps(self.parts),
            "served_per_s": self.served_per_s,
            "service_s": self.service_s,
            "waiting": self.waiting,
            "utilisation": self.utilisation,
        }
        return {name: value for name, value in figures.items() if value is not None}


@dataclass(slots=True)
class StageUsage:
    """Of one stage. `instances` are (ns since the load's start, how many serve); `windows` are
    equal parts of the load."""

    load: StageFigures
    instances: list[tuple[int, int]] = field(default_factory=list)
    windows: list[StageFigures] = field(default_factory=list)
    last: ScaleLine | None = None

    @property
    def decision(self) -> str:
        """The last one, with its reason; empty where there was none."""
        if self.last is None:
            return ""
        return f"{self.last.from_instances} -> {self.last.to_instances}: {self.last.reason}"

    @property
    def busiest(self) -> float | None:
        """The utilisation of the busiest window."""
        known = [one.utilisation for one in self.windows if one.utilisation is not None]
        return max(known, default=None)

    def as_json(self) -> dict[str, object]:
        """By name. Instances are those of the whole load, `windows` have figures of its tenths."""
        counts = [count for _, count in self.instances]
        figures = self.load.as_json() | {
            "max_instances": max(counts, default=0),
            "final_instances": counts[-1] if counts else 0,
            "windows": [one.as_json() for one in self.windows],
        }
        if self.last is not None:
            figures |= {"last_decision": self.decision, "last_values": self.last.values}
        return figures


def usage_by_stage(
    history: History, decisions: Sequence[ScaleLine], from_ns: int, to_ns: int
) -> dict[str, StageUsage]:
    """Of every stage between these times, by name; empty without stages."""
    stages = {name: p.spec.stage for name, p in history.policies.items() if p.spec.stage}
    steps = instances_by_model(history)
    found = {}
    for name in sorted(stages, key=lambda name: (stages[name].model, stages[name].number)):
        own = [instance for instance in history.instances if instance.model == name]
        edges = [from_ns + (to_ns - from_ns) * n // _WINDOWS for n in range(_WINDOWS + 1)]
        usage = StageUsage(_figures(own, from_ns, to_ns))
        usage.windows = [_figures(own, *edge) for edge in pairwise(edges)]
        usage.instances = since(steps.get(name, []), from_ns)
        usage.last = next((d for d in reversed(decisions) if d.model == name), None)
        found[name] = usage
    return found


def stage_text(usage: Mapping[str, StageUsage], end_ns: int) -> str:
    """A chart and a row for each stage; empty without stages."""
    instances = {f"{name}: instances that serve": of.instances for name, of in usage.items()}
    return charts_and_table(instances, end_ns, STAGE_HEADER, stage_rows(usage))


def stage_rows(usage: Mapping[str, StageUsage]) -> list[tuple[str, ...]]:
    """A row of words for each stage below STAGE_HEADER."""
    return [_row(name, of) for name, of in usage.items()]


# -- helpers, in the order used -------------------------------------------------------------------


def _figures(instances: Sequence[InstanceHistory], from_ns: int, to_ns: int) -> StageFigures:
    before = {one.number: _counts(one, from_ns) for one in instances}
    after = {one.number: _counts(one, to_ns) for one in instances}
    served_ns = sum(
        max(min(stop_ns, to_ns) - max(start_ns, from_ns), 0)
        for one in instances
        for state, start_ns, stop_ns in one.stretches(to_ns)
        if state in _AT_WORK
    )
    return StageFigures(max(to_ns - from_ns, 0), served_ns, tuple(differences(before, after)))


def _counts(instance: InstanceHistory, at_ns: int) -> StageCounts:
    """As reported last by then."""
    reported = [counts for told_ns, counts in instance.visits if told_ns <= at_ns]
    return reported[-1] if reported else StageCounts()


def _row(name: str, of: StageUsage) -> tuple[str, ...]:
    counts, load = [count for _, count in of.instances], of.load
    return (
        name,
        f"{counts[0]} -> {max(counts)} -> {counts[-1]}",
        f"{load.total('done'):,}",
        _number(load.arrivals_per_s),
        _number(cv_of_gaps(load.parts)),
        _number(load.served_per_s),
        seconds(load.service_s),
        _number(load.waiting),
        _percent(load.utilisation),
        _percent(of.busiest),
        of.decision or "-",
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"
