"""`bench fidelity`: one load on a real pool and in the simulator, figure by figure.

The real pool plays it several times, the simulator with what a calibration measured just before.
The controller and the Batcher are the same code in both; what is put to the test is everything
that the simulator replaces: clock, network, accelerators, gateway.

The pools are many timed workers, or two that compute. Their models are made for the run. Every
worker is a host of its own, so that parameters cross links, which are so narrow that a load takes
about the time that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from livescale.clusters.profiles import read_profile
from livescale.config.pool import PoolConfig
from livescale.engine.files.make import Preset, make_model
from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.base.made_models import bare_hosts, pool_config
from livescale.lab.bench.engines.profile import ProfileOptions, run_profile
from livescale.lab.bench.engines.profile_points import ProfileLimits
from livescale.lab.bench.pools import fidelity_profile
from livescale.lab.bench.pools.fidelity_figures import (
    GOAL,
    Agreement,
    agreement_table,
    agreements,
    run_figures,
)
from livescale.lab.bench.pools.fidelity_runs import PlayedRun, Strain, play_real, play_simulated
from livescale.latency.table import TableLatency
from livescale.latency.work import LinearLatency
from livescale.load.traces import TraceRow, upscale
from livescale.report.html import write_html_report
from livescale.report.run.reported_run import ReportedRun
from livescale.sim.base.config import SimConfig
from livescale.sim.pools.capacity import CapacityError, ServingCapacity, measure_capacity
from livescale.sim.pools.runs import fit_rows
from livescale.values.units import NS_PER_S

_MODEL = "fidelity"
# Many small layers: their bytes cost the machine little, and phases of a load can be told apart.
_TIMED_SHAPE = Preset(16, 128, 256, 4, 2, 1024)
_RUN_US, _TOKEN_US = 40_000, 400
_DECODES_MAX = 32
_CPU_SHAPE = Preset(6, 256, 704, 8, 2, 2048)


@dataclass(frozen=True, slots=True)
class FidelityPool:
    """A kind of workers, the settings of their pool (but for the record's path), and how long a
    Run takes on such a worker that has the machine to itself."""

    kind: str
    config: PoolConfig
    latency: fidelity_profile.Bare


def timed_pool(scratch: Path, workers: int, load_s: float) -> FidelityPool:
    """Workers that wait: 40 ms for a Run and 0.4 ms per token, as a large model takes on one
    accelerator. So slow that the machine itself is idle, mostly."""
    latency = LinearLatency(_RUN_US * 1000, _TOKEN_US * 1000)
    settings: dict[str, object] = {
        "device": "timed",
        "timed_run_us": _RUN_US,
        "timed_token_us": _TOKEN_US,
        # Counted, not allocated.
        "kv_bytes": 1 << 30,
        "run_tokens_max": 256,
    }
    config = _config(scratch, _TIMED_SHAPE, workers, load_s, settings)
    return FidelityPool("timed", config, latency)


def cpu_pool(
    scratch: Path, workers: int, load_s: float, profile_s: float, say: Callable[[str], None]
) -> FidelityPool:
    """Workers that compute, one thread each. The engine's Runs are profiled for so many seconds.

    Raises BenchError when that was too short.
    """
    settings: dict[str, object] = {"device": "cpu", "kv_bytes": 64 << 20}
    config = _config(scratch, _CPU_SHAPE, workers, load_s, settings)
    options = ProfileOptions(
        out=scratch / "profile.csv",
        model=scratch / _MODEL,
        seconds=profile_s,
        # Chunks larger than any Run: how a chunk's attention grows with what stands before it is
        # read off whole prompts.
        limits=ProfileLimits(
            _CPU_SHAPE.model_tokens_max // 2, _DECODES_MAX, _CPU_SHAPE.model_tokens_max
        ),
    )
    run_profile(options, say)
    return FidelityPool("cpu", config, TableLatency.measured(read_profile(options.out)))


def _config(
    scratch: Path, shape: Preset, workers: int, load_s: float, settings: dict[str, object]
) -> PoolConfig:
    directory = scratch / _MODEL
    make_model(directory, shape)
    size_bytes = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    common: dict[str, object] = {
        # Sources are devices alone: an agent per host would be a process more per worker.
        # Calibration needs loads: bytes that are there already tell nothing of links.
        **bare_hosts(workers, max(1 << 20, int(size_bytes / load_s))),
        "arena_bytes": 2 * size_bytes,
        # Its bursts are made for them.
        "scaling_policy": "bounds",
        "chunk_bytes": 64 << 10,
        "queue_prompt_tokens_max": None,
        "record": str(scratch / "record.jsonl"),
    }
    return pool_config(scratch, [{"path": str(directory)}], {**common, **settings})


Say = Callable[[str], None]
_SLO = "5x-mean"


@dataclass(frozen=True, slots=True)
class FidelityOptions:
    """What is played: `runs` times in each world, after a calibration of so many `bursts`.

    `rows` are scaled so that their rate is `load_percent` of the capacity.
    """

    trace: str
    rows: Sequence[TraceRow]
    runs: int = 5
    load_percent: int = 60
    bursts: int = fidelity_profile.BURSTS
    seed: int = 0
    report: Path | None = None


@dataclass(frozen=True, slots=True)
class FidelityReport:
    """What came of both worlds."""

    pool: FidelityPool
    profile: fidelity_profile.PoolProfile
    capacity: ServingCapacity
    load_percent: int
    requests: int
    strains: tuple[Strain, ...]
    found: tuple[Agreement, ...]

    @property
    def is_good(self) -> bool:
        """Every figure of the goal was measured and is right."""
        within = {item.name: item.is_within for item in self.found}
        return all(within.get(name, False) for name in GOAL)

    def as_json(self) -> dict[str, object]:
        return {
            "kind": self.pool.kind,
            "workers": self.pool.config.workers,
            "profile": self.profile.as_json(),
            "capacity_requests_per_s": self.capacity.requests_per_s,
            "load_percent_of_capacity": self.load_percent,
            "requests": self.requests,
            "cores_used": [strain.cores_used for strain in self.strains],
            "others_share": [strain.others_share for strain in self.strains],
            "pace_ns": [strain.pace_ns for strain in self.strains],
            "client_late_p99_s": [
                strain.late_p99_ns / NS_PER_S
                for strain in self.strains
                if strain.late_p99_ns is not None
            ],
            "figures": [item.as_json() for item in self.found],
            "goal": list(GOAL),
            "good": self.is_good,
        }

    def text(self) -> str:
        used = max(strain.cores_used for strain in self.strains)
        others = max(strain.others_share for strain in self.strains)
        late_ns = max(strain.late_p99_ns or 0 for strain in self.strains)
        pace_ns = [ns for strain in self.strains for ns in strain.pace_ns]
        missed = [item.name for item in self.found if item.name in GOAL and not item.is_within]
        verdict = "the goal is met" if self.is_good else f"off: {', '.join(missed)}"
        return "\n".join(
            [
                agreement_table(self.found),
                self.profile.text(),
                f"load      {self.requests} requests,"
                f" {self.load_percent} % of the capacity of"
                f" {self.capacity.requests_per_s:.1f} requests/s",
                f"machine   at most {used:.2f} of {self.strains[0].cores} cores were used, by"
                f" others {others:.0%}; the client was at most {late_ns / 1e6:.1f} ms late (p99)",
                f"          a fixed computation took {min(pace_ns) / 1e3:.0f} to"
                f" {max(pace_ns) / 1e3:.0f} us before and after the runs",
                f"verdict   {', '.join(GOAL)}: {verdict}",
            ]
        )


def run_fidelity(
    pool: FidelityPool, options: FidelityOptions, scratch: Path, say: Say
) -> FidelityReport:
    """Calibrate, find the capacity, play in both worlds. Raises BenchError."""
    config = pool.config
    folder = options.report if options.report is not None else scratch
    folder.mkdir(parents=True, exist_ok=True)
    calibrated = _calibrate(pool, folder, options)
    profile = fidelity_profile.measure_profile(calibrated, pool.latency, config, options.bursts)
    say(profile.text())
    world = fidelity_profile.simulated_pool(calibrated, config, profile)
    rows, clipped = fit_rows(options.rows, calibrated.controller.models[0].spec.model_tokens_max)
    if clipped:
        say(f"{clipped} requests were longer than the model's limit and are clipped to it")
    capacity = _capacity(rows, world, options.seed)
    rows = upscale(rows, capacity.factor * options.load_percent / 100, options.seed)
    say(
        f"the pool keeps up with {capacity.requests_per_s:.1f} requests/s in the simulator;"
        f" playing {options.load_percent} % of that: {len(rows)} requests"
    )
    real: list[ReportedRun] = []
    strains: list[Strain] = []
    for number in range(1, options.runs + 1):
        name = f"real-{number}"
        own = msgspec.structs.replace(config, record=str(folder / f"{pool.kind}-{name}.jsonl"))
        played, strain = play_real(own, rows, name, options.seed)
        strains.append(strain)
        real.append(played.reported(options.trace, _SLO))
        say(f"{name}: {_headline(real[-1])}; {strain.cores_used:.2f} cores used")
    simulated = [
        play_simulated(
            world=world,
            rows=rows,
            name=f"simulated-{number + 1}",
            client=profile.client,
            seed=options.seed + number,
            record=folder / f"{pool.kind}-simulated-{number + 1}.jsonl",
        ).reported(options.trace, _SLO)
        for number in range(options.runs)
    ]
    say(f"simulated: {_headline(simulated[0])}")
    if options.report is not None:
        page = folder / f"{pool.kind}.html"
        write_html_report(page, [*real, simulated[0]], f"{pool.kind} workers in both worlds")
    found = agreements([run_figures(run) for run in real], [run_figures(run) for run in simulated])
    return FidelityReport(
        pool=pool,
        profile=profile,
        capacity=capacity,
        load_percent=options.load_percent,
        requests=len(rows),
        strains=tuple(strains),
        found=tuple(found),
    )


# -- helpers, in the order used -------------------------------------------------------------------


def _calibrate(pool: FidelityPool, folder: Path, options: FidelityOptions) -> PlayedRun:
    record = str(folder / f"{pool.kind}-calibration.jsonl")
    config = msgspec.structs.replace(pool.config, record=record)
    rows = fidelity_profile.calibration_rows(pool.latency, config, options.bursts)
    return play_real(config, rows, "calibration", options.seed)[0]


def _capacity(rows: Sequence[TraceRow], world: SimConfig, seed: int) -> ServingCapacity:
    model = world.controller.models[0].spec.name
    try:
        return measure_capacity({model: rows}, world, seed)
    except CapacityError as error:
        raise BenchError(f"the capacity of the pool: {error}") from error


def _headline(run: ReportedRun) -> str:
    figures = run_figures(run)
    parts = [f"TTFT {1e3 * figures['ttft_p50_s']:.0f} / {1e3 * figures['ttft_p90_s']:.0f} ms"]
    if "scale_up_p50_s" in figures:
        parts.append(f"a scale-up {1e3 * figures['scale_up_p50_s']:.0f} ms")
    parts.append(f"{figures['instances_started']:.0f} instances started")
    return ", ".join(parts)
