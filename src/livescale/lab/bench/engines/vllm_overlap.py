"""What a prompt gains by gates: vLLM's first token during a load, over its first token after it.

Layers are read, verified and given to the engine at the pace of a link that brings the model in
1.5 times what the prompt takes. The prompt is there when the load begins. Both ways in turns, in
one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from livescale.common.interpreter import module_words
from livescale.lab.bench.base.line_process import LineProcess, thread_environment
from livescale.lab.bench.base.made_models import make_bench_model
from livescale.lab.bench.engines.vllm_options import VllmBenchOptions
from livescale.vllm_engine.environment import DEFAULTS, FIXED

_ANSWER_S = 600.0
_PROMPT_TOKENS = 900
_LOAD_PER_PREFILL = 1.5


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
    python = str(options.vllm_python)
    words = module_words("livescale.lab.bench.engines.vllm_overlap_worker", python=python)
    environ = {**thread_environment(options.threads), **DEFAULTS, **FIXED}
    directory = scratch / "model"
    make_bench_model(directory, options.shape, options.vocabulary, "float32")
    asked = {
        "directory": str(directory),
        "prompt_tokens": _PROMPT_TOKENS,
        "load_per_prefill": _LOAD_PER_PREFILL,
        "repetitions": options.repetitions,
    }
    with LineProcess("vLLM", words, environ) as process:
        answer = process.ask(asked, _ANSWER_S)
    say("  prompts during a load and after it are done")
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
