"""Configuration: the one table of settings, and how file, environment and flags become a value.

The fields of PoolConfig and ModelConfig *are* the table: type, default, unit, bounds and help
stand in one place. Flags and documentation are made from it. What a value leads to is decided
elsewhere. A YAML file is overridden by LIVESCALE_<NAME> variables, these by flags.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from livescale.settings import (
    ENVIRONMENT_PREFIX,
    About,
    ConfigError,
    as_mapping,
    kind_of,
    parse_schedule,
    read_values,
    read_yaml,
    settings_of,
    shown_default,
    table_cells,
    unknown,
)
from livescale.slo import SloError, parse_slo
from livescale.topology_files import read_topology
from livescale.types import SEQUENCES_MAX, Value

TESTBED_VARIABLE = "LIVESCALE_TESTBED"
"""Names the testbed to what runs inside `livescale testbed run`."""

# Where data lies is no business of a pool, nor is the testbed around it; a key must not stand
# among values that are written down.
_NOT_SETTINGS = (
    "LIVESCALE_DATA",
    "LIVESCALE_API_KEY",
    "LIVESCALE_ADMIN_KEY",
    TESTBED_VARIABLE,
)
_KIB, _MIB, _GIB, _TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

ROOFLINE_PREFIX = "roofline:"
"""What a `timed_profile` begins with that is no file."""


class ModelConfig(Value, frozen=True, kw_only=True):
    """One entry of `models:`."""

    path: Annotated[str, About("directory of the model; relative to the file that names it")]
    name: Annotated[str, About("name in requests; the directory's name if empty")] = ""
    min_replicas: Annotated[
        int, About("instances at least; 0: the last one goes when nobody asks (scale to zero)")
    ] = 1
    max_replicas: Annotated[
        int | None, About("instances at most; as many as there are workers if none", lower=1)
    ] = None
    prefill_tokens_per_s: Annotated[
        int | None, About("capacity of one instance; measured at warm-up if none", "tokens/s", 1)
    ] = None
    kv_blocks: Annotated[
        int | None, About("KV blocks of one instance; measured at warm-up if none", "blocks", 1)
    ] = None
    idle_s: Annotated[
        int, About("time without a request after which the last instance goes", "s", 0, 31_536_000)
    ] = 60
    priority: Annotated[
        int, About("models of higher priority get scarce devices first", "", -1000, 1000)
    ] = 0
    target_ongoing_requests: Annotated[
        int | None,
        About("unfinished requests per instance to scale to; the pool's if none", "requests", 1),
    ] = None
    schedule: Annotated[
        str,
        About(
            "limits by time of day (UTC): '08:00-20:00 min=2 max=6', more after a semicolon;"
            " the first that holds replaces the limits above"
        ),
    ] = ""


class PoolConfig(Value, frozen=True, kw_only=True):
    """All settings of a pool. Made by `load_config`, which also checks them."""

    host: Annotated[str, About("address that the HTTP API listens on")] = "127.0.0.1"
    port: Annotated[int, About("port of the HTTP API; 0 takes a free one", upper=65535)] = 8000
    workers: Annotated[
        int,
        About("worker processes, one per device; those of `topology` if it is given", "", 1, 4096),
    ] = 3
    hosts: Annotated[
        int,
        About(
            "hosts that the workers are taken for, all on this machine: sockets between them",
            "",
            1,
            256,
        ),
    ] = 1
    topology: Annotated[
        str | None, About("file of hosts, devices and links; none: one host without limits")
    ] = None
    worker_threads: Annotated[int, About("compute threads of a worker", "", 1, 1024)] = 1
    device: Annotated[
        str,
        About(
            "what a worker computes on; cuda: not yet tried on a GPU; timed: it only waits",
            choices=("cpu", "cuda", "timed"),
        ),
    ] = "cpu"
    timed_run_us: Annotated[
        int, About("time that a timed worker takes for anything it computes", "us", 0, 60_000_000)
    ] = 8000
    timed_token_us: Annotated[
        int, About("time that a timed worker takes for every token on top", "us", 0, 60_000_000)
    ] = 67
    timed_profile: Annotated[
        str | None,
        About(
            "instead of these two: a file of `bench profile`, or roofline:ACCELERATOR:MODEL, such"
            " as roofline:a100:llama-3-8b"
        ),
    ] = None
    weights_layout: Annotated[
        str,
        About(
            "packed: a CPU computes with a second, faster copy of the parameters; plain: without",
            choices=("packed", "plain"),
        ),
    ] = "packed"
    arena_bytes: Annotated[int, About("memory for parameters, per worker", "bytes", _MIB, _TIB)] = (
        _GIB
    )
    resident_bytes: Annotated[
        int,
        About(
            "end of a worker's arena that keeps first layers of models that it gave up; 0: none",
            "bytes",
            0,
            _TIB,
        ),
    ] = 0
    kv_bytes: Annotated[
        int, About("memory for the KV cache, per worker", "bytes", 64 * _KIB, _TIB)
    ] = 256 * _MIB
    block_tokens: Annotated[int, About("tokens of one KV block", "tokens", 1, 1024)] = 16
    chunk_bytes: Annotated[
        int, About("unit of transfer inside a layer", "bytes", 4 * _KIB, 16 * _MIB)
    ] = _MIB
    uplink_bytes_per_s: Annotated[
        int | None, About("limit on what a worker sends; none: no limit", "bytes/s", _KIB)
    ] = None
    downlink_bytes_per_s: Annotated[
        int | None, About("limit on what a worker receives; none: no limit", "bytes/s", _KIB)
    ] = None
    carrier: Annotated[
        str,
        About(
            "auto: shared memory within a host, TCP between hosts; tcp: no shared memory; nixl:"
            " NIXL instead of TCP, for RDMA networks (extra rdma)",
            choices=("auto", "tcp", "nixl"),
        ),
    ] = "auto"
    stall_ms: Annotated[
        int,
        About("time without a byte after which parameters are asked for elsewhere", "ms", 100),
    ] = 2000
    lost_after_ms: Annotated[
        int,
        About(
            "silence after which a worker, an agent, the controller or a gateway is given up",
            "ms",
            200,
            3_600_000,
        ),
    ] = 5000
    stuck_after_ms: Annotated[
        int,
        About(
            "time after which a single piece of a worker's or agent's work counts as silence",
            "ms",
            1000,
            86_400_000,
        ),
    ] = 60_000
    parameter_share_percent: Annotated[
        int, About("share of a limited uplink that parameters may take at most", "%", 1, 100)
    ] = 100
    multicast: Annotated[
        str, About("how parameters get from those who have them to those who need them")
    ] = "auto"
    live_order: Annotated[
        str,
        About(
            "how a loading instance works before everything is there: zigzag and best-effort share"
            " prompts with an overloaded instance, overlap works alone, stop-the-world waits",
            choices=("zigzag", "best-effort", "overlap", "stop-the-world"),
        ),
    ] = "zigzag"
    live_over_ms: Annotated[
        int | None,
        About(
            "loads that should take no longer are waited for; none: a quarter of the SLO's TTFT,"
            " or 100 if that is relative",
            "ms",
            0,
            3_600_000,
        ),
    ] = None
    live_ahead_max: Annotated[
        int,
        About(
            "requests sent to a loading instance before it or its partner can start them",
            "requests",
            1,
            4096,
        ),
    ] = 8
    live_batches_max: Annotated[
        int, About("batches of prompts that a loading instance works on", "batches", 1, 4096)
    ] = 16
    live_gap_ms: Annotated[
        int | None,
        About(
            "time that batches from loading instances may keep decodes waiting; none: no longer"
            " than a Run full of prompts",
            "ms",
            1,
            60_000,
        ),
    ] = None
    live_migration: Annotated[
        str,
        About(
            "when a loading instance has everything, requests that decode stay where they are, or"
            " move to it with their KV where that pays",
            choices=("stay", "move"),
        ),
    ] = "stay"
    placement: Annotated[
        str,
        About(
            "copies in host memory: spread: one of each model in the cluster; cache: on each host"
            " what it loaded last; all: every model on every host; none",
            choices=("spread", "cache", "all", "none"),
        ),
    ] = "spread"
    cache_ttl_s: Annotated[
        int, About("time after its last use that placement cache keeps a copy", "s", 1, 31_536_000)
    ] = 30
    host_memory_bytes: Annotated[
        int | None,
        About(
            "memory for copies, per host; 0: no agents; none: what placement keeps, and one more;"
            " for models that come later up to half of what the machine has left",
            "bytes",
            upper=64 * _TIB,
        ),
    ] = None
    storage_bytes_per_s: Annotated[
        int | None,
        About("limit on what a process reads of models; none: no limit", "bytes/s", _KIB),
    ] = None
    run_tokens_max: Annotated[
        int, About("tokens that an instance computes at once", "tokens", 1, 1 << 20)
    ] = 128
    sequences_max: Annotated[
        int, About("requests that an instance computes at once", "requests", 1, 1 << 16)
    ] = SEQUENCES_MAX
    oldest_prompt_percent: Annotated[
        int,
        About("share of prompt work for the oldest prompt; shorter ones get the rest", "%", 1, 100),
    ] = 50
    growth_tokens: Annotated[
        int,
        About("room kept for each running request when another is admitted", "tokens", 0, 1 << 20),
    ] = 64
    dispatched_ahead_max: Annotated[
        int, About("requests sent to an instance before it can start them", "requests", 1, 4096)
    ] = 8
    queue_requests_max: Annotated[
        int, About("waiting requests of a model above which new ones are refused", "requests", 1)
    ] = 1024
    queue_prompt_tokens_max: Annotated[
        int | None,
        About("prompt tokens of those, above which new ones are refused; none: no limit", "tokens"),
    ] = 1 << 20
    queue_timeout_s: Annotated[
        int | None,
        About("time that a request waits for an instance, then it is refused; none: any", "s", 1),
    ] = 60
    request_timeout_s: Annotated[
        int | None,
        About("time from arrival to last token, then a request is ended; none: no limit", "s", 1),
    ] = None
    receive_timeout_s: Annotated[
        int, About("time that a client has to send a request", "s", 1, 86_400)
    ] = 60
    stalled_client_s: Annotated[
        int, About("time without reading after which a client is cut off", "s", 1, 86_400)
    ] = 60
    api_key_file: Annotated[
        str | None,
        About(
            "file of the keys that /v1 asks for, one per line, perhaps with weight=N behind;"
            " none: open to all"
        ),
    ] = None
    admin_key_file: Annotated[
        str | None,
        About("file of the keys that /admin asks for, one per line; none: see operations.md"),
    ] = None
    cors_origins: Annotated[
        str,
        About("origins of web pages that may use /v1, separated by commas, '*': all; empty: none"),
    ] = ""
    metrics_compat: Annotated[
        str, About("names under which /metrics shows its figures again", choices=("none", "vllm"))
    ] = "none"
    step_gap_us: Annotated[
        int, About("shortest time between two decisions", "us", 0, 1_000_000)
    ] = 1000
    load_window_ms: Annotated[
        int, About("window over which the token rate is taken", "ms", 10, 3_600_000)
    ] = 1000
    token_rate_upper_percent: Annotated[
        int, About("arriving prompt tokens above which a model grows", "% of capacity", 1, 1000)
    ] = 90
    token_rate_lower_percent: Annotated[
        int, About("arriving prompt tokens below which it may shrink", "% of capacity", 0, 1000)
    ] = 60
    prefill_queue_upper_ms: Annotated[
        int, About("queued prefill work above which a model grows", "ms", 1, 3_600_000)
    ] = 700
    prefill_queue_lower_ms: Annotated[
        int, About("queued prefill work below which it may shrink", "ms", 0, 3_600_000)
    ] = 500
    kv_upper_percent: Annotated[
        int, About("KV blocks in use above which a model grows", "%", 1, 100)
    ] = 85
    kv_lower_percent: Annotated[
        int, About("KV blocks in use below which it may shrink", "%", 0, 100)
    ] = 75
    requests_upper_percent: Annotated[
        int,
        About("unfinished requests above which a model grows", "% of sequences_max", 1, 100),
    ] = 85
    requests_lower_percent: Annotated[
        int,
        About("unfinished requests below which it may shrink", "% of sequences_max", 1, 100),
    ] = 75
    target_ongoing_requests: Annotated[
        int | None,
        About(
            "unfinished requests per instance to scale to; none: by the bounds above", "requests", 1
        ),
    ] = None
    scale_down_timeout_ms: Annotated[
        int, About("time below every lower bound before a model shrinks", "ms", 0, 86_400_000)
    ] = 333
    settle_ms: Annotated[
        int, About("time to wait at start for all workers to join", "ms", 0, 3_600_000)
    ] = 1000
    drain_timeout_s: Annotated[
        int, About("time that running requests get when the pool stops", "s", 0, 86_400)
    ] = 30
    request_attempts_max: Annotated[
        int, About("times a request is tried when workers are lost", "attempts", 1, 100)
    ] = 2
    record: Annotated[
        str | None, About("file for the run record (.zst: compressed); none: no record")
    ] = None
    record_bytes_max: Annotated[
        int | None,
        About(
            "size at which a further part of the run record begins (FILE.2.jsonl, …); none: never",
            "bytes",
            1 << 16,
            _TIB,
        ),
    ] = None
    state: Annotated[
        str | None,
        About(
            "directory that keeps models and limits of the running pool for its next start;"
            " none: they go with the pool"
        ),
    ] = None
    slo: Annotated[str, About("what counts as good: '5x-mean' or 'ttft=450ms,tbt=150ms'")] = (
        "5x-mean"
    )
    log_level: Annotated[
        str,
        About(
            "what processes log besides the pool's news",
            choices=("debug", "info", "warning", "error"),
        ),
    ] = "warning"
    models: tuple[ModelConfig, ...] = ()


SETTINGS = settings_of(PoolConfig)
MODEL_SETTINGS = settings_of(ModelConfig)
CHANGEABLE_SETTINGS = tuple(
    setting
    for setting in MODEL_SETTINGS
    if setting.name
    in (
        *("min_replicas", "max_replicas", "idle_s", "priority"),
        *("target_ongoing_requests", "schedule"),
    )
)
"""Those of a model that can be changed while it runs."""


def load_config(
    path: Path | None,
    model_paths: list[str],
    environ: Mapping[str, str],
    flags: Mapping[str, object],
) -> PoolConfig:
    """The checked configuration: YAML file < environment < flags.

    `model_paths` are added to the file's models. A flag of None was not given; the word "none"
    as a flag or variable means None. Raises ConfigError.
    """
    values: dict[str, object] = {}
    models: list[ModelConfig] = []
    if path is not None:
        document = read_yaml(path)
        models += _models_of(document.pop("models", None), path)
        values |= read_values(document, SETTINGS, f"{path}: ", also=("models",))
        if values.get("topology") is not None:
            values["topology"] = str(path.parent / str(values["topology"]))
        timed_profile = values.get("timed_profile")
        if timed_profile is not None and not str(timed_profile).startswith(ROOFLINE_PREFIX):
            values["timed_profile"] = str(path.parent / str(timed_profile))
    values |= _read_environment(environ)
    given = {name: value for name, value in flags.items() if value is not None}
    values |= read_values(given, SETTINGS, "flags: ", is_text=True)
    if values.get("topology") is not None:
        _take_workers(values)
    for model_path in model_paths:
        models.append(_named(ModelConfig(path=model_path)))
    config = msgspec.convert({**values, "models": tuple(models)}, PoolConfig)
    _check(config)
    return config


def model_of(fields: Mapping[object, object], config: PoolConfig) -> ModelConfig:
    """One entry of `models:` for a pool that runs with this configuration. Raises ConfigError."""
    model = _model(fields, "model", Path())
    _check_model(model, config)
    return model


def changed_model(
    model: ModelConfig, changes: Mapping[str, object], config: PoolConfig
) -> ModelConfig:
    """The model with other limits. Raises ConfigError, also for what cannot be changed."""
    values = read_values(changes, CHANGEABLE_SETTINGS, f"model {model.name}: ")
    changed: ModelConfig = msgspec.structs.replace(model, **values)
    _check_model(changed, config)
    return changed


def checked_model(model: ModelConfig, config: PoolConfig) -> ModelConfig:
    """An entry of `models:` that was written down earlier, if it holds for this pool. Raises
    ConfigError."""
    return model_of(msgspec.to_builtins(model), config)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser one flag per pool setting. Values stay text; `given_flags` collects them."""
    group = parser.add_argument_group("settings", "see also LIVESCALE_<NAME> and the config file")
    for setting in SETTINGS:
        unit = f" [{setting.about.unit}]" if setting.about.unit else ""
        words = f"{setting.about.help}{unit} (default: {shown_default(setting)})"
        group.add_argument(
            setting.flag,
            dest=setting.name,
            metavar="|".join(setting.about.choices) or setting.type.upper(),
            default=argparse.SUPPRESS,
            help=words.replace("%", "%%"),
        )
    for kind in ("api", "admin"):
        refuse = functools.partial(_refused_key, kind)
        group.add_argument(f"--{kind}-key", type=refuse, help=argparse.SUPPRESS)


