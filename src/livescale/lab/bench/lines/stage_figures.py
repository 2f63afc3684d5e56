"""What a run of `bench stages` came to, from its record: real and simulated pools write the same.

Goodput is what counts: requests whose first token came within the SLO, per second of devices that
instances held while requests came.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from livescale.config.slo import RequestTiming, percentile
from livescale.lab.bench.base.errors import BenchError
from livescale.messages.commands import ScaleDecided
from livescale.telemetry.history.device_time import device_time
from livescale.telemetry.history.reading import read_history
from livescale.telemetry.record.record import AnyLine, RequestLine, StepLine
from livescale.values.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class StageRun:
    """`good` of the `requests` had their first token within the SLO; instances held devices for
    `device_s`. `ttft_ns` are those of requests that had a token. `grown`: by stage that came to
    more instances than it had at first, the most that it came to, and the reason of its first
    growth."""

    good: int
    requests: int
    device_s: float
    ttft_ns: tuple[int, ...]
    grown: dict[int, tuple[int, str]]

    @property
    def good_per_device_s(self) -> float:
        return self.good / self.device_s

    def ttft_s(self, percent: int) -> float:
        """A percentile. At least one request had a token."""
        return percentile(self.ttft_ns, percent) / NS_PER_S

    def as_json(self) -> dict[str, object]:
        return {
            "good": self.good,
            "requests": self.requests,
            "device_s": self.device_s,
            "good_per_device_s": self.good_per_device_s,
            "ttft_p50_s": self.ttft_s(50),
            "ttft_p99_s": self.ttft_s(99),
            "grown": {
                str(stage): {"instances_max": most, "reason": reason}
                for stage, (most, reason) in self.grown.items()
            },
        }


def read_run(
    lines: Sequence[AnyLine], slo_ns: int, timings: Sequence[RequestTiming] | None = None
) -> StageRun:
    """What happened while requests came, as the record's own clocks say, or the client's `timings`
    where there are some. Raises BenchError where no request was in time."""
    if timings is None:
        timings = [line.timing() for line in lines if isinstance(line, RequestLine)]
    ttft_ns = [its.token_ns[0] - its.scheduled_ns for its in timings if its.token_ns]
    good = sum(ttft <= slo_ns for ttft in ttft_ns)
    if not good:
        raise BenchError("no request had its first token within the SLO")
    due_ns = [timing.scheduled_ns for timing in timings]
    first_ns, last_ns = min(due_ns), max(due_ns)
    held_ns = device_time(read_history(lines), first_ns, last_ns).held_ns
    return StageRun(
        good=good,
        requests=len(timings),
        device_s=held_ns / NS_PER_S,
        ttft_ns=tuple(ttft_ns),
        grown=_grown(lines, first_ns),
    )


def together(runs: Iterable[StageRun]) -> StageRun:
    """Several runs as one."""
    runs = list(runs)
    grown: dict[int, tuple[int, str]] = {}
    for run in runs:
        for stage, (most, reason) in run.grown.items():
            known, first = grown.get(stage, (most, reason))
            grown[stage] = (max(known, most), first)
    return StageRun(
        good=sum(run.good for run in runs),
        requests=sum(run.requests for run in runs),
        device_s=sum(run.device_s for run in runs),
        ttft_ns=tuple(ttft for run in runs for ttft in run.ttft_ns),
        grown=dict(sorted(grown.items())),
    )


# -- helpers, in the order used -------------------------------------------------------------------


def _grown(lines: Iterable[AnyLine], since_ns: int) -> dict[int, tuple[int, str]]:
    """By stage, from the time on."""
    first: dict[int, int] = {}
    found: dict[int, tuple[int, str]] = {}
    for at_ns, decided in _decisions(lines):
        stage, count = int(decided.model.rpartition("/")[2]), decided.to_instances
        if at_ns < since_ns:
            first[stage] = count
        elif count > first.setdefault(stage, decided.from_instances):
            most, reason = found.get(stage, (0, decided.reason))
            found[stage] = (max(most, count), reason)
    return dict(sorted(found.items()))


def _decisions(lines: Iterable[AnyLine]) -> Iterator[tuple[int, ScaleDecided]]:
    for line in lines:
        if isinstance(line, StepLine):
            for command in line.commands:
                if isinstance(command, ScaleDecided):
                    yield line.now_ns, command
