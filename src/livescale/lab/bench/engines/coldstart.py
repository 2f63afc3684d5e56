"""`bench coldstart`: from nothing to the first token, and from a warm worker to the first token.

A source holds the model. A new process starts, becomes a worker, receives the model from the
source over the wire and answers a request: cold. It forgets the model and does the last part again:
warm. vLLM, where there is one, starts beside them with its compile cache filled.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec

from livescale.engine.files.model_files import model_spec, read_manifest
from livescale.lab.bench.base.line_process import LineProcess, bench_process
from livescale.lab.bench.base.made_models import BenchShape, made_model
from livescale.lab.bench.engines.engines import vllm_process

COLD_PHASES = ("process", "imports", "context", "kernels", "connections", "bytes", "first_token")

_START_S = 600.0
_MODEL = "bench"
_SOURCE, _TARGET = 0, 1
_BLOCK_TOKENS = 16
_RUN_TOKENS_MAX = 128
_CHUNK_BYTES = 1 << 20
_KV_BYTES = 256 << 20

Phases = dict[str, float]


@dataclass(frozen=True, slots=True)
class ColdStartOptions:
    """What is run."""

    shape: BenchShape
    dtype: str = "bfloat16"
    vocabulary: int = 8192
    prompt_tokens: int = 64
    repetitions: int = 3
    threads: int = 1
    vllm_python: Path | None = None


@dataclass(frozen=True, slots=True)
class ColdStartReport:
    """Medians over the repetitions, in ms per phase, with the `total` of each start."""

    model_bytes: int
    cold_ms: Phases
    warm_ms: Phases
    vllm_ms: Phases | None

    def as_json(self) -> dict[str, object]:
        figures: dict[str, object] = {
            "model_bytes": self.model_bytes,
            "cold_ms": self.cold_ms,
            "warm_ms": self.warm_ms,
            "ratio_cold_to_warm": self.cold_ms["total"] / self.warm_ms["total"],
        }
        if self.vllm_ms is not None:
            figures["vllm_ms"] = self.vllm_ms
            figures["ratio_vllm_to_cold"] = self.vllm_ms["total"] / self.cold_ms["total"]
            figures["ratio_vllm_to_warm"] = self.vllm_ms["total"] / self.warm_ms["total"]
        return figures

    def text(self) -> str:
        lines = [f"{'':<14}{'cold':>10}{'warm':>10}   ms, medians; {self.model_bytes / 1e6:.0f} MB"]
        for phase in (*COLD_PHASES, "total"):
            warm = f"{self.warm_ms[phase]:.1f}" if phase in self.warm_ms else "-"
            lines.append(f"{phase:<14}{self.cold_ms[phase]:>10.1f}{warm:>10}")
        lines.append(f"cold / warm   {self.cold_ms['total'] / self.warm_ms['total']:.1f}")
        if self.vllm_ms is not None:
            total = self.vllm_ms["total"]
            lines.append(
                f"vLLM (warm compile cache): ready after {self.vllm_ms['ready']:.0f} ms,"
                f" first token after {total:.0f} ms: {total / self.cold_ms['total']:.1f} x cold,"
                f" {total / self.warm_ms['total']:.1f} x warm"
            )
        return "\n".join(lines)


def run_coldstart(options: ColdStartOptions, say: Callable[[str], None]) -> ColdStartReport:
    """Measure all starts, one after the other. Raises BenchError."""
    with made_model(options.shape, options.vocabulary, options.dtype) as directory:
        starts = _Starts(options, directory)
        cold, warm = [], []
        with starts.source() as source:
            for number in range(1, options.repetitions + 1):
                of_cold, of_warm = starts.cold_and_warm(source)
                cold.append(of_cold)
                warm.append(of_warm)
                say(f"  start {number} of {options.repetitions} is done")
        vllm = []
        if options.vllm_python is not None:
            say("  vLLM: one start to fill its compile cache, then the ones that count")
            vllm = [starts.vllm() for _ in range(options.repetitions + 1)][1:]
        return ColdStartReport(
            model_bytes=starts.manifest.size_bytes,
            cold_ms=_medians(cold),
            warm_ms=_medians(warm),
            vllm_ms=_medians(vllm) if vllm else None,
        )


class _Starts:
    """The ways to a first token of one model."""

    def __init__(self, options: ColdStartOptions, directory: Path) -> None:
        self._options = options
        self._directory = directory
        self.manifest = read_manifest(directory, _MODEL)
        rng = random.Random(0)
        self._prompt = [rng.randrange(2, options.vocabulary) for _ in range(options.prompt_tokens)]

    def source(self) -> LineProcess:
        """A worker that has the model from storage."""
        source = self._worker("source", _SOURCE, [])
        source.receive(_START_S)
        manifest = msgspec.to_builtins(self.manifest)
        source.ask(
            {"do": "read", "manifest": manifest, "directory": str(self._directory)}, _START_S
        )
        return source

    def cold_and_warm(self, source: LineProcess) -> tuple[Phases, Phases]:
        """A new process up to its first token, and the same worker once more."""
        place = source.ask({"do": "where"}, _START_S)["address"]
        spawned_ns = time.monotonic_ns()
        with self._worker("target", _TARGET, [{"worker": _SOURCE, "address": place}]) as target:
            target.receive(_START_S)
            where = target.ask({"do": "where"}, _START_S)
            loaded = self._loaded(target)
            target.ask({"do": "release"}, _START_S)
            warm = self._loaded(target)
        marks_ns = [spawned_ns, *where["marks_ns"].values()]
        assert tuple(where["marks_ns"]) == COLD_PHASES[:5], where
        times_ms = [(stop_ns - start_ns) / 1e6 for start_ns, stop_ns in pairwise(marks_ns)]
        cold = {**dict(zip(COLD_PHASES[:5], times_ms, strict=True)), **loaded}
        # The lines between the phases are the benchmark's own: the total is the sum of the phases.
        for phases in (cold, warm):
            phases["total"] = sum(phases.values())
        return cold, warm

    def vllm(self) -> Phases:
        """vLLM's offline engine from process start to its first token."""
        options = self._options
        assert options.vllm_python is not None, "it is asked for"
        job = {
            "directory": str(self._directory),
            "dtype": options.dtype,
            "prompt_tokens": options.prompt_tokens,
            "output_tokens": options.prompt_tokens,
            "in_flight_max": 8,
        }
        spawned_ns = time.monotonic_ns()
        with vllm_process("vllm", options.vllm_python, options.threads) as process:
            process.ask(job, _START_S)
            ready_ns = time.monotonic_ns()
            process.ask({"in_flight": 1, "output_tokens": 1, "prompts": [self._prompt]}, _START_S)
            first_ns = time.monotonic_ns()
        phases = {
            "ready": (ready_ns - spawned_ns) / 1e6,
            "first_token": (first_ns - ready_ns) / 1e6,
        }
        return {**phases, "total": sum(phases.values())}

    # -- helpers, in the order used ---------------------------------------------------------

    def _worker(self, name: str, number: int, peers: list[dict[str, object]]) -> LineProcess:
        """A starting worker."""
        options = self._options
        environ = {"HF_HUB_OFFLINE": "1"}
        worker = bench_process(
            name, "peers.engines.start_probe", threads=options.threads, environ=environ
        )
        worker.send(
            {
                "worker": number,
                "peers": peers,
                "threads": options.threads,
                "arena_bytes": self.manifest.size_bytes,
                "kv_bytes": self._kv_bytes(),
                "block_tokens": _BLOCK_TOKENS,
                "run_tokens_max": _RUN_TOKENS_MAX,
                "chunk_bytes": _CHUNK_BYTES,
            }
        )
        return worker

    def _kv_bytes(self) -> int:
        tokens = -(-(self._options.prompt_tokens + 1) // _BLOCK_TOKENS) * _BLOCK_TOKENS
        needed = tokens * model_spec(self.manifest).kv_bytes_per_token
        return max(_KV_BYTES, needed)

    def _loaded(self, target: LineProcess) -> Phases:
        """`bytes`: from the order until the model is complete, its modules built meanwhile."""
        times = target.ask(
            {
                "do": "receive",
                "manifest": msgspec.to_builtins(self.manifest),
                "source": _SOURCE,
                "prompt": self._prompt,
            },
            _START_S,
        )
        return {
            "bytes": (times["completed_ns"] - times["order_ns"]) / 1e6,
            "first_token": (times["first_token_ns"] - times["completed_ns"]) / 1e6,
        }


def _medians(starts: Sequence[Phases]) -> Phases:
    return {phase: median(start[phase] for start in starts) for phase in starts[0]}