def given_flags(arguments: argparse.Namespace) -> dict[str, object]:
    """The settings among the parsed arguments, for `load_config`."""
    names = {setting.name for setting in SETTINGS}
    return {name: value for name, value in vars(arguments).items() if name in names}


def settings_table_markdown() -> str:
    """The documentation's tables of pool and model settings."""
    lines = [
        "| setting | variable | type | unit | default | meaning |",
        "|---|---|---|---|---|---|",
    ]
    for setting in SETTINGS:
        lines.append(f"| `{setting.name}` | `{setting.variable}` | {table_cells(setting)} |")
    lines += ["", "| key of `models:` | type | unit | default | meaning |", "|---|---|---|---|---|"]
    for setting in MODEL_SETTINGS:
        lines.append(f"| `{setting.name}` | {table_cells(setting)} |")
    return "\n".join(lines) + "\n"


# -- helpers, in the order used -------------------------------------------------------------------


def _models_of(entries: object, path: Path) -> list[ModelConfig]:
    if entries is None:
        return []
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: models must be a list, not {kind_of(entries)}")
    models = []
    for index, entry in enumerate(entries):
        where = f"{path}: models[{index}]"
        fields = as_mapping({"path": entry} if isinstance(entry, str) else entry, where)
        models.append(_model(fields, where, path.parent))
    return models


