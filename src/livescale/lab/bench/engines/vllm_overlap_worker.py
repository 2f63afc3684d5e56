"""The engine of `vllm_overlap.py`: an interpreter that has vLLM runs this module.

Standard input has one question (JSON, a line), standard output gets the answer.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

from livescale.batching.engine_serving import EngineServing
from livescale.batching.runs.batcher import BatcherConfig
from livescale.batching.runs.run import SequenceSpec
from livescale.engine.files.model_config import parse_config
from livescale.engine.files.model_files import read_layers, read_manifest
from livescale.values.types import Manifest, SamplingParams
from livescale.vllm_engine.executor import VllmExecutor
from livescale.vllm_engine.skeleton import EngineTerms

_BLOCK_TOKENS, _SEQUENCES = 32, 4
_KV_BYTES = 256 << 20


class PacedLoads:
    """Loads of one model, again and again, into one engine."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self._directory = Path(asked["directory"])
        self._manifest: Manifest = read_manifest(self._directory, "bench")
        vocabulary = parse_config(self._manifest.config_json, "bench").vocab_size
        count = asked["prompt_tokens"]
        self._prompt = tuple(7 * place % vocabulary for place in range(count))
        self._arena = memoryview(bytearray(self._manifest.size_bytes))
        self._run_tokens = -(-count // _BLOCK_TOKENS) * _BLOCK_TOKENS
        terms = EngineTerms(_KV_BYTES, _BLOCK_TOKENS, self._run_tokens, _SEQUENCES, False)
        self._executor = VllmExecutor(terms, skeletons_max=1)
        self._came: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._executor.when_missing(self._take)
        self._executor.prepare(self._manifest)

    def first_token(self, load_s: float, *, overlaps: bool) -> dict[str, Any]:
        """A load that takes so long, and a prompt that is there when it begins."""
        manifest, executor = self._manifest, self._executor
        executor.assign(manifest, self._arena)
        config = BatcherConfig(executor.kv_blocks, _BLOCK_TOKENS, self._run_tokens, _SEQUENCES)
        serving = EngineServing(1, config, manifest.span, overlaps=overlaps)
        serving.add(SequenceSpec("a", 1, self._prompt, SamplingParams(1)))
        began_s = time.monotonic()
        feed = threading.Thread(target=self._feed, args=(began_s, load_s))
        feed.start()
        for _ in manifest.layers[: 1 if overlaps else None]:
            self._take()
        loaded_s = time.monotonic()
        serving.layers_arrived(1 if overlaps else manifest.span.stop)
        run = serving.next()
        assert run is not None
        step = executor.run(run).step
        assert step is not None
        ended_s = time.monotonic()
        feed.join()
        executor.release()
        return {
            "ttft_s": ended_s - began_s,
            "run_s": ended_s - loaded_s,
            "tokens": step.tokens[0].token_ids,
        }

    def _feed(self, began_s: float, load_s: float) -> None:
        """Layers come when a link of one rate would have brought them."""
        bytes_came = 0
        for layer in read_layers(self._directory, self._manifest, self._arena):
            bytes_came += self._manifest.layers[layer].size_bytes
            due_s = began_s + load_s * bytes_came / self._manifest.size_bytes
            time.sleep(max(0.0, due_s - time.monotonic()))
            self._came.put(layer)

    def _take(self) -> bool:
        self._executor.materialize(self._came.get())
        return True


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    loads = PacedLoads(asked)
    prefill_s = min(loads.first_token(0.0, overlaps=False)["run_s"] for _ in range(3))
    load_s = prefill_s * asked["load_per_prefill"]
    found: dict[str, list[dict[str, Any]]] = {"during": [], "after": []}
    for _ in range(asked["repetitions"]):
        for way, of_way in found.items():
            of_way.append(loads.first_token(load_s, overlaps=way == "during"))
    print(json.dumps({"load_s": load_s, "prefill_s": prefill_s, **found}), flush=True)


if __name__ == "__main__":
    main()
