"""How long a kept engine of vLLM takes to get the parameters of a model that lies in an arena.

Run by an interpreter that has vLLM and this package.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from livescale.lab.bench.peers.line_server import Job, serve_lines
from livescale.vllm_engine.environment import set_environment

_BLOCK_TOKENS = 32
_RUN_TOKENS_MAX = 128
_SEQUENCES_MAX = 8


def load(job: Job) -> tuple[str, Callable[[Job], Job]]:
    """An engine for the model in a directory, whose parameters are views of the arena where they
    can be."""
    set_environment("warning")

    from livescale.engine.files.model_files import read_layers, read_manifest
    from livescale.vllm_engine.executor import VllmExecutor
    from livescale.vllm_engine.skeleton import EngineTerms

    terms = EngineTerms(job["kv_bytes"], _BLOCK_TOKENS, _RUN_TOKENS_MAX, _SEQUENCES_MAX, True)
    executor = VllmExecutor(terms, skeletons_max=1)
    directory = Path(job["directory"])
    manifest = read_manifest(directory, "bench")
    arena = memoryview(bytearray(manifest.size_bytes))
    layers = list(read_layers(directory, manifest, arena))
    executor.prepare(manifest)

    def bind(_: Job) -> Job:
        """From parameters that are all there to an engine that has them."""
        began_ns = time.perf_counter_ns()
        executor.assign(manifest, arena)
        for layer in layers:
            executor.materialize(layer)
        elapsed_ns = time.perf_counter_ns() - began_ns
        copies_nothing = executor.copies_nothing
        executor.release()
        return {
            "elapsed_ns": elapsed_ns,
            "copies_nothing": copies_nothing,
            "model_bytes": manifest.size_bytes,
        }

    return "views", bind


if __name__ == "__main__":
    serve_lines(load)
