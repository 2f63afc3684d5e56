"""From configuration to what the processes are told: models prepared once, sizes checked early.

Everything that can be wrong with a model or a size is found here, before any process starts.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from livescale.batching.latency import LinearLatency
from livescale.config import ModelConfig, PoolConfig
from livescale.control.config import Bounds, ControllerConfig, ModelPolicy
from livescale.engine.errors import ModelError
from livescale.engine.model_files import (
    eos_token_ids,
    model_spec,
    read_manifest,
    sampling_defaults,
)
from livescale.runtime.boot import CatalogEntry
from livescale.settings import ConfigError
from livescale.topology import Device


def prepare_models(config: PoolConfig) -> tuple[CatalogEntry, ...]:
    """Read every model's config, headers and checksums.

    Raises ModelError for a broken directory, ConfigError (with both sizes) for a model that does
    not fit a worker.
    """
    _check_memory(config, 0)
    models = tuple(_prepare(config, model) for model in config.models)
    if config.device == "cpu" and config.weights_layout == "packed":
        _check_memory(config, max(entry.manifest.size_bytes for entry in models))
    return models


def controller_config(
    config: PoolConfig, models: tuple[CatalogEntry, ...], epoch: int
) -> ControllerConfig:
    """The controller's view of the configuration, in its own units."""
    ms = 1_000_000
    bounds = Bounds(
        token_rate_upper_permille=10 * config.token_rate_upper_percent,
        token_rate_lower_permille=10 * config.token_rate_lower_percent,
        backlog_upper_ns=config.prefill_queue_upper_ms * ms,
        backlog_lower_ns=config.prefill_queue_lower_ms * ms,
        kv_upper_permille=10 * config.kv_upper_percent,
        kv_lower_permille=10 * config.kv_lower_percent,
        load_window_ns=config.load_window_ms * ms,
        scale_down_timeout_ns=config.scale_down_timeout_ms * ms,
    )
    policies = tuple(
        ModelPolicy(
            spec=entry.spec,
            instances_min=model.min_replicas,
            instances_max=model.max_replicas or config.workers,
            prefill_tokens_per_s=model.prefill_tokens_per_s,
            kv_blocks=model.kv_blocks,
        )
        for model, entry in zip(config.models, models, strict=True)
    )
    return ControllerConfig(
        models=policies,
        workers_expected=config.workers,
        epoch=epoch,
        settle_ns=config.settle_ms * ms,
        dispatched_ahead_max=config.dispatched_ahead_max,
        request_attempts_max=config.request_attempts_max,
        bounds=bounds,
    )


def device(config: PoolConfig) -> Device:
    """What every worker of a one-machine pool owns."""
    return Device(
        kind=config.device,
        host="localhost",
        leaf="leaf0",
        arena_bytes=config.arena_bytes,
        kv_bytes=config.kv_bytes,
        uplink_bytes_per_s=config.uplink_bytes_per_s,
        downlink_bytes_per_s=config.downlink_bytes_per_s,
    )


def latency(config: PoolConfig) -> LinearLatency:
    """How long a timed worker takes for a Run."""
    return LinearLatency(config.timed_run_us * 1000, config.timed_token_us * 1000)


def _check_memory(config: PoolConfig, packed_bytes: int) -> None:
    """Workers touch all their memory at once: too much of it would bring the machine down.

    `packed_bytes` is what the largest second copy of parameters takes on each worker.
    """
    # A timed worker only counts its KV blocks.
    kv_bytes = 0 if config.device == "timed" else config.kv_bytes
    needed = config.workers * (config.arena_bytes + kv_bytes + packed_bytes)
    total = psutil.virtual_memory().total
    if needed > total:
        packed = f" and {packed_bytes} for weights_layout packed" if packed_bytes else ""
        raise ConfigError(
            f"{config.workers} workers with arena_bytes {config.arena_bytes} and kv_bytes"
            f" {kv_bytes}{packed} need {needed} bytes, the machine has {total}"
        )


def _prepare(config: PoolConfig, model: ModelConfig) -> CatalogEntry:
    directory = Path(model.path).resolve()
    name = model.name or directory.name
    manifest = read_manifest(directory, name)
    if not (directory / "tokenizer.json").is_file():
        raise ModelError(f"{directory} has no tokenizer.json: requests could not be read")
    spec = model_spec(manifest)
    if manifest.size_bytes > config.arena_bytes:
        raise ConfigError(
            f"model {name} has {manifest.size_bytes} bytes of parameters,"
            f" a worker's arena has {config.arena_bytes} (arena_bytes): it does not fit"
        )
    block_bytes = spec.kv_bytes_per_token * config.block_tokens
    kv_tokens = config.kv_bytes // block_bytes * config.block_tokens
    if kv_tokens == 0:
        raise ConfigError(
            f"kv_bytes {config.kv_bytes} holds no KV block of model {name}: one block of"
            f" {config.block_tokens} tokens has {block_bytes} bytes"
        )
    return CatalogEntry(
        spec=spec,
        manifest=manifest,
        directory=str(directory),
        eos_token_ids=eos_token_ids(directory),
        # The last generated token needs no KV, all others do.
        request_tokens_max=min(spec.model_tokens_max, kv_tokens + 1),
        sampling_defaults=sampling_defaults(directory),
    )
