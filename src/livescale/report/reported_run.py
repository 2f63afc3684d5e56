"""One run among those that are compared: its report, and what is derived from its record once."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from livescale.report.run_report import RunReport
from livescale.report.usage import ModelUsage, usage_by_model
from livescale.slo import SloAbsolute
from livescale.telemetry.history.reading import History
from livescale.telemetry.record import TrafficLine

_NS_PER_S = 1_000_000_000


@dataclass(frozen=True)
class ReportedRun:
    """A run under the name by which a reader tells it from others, its strategy mostly.

    `slo` is what requests are judged by in figures over time; runs that are compared have the
    same one. `device_dollars_per_hour` is the price of one device, where it is known.
    """

    name: str
    report: RunReport
    slo: SloAbsolute | None = None
    cluster: str = ""
    device_dollars_per_hour: float | None = None

    @property
    def history(self) -> History:
        return self.report.history

    @cached_property
    def usage(self) -> dict[str, ModelUsage]:
        """What each model was asked and what it took while the load went on, by name."""
        started_ns = self.report.started_ns
        return usage_by_model(self.history, started_ns, started_ns + self.end_ns)

    @property
    def device_s(self) -> float:
        """How long instances held devices while the load went on, loading included, summed up
        over the devices."""
        return sum(usage.device_ns for usage in self.usage.values()) / _NS_PER_S

    @property
    def dollars(self) -> float | None:
        """What the device time costs."""
        if self.device_dollars_per_hour is None:
            return None
        return self.device_s / 3600 * self.device_dollars_per_hour

    @property
    def end_ns(self) -> int:
        """When the load was over, since its start: its last request's end, else the last step."""
        duration_s = self.report.summary.duration_s
        if duration_s is not None:
            return int(duration_s * _NS_PER_S)
        return max(self.history.end_ns - self.report.started_ns, 0)

    @property
    def instances_mean(self) -> float | None:
        """Serving instances on average over the load; None if it took no time."""
        if not self.end_ns:
            return None
        steps = [*self.report.instances, (self.end_ns, 0)]
        spans = pairwise(steps)
        held = sum(n * max(min(stop, self.end_ns) - start, 0) for (start, n), (stop, _) in spans)
        return held / self.end_ns

    @cached_property
    def traffic(self) -> list[tuple[int, dict[str, int]]]:
        """(now_ns, bytes of parameters that links have carried since the entry before, by kind of
        link). Counters that begin anew, as those of a new controller do, add up."""
        entries: list[tuple[int, dict[str, int]]] = []
        before: dict[str, int] = {}
        for line in self.report.lines:
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
        """The figures of the run by name, for other programs; what is not known is absent."""
        named: dict[str, object | None] = {"name": self.name, "cluster": self.cluster or None}
        named |= self.report.as_json()
        for name in ("ttft", "tbt"):
            latency = getattr(self.report.summary, name)
            if latency is not None:
                named |= {f"{name}_mean_s": latency.mean_s, f"{name}_p90_s": latency.p90_s}
        named |= {
            "instances_mean": self.instances_mean,
            "device_seconds": self.device_s,
            "dollars": self.dollars,
            "carried_bytes": self.carried_bytes or None,
        }
        return {name: value for name, value in named.items() if value is not None}
