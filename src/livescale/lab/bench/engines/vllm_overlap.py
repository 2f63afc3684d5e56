"""What a prompt gains by gates: vLLM's first token during a load, over its first token after it.

Layers are read, verified and given to the engine at the pace of a link that brings the model in
`load_per_prefill` times what the prompt takes. The prompt is there when the load begins. Both ways
in turns, in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from livescale.common.interpreter import module_words
from livescale.lab.bench.base.line_process import LineProcess, thread_environment
from livescale.lab.bench.base.made_models import BenchShape, made_model
from livescale.lab.bench.engines.vllm_options import VllmBenchOptions
from livescale.vllm_engine.environment import DEFAULTS, FIXED

_ANSWER_S = 600.0
_SHAPE = BenchShape(512, 8)


@dataclass(frozen=True, slots=True)
class OverlapOptions:
    """What is run. With `binds_views` parameters are views of the arena, else vLLM packs them."""

    shape: BenchShape = _SHAPE
    vocabulary: int = 8192
    prompt_tokens: int = 900
    load_per_prefill: float = 1.5
    repetitions: int = 5
    binds_views: bool = False
    threads: int = 1


@dataclass(frozen=True, slots=True)
class OverlapFigures:
    """Medians. `token_mismatches`: repetitions in which the first tokens of the two ways were not
    equal."""

    overlap_ttft_ratio: float
    load_s: float
    prefill_s: float
    during_s: float
    after_s: float
    token_mismatches: int

    def figures(self) -> dict[str, object]:
        return {
            "overlap_ttft_ratio": self.overlap_ttft_ratio,
            "overlap_token_mismatches": self.token_mismatches,
        }

    def details(self) -> object:
        return asdict(self)

    def text(self) -> str:
        return (
            f"first token of a prompt during a load of {self.load_s:.2f} s {self.during_s:.2f} s"
            f" from its start, after the load {self.after_s:.2f} s: {self.overlap_ttft_ratio:.2f};"
            f" {self.token_mismatches} tokens differ"
        )


def measure_gates(
    options: VllmBenchOptions, scratch: Path, say: Callable[[str], None]
) -> OverlapFigures:
    """Of packed parameters, as a pool's are by default. Raises BenchError."""
    asked = OverlapOptions(
        options.shape,
        options.vocabulary,
        repetitions=options.repetitions,
        threads=options.threads,
    )
    found = measure_overlap(options.vllm_python, asked)
    say("  prompts during a load and after it are done")
    return found


def measure_overlap(python: Path, options: OverlapOptions) -> OverlapFigures:
    """With the vLLM of this interpreter, which has this livescale, too. Raises BenchError."""
    words = module_words("livescale.lab.bench.engines.vllm_overlap_worker", python=str(python))
    environ = {**thread_environment(options.threads), **DEFAULTS, **FIXED}
    with (
        made_model(options.shape, options.vocabulary, "float32") as directory,
        LineProcess("vLLM", words, environ) as process,
    ):
        answer = process.ask({**asdict(options), "directory": str(directory)}, _ANSWER_S)
    during, after = answer["during"], answer["after"]
    pairs = list(zip(during, after, strict=True))
    return OverlapFigures(
        overlap_ttft_ratio=median(one["ttft_s"] / other["ttft_s"] for one, other in pairs),
        load_s=answer["load_s"],
        prefill_s=answer["prefill_s"],
        during_s=median(one["ttft_s"] for one in during),
        after_s=median(one["ttft_s"] for one in after),
        token_mismatches=sum(one["tokens"] != other["tokens"] for one, other in pairs),
    )
