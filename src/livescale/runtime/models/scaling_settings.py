"""What models and their stages scale by, from the settings."""

from __future__ import annotations

from livescale.config.cores import cores_max, cores_model
from livescale.config.model import ModelConfig
from livescale.config.pool import PoolConfig
from livescale.config.slo import SloAbsolute, parse_slo
from livescale.config.variation import variation_weights
from livescale.values.scaling_policies import (
    Bounds,
    ScalingPolicy,
    SloAim,
    StagesByQueue,
    TargetOngoing,
)
from livescale.values.types import ModelSpec
from livescale.values.units import NS_PER_MS


def pool_scaling(config: PoolConfig) -> ScalingPolicy:
    """What models scale by that say nothing else."""
    if config.target_ongoing_requests is not None:
        return _target(config, config.target_ongoing_requests)
    bounds = _bounds(config)
    if config.scaling_policy == "bounds":
        return bounds
    return SloAim(
        ttft_ns=_ttft_aim_ns(config),
        floor_decay_ns=config.floor_decay_ms * NS_PER_MS,
        scale_down_timeout_ns=_timeout_ns(config, SloAim().scale_down_timeout_ns),
        load_window_ns=bounds.load_window_ns,
        room=bounds,
        run_tokens_max=config.run_tokens_max,
    )


def model_scaling(config: PoolConfig, model: ModelConfig, spec: ModelSpec) -> ScalingPolicy | None:
    """What the model, or this stage of it, scales by (None: by what the pool's models do)."""
    if model.target_ongoing_requests is not None:
        return _target(config, model.target_ongoing_requests)
    if spec.stage is None or config.scaling_policy not in ("stages", "pipelines"):
        return None
    cores = cores_model(config)
    return StagesByQueue(
        slo_ns=_ttft_aim_ns(config),
        period_ns=config.stage_period_ms * NS_PER_MS,
        scale_down_timeout_ns=_timeout_ns(config, StagesByQueue().scale_down_timeout_ns),
        replicas_total=model.max_stage_replicas,
        is_uniform=config.scaling_policy == "pipelines",
        weights=variation_weights(),
        cores=cores,
        cores_max=1 if cores is None else cores_max(config),
    )


def tbt_aim_ns(config: PoolConfig) -> int:
    """The mean time between tokens that the SLO asks for (0: it asks for none)."""
    slo = parse_slo(config.slo)
    return (slo.tbt_ns or 0) if isinstance(slo, SloAbsolute) else 0


def _ttft_aim_ns(config: PoolConfig) -> int | None:
    """The configured one (None: there is none)."""
    if config.ttft_aim_ms is not None:
        return config.ttft_aim_ms * NS_PER_MS
    slo = parse_slo(config.slo)
    return slo.ttft_ns if isinstance(slo, SloAbsolute) else None


def _timeout_ns(config: PoolConfig, default_ns: int) -> int:
    """Before a model shrinks."""
    timeout_ms = config.scale_down_timeout_ms
    return default_ns if timeout_ms is None else timeout_ms * NS_PER_MS


def _bounds(config: PoolConfig) -> Bounds:
    return Bounds(
        token_rate_upper_permille=10 * config.token_rate_upper_percent,
        token_rate_lower_permille=10 * config.token_rate_lower_percent,
        backlog_upper_ns=config.prefill_queue_upper_ms * NS_PER_MS,
        backlog_lower_ns=config.prefill_queue_lower_ms * NS_PER_MS,
        kv_upper_permille=10 * config.kv_upper_percent,
        kv_lower_permille=10 * config.kv_lower_percent,
        requests_upper_permille=10 * config.requests_upper_percent,
        requests_lower_permille=10 * config.requests_lower_percent,
        load_window_ns=config.load_window_ms * NS_PER_MS,
        scale_down_timeout_ns=_timeout_ns(config, Bounds().scale_down_timeout_ns),
    )


def _target(config: PoolConfig, requests: int) -> TargetOngoing:
    return TargetOngoing(
        target_permille=1000 * requests,
        scale_down_timeout_ns=_timeout_ns(config, TargetOngoing().scale_down_timeout_ns),
    )
