"""`bench profile`: how long this machine takes for what, as a profile that a table is read from.

Single Runs of the real engine are timed over a grid of chunks, batches and contexts, in rounds
until the time is up; the fastest counts, for other programs only add. Runs between the grid's are
timed in the same rounds and held out: the table that is read back from the file predicts them, and
its error is reported.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import msgspec

from livescale.cli.loads import writing
from livescale.clusters.profiles import read_profile, write_profile
from livescale.engine.files.model_config import parse_config
from livescale.engine.files.model_files import read_manifest
from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.base.line_process import LineProcess, bench_process
from livescale.lab.bench.base.made_models import BenchShape, made_model
from livescale.lab.bench.engines.profile_points import (
    ProfiledModel,
    ProfileLimits,
    TimedRun,
    operations,
)
from livescale.latency.table import TableLatency
from livescale.report.run.terminal import table

_START_S = 600.0
_RUN_S = 600.0
BLOCK_TOKENS = 16
_SHAPE, _LIMITS = BenchShape(512, 8), ProfileLimits(1024, 32, 2048)
_KINDS = ("prefill", "decode", "mixed")
_HEADER = ("Run", "measured ms", "predicted", "error %")


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """What is measured. Without a `model` directory one of this shape is made."""

    out: Path
    model: Path | None = None
    shape: BenchShape = _SHAPE
    dtype: str = "bfloat16"
    vocabulary: int = 8192
    device: str = "cpu"
    threads: int = 1
    seconds: float = 60.0
    limits: ProfileLimits = _LIMITS


@dataclass(frozen=True, slots=True)
class ProfiledRun:
    """A Run that was held out: measured, and predicted."""

    run: TimedRun
    measured_ns: int
    predicted_ns: int

    @property
    def error_percent(self) -> float:
        return 100 * (self.predicted_ns / self.measured_ns - 1)


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """Which model and machine were profiled, with how many Runs, and how well it predicts."""

    model: ProfiledModel
    out: Path
    runs: int
    rounds: int
    is_complete: bool
    elapsed_s: float
    held_out: tuple[ProfiledRun, ...]

    def error_percent(self, kind: str | None = None) -> float | None:
        """Mean of |predicted / measured - 1| over the Runs held out; None when there are none."""
        errors = [abs(r.error_percent) for r in self.held_out if kind in (None, r.run.kind)]
        return fmean(errors) if errors else None

    def as_json(self) -> dict[str, object]:
        errors = {kind: self.error_percent(kind) for kind in _KINDS}
        return {
            "gpu": self.model.gpu,
            "model": self.model.name,
            "runs": self.runs,
            "rounds": self.rounds,
            "is_complete": self.is_complete,
            "elapsed_s": self.elapsed_s,
            "held_out_error_percent": self.error_percent(),
            "held_out_error_percent_by_kind": {k: e for k, e in errors.items() if e is not None},
            "held_out": [
                {
                    "prefills": [list(chunk) for chunk in held.run.prefills],
                    "decodes": held.run.decodes,
                    "context": held.run.context,
                    "measured_ms": held.measured_ns / 1e6,
                    "predicted_ms": held.predicted_ns / 1e6,
                }
                for held in self.held_out
            ],
        }

    def text(self) -> str:
        """A table of the Runs that were held out, and the errors."""
        lines = [
            f"{self.model.name} on {self.model.gpu}: {self.runs} Runs of the grid, the fastest"
            f" of {self.rounds} rounds, {self.elapsed_s:.0f} s; written to {self.out}",
            "held out (chunk+before, decodes x context):",
            table(_HEADER, [_cells(held) for held in self.held_out]),
        ]
        errors = ((kind, self.error_percent(kind)) for kind in (*_KINDS, None))
        words = [f"{kind or 'all'} {error:.1f} %" for kind, error in errors if error is not None]
        lines.append(f"mean error: {', '.join(words)}")
        if not self.is_complete:
            lines.append("The time was up before the first round: the largest Runs are missing.")
        return "\n".join(lines)


def run_profile(options: ProfileOptions, say: Callable[[str], None]) -> ProfileReport:
    """Measure, write the profile, read it back and judge it.

    Raises BenchError when there was too little time, ModelError for a model that cannot run.
    """
    with ExitStack() as stack:
        directory = options.model
        if directory is None:
            made = made_model(options.shape, options.vocabulary, options.dtype)
            directory = stack.enter_context(made)
        sizes = parse_config(
            read_manifest(directory, directory.name).config_json, f"config of {directory.name}"
        )
        if options.limits.context_tokens_max > sizes.model_tokens_max:
            raise BenchError(
                f"{directory.name} takes {sizes.model_tokens_max} tokens, fewer than the"
                f" {options.limits.context_tokens_max} of --context-max"
            )
        grid = tuple(dict.fromkeys(options.limits.grid()))
        held = tuple(run for run in dict.fromkeys(options.limits.held_out()) if run not in grid)
        process = stack.enter_context(
            bench_process("livescale", "peers.engines.iteration_times", threads=options.threads)
        )
        process.send(_job(options, directory, (*grid, *held)))
        gpu = process.receive(_START_S)["settings"]
        say(f"{directory.name} on {gpu}: {len(grid)} Runs, {len(held)} held out; measuring …")
        began_s = time.monotonic()
        times_ns, rounds = _measure(process, (*grid, *held), options.seconds)
        elapsed_s = time.monotonic() - began_s
    model = ProfiledModel(
        gpu, directory.name, sizes.decoder_layers, sizes.heads, sizes.kv_heads, sizes.head_dim
    )
    profile = operations(times_ns, options.limits, model)
    if not profile.attention or len(profile.linear) < 2 or not any(r in times_ns for r in held):
        raise BenchError(f"--seconds {options.seconds:g}: too few Runs ended in that time")
    with writing(options.out):
        write_profile(options.out, profile)
    latency = TableLatency.measured(read_profile(options.out))
    judged = (ProfiledRun(r, times_ns[r], latency.run_ns(r.work)) for r in held if r in times_ns)
    return ProfileReport(
        model=model,
        out=options.out,
        runs=sum(run in times_ns for run in grid),
        rounds=rounds,
        is_complete=len(times_ns) == len(grid) + len(held),
        elapsed_s=elapsed_s,
        held_out=tuple(judged),
    )


# -- helpers, in the order used -------------------------------------------------------------------


def _job(options: ProfileOptions, directory: Path, runs: Iterable[TimedRun]) -> dict[str, object]:
    """Room in the KV cache for the largest Run, of which every request may fill a block badly."""
    blocks = (
        -(-run.context_tokens // BLOCK_TOKENS) + run.decodes + len(run.prefills) for run in runs
    )
    own = {"device": options.device, "threads": options.threads}
    return runs_job(directory, max(blocks)) | own


def runs_job(directory: Path, kv_blocks: int) -> dict[str, object]:
    """Of `peers/engines/iteration_times.py`, with one thread of a CPU."""
    return {
        "directory": str(directory),
        "model": directory.name,
        "device": "cpu",
        "threads": 1,
        "block_tokens": BLOCK_TOKENS,
        "kv_blocks": kv_blocks,
    }


def _measure(
    process: LineProcess, runs: Iterable[TimedRun], seconds: float
) -> tuple[dict[TimedRun, int], int]:
    """The least time of every Run, and the complete rounds that counted.

    Small Runs come first, so that a time that is too short costs the largest ones. The first time
    that a Run is asked for warms it up and does not count, unless there is no other.
    """
    ordered = sorted(runs, key=lambda run: (run.work.token_count, run.context_tokens))
    # Kernels are compiled on their first call: that is no part of the time.
    _round(process, ordered[:2], math.inf)
    deadline_s = time.monotonic() + seconds
    warm_ns = _round(process, ordered, deadline_s)
    times_ns: dict[TimedRun, int] = {}
    rounds = 0
    while len(warm_ns) == len(ordered) and time.monotonic() < deadline_s:
        counted = _round(process, ordered, deadline_s)
        for run, ns in counted.items():
            times_ns[run] = min(ns, times_ns.get(run, ns))
        rounds += len(counted) == len(ordered)
    return {**warm_ns, **times_ns}, rounds


def _round(
    process: LineProcess, runs: Iterable[TimedRun], deadline_s: float
) -> dict[TimedRun, int]:
    times_ns: dict[TimedRun, int] = {}
    for run in runs:
        if time.monotonic() >= deadline_s:
            break
        times_ns[run] = process.ask(msgspec.to_builtins(run), _RUN_S)["elapsed_ns"]
    return times_ns


def _cells(held: ProfiledRun) -> list[object]:
    parts = [f"{new}+{before}" for new, before in held.run.prefills]
    if held.run.decodes:
        parts.append(f"{held.run.decodes}x{held.run.context}")
    times = (held.measured_ns / 1e6, held.predicted_ns / 1e6, held.error_percent)
    return [", ".join(parts), *times]
