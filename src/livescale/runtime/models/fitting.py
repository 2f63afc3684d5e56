"""A configuration for this machine: what its user did not choose follows from models and memory."""

from __future__ import annotations

from collections.abc import Container

import psutil

from livescale.common.regions import ALIGNMENT_BYTES
from livescale.config.automatic import MachineMemory, ModelNeed, fitted
from livescale.config.model import ModelConfig
from livescale.config.pool import PoolConfig
from livescale.engine.files.checkpoint import ITEM_BYTES, read_text, stored_tensors
from livescale.engine.files.model_config import parse_config
from livescale.runtime.layout.worker_python import gpus_of
from livescale.runtime.models.catalog import model_directory

_FREE_PERCENT = 95
"""Of what the system calls available: a pool has more than its large pieces."""


def fitted_here(config: PoolConfig, given: Container[str]) -> tuple[PoolConfig, str]:
    """What `fitted` says for the models and this machine. Only headers of models are read. Raises
    ConfigError and ModelError."""
    if config.device == "vllm" or not config.workers:
        return config, ""
    needs = [model_need(model) for model in config.models]
    free_bytes = psutil.virtual_memory().available * _FREE_PERCENT // 100
    gpus = gpus_of(config.worker_python) if config.device == "cuda" else 0
    return fitted(config, given, needs, MachineMemory(free_bytes, gpus))


def model_need(model: ModelConfig) -> ModelNeed:
    """Of the model as it lies in a directory. Raises ModelError."""
    directory = model_directory(model)
    where = str(directory / "config.json")
    shape = parse_config(read_text(directory / "config.json"), where)
    tensors = stored_tensors(directory).values()
    layers = shape.decoder_layers + 2
    size_bytes = sum(tensor.size_bytes for tensor in tensors) + layers * ALIGNMENT_BYTES
    item_bytes = max(ITEM_BYTES.get(tensor.dtype, 0) for tensor in tensors)
    token_bytes = 2 * shape.decoder_layers * shape.kv_heads * shape.head_dim * item_bytes
    tokens = model.max_model_tokens or shape.model_tokens_max
    return ModelNeed(size_bytes, token_bytes * tokens)
