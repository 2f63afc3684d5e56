"""What a shared pool saves: models on fixed pools of their own, and all of them on one pool.

The figure is in devices. A model keeps its promise if its attainment (the share of its requests
that end well within its SLO) is at least 99 % of what it is with the largest pool all to itself.
The fewest devices with which every model does so are compared. The same models are also played with
their peaks together and apart, and with half of them preferred: a *case* each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from livescale.clusters.files import NamedTopology
from livescale.config.slo import SloAbsolute, SloError, SloRule
from livescale.lab.bench.base.errors import BenchError
from livescale.load.peaks import Peaks, turned
from livescale.load.traces import TraceRow
from livescale.report.run.summary import RunSummary, summarize
from livescale.report.run.terminal import seconds, table
from livescale.sim.pools.configs import build_config, tokens_max
from livescale.sim.pools.limits import PooledModel
from livescale.sim.pools.runs import (
    PoolRun,
    fit_rows,
    lead_ns,
    run_pool,
    run_with_history,
    token_weights,
)
from livescale.sim.pools.systems import SYSTEMS, System, find_system
from livescale.telemetry.history.device_time import DeviceTime, device_time
from livescale.values.units import NS_PER_S

SHARING = (
    *("livescale", "livescale-recent", "livescale-on-demand", "livescale-no-spares"),
    *("stop", "overlap", "serverlessllm", "allcache", "fixed-full"),
)
KEPT = 0.99
"""Of the attainment with a pool of one's own."""
_ANY = SloAbsolute(1 << 62, None)


@dataclass(frozen=True, slots=True)
class SharedModel:
    """A model, what is asked of it, and how its requests are judged: a rule that refers to a mean
    is resolved against the model's run with the largest pool to itself."""

    model: PooledModel
    rows: Sequence[TraceRow]
    slo: SloRule


class SharingCase(NamedTuple):
    """When the models' peaks come. With `priorities`, the first half of the models (rounded up) has
    a priority that is higher by one than its own."""

    peaks: Peaks = Peaks.AS_THEY_ARE
    priorities: bool = False


PLAIN = SharingCase()
"""The load as it is: the smallest pools are those of this case."""


@dataclass(frozen=True, slots=True)
class SharingOptions:
    """The models share pools of so many `devices` each, ascending; `cluster` makes one. `plays`
    says which cases each system plays. All requests arrive before `period_ns`: traces are turned
    within that time."""

    models: Sequence[SharedModel]
    cluster: Callable[[int], NamedTopology]
    devices: Sequence[int]
    plays: Mapping[str, Sequence[SharingCase]]
    period_ns: int
    seed: int = 0

    @property
    def preferred(self) -> list[str]:
        """Models that a case with priorities prefers."""
        half = (len(self.models) + 1) // 2
        return [shared.model.name for shared in self.models[:half]]


@dataclass(frozen=True, slots=True)
class OwnPool:
    """A model on fixed pools of its own: attainment with the largest one, and the fewest devices
    that keep it."""

    slo: SloAbsolute
    attainment: float
    devices: int


@dataclass(frozen=True, slots=True)
class SharingRow:
    """One system on so many devices in one case. `of_halves` is the attainment of the models that
    cases with priorities prefer, and of the others (None: there are none), in each case.
    Latencies are of requests that ended well."""

    system: str
    case: SharingCase
    devices: int
    attainment: float
    of_models: Mapping[str, float]
    of_halves: tuple[float, float | None]
    summary: RunSummary
    spent: DeviceTime

    def keeps(self, own: Mapping[str, OwnPool]) -> bool:
        """Every model keeps its promise."""
        return all(met >= KEPT * own[name].attainment for name, met in self.of_models.items())

    def as_json(self) -> dict[str, object]:
        latencies = self.summary.latencies()
        return {
            "system": self.system,
            "peaks": str(self.case.peaks),
            "priorities": self.case.priorities,
            "devices": self.devices,
            "attainment": self.attainment,
            "preferred_attainment": self.of_halves[0],
            "other_attainment": self.of_halves[1],
            "worst_model_attainment": min(self.of_models.values()),
            "attainment_of_models": dict(self.of_models),
            "ttft_p99_s": latencies["ttft_p99_s"],
            "tbt_p99_s": latencies["tbt_p99_s"],
            "requests": self.summary.requests,
            "failed": self.summary.failed,
            "serving_s": self.spent.serve_ns / NS_PER_S,
            "spare_s": self.spent.spare_ns / NS_PER_S,
            "idle_s": self.spent.idle_ns / NS_PER_S,
        }