def _model(fields: Mapping[object, object], where: str, base: Path) -> ModelConfig:
    values = read_values(fields, MODEL_SETTINGS, f"{where}.")
    if "path" not in values:
        raise ConfigError(f"{where}: path is missing")
    values["path"] = str(base / str(values["path"]))
    return _named(msgspec.convert(values, ModelConfig))


def _named(model: ModelConfig) -> ModelConfig:
    name = model.name or Path(os.path.abspath(model.path)).name
    if not name:
        raise ConfigError(f"models: '{model.path}' gives no name; set `name`")
    return msgspec.structs.replace(model, name=name)


def _take_workers(values: dict[str, object]) -> None:
    """A topology has as many workers as devices."""
    path = Path(str(values["topology"]))
    devices = len(read_topology(path).topology.devices)
    if values.setdefault("workers", devices) != devices:
        raise ConfigError(f"workers is {values['workers']}, but {path} has {devices} devices")


def _read_environment(environ: Mapping[str, str]) -> dict[str, object]:
    known = {setting.variable: setting.name for setting in SETTINGS}
    given = {}
    for variable in sorted(environ):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in _NOT_SETTINGS:
            continue
        if variable not in known:
            raise ConfigError(unknown("environment: unknown variable", variable, known))
        given[known[variable]] = environ[variable]
    return read_values(given, SETTINGS, "environment: ", is_text=True)


