"""What is compared of two worlds: figures of a run by name, and verdicts over several runs.

Both worlds write the same record, and both records are read here by the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median

from livescale.config.slo import percentile
from livescale.report.run.reported_run import ReportedRun
from livescale.report.run.terminal import table
from livescale.telemetry.history.holding_history import Ending
from livescale.telemetry.record.record import LoadPhases, ScaleLine
from livescale.values.units import NS_PER_S

TOLERANCE_PERCENT = 5
GOAL = ("ttft_p50_s", "ttft_p90_s", "scale_up_p50_s", "scale_up_p90_s")
"""The figures that the simulator has to get right where workers are timed."""


def run_figures(run: ReportedRun) -> dict[str, float]:
    """The figures of one run; those that it has no measurement of are absent.

    TTFT and TBT are what the client saw. Phases are those of the instances that were loaded after
    the load began: medians over them, in seconds; `scale_up` is from the decision until the
    instance serves. `instances_mean` is weighted with time, from the load's start to its last
    token.
    """
    figures: dict[str, float] = {}
    summary = run.summary
    for name, latency in (("ttft", summary.ttft), ("tbt", summary.tbt)):
        if latency is not None:
            figures |= {f"{name}_{figure}": value for figure, value in asdict(latency).items()}
    loads = list(loads_of(run))
    for name, begin, end in _PHASES:
        spans = [(begin(event, load), end(event, load)) for event, load in loads]
        values = [stop - start for start, stop in spans if start is not None and stop is not None]
        if values:
            figures[f"{name}_p50_s"] = median(values) / NS_PER_S
            if name == "scale_up":
                figures[f"{name}_p90_s"] = percentile(values, 90) / NS_PER_S
                figures[f"{name}_mean_s"] = fmean(values) / NS_PER_S
    figures["scale_ups"] = len(run.scale_ups)
    figures["scale_downs"] = len(run.scale_events) - len(run.scale_ups)
    figures |= _counts(run)
    figures["instances_max"] = max(count for _, count in run.instances)
    if run.instances_mean is not None:
        figures["instances_mean"] = run.instances_mean
    return figures


def loads_of(run: ReportedRun) -> Iterable[tuple[ScaleLine, LoadPhases]]:
    """The loads that came to their end, of the scale-ups that the load of requests made."""
    for event in run.scale_ups:
        for load in event.loads:
            if event.decided_ns >= run.started_ns and load.loaded_ns is not None:
                yield event, load


@dataclass(frozen=True, slots=True)
class Agreement:
    """One figure in both worlds. `simulated` is the median of the simulated runs."""

    name: str
    real: tuple[float, ...]
    simulated_runs: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.real)

    @property
    def simulated(self) -> float:
        return median(self.simulated_runs)

    @property
    def off(self) -> float | None:
        """How far the simulation is off, as a part of the real median; None if that is 0."""
        return self.simulated / self.median - 1 if self.median else None

    @property
    def is_within(self) -> bool:
        """Within the tolerance of the real runs' median."""
        return abs(self.simulated - self.median) * 100 <= TOLERANCE_PERCENT * abs(self.median)

    @property
    def is_inside(self) -> bool:
        """Not outside of what the real runs themselves came to. No agreement: real runs may be far
        apart."""
        return min(self.real) <= self.simulated <= max(self.real)

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "real": list(self.real),
            "median": self.median,
            "min": min(self.real),
            "max": max(self.real),
            "sim": self.simulated,
            "sim_runs": list(self.simulated_runs),
            "within_5_percent": self.is_within,
            "inside_spread": self.is_inside,
        }


def agreements(
    real: Sequence[Mapping[str, float]], simulated: Sequence[Mapping[str, float]]
) -> list[Agreement]:
    """Figure by figure, for those that every run of both worlds has."""
    names = [name for name in real[0] if all(name in run for run in (*real, *simulated))]
    return [
        Agreement(name, tuple(run[name] for run in real), tuple(run[name] for run in simulated))
        for name in names
    ]


def agreement_table(found: Sequence[Agreement]) -> str:
    """For people: times in milliseconds, counts as they are."""
    rows: list[list[object]] = []
    for item in found:
        unit, factor = ("ms", 1e3) if item.name.endswith("_s") else ("", 1.0)
        name = item.name.removesuffix("_s") if unit else item.name
        verdict = f"within {TOLERANCE_PERCENT} %" if item.is_within else "off"
        spread = "inside" if item.is_inside else "outside"
        off = "" if item.off is None else f"{100 * item.off:+.1f} %"
        cells = [f"{factor * value:.1f}" for value in item.real]
        middle = [f"{factor * item.median:.1f}", f"{factor * item.simulated:.1f}"]
        rows.append([name, unit, *cells, *middle, off, verdict, spread])
    runs = [f"real {number}" for number in range(1, len(found[0].real) + 1)] if found else []
    return table(["", "", *runs, "median", "simulated", "off", "verdict", "spread"], rows)


# -- helpers --------------------------------------------------------------------------------------

_Moment = Callable[[ScaleLine, LoadPhases], int | None]
_PHASES: tuple[tuple[str, _Moment, _Moment], ...] = (
    ("scale_up", lambda event, load: event.decided_ns, lambda event, load: load.loaded_ns),
    ("first_byte", lambda event, load: event.decided_ns, lambda event, load: load.first_byte_ns),
    ("first_layer", lambda event, load: event.decided_ns, lambda event, load: load.first_layer_ns),
    ("loaded", lambda event, load: load.first_layer_ns, lambda event, load: load.loaded_ns),
    ("first_token", lambda event, load: load.loaded_ns, lambda event, load: load.first_token_ns),
)
"""From one moment to another. The simulator reports the first byte when it asks for it, so the
first layer counts from the decision, too."""


def _counts(run: ReportedRun) -> dict[str, float]:
    """Instances that were ordered and instances that were let go, rank by rank."""
    begun = [held.begun_ns for held in run.history.holdings if held.is_ordered]
    over = [held.ended_ns for held in run.history.holdings if held.ending is Ending.RELEASED]
    return {
        "instances_started": sum(at_ns >= run.started_ns for at_ns in begun),
        "instances_released": sum((at_ns or 0) >= run.started_ns for at_ns in over),
    }
