"""Do live pairs pay: one burst on one instance that becomes several, by speed of links and model.

Every row is one simulated pool of A800 devices: one instance serves, a burst comes, and the others
load from it, cold. Four systems differ only in what a loading instance does meanwhile. What is
judged is `livescale-bounds`, which decides pair by pair, beside the better of always and never.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from livescale.clusters.files import NamedTopology
from livescale.clusters.topology import Device, Topology
from livescale.config.slo import SloAbsolute
from livescale.load.traces import TraceRow
from livescale.report.run.summary import Latency, RunSummary, summarize
from livescale.report.run.terminal import seconds, table
from livescale.sim.pools.configs import build_config
from livescale.sim.pools.limits import PooledModel
from livescale.sim.pools.runs import lead_ns, run_pool
from livescale.sim.pools.systems import SYSTEMS
from livescale.values.types import WorkerRef
from livescale.values.units import GBIT_BYTES, NS_PER_MS

STOP, ALONE, PAIRED, JUDGED = (
    "livescale-stop",
    "livescale-overlap",
    "livescale-pairs",
    "livescale-bounds",
)
_STORAGE_GBIT = 10
_ANY = SloAbsolute(1 << 62, None)


@dataclass(frozen=True, slots=True)
class PairsOptions:
    """Every model meets every burst on every link. A burst has so many prompts of `prompt_tokens`,
    `gap_ms` apart, each with `output_tokens` to generate; there is room for `instances`."""

    models: Sequence[PooledModel]
    links_gbit: Sequence[int] = (10, 25, 50, 100, 400)
    requests: Sequence[int] = (24,)
    gaps_ms: Sequence[int] = (0,)
    prompt_tokens: int = 2000
    output_tokens: int = 64
    instances: int = 4
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PairsRow:
    """One system under one burst."""

    model: str
    link_gbit: int
    requests: int
    gap_ms: int
    system: str
    summary: RunSummary

    @property
    def load(self) -> tuple[str, int, int, int]:
        """What all systems are compared under."""
        return self.model, self.link_gbit, self.requests, self.gap_ms

    def as_json(self) -> dict[str, object]:
        latencies = self.summary.latencies()
        return {
            "model": self.model,
            "link_gbit": self.link_gbit,
            "requests": self.requests,
            "gap_ms": self.gap_ms,
            "system": self.system,
            "failed": self.summary.failed,
            "ttft_mean_s": latencies["ttft_mean_s"],
            "ttft_p99_s": latencies["ttft_p99_s"],
            "tbt_p99_s": latencies["tbt_p99_s"],
        }


@dataclass(frozen=True, slots=True)
class PairsReport:
    rows: Sequence[PairsRow]

    def text(self) -> str:
        """A line for each burst, and the worst of the ratios."""
        header = ["model", "Gbit/s", "prompts", "apart", STOP, ALONE, PAIRED, JUDGED]
        lines: list[list[object]] = []
        for load, by_system in self._by_load().items():
            model, link_gbit, requests, gap_ms = load
            cells = [_cell(by_system[name]) for name in (STOP, ALONE, PAIRED, JUDGED)]
            mean, p99 = self._ratios(by_system)
            ratios = [f"{mean:.3f}", f"{p99:.3f}"] if mean and p99 else ["", ""]
            lines.append([model, link_gbit, requests, f"{gap_ms} ms", *cells, *ratios])
        worst = ", ".join(f"{name} {value:.3f}" for name, value in self.worst().items())
        words = "TTFT mean / p99, TBT p99; mean and p99 over the better of overlap and pairs"
        return f"{table([*header, 'mean x', 'p99 x'], lines)}\n{words}\nworst: {worst}"

    def worst(self) -> dict[str, float]:
        """Largest ratios of the judged system: mean and p99 TTFT over the better of the two that
        always do the same, and mean TTFT and p99 TBT over stop-the-world."""
        found: dict[str, float] = {}
        for by_system in self._by_load().values():
            mean, p99 = self._ratios(by_system)
            stop, judged = by_system[STOP].summary, by_system[JUDGED].summary
            ratios = {
                "mean_over_better": mean,
                "p99_over_better": p99,
                "mean_over_stop": _over(judged.ttft, stop.ttft, "mean_s"),
                "tbt_p99_over_stop": _over(judged.tbt, stop.tbt, "p99_s"),
            }
            for name, ratio in ratios.items():
                if ratio is not None:
                    found[name] = max(found.get(name, 0.0), ratio)
        return found

    def as_json(self) -> dict[str, object]:
        return {"rows": [row.as_json() for row in self.rows], "worst": self.worst()}

    def _by_load(self) -> dict[tuple[str, int, int, int], dict[str, PairsRow]]:
        found: dict[tuple[str, int, int, int], dict[str, PairsRow]] = {}
        for row in self.rows:
            found.setdefault(row.load, {})[row.system] = row
        return found

    @staticmethod
    def _ratios(by_system: dict[str, PairsRow]) -> tuple[float | None, float | None]:
        """Mean and p99 TTFT over the better of the two, figure by figure: the larger ratio."""
        judged = by_system[JUDGED].summary.ttft
        others = [by_system[name].summary.ttft for name in (ALONE, PAIRED)]
        mean, p99 = ([_over(judged, other, of) for other in others] for of in ("mean_s", "p99_s"))
        return _largest(mean), _largest(p99)


def run_pairs(options: PairsOptions, say: Callable[[str], None]) -> PairsReport:
    """Play every burst with the four systems. Raises PoolError."""
    rows: list[PairsRow] = []
    systems = (STOP, ALONE, PAIRED, JUDGED)
    for model, link_gbit in product(options.models, options.links_gbit):
        for count, gap_ms, name in product(options.requests, options.gaps_ms, systems):
            load = (model.name, link_gbit, count, gap_ms)
            rows.append(PairsRow(*load, name, _play(options, model, load, name)))
        say(f"{model.name} at {link_gbit} Gbit/s is done")
    return PairsReport(rows)


# -- helpers, in the order used -------------------------------------------------------------------


def _play(
    options: PairsOptions, model: PooledModel, load: tuple[str, int, int, int], name: str
) -> RunSummary:
    _, link_gbit, count, gap_ms = load
    cluster = _cluster(options.instances, model.tp_size, link_gbit * GBIT_BYTES)
    config = build_config(cluster, [model], SYSTEMS[name])
    size = (options.prompt_tokens, options.output_tokens)
    burst = [TraceRow(number * gap_ms * NS_PER_MS, *size) for number in range(count)]
    run = run_pool(config, {model.name: burst}, lead_ns(config), options.seed)
    return summarize(run.timings(), _ANY)


def _cluster(instances: int, tp_size: int, rate: int) -> NamedTopology:
    """One host for each instance, whose ranks have NICs of their own; no host memory."""
    devices = {
        WorkerRef(number): Device(
            kind="a800",
            host=f"host-{number // tp_size}",
            leaf="leaf-0",
            arena_bytes=0,
            kv_bytes=0,
            uplink_bytes_per_s=rate,
            downlink_bytes_per_s=rate,
        )
        for number in range(instances * tp_size)
    }
    storage = _STORAGE_GBIT * GBIT_BYTES
    return NamedTopology(Topology(devices, {}, remote_storage_bytes_per_s=storage))


def _cell(row: PairsRow) -> str:
    ttft, tbt = row.summary.ttft, row.summary.tbt
    if ttft is None or tbt is None:
        return "none ended well"
    failed = f", {row.summary.failed} failed" if row.summary.failed else ""
    return f"{seconds(ttft.mean_s)} / {seconds(ttft.p99_s)}, {seconds(tbt.p99_s)}{failed}"


def _over(one: Latency | None, other: Latency | None, name: str) -> float | None:
    if one is None or other is None:
        return None
    return float(getattr(one, name)) / float(getattr(other, name))


def _largest(ratios: Sequence[float | None]) -> float | None:
    known = [ratio for ratio in ratios if ratio is not None]
    return max(known) if len(known) == len(ratios) else None