@dataclass(frozen=True, slots=True)
class SharingReport:
    own: Mapping[str, OwnPool]
    rows: Sequence[SharingRow]
    preferred: Sequence[str]
    seed: int

    @property
    def dedicated_devices(self) -> int:
        """Of all models' own pools together."""
        return sum(pool.devices for pool in self.own.values())

    @property
    def smallest(self) -> dict[str, int | None]:
        """By system that played the load as it is, the fewest devices with which every model keeps
        its promise (None: more than were tried)."""
        found = self._smallest()
        return {system: devices for (system, case), devices in found.items() if case == PLAIN}

    @property
    def devices_share(self) -> float | None:
        """Devices that `livescale` needs over those of the models' own pools."""
        needed = self.smallest.get("livescale")
        return None if needed is None else needed / self.dedicated_devices

    def _smallest(self) -> dict[tuple[str, SharingCase], int | None]:
        found: dict[tuple[str, SharingCase], int | None] = {}
        for row in self.rows:
            key = row.system, row.case
            if found.setdefault(key, None) is None and row.keeps(self.own):
                found[key] = row.devices
        return found

    def text(self) -> str:
        pools = [
            [name, pool.devices, f"{100 * pool.attainment:.2f} %", str(pool.slo)]
            for name, pool in self.own.items()
        ]
        plain = [row for row in self.rows if row.case == PLAIN]
        staged = [row for row in self.rows if row.case != PLAIN]
        tables = [table(["model", "devices of its own", "attainment alone", "SLO"], pools)]
        if plain:
            tables.append(table(_HEADER, [_cells(row, self.own) for row in plain]))
        if staged:
            tables.append(
                "Bursts that come together (aligned) and apart (shifted). With priorities, these"
                f" models have a higher one: {', '.join(self.preferred)}"
            )
            header = [*_CASE_HEADER, *_HEADER[1:]]
            tables.append(table(header, [_case_cells(row, self.own) for row in staged]))
        lines = [f"dedicated pools: {self.dedicated_devices} devices"]
        for (system, case), needed in self._smallest().items():
            lines.append(f"{_played(system, case)}: {needed or 'more than tried'}")
        if self.devices_share is not None:
            lines.append(f"livescale needs {100 * self.devices_share:.0f} % of dedicated pools")
        return "\n\n".join(tables) + "\n\n" + "\n".join(lines)

    def as_json(self) -> dict[str, object]:
        return {
            "seed": self.seed,
            "rows": [row.as_json() for row in self.rows],
            "preferred": list(self.preferred),
            "smallest": self.smallest,
            "smallest_of_cases": [
                {
                    "system": system,
                    "peaks": str(case.peaks),
                    "priorities": case.priorities,
                    "devices": devices,
                }
                for (system, case), devices in self._smallest().items()
            ],
            "dedicated": {name: pool.devices for name, pool in self.own.items()},
            "dedicated_devices": self.dedicated_devices,
            "devices_share": self.devices_share,
        }


def run_sharing(options: SharingOptions, say: Callable[[str], None]) -> SharingReport:
    """Play everything, one simulation after the other. The same options give the same rows.

    Raises BenchError, which names the model that cannot be judged, and PoolError.
    """
    bench = _SharingBench(options)
    own = {}
    for shared in options.models:
        own[shared.model.name] = found = bench.own_pool(shared)
        told = f"{found.devices} devices of its own keep {100 * found.attainment:.2f} %"
        say(f"  {shared.model.name}: {told}")
    rows = []
    for name, cases in options.plays.items():
        for case in cases:
            system = find_system(name)
            rows += [bench.row(system, case, count, own) for count in options.devices]
            say(f"  {_played(name, case)}: {len(options.devices)} pools")
    return SharingReport(own, rows, options.preferred, options.seed)


# -- helpers, in the order used -------------------------------------------------------------------