def _refused_key(kind: str, _key: str) -> None:
    raise argparse.ArgumentTypeError(
        "every user of the machine can read a command line: put keys into a file and name it with"
        f" --{kind}-key-file, or one into LIVESCALE_{kind.upper()}_KEY"
    )


# -- what must hold between settings --------------------------------------------------------------


def _check(config: PoolConfig) -> None:
    for name in ("token_rate", "prefill_queue", "kv", "requests"):
        unit = "ms" if name == "prefill_queue" else "percent"
        _at_most(config, f"{name}_lower_{unit}", f"{name}_upper_{unit}")
    _at_most(config, "chunk_bytes", "arena_bytes")
    _at_most(config, "hosts", "workers")
    # Each running request computes at least one token per run, or its decoding would starve.
    _at_most(config, "sequences_max", "run_tokens_max")
    try:
        parse_slo(config.slo)
    except SloError as error:
        raise ConfigError(f"slo: {error}") from None
    if config.timed_profile is not None and config.device != "timed":
        raise ConfigError(f"timed_profile is for device timed, not for {config.device}")
    if config.carrier == "nixl" and importlib.util.find_spec("nixl_cu12") is None:
        raise ConfigError("carrier: nixl is not installed: pip install 'livescale[rdma]'")
    _check_models(config)


