"""A pool over several hosts as one picture: when each host was there and why it went, what its
workers did, and how many instances served, by host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes

from livescale.messages.events import WorkerJoined, WorkerLost
from livescale.report.pictures.canvas import (
    ACCENT,
    COLOURS,
    LIMIT,
    REST,
    PlotRow,
    amount_axis,
    draw_picture,
    time_axis,
)
from livescale.report.pictures.lanes import (
    LanesShown,
    Shape,
    draw_shapes,
    instance_shapes,
    part_name,
    tint,
)
from livescale.report.run.reported_run import ReportedRun
from livescale.telemetry.history.changes import member_name
from livescale.telemetry.record.record import StepLine
from livescale.telemetry.timeline import spans_of_serving
from livescale.values.units import NS_PER_S

_LANE_IN = 0.42
_MARKS = {"joined": (">", ACCENT), "lost": ("X", "#D55E00"), "left": ("<", LIMIT)}


@dataclass(frozen=True, slots=True)
class HostVisit:
    """A host from its first worker's joining until it was gone (`is_lost`: not in order); times are
    the record's, None: it was there to the end. `workers` are the numbers of its workers."""

    host: str
    workers: tuple[int, ...]
    joined_ns: int
    gone_ns: int | None = None
    is_lost: bool = False


def host_visits(run: ReportedRun) -> list[HostVisit]:
    """Every visit of every host that has workers, by name and then in order."""
    there: dict[str, tuple[int, dict[int, None]]] = {}
    host_of: dict[int, str] = {}
    left = {departure.member for departure in run.history.departures}
    visits: list[HostVisit] = []
    for step in run.lines:
        if not isinstance(step, StepLine):
            continue
        for event in step.events:
            if isinstance(event, WorkerJoined):
                host = event.device.host
                host_of[event.worker.worker] = host
                there.setdefault(host, (step.now_ns, {}))[1][event.worker.worker] = None
            elif isinstance(event, WorkerLost):
                was_on = host_of.pop(event.worker.worker, None)
                if was_on is not None and was_on not in host_of.values():
                    joined_ns, workers = there.pop(was_on)
                    is_lost = member_name(event.worker) not in left
                    numbers = tuple(sorted(workers))
                    visits.append(HostVisit(was_on, numbers, joined_ns, step.now_ns, is_lost))
    visits += [
        HostVisit(host, tuple(sorted(workers)), joined_ns)
        for host, (joined_ns, workers) in there.items()
    ]
    return sorted(visits, key=lambda visit: (visit.host, visit.joined_ns))


def host_picture(path: Path, run: ReportedRun, title: str) -> None:
    """Two plots over one time: instances that serve, by host, and a lane per host. Raises as
    `draw_picture`."""
    visits = host_visits(run)
    hosts = sorted({visit.host for visit in visits})
    plot = _HostPlot(run, visits, hosts)
    told = "hosts: there while grey; > joined, x lost without a word, < left in order"
    rows = [
        PlotRow(1.7, plot.draw_instances, "instances that serve, by host"),
        PlotRow(
            _LANE_IN * max(len(hosts), 1) + 0.8,
            plot.draw_lanes,
            f"{told}; pale: an instance loads, dark: serves, half as high: drains",
        ),
    ]
    draw_picture(path, title, rows)


# -- helpers, in the order used -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _HostPlot:
    """Both plots of a run: its visits, and the hosts in their order. Times count from the load's
    start."""

    run: ReportedRun
    visits: Sequence[HostVisit]
    hosts: Sequence[str]

    def draw_instances(self, axes: Axes) -> None:
        """One host's on top of the other's."""
        from_s, until_s = self._span_s()
        deltas = {host: self._serving(host) for host in self.hosts}
        changes_s = {at_s for of in deltas.values() for at_s, _ in of if from_s < at_s < until_s}
        times_s = [from_s, *sorted(changes_s), until_s]
        counts = [[sum(d for at, d in of if at <= t) for t in times_s] for of in deltas.values()]
        colours = [COLOURS[number % len(COLOURS)] for number in range(len(deltas))]
        axes.stackplot(times_s, counts, labels=self.hosts, colors=colours, step="post", linewidth=0)
        time_axis(axes, until_s, from_s)
        largest = max(map(sum, zip(*counts, strict=True)), default=0)
        amount_axis(axes, "instances", largest, is_count=True)
        axes.legend(loc="upper right", frameon=False, ncols=max(len(deltas), 1), handlelength=1.2)

    def draw_lanes(self, axes: Axes) -> None:
        """A lane for each."""
        from_s, until_s = self._span_s()
        grey = tint(REST, 0.28)
        for visit in self.visits:
            place, at_s = self.hosts.index(visit.host), self._s(visit.joined_ns)
            gone_s = until_s if visit.gone_ns is None else self._s(visit.gone_ns)
            axes.barh(place, gone_s - at_s, left=at_s, height=0.9, color=grey, linewidth=0)
            _mark(axes, "joined", at_s, place)
            if visit.gone_ns is not None:
                _mark(axes, "lost" if visit.is_lost else "left", gone_s, place)
        draw_shapes(axes, self._shapes())
        axes.set_ylim(len(self.hosts) - 0.45, -0.55)
        axes.set_yticks(range(len(self.hosts)), self.hosts)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        time_axis(axes, until_s, from_s)

    def _s(self, at_ns: int) -> float:
        return (at_ns - self.run.started_ns) / NS_PER_S

    def _span_s(self) -> tuple[float, float]:
        joined_s = [self._s(visit.joined_ns) for visit in self.visits]
        return min([0.0, *joined_s]), self._s(self.run.history.end_ns)

    def _serving(self, host: str) -> list[tuple[float, int]]:
        """+1 and -1 where instances of a host began and ceased to serve."""
        deltas: list[tuple[float, int]] = []
        for instance, start_ns, stop_ns in spans_of_serving(self.run.history):
            visit = self._visit_of(instance.holdings[0].member.worker, start_ns, host)
            if visit is not None:
                deltas += [(self._s(start_ns), 1), (self._s(stop_ns), -1)]
        return deltas

    def _visit_of(self, worker: int, at_ns: int, host: str | None = None) -> HostVisit | None:
        """The visit (of that host) during which a worker was at work at that time."""
        for visit in self.visits:
            gone_ns = at_ns if visit.gone_ns is None else visit.gone_ns
            is_there = worker in visit.workers and visit.joined_ns <= at_ns <= gone_ns
            if is_there and host in (None, visit.host):
                return visit
        return None

    def _shapes(self) -> list[Shape]:
        """Each host's instances, its workers one below the other."""
        instances = self.run.history.instances
        parts = dict.fromkeys(part_name(i.model, role) for i in instances for _, role in i.roles)
        colours = {part: COLOURS[n % len(COLOURS)] for n, part in enumerate(parts)}
        shown = LanesShown(self.run.started_ns, self.run.history.end_ns, colours)
        shapes = []
        for instance in instances:
            for held in instance.holdings:
                visit = self._visit_of(held.member.worker, held.begun_ns)
                if visit is None:
                    continue
                part = 0.8 / len(visit.workers)
                row = visit.workers.index(held.member.worker) + 0.5
                middle = self.hosts.index(visit.host) - 0.4 + part * row
                shapes += instance_shapes(instance, held, (middle, part), shown)
        return shapes


def _mark(axes: Axes, what: str, at_s: float, place: int) -> None:
    marker, colour = _MARKS[what]
    axes.plot([at_s], [place], marker=marker, color=colour, markersize=7, zorder=5, clip_on=False)
