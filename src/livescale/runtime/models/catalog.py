"""From configuration to what the processes are told: models prepared once, sizes checked early.

Everything that can be wrong with a model or a size is found here, before any process starts, or
before a model is published in a running pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from livescale.batching.live.live_batch import MOVE_FACTOR, LiveLimits
from livescale.common.regions import ALIGNMENT_BYTES
from livescale.common.settings import ConfigError, parse_schedule
from livescale.config.model import ModelConfig, RolesConfig, leaders_max, stage_spans
from livescale.config.pool import WORKERS_MAX, PoolConfig
from livescale.config.slo import SloAbsolute, parse_slo
from livescale.control.multicast.planner import STRATEGIES
from livescale.control.state.config import ANY_PAIR, ControllerConfig, PairRule
from livescale.engine.files.model_files import (
    eos_token_ids,
    model_spec,
    read_manifest,
    sampling_defaults,
    stage_manifests,
)
from livescale.latency.layer_times import request_layer_ns
from livescale.runtime.layout.pool_layout import HostSeat, PoolLayout
from livescale.runtime.models.catalog_warnings import kv_warnings, read_tokenizer_warnings
from livescale.runtime.models.scaling_settings import model_scaling, pool_scaling, tbt_aim_ns
from livescale.runtime.models.timed_latency import table_latency
from livescale.runtime.wire.protocol import CatalogEntry, PublishedModel
from livescale.values.bindings import Binding, EarlyBinding, LateBinding
from livescale.values.chunks import fitting_chunk_bytes
from livescale.values.copy_strategies import (
    AllCopies,
    CacheCopies,
    KeyStageCopies,
    NoCopies,
    Placement,
    SpreadCopies,
)
from livescale.values.scaling_policies import ModelPolicy, RoleLimits
from livescale.values.stages import StageError, even_stages
from livescale.values.types import Manifest, ModelSpec
from livescale.values.units import NS_PER_MS, NS_PER_S

_PAIR_RUNS_MIN = 4
_LIVE_OVER_NS = 100 * NS_PER_MS


def prepare_models(config: PoolConfig) -> tuple[CatalogEntry, ...]:
    """Read every model's config, headers and checksums.

    Raises ModelError for a broken directory, ConfigError (with both sizes) for a model that does
    not fit a worker.
    """
    check_memory(config, 0, 0)
    return tuple(prepare_model(config, model) for model in config.models)


def prepare_model(
    config: PoolConfig,
    model: ModelConfig,
    check_modules: Callable[[Path], object] = lambda directory: None,
) -> CatalogEntry:
    """Read one model's config, headers and checksums: every byte of it, once.

    Raises ModelError or ConfigError as `prepare_models` does. `check_modules` raises ModelError for
    a directory whose tensors do not fit the modules that are to compute with them (`ModuleCheck`):
    that takes seconds, which the start of a pool does without. There the first load finds it out.
    """
    directory = model_directory(model)
    name = model.name or directory.name
    manifest = read_manifest(directory, name)
    check_modules(directory)
    end_ids = eos_token_ids(directory)
    tokenizer_warnings = read_tokenizer_warnings(directory, manifest, end_ids)
    spec = model_spec(manifest)
    tokens_max = _model_tokens_max(model, spec)
    parts = manifests_of(model, manifest)
    largest = max(parts, key=lambda part: part.size_bytes)
    if largest.size_bytes > config.arena_bytes:
        raise ConfigError(
            f"model {largest.model} has {largest.size_bytes} bytes of parameters, above "
            f"the worker's arena of {config.arena_bytes} bytes. Raise arena_bytes"
        )
    block_bytes = max(model_spec(part).kv_bytes_per_token for part in parts) * config.block_tokens
    kv_tokens = config.kv_bytes // block_bytes * config.block_tokens
    if kv_tokens == 0:
        raise ConfigError(
            f"kv_bytes {config.kv_bytes} holds no KV block of model {name}: one block of"
            f" {config.block_tokens} tokens has {block_bytes} bytes"
        )
    leaders = leaders_max(model, config.workers)
    quota_tokens = kv_tokens // config.block_tokens // leaders * config.block_tokens
    if quota_tokens == 0:
        raise ConfigError(
            f"kv_bytes {config.kv_bytes} holds no KV block of model {name} for each of the"
            f" {leaders} leaders that an instance of a stage may have: they need"
            f" {leaders * block_bytes} bytes at least (or a smaller max_stage_replicas)"
        )
    # The last generated token needs no KV, all others do.
    room_tokens = quota_tokens + 1
    if config.device == "vllm":
        # One block is the engine's own, and it wants room for all tokens.
        room_tokens = quota_tokens - config.block_tokens
        if room_tokens == 0:
            raise ConfigError(
                f"kv_bytes {config.kv_bytes} holds one KV block of model {name}: vLLM needs two,"
                f" of {block_bytes} bytes each"
            )
    request_tokens_max = min(tokens_max, room_tokens)
    return CatalogEntry(
        spec=spec,
        manifest=manifest,
        directory=str(directory),
        eos_token_ids=end_ids,
        request_tokens_max=request_tokens_max,
        sampling_defaults=sampling_defaults(directory),
        warnings=(
            *kv_warnings(config, name, tokens_max, request_tokens_max, block_bytes * leaders),
            *tokenizer_warnings,
        ),
    )


def model_directory(model: ModelConfig) -> Path:
    """Where its files are, from wherever it is asked for."""
    return Path(model.path).resolve()


def _model_tokens_max(model: ModelConfig, spec: ModelSpec) -> int:
    """Prompt and answer of a request, wherever there is KV for them. Raises ConfigError."""
    given, own = model.max_model_tokens, spec.model_tokens_max
    if given is not None and given > own:
        raise ConfigError(
            f"model {spec.name}: max_model_tokens is {given}, above the model's length "
            f"of {own} tokens. Lower it"
        )
    return own if given is None else given


def manifests_of(model: ModelConfig, manifest: Manifest) -> tuple[Manifest, ...]:
    """Of the model, or of each of its stages. Raises ConfigError for stages that it cannot have."""
    if not model.has_stages:
        return (manifest,)
    try:
        if model.stages is None:
            return stage_manifests(manifest, stage_spans(model, f"model {manifest.model}: "))
        layer_ns = None
        if model.stage_profile is not None:
            layer_ns = request_layer_ns(table_latency(Path(model.stage_profile)))
        spans = even_stages(model_spec(manifest), model.stages, layer_ns)
        return stage_manifests(manifest, spans)
    except StageError as error:
        raise ConfigError(str(error)) from error


def published(
    config: PoolConfig, settings: ModelConfig, entry: CatalogEntry
) -> list[PublishedModel]:
    """The model as the pool has it, or each of its stages, which to all that loads are models."""
    entries = [
        msgspec.structs.replace(entry, spec=model_spec(manifest), manifest=manifest)
        for manifest in manifests_of(settings, entry.manifest)
    ]
    return [PublishedModel(one, model_policy(config, settings, one), settings) for one in entries]


def sizes_of(models: Iterable[CatalogEntry]) -> dict[str, int]:
    """Bytes of parameters by name."""
    return {entry.spec.name: entry.manifest.size_bytes for entry in models}


def with_host_memory(
    layout: PoolLayout, config: PoolConfig, models: Mapping[str, int]
) -> PoolLayout:
    """The layout with the memory that each host has for copies of the models, whose sizes in bytes
    are given by name, where the layout does not say.

    Raises ConfigError when the machine has too little memory for all of it together.
    """
    taken = [_memory_of(seat, config, len(layout.hosts), models) for seat in layout.hosts]
    # With auto it depends on the model, and another one may be added: there is room for any.
    packed = config.device in ("cpu", "vllm") and config.weights_layout in ("auto", "packed")
    largest = max(models.values(), default=0)
    needed = check_memory(config, largest if packed else 0, sum(taken))
    more = _growth_bytes(config, needed) // len(layout.hosts)
    hosts = []
    for seat, own in zip(layout.hosts, taken, strict=True):
        # Only where nothing says how much memory the host has for copies.
        grows = own and config.host_memory_bytes is None and not seat.host.memory_bytes
        host = msgspec.structs.replace(seat.host, memory_bytes=own + more if grows else own)
        hosts.append(msgspec.structs.replace(seat, host=host, memory_touched_bytes=own))
    _check_room(hosts, models)
    return msgspec.structs.replace(layout, hosts=tuple(hosts))


def _growth_bytes(config: PoolConfig, needed_bytes: int) -> int:
    """What copies of later models may take besides: half of what the machine has left when the
    pool has all it needs. A network card that reaches into memory would pin all of it: none."""
    if config.carrier == "nixl":
        return 0
    available_bytes: int = psutil.virtual_memory().available
    return max(0, available_bytes - needed_bytes) // 2


def _check_room(hosts: Sequence[HostSeat], models: Mapping[str, int]) -> None:
    """Where there are agents, each model's copy fits one of them."""
    room_bytes = max((seat.host.memory_bytes for seat in hosts), default=0)
    for name, size_bytes in models.items():
        if 0 < room_bytes < size_bytes:
            raise ConfigError(
                f"model {name} has {size_bytes} bytes of parameters, above the "
                f"{room_bytes} bytes for host copies. Raise host_memory_bytes, or set 0 "
                "for no copies"
            )