@dataclass(slots=True)
class _SharingBench:
    options: SharingOptions
    #: by model, as instances can serve them
    _loads: dict[str, list[TraceRow]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.options.models or not self.options.devices:
            raise BenchError("a shared pool has at least one model, and at least one size")
        models = [shared.model for shared in self.options.models]
        fewest = min(self.options.devices)
        if fewest < sum(model.tp_size for model in models):
            named = "1 device" if fewest == 1 else f"{fewest} devices"
            raise BenchError(f"{named} for {len(models)} models: each has one instance at least")
        largest = self.options.cluster(max(self.options.devices))
        config = build_config(largest, models, SYSTEMS["livescale"])
        for shared in self.options.models:
            if not shared.rows:
                raise BenchError(f"{shared.model.name} has no request")
            fitted, _ = fit_rows(shared.rows, tokens_max(config, shared.model.name))
            self._loads[shared.model.name] = fitted

    def own_pool(self, shared: SharedModel) -> OwnPool:
        """Fixed pools that serve this model alone, from the smallest one on."""
        most = max(self.options.devices)
        full = self._alone(shared.model, most)
        try:
            slo = shared.slo.resolve(full.timings())
        except SloError as error:
            raise BenchError(f"{shared.model.name}: {error}") from error
        model = _promised(shared.model, slo)
        best = _attainment(self._alone(model, most), slo)
        for count in range(model.tp_size, most, model.tp_size):
            if _attainment(self._alone(model, count), slo) >= KEPT * best:
                return OwnPool(slo, best, count)
        return OwnPool(slo, best, most)

    def row(
        self, system: System, case: SharingCase, devices: int, own: Mapping[str, OwnPool]
    ) -> SharingRow:
        options, cluster = self.options, self.options.cluster(devices)
        loads = turned(self._loads, case.peaks, options.period_ns)
        models = [_promised(m.model, own[m.model.name].slo) for m in options.models]
        if case.priorities:
            models = [
                msgspec.structs.replace(model, priority=model.priority + 1)
                if model.name in options.preferred
                else model
                for model in models
            ]
        config = build_config(cluster, models, system, token_weights(loads))
        run, history = run_with_history(config, loads, lead_ns(config), options.seed)
        met = {name: _met(run, name, pool.slo) for name, pool in own.items()}
        asked = {name: len(rows) for name, rows in loads.items()}
        others = [name for name in asked if name not in options.preferred]
        return SharingRow(
            system=system.name,
            case=case,
            devices=devices,
            attainment=sum(met.values()) / sum(asked.values()),
            of_models={name: count / asked[name] for name, count in met.items()},
            of_halves=(
                _share(met, asked, options.preferred),
                _share(met, asked, others) if others else None,
            ),
            summary=summarize(run.timings(), _ANY),
            spent=device_time(history, run.started_ns, run.ended_ns),
        )

    def _alone(self, model: PooledModel, devices: int) -> PoolRun:
        config = build_config(self.options.cluster(devices), [model], SYSTEMS["fixed-full"])
        load = {model.name: self._loads[model.name]}
        return run_pool(config, load, lead_ns(config), self.options.seed)


_HEADER = ["system", "devices", "attainment", "worst model", "keeps", "failed"]
_HEADER += ["TTFT p99", "TBT p99", "serving s", "spare s", "idle s"]
_CASE_HEADER = ["system", "peaks", "priorities", "preferred", "others"]


def _played(system: str, case: SharingCase) -> str:
    """The system, and the case if that is not the load as it is."""
    if case == PLAIN:
        return system
    return f"{system}, peaks {case.peaks}, priorities {_on(case)}"


def _on(case: SharingCase) -> str:
    return "on" if case.priorities else "off"


def _share(met: Mapping[str, int], asked: Mapping[str, int], names: Sequence[str]) -> float:
    """Of all requests of these models."""
    return sum(met[name] for name in names) / sum(asked[name] for name in names)


def _promised(model: PooledModel, slo: SloAbsolute) -> PooledModel:
    """The pool knows what it is judged by."""
    return msgspec.structs.replace(model, slo=slo)


def _attainment(run: PoolRun, slo: SloAbsolute) -> float:
    timings = run.timings()
    return sum(map(slo.is_met, timings)) / len(timings)


def _met(run: PoolRun, model: str, slo: SloAbsolute) -> int:
    return sum(slo.is_met(line.timing()) for line in run.result.requests if line.model == model)


def _case_cells(row: SharingRow, own: Mapping[str, OwnPool]) -> list[object]:
    first, others = row.of_halves
    case = [str(row.case.peaks), _on(row.case), f"{100 * first:.2f} %"]
    told = "-" if others is None else f"{100 * others:.2f} %"
    return [row.system, *case, told, *_cells(row, own)[1:]]


def _cells(row: SharingRow, own: Mapping[str, OwnPool]) -> list[object]:
    latencies = row.summary.latencies()
    spent = (row.spent.serve_ns, row.spent.spare_ns, row.spent.idle_ns)
    return [
        row.system,
        row.devices,
        f"{100 * row.attainment:.2f} %",
        f"{100 * min(row.of_models.values()):.2f} %",
        "yes" if row.keeps(own) else "no",
        row.summary.failed,
        seconds(latencies["ttft_p99_s"]),
        seconds(latencies["tbt_p99_s"]),
        *(f"{ns / NS_PER_S:,.1f}" for ns in spent),
    ]
