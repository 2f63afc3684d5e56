"""What `bench vllm` runs, and settings that all of its pools have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from livescale.lab.bench.base.made_models import BenchShape

FLAG = "--vllm-python"
BLOCK_TOKENS = 32
"""Of a KV block: what vLLM's attention on CPUs takes."""
LOADED_SHAPE = BenchShape(256, 6)
LOADED_VOCABULARY = 2048
"""21 MB in fp32, with heads of 64."""


@dataclass(frozen=True, slots=True)
class VllmBenchOptions:
    """What is run: `shape` and what follows for serving, `loads` and `link_*` for loading."""

    vllm_python: Path
    shape: BenchShape
    parts: tuple[str, ...] = ("serving", "loads", "binding", "overlap")
    dtype: str = "float32"
    vocabulary: int = 8192
    streams: int = 8
    prompt_tokens: int = 64
    output_tokens: int = 64
    repetitions: int = 4
    threads: int = 1
    has_defaults: bool = True
    loads: int = 5
    link_size_bytes: int = 1 << 30
    link_bytes_per_s: int = 125_000_000
    seed: int = 0


def vllm_settings(options: VllmBenchOptions) -> dict[str, object]:
    """Of a pool with one worker."""
    return {
        "device": "vllm",
        "worker_python": str(options.vllm_python),
        "workers": 1,
        "worker_threads": options.threads,
        "block_tokens": BLOCK_TOKENS,
        "vllm_engines_max": 1,
        "port": 0,
        # One more is not needed, and would load beside what is measured.
        "warm_spares": "off",
        "spares_ahead": "none",
    }