def _memory_of(seat: HostSeat, config: PoolConfig, hosts: int, models: Mapping[str, int]) -> int:
    if config.placement == "none":
        return 0
    # What is configured for all hosts goes before what a topology says of one.
    if config.host_memory_bytes is not None:
        return config.host_memory_bytes
    return seat.host.memory_bytes or _enough_bytes(config, hosts, models)


def _enough_bytes(config: PoolConfig, hosts: int, models: Mapping[str, int]) -> int:
    """Memory per host that holds what the placement keeps.

    For one copy of each model in the cluster: an even share, and room for one more of the largest,
    so that a copy finds a place wherever it is made, also that of a model which is added later.
    """
    sizes = [-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in models.values()]
    share = sum(sizes) if config.placement != "spread" else -(-sum(sizes) // hosts)
    return share + max(sizes, default=0)


def controller_config(
    config: PoolConfig, layout: PoolLayout, policies: tuple[ModelPolicy, ...], epoch: int
) -> ControllerConfig:
    """The controller's view of the configuration, in its own units."""
    if config.multicast not in STRATEGIES:
        known = ", ".join(STRATEGIES)
        raise ConfigError(f"multicast is '{config.multicast}', not one of {known}")
    return ControllerConfig(
        models=policies,
        workers_expected=len(layout.seats),
        agents_expected=len(layout.agents),
        epoch=epoch,
        settle_ns=config.settle_ms * NS_PER_MS,
        dispatched_ahead_max=config.dispatched_ahead_max,
        binding=binding(config),
        sequences_max=config.sequences_max,
        request_attempts_max=config.request_attempts_max,
        # A gateway may give a silent worker up a little before the controller does.
        avoid_ns=max(NS_PER_S, config.lost_after_ms * NS_PER_MS),
        scaling=pool_scaling(config),
        multicast=config.multicast,
        avoids_serving=config.serving_links == "avoid",
        placement=_placement(config),
        live_order=config.live_order,
        teams=None if config.teams == "none" else config.teams,
        warm_spares=config.warm_spares,
        spares_ahead=config.spares_ahead == "empty",
        spare_idle_ns=config.spare_idle_ms * NS_PER_MS,
        drain=config.drain,
        live_over_ns=live_over_ns(config),
        live_ahead_max=config.live_ahead_max,
        pairs=pair_rule(config),
        chunk_bytes=fitting_chunk_bytes(config.chunk_bytes, layout.rates_bytes_per_s),
        leaves=layout.leaves,
        group_bytes_per_s=layout.group_bytes_per_s,
        remote_storage_bytes_per_s=layout.remote_storage_bytes_per_s,
        assumes_group_rate=layout.assumes_group_rate,
        # The share is kept by the data planes, together with the rate.
        parameter_share_percent=100 if layout.has_links else config.parameter_share_percent,
        wall_ns=time.time_ns() - time.monotonic_ns(),
    )


def binding(config: PoolConfig) -> Binding:
    """When requests are bound to instances."""
    if config.binding == "early":
        return EarlyBinding(min(config.dispatched_ahead_max, EarlyBinding().ahead_max))
    return LateBinding(
        ahead_tokens_max=config.runs_ahead_max * config.run_tokens_max,
        oldest_prompt_percent=config.oldest_prompt_percent,
        passes_max=config.passes_max,
        run_tokens_max=config.run_tokens_max,
    )


def model_policy(config: PoolConfig, model: ModelConfig, entry: CatalogEntry) -> ModelPolicy:
    """The model's limits and its own way of scaling, in the controller's units."""
    workers = workers_max(config)
    roles = () if model.roles is None else _role_limits(model.roles, workers)
    most = sum(limits.instances_max for limits in roles) or model.max_replicas or workers
    return ModelPolicy(
        spec=entry.spec,
        instances_min=model.min_replicas if model.has_stages else model.instances_min,
        instances_max=min(most, workers),
        prefill_tokens_per_s=model.prefill_tokens_per_s,
        kv_blocks=model.kv_blocks,
        priority=model.priority,
        scaling=model_scaling(config, model, entry.spec),
        schedule=parse_schedule(model.schedule),
        idle_ns=model.idle_s * NS_PER_S,
        roles=roles,
    )


def _role_limits(roles: RolesConfig, workers: int) -> tuple[RoleLimits, ...]:
    """Where no most is given, each role may have the workers that the other's least leaves."""
    needed = sum(max(limits.min_replicas, 1) for _, limits in roles.both)
    return tuple(
        RoleLimits(
            role=role,
            instances_min=limits.min_replicas,
            instances_max=limits.max_replicas or workers - needed + max(limits.min_replicas, 1),
        )
        for role, limits in roles.both
    )


def workers_max(config: PoolConfig) -> int:
    """How many workers the pool may ever have: its own, or as many as join."""
    return config.workers if config.listen is None else WORKERS_MAX


def live_limits(config: PoolConfig) -> LiveLimits:
    """What bounds live work on an instance: a batch is what it would compute at once."""
    return LiveLimits(
        batches_max=config.live_batches_max,
        batch_tokens_max=config.run_tokens_max,
        gap_ns=(config.live_gap_ms or 0) * NS_PER_MS,
        move_factor=MOVE_FACTOR if config.live_migration == "move" else 0,
        team_end=config.team_end,
        tbt_ns=tbt_aim_ns(config),
    )


def pair_rule(config: PoolConfig) -> PairRule:
    """Where a loading instance gets a partner: loads of four Runs at least, if pairs are to pay."""
    if config.live_pairs == "always":
        return ANY_PAIR
    return PairRule(
        load_tokens_min=_PAIR_RUNS_MIN * config.run_tokens_max, block_tokens=config.block_tokens
    )


def live_over_ns(config: PoolConfig) -> int:
    """Loads that should take no longer are waited for."""
    if config.live_over_ms is not None:
        return config.live_over_ms * NS_PER_MS
    slo = parse_slo(config.slo)
    return slo.ttft_ns // 4 if isinstance(slo, SloAbsolute) else _LIVE_OVER_NS


def _placement(config: PoolConfig) -> Placement:
    placements: dict[str, Placement] = {
        "cache": CacheCopies(ttl_ns=config.cache_ttl_s * NS_PER_S),
        "spread": SpreadCopies(),
        "all": AllCopies(),
        "key-stages": KeyStageCopies(),
        "none": NoCopies(),
    }
    return placements[config.placement]


def check_memory(config: PoolConfig, packed_bytes: int, copies_bytes: int) -> int:
    """Workers and agents touch their memory at once: too much of it would bring the machine down.

    Returns what all of them take together. Raises ConfigError with the sizes.

    `packed_bytes` is what the largest second copy of parameters takes on each worker,
    `copies_bytes` what all host agents together have for copies.
    """
    # A timed worker only counts its KV blocks.
    kv_bytes = 0 if config.device == "timed" else config.kv_bytes
    if config.device == "vllm":
        engines = _engines(config, kv_bytes + packed_bytes)
        kv_bytes, packed_bytes = engines * kv_bytes, engines * packed_bytes
    needed = config.workers * (config.arena_bytes + kv_bytes + packed_bytes) + copies_bytes
    total = psutil.virtual_memory().total
    if needed > total:
        packed = f" and {packed_bytes} for packed weights (weights_layout)" if packed_bytes else ""
        copies = f", and {copies_bytes} for host copies," if copies_bytes else ""
        raise ConfigError(
            f"{config.workers} workers with arena_bytes {config.arena_bytes} and "
            f"kv_bytes {kv_bytes}{packed}{copies} need {needed} bytes, above the {total} "
            "bytes of the machine. Lower them"
        )
    return needed


def _engines(config: PoolConfig, engine_bytes: int) -> int:
    """How many engines of this size a worker keeps."""
    if config.vllm_engines_bytes is None or not engine_bytes:
        return config.vllm_engines_max
    return min(config.vllm_engines_max, max(config.vllm_engines_bytes // engine_bytes, 1))