def _at_most(config: PoolConfig, smaller: str, larger: str) -> None:
    low, high = getattr(config, smaller), getattr(config, larger)
    if low > high:
        raise ConfigError(f"{smaller} is {low}, above {larger} {high}")


def _check_models(config: PoolConfig) -> None:
    if not config.models:
        raise ConfigError("models: none given; name a model's directory or a config file")
    seen: dict[str, str] = {}
    for model in config.models:
        if model.name in seen:
            raise ConfigError(
                f"models: '{model.name}' names both {seen[model.name]} and {model.path};"
                " set another `name` in the config file"
            )
        seen[model.name] = model.path
        _check_model(model, config)
    wanted = sum(model.min_replicas for model in config.models)
    if wanted > config.workers:
        raise ConfigError(
            f"models: min_replicas add up to {wanted}, above workers {config.workers}"
        )


def _check_model(model: ModelConfig, config: PoolConfig) -> None:
    """What must hold within one model's settings."""
    where = f"models: {model.name}: "
    try:
        parse_schedule(model.schedule)
    except ConfigError as error:
        raise ConfigError(f"{where}schedule: {error}") from None
    largest = config.workers if model.max_replicas is None else model.max_replicas
    if largest > config.workers:
        raise ConfigError(f"{where}max_replicas is {largest}, above workers {config.workers}")
    if model.min_replicas > largest:
        limit = "workers" if model.max_replicas is None else "max_replicas"
        raise ConfigError(f"{where}min_replicas is {model.min_replicas}, above {limit} {largest}")
