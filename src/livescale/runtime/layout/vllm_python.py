"""What speaks against vLLM as the engine of workers, found out before any of them is started."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from livescale.common.interpreter import module_words
from livescale.config.pool import PoolConfig
from livescale.runtime.layout.worker_python import (
    WorkerPythonError,
    check_worker_python,
    output_of,
)
from livescale.runtime.wire.protocol import CatalogEntry
from livescale.vllm_engine.check import VllmAnswer, VllmQuestion


def check_vllm(config: PoolConfig, models: Sequence[CatalogEntry]) -> None:
    """Nothing, where there are no workers of this device. Raises WorkerPythonError where
    `worker_python` has no vLLM, or none that can run these models; the first reason counts."""
    if config.device != "vllm" or not config.workers:
        return
    if config.worker_python is None:
        raise WorkerPythonError("worker_python is missing. Device vllm needs it")
    check_worker_python(config.worker_python)
    question = VllmQuestion(
        block_tokens=config.block_tokens,
        configs={model.spec.name: model.manifest.config_json for model in models},
        any_version=config.vllm_any_version == "yes",
    )
    words = module_words("livescale.vllm_engine.check", python=config.worker_python)
    text = output_of(words, config.worker_python, msgspec.json.encode(question).decode())
    answer = msgspec.json.decode(text, type=VllmAnswer)
    for refusal in answer.refusals:
        raise WorkerPythonError(f"worker_python: {config.worker_python}: {refusal}")
