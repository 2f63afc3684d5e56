"""Whether scaling pays: systems under parts of the load that the whole pool can serve.

Every row is one simulated pool. Beside systems that scale stand the whole pool serving all the
time, a fixed pool that takes the device time of `livescale`, and what scaling could do at most.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from livescale.clusters.files import NamedTopology
from livescale.config.slo import SloAbsolute
from livescale.lab.bench.base.errors import BenchError
from livescale.load.traces import TraceRow, upscale
from livescale.report.run.summary import RunSummary, summarize
from livescale.report.run.terminal import seconds, table
from livescale.report.run.where_time_went import device_figures, slow_figures
from livescale.sim.pools.capacity import CapacityError, measure_capacity
from livescale.sim.pools.configs import build_config, tokens_max
from livescale.sim.pools.equal_time import play_equal
from livescale.sim.pools.limits import PooledModel, PoolError
from livescale.sim.pools.runs import PoolRun, fit_rows, lead_ns, run_with_history
from livescale.sim.pools.systems import SYSTEMS, System, find_system
from livescale.telemetry.history.device_time import DeviceTime, device_time
from livescale.telemetry.history.reading import History
from livescale.telemetry.history.waiting import SlowRequests, slow_requests
from livescale.values.units import NS_PER_S

SCALING = ("stop", "overlap", "zigzag", "livescale", "ideal")
_ANY = SloAbsolute(1 << 62, None)
_LIKE = "livescale"


@dataclass(frozen=True, slots=True)
class NamedLoad:
    """A trace under its name."""

    name: str
    rows: Sequence[TraceRow]


@dataclass(frozen=True, slots=True)
class ScalingOptions:
    """Every trace is played by every model on every cluster at every part of what the whole pool
    can serve. `requests_per_s` stands in place of that capacity, where it is known (None: it is
    measured). Models of `fewest_ranks` have the fewest ranks that fit, whatever they say."""

    traces: Sequence[NamedLoad]
    models: Sequence[PooledModel]
    clusters: Sequence[tuple[str, NamedTopology]]
    parts: Sequence[float]
    requests_per_s: float | None = None
    fewest_ranks: Collection[str] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """One system under one load. Latencies are those of requests that ended well (None: there are
    none)."""

    trace: str
    model: str
    cluster: str
    part: float
    system: str
    devices: int
    capacity_per_s: float
    clipped: int
    summary: RunSummary
    spent: DeviceTime
    slow: SlowRequests

    def as_json(self) -> dict[str, object]:
        """`device_s` is how long instances held devices, loading included; `serving_s` of it with
        everything there and not draining; `spare_s`, which is no part of it, how long devices held
        parameters of no instance."""
        latencies = self.summary.latencies()
        return {
            "trace": self.trace,
            "model": self.model,
            "cluster": self.cluster,
            "part": self.part,
            "system": self.system,
            "requests": self.summary.requests,
            "failed": self.summary.failed,
            "ttft_mean_s": latencies["ttft_mean_s"],
            "ttft_p99_s": latencies["ttft_p99_s"],
            "tbt_p99_s": latencies["tbt_p99_s"],
            "device_s": self.spent.held_ns / NS_PER_S,
            "serving_s": self.spent.serve_ns / NS_PER_S,
            "spare_s": self.spent.spare_ns / NS_PER_S,
            "devices": self.devices,
            "capacity_requests_per_s": self.capacity_per_s,
            "clipped": self.clipped,
            **device_figures(self.spent),
            **slow_figures(self.slow),
        }


@dataclass(frozen=True, slots=True)
class ScalingReport:
    rows: Sequence[ScalingRow]
    seed: int

    def text(self) -> str:
        """A table for each load."""
        tables = []
        for load in dict.fromkeys((r.trace, r.model, r.cluster, r.part) for r in self.rows):
            rows = [r for r in self.rows if (r.trace, r.model, r.cluster, r.part) == load]
            trace, model, cluster, part = load
            tables.append(f"{trace}, {model} on {cluster}, part {part:g}\n{_table(rows)}")
            failed = [f"{r.system} {r.summary.failed}" for r in rows if r.summary.failed]
            if failed:
                told = "requests failed, and are not in the latencies"
                tables.append(f"{told}: {', '.join(failed)} of {rows[0].summary.requests}")
        return "\n\n".join(tables)

    def as_json(self) -> dict[str, object]:
        return {"seed": self.seed, "rows": [row.as_json() for row in self.rows]}


def run_scaling(options: ScalingOptions, say: Callable[[str], None]) -> ScalingReport:
    """Play everything, one simulation after the other. The same options give the same rows.

    Raises BenchError, which names the load that cannot be played, and PoolError.
    """
    for part in options.parts:
        if not 0 < part <= 1:
            raise BenchError(f"part {part:g}: a part of what the pool can serve is in (0, 1]")
    setups = [
        _Setup(trace, _sized(model, cluster, options), name, cluster, options.seed)
        for trace in options.traces
        for name, cluster in options.clusters
        for model in options.models
    ]
    rows: list[ScalingRow] = []
    for setup in setups:
        factor, per_s, words = setup.capacity(options.requests_per_s)
        say(f"{setup.name}: the whole pool serves {per_s:.2f} requests/s ({words})")
        for part in options.parts:
            rows += setup.play(part, factor, per_s, say)
    return ScalingReport(rows, options.seed)


# -- helpers, in the order used -------------------------------------------------------------------


_RANKS = (1, 2, 4, 8)


def _sized(model: PooledModel, cluster: NamedTopology, options: ScalingOptions) -> PooledModel:
    """With the ranks that were asked for, or the fewest that fit; as it is where none do."""
    if model.name not in options.fewest_ranks:
        return model
    for ranks in _RANKS:
        sized = msgspec.structs.replace(model, tp_size=ranks)
        with contextlib.suppress(PoolError):
            build_config(cluster, [sized], SYSTEMS["fixed-full"])
            return sized
    return model


class _Setup:
    """A trace, the model that answers it, and its cluster. Raises PoolError if they cannot be, and
    BenchError for a trace without requests."""

    def __init__(
        self,
        trace: NamedLoad,
        model: PooledModel,
        cluster_name: str,
        cluster: NamedTopology,
        seed: int,
    ) -> None:
        self._trace, self._model, self._seed = trace, model, seed
        self._cluster_name, self._cluster = cluster_name, cluster
        if not trace.rows:
            raise BenchError(f"trace {trace.name} has no request")
        try:
            self._full = build_config(cluster, [model], SYSTEMS["fixed-full"])
        except PoolError as error:
            raise PoolError(f"{cluster_name}: {error}") from error
        self._rows, self._clipped = fit_rows(trace.rows, tokens_max(self._full, model.name))

    @property
    def name(self) -> str:
        return f"{self._trace.name}, {self._model.name} on {self._cluster_name}"

    def capacity(self, requests_per_s: float | None) -> tuple[float, float, str]:
        """The factor by which the trace saturates the whole pool, that rate, and whence it is."""
        try:
            if requests_per_s is None:
                loads = {self._model.name: self._rows}
                found = measure_capacity(loads, self._full, self._seed)
                told = f"measured in {found.simulations} simulations"
                return found.factor, found.requests_per_s, told
            duration_ns = self._rows[-1].arrival_ns
            if not duration_ns:
                raise CapacityError("a load of one moment has no rate, and so no capacity")
        except CapacityError as error:
            raise BenchError(f"{self.name}: {error}") from error
        factor = requests_per_s * duration_ns / (len(self._rows) * NS_PER_S)
        return factor, requests_per_s, "as given"

    def play(
        self, part: float, factor: float, per_s: float, say: Callable[[str], None]
    ) -> list[ScalingRow]:
        """A row for each system, under that part of the load."""
        rows = upscale(self._rows, factor * part, self._seed)
        if not rows:
            raise BenchError(f"{self.name}: no request is left at part {part:g}")
        # As in a real pool, the first instances are there before the load begins: for every
        # system at the same time.
        systems = [SYSTEMS["fixed-full"], *(SYSTEMS[name] for name in SCALING)]
        configs = [build_config(self._cluster, [self._model], system) for system in systems]
        start_ns = max(map(lead_ns, configs))
        histories: dict[str, tuple[PoolRun, History]] = {}

        def play(system: System) -> PoolRun:
            config = build_config(self._cluster, [self._model], system)
            load = {self._model.name: rows}
            histories[system.name] = run_with_history(config, load, start_ns, self._seed)
            return histories[system.name][0]

        for system in systems:
            play(system)
        auto = find_system(f"fixed:auto={_LIKE}")
        devices = len(self._cluster.topology.devices)
        like = histories[_LIKE][0]
        sized, _ = play_equal(auto, like, devices, self._model.tp_size, play)
        order = {"fixed-full": devices, auto.name: sized.fixed_devices or 0}
        order |= dict.fromkeys(SCALING, devices)
        say(f"  part {part:g}: {len(rows)} requests, {len(order)} systems")
        return [
            self._row(part, per_s, name, count, *histories[name]) for name, count in order.items()
        ]

    def _row(
        self,
        part: float,
        per_s: float,
        system: str,
        devices: int,
        run: PoolRun,
        history: History,
    ) -> ScalingRow:
        return ScalingRow(
            trace=self._trace.name,
            model=self._model.name,
            cluster=self._cluster_name,
            part=part,
            system="fixed-auto" if system.startswith("fixed:auto") else system,
            devices=devices,
            capacity_per_s=per_s,
            clipped=self._clipped,
            summary=summarize(run.timings(), _ANY),
            spent=device_time(history, run.started_ns, run.ended_ns),
            slow=slow_requests(history),
        )


def _table(rows: Sequence[ScalingRow]) -> str:
    header = ["system", "failed", "TTFT mean", "p99", "TBT p99", "device s", "serving", "spare"]
    header += ["slowest 5 %", "it loads", "all taken", "neither", "computing"]
    return table(header, [_cells(row) for row in rows])


def _cells(row: ScalingRow) -> list[object]:
    latencies = row.summary.latencies()
    slow, count = row.slow, max(row.slow.requests, 1) * NS_PER_S
    parts = (slow.ttft_ns, slow.loading_ns, slow.full_ns, slow.held_back_ns, slow.compute_ns)
    spent = (row.spent.held_ns, row.spent.serve_ns, row.spent.spare_ns)
    return [
        row.system + (f" ({row.devices})" if row.system == "fixed-auto" else ""),
        row.summary.failed,
        *(seconds(latencies[name]) for name in ("ttft_mean_s", "ttft_p99_s", "tbt_p99_s")),
        *(f"{ns / NS_PER_S:,.1f}" for ns in spent),
        *(seconds(ns / count) for ns in parts),
    ]
