"""`bench cores`: how long a Run of prompts takes with one core, two, and so on (QUART Fig. 3b).

One process computes with a made model; the numbers of cores come in turns, round after round, and
of each number the fastest Run counts, for other programs only add. The regression is that of
`control/stages/compensation.py`, and its file is what `cores_profile` names.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from livescale.cli.loads import writing
from livescale.config.cores import write_cores
from livescale.control.stages.compensation import fit_cores
from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.base.line_process import LineProcess, bench_process
from livescale.lab.bench.base.made_models import BenchShape, made_model
from livescale.lab.bench.engines.profile import BLOCK_TOKENS, runs_job
from livescale.report.run.terminal import table
from livescale.runtime.children.pool_process import SLEEPING_THREADS
from livescale.values.scaling_policies import CoresModel

_START_S = 600.0
_RUN_S = 600.0
_SHAPE = BenchShape(512, 8)
_PAPER_PERCENT = -33
"""What the median latency changes by from two cores to four, on the authors' machine."""


@dataclass(frozen=True, slots=True)
class CoresOptions:
    """A made model of this shape; Runs have one prompt of so many tokens."""

    out: Path | None = None
    shape: BenchShape = _SHAPE
    dtype: str = "bfloat16"
    vocabulary: int = 8192
    prompt_tokens: int = 64
    rounds: int = 30
    cores_max: int = 0


@dataclass(frozen=True, slots=True)
class CoresReport:
    """Times of a Run (ns) by number of cores, in the order in which they were taken."""

    options: CoresOptions
    times_ns: dict[int, list[int]]
    model: CoresModel

    def fastest_ns(self, cores: int) -> int:
        return min(self.times_ns[cores])

    @property
    def change_percent(self) -> float:
        """Of the fastest Run, from half of the cores to all of them."""
        most = max(self.times_ns)
        return 100 * (self.fastest_ns(most) / self.fastest_ns(max(most // 2, 1)) - 1)

    def as_json(self) -> dict[str, object]:
        return {
            "shape": str(self.options.shape),
            "dtype": self.options.dtype,
            "prompt_tokens": self.options.prompt_tokens,
            "rounds": self.options.rounds,
            "service_ms": {str(n): self.fastest_ns(n) / 1e6 for n in self.times_ns},
            "service_median_ms": {str(n): median(t) / 1e6 for n, t in self.times_ns.items()},
            "ratio_to_one_core": {
                str(n): self.fastest_ns(n) / self.fastest_ns(1) for n in self.times_ns
            },
            "change_percent": self.change_percent,
            "paper_change_percent": _PAPER_PERCENT,
            "fixed_ms": self.model.fixed_ns / 1e6,
            "shared_ms": self.model.shared_ns / 1e6,
        }

    def text(self) -> str:
        """The times, and the line that was fitted."""
        rows = [
            (
                n,
                self.fastest_ns(n) / 1e6,
                median(times) / 1e6,
                self.fastest_ns(n) / self.fastest_ns(1),
                self.model.service_ns(n) / 1e6,
            )
            for n, times in self.times_ns.items()
        ]
        most, options = max(self.times_ns), self.options
        written = f"; written to {options.out}" if options.out is not None else ""
        return "\n".join(
            (
                f"{options.shape}, {options.dtype}, Runs of {options.prompt_tokens} tokens,"
                f" {options.rounds} rounds",
                table(("cores", "fastest ms", "median", "to one core", "fitted"), rows),
                f"{self.change_percent:+.0f} % from {max(most // 2, 1)} to {most} cores"
                f" (paper: {_PAPER_PERCENT} % from 2 to 4);"
                f" {self.model.fixed_ns / 1e6:.3g} ms + {self.model.shared_ns / 1e6:.3g} ms"
                f" / cores{written}",
            )
        )


def run_cores(options: CoresOptions, say: Callable[[str], None]) -> CoresReport:
    """Measure, fit, and write what was fitted to `out`. Raises BenchError on a machine with one
    core."""
    there = len(os.sched_getaffinity(0))
    most = min(options.cores_max or there, there)
    if most < 2:
        raise BenchError(f"a profile needs two cores at least, and there are {most}")
    with (
        made_model(options.shape, options.vocabulary, options.dtype) as directory,
        bench_process(
            "livescale", "peers.engines.iteration_times", threads=1, environ=SLEEPING_THREADS
        ) as process,
    ):
        process.ask(runs_job(directory, -(-options.prompt_tokens // BLOCK_TOKENS)), _START_S)
        say(f"{options.shape} with 1 to {most} cores, {options.rounds} rounds …")
        times_ns = _measure(process, options, most)
    points = [(cores, min(times)) for cores, times in times_ns.items()]
    model = fit_cores(points)
    if options.out is not None:
        with writing(options.out):
            write_cores(options.out, model)
    return CoresReport(options, times_ns, model)


# -- helpers --------------------------------------------------------------------------------------


def _measure(process: LineProcess, options: CoresOptions, most: int) -> dict[int, list[int]]:
    """The first Run of each number warms up: its threads begin, kernels are compiled."""
    times_ns: dict[int, list[int]] = {cores: [] for cores in range(1, most + 1)}
    for _ in range(options.rounds):
        for cores, times in times_ns.items():
            run = {"prefills": [[options.prompt_tokens, 0]], "decodes": 0, "context": 1}
            asked = {**run, "samples": True, "cores": cores}
            process.ask(asked, _RUN_S)
            times.append(process.ask(asked, _RUN_S)["elapsed_ns"])
    return times_ns
