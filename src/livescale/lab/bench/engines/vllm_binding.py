"""How long a kept engine takes to get parameters that are in the arena already, as views of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from livescale.common.interpreter import module_words
from livescale.lab.bench.base.line_process import LineProcess, thread_environment
from livescale.lab.bench.base.made_models import make_bench_model
from livescale.lab.bench.engines.engine_report import spread
from livescale.lab.bench.engines.vllm_options import (
    LOADED_SHAPE,
    LOADED_VOCABULARY,
    VllmBenchOptions,
)

_START_S = 600.0
_BIND_S = 60.0
_KV_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class BoundModel:
    """One model, and each time it took, in ns. `copies_nothing`: all parameters are views."""

    model_bytes: int
    copies_nothing: bool
    took_ns: tuple[int, ...]

    @property
    def bind_ms(self) -> float:
        return median(self.took_ns) / 1e6


@dataclass(frozen=True, slots=True)
class BindingFigures:
    """The model of `bench vllm`'s loads first, then the one that serves."""

    models: tuple[BoundModel, ...]

    def figures(self) -> dict[str, object]:
        return {"bind_ms": max(model.bind_ms for model in self.models)}

    def details(self) -> object:
        return [
            {
                "model_bytes": model.model_bytes,
                "copies_nothing": model.copies_nothing,
                "bind_ms": spread([ns / 1e6 for ns in model.took_ns]),
            }
            for model in self.models
        ]

    def text(self) -> str:
        return "\n".join(
            f"{model.model_bytes / 1e6:.0f} MB that are there, bound in {model.bind_ms:.2f} ms"
            + ("" if model.copies_nothing else " (NOT all as views)")
            for model in self.models
        )


def measure_binding(
    options: VllmBenchOptions, scratch: Path, say: Callable[[str], None]
) -> BindingFigures:
    """The first binding of each is not counted. Raises BenchError."""
    make_bench_model(scratch / "small", LOADED_SHAPE, LOADED_VOCABULARY, "float32")
    make_bench_model(scratch / "large", options.shape, options.vocabulary, options.dtype)
    models = tuple(_bound(options, scratch / name) for name in ("small", "large"))
    say("  both models are bound")
    return BindingFigures(models)


def _bound(options: VllmBenchOptions, directory: Path) -> BoundModel:
    words = module_words(
        "livescale.lab.bench.peers.engines.vllm_binding", python=str(options.vllm_python)
    )
    job = {"directory": str(directory), "kv_bytes": _KV_BYTES}
    with LineProcess("vLLM's engine", words, thread_environment(options.threads)) as process:
        process.ask(job, _START_S)
        answers = [process.ask({}, _BIND_S) for _ in range(options.loads + 1)][1:]
    first = answers[0]
    took_ns = tuple(answer["elapsed_ns"] for answer in answers)
    return BoundModel(first["model_bytes"], first["copies_nothing"], took_ns)
