"""How file, environment and flags become a checked configuration.

A YAML file is overridden by LIVESCALE_<NAME> variables, these by flags.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from livescale.clusters.files import read_topology
from livescale.common.addresses import parse_address
from livescale.common.settings import (
    ENVIRONMENT_PREFIX,
    ConfigError,
    as_mapping,
    kind_of,
    parse_schedule,
    read_values,
    read_yaml,
    shown_default,
    unknown,
)
from livescale.config.model import CHANGEABLE_SETTINGS, MODEL_SETTINGS, ModelConfig
from livescale.config.pool import ROOFLINE_PREFIX, SETTINGS, WORKERS_MAX, PoolConfig
from livescale.config.serve_file import pool_document
from livescale.load.slo import SloError, parse_slo

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
_READ_BY_CHILDREN = ("tls_dir", "ssl_certfile", "ssl_keyfile", "worker_python")


def load_config(
    path: Path | None,
    model_paths: list[str],
    environ: Mapping[str, str],
    flags: Mapping[str, object],
    defaults: Mapping[str, object] | None = None,
) -> PoolConfig:
    """The checked configuration: `defaults` of the caller < YAML file < environment < flags.

    `model_paths` are added to the file's models. A flag of None was not given; the word "none"
    as a flag or variable means None. Raises ConfigError.
    """
    values: dict[str, object] = dict(defaults or {})
    models: list[ModelConfig] = []
    if path is not None:
        document = dict(pool_document(read_yaml(path), path))
        models += _models_of(document.pop("models", None), path)
        document.pop("ray", None)  # `config/ray.py` reads it, where Ray is asked for
        values |= read_values(document, SETTINGS, f"{path}: ", also=("models", "ray"))
        if values.get("topology") is not None:
            values["topology"] = str(path.parent / str(values["topology"]))
        timed_profile = values.get("timed_profile")
        if timed_profile is not None and not str(timed_profile).startswith(ROOFLINE_PREFIX):
            values["timed_profile"] = str(path.parent / str(timed_profile))
    values |= _read_environment(environ)
    given = {name: value for name, value in flags.items() if value is not None}
    values |= read_values(given, SETTINGS, "flags: ", is_text=True)
    for name in _READ_BY_CHILDREN:
        if values.get(name) is not None:
            values[name] = os.path.abspath(str(values[name]))
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
    if config.listen is not None:
        parse_address(config.listen, "listen")
    elif not config.workers:
        raise ConfigError("workers is 0, and no machine may join: say where with `listen`")
    elif config.token_file is not None:
        raise ConfigError("token_file is for a pool that others join: say where with `listen`")
    if config.workers or config.hosts > 1:
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
    _check_tls(config)
    _check_models(config)


def _check_tls(config: PoolConfig) -> None:
    if (config.ssl_certfile is None) != (config.ssl_keyfile is None):
        raise ConfigError("ssl_certfile and ssl_keyfile: one needs the other")
    if config.tls_dir is None and config.data_plane_tls == "on":
        raise ConfigError("data_plane_tls is on, and there are no certificates: give tls_dir")
    if config.tls_dir is not None and config.carrier == "nixl":
        raise ConfigError(
            "carrier nixl cannot be used with tls_dir: a process that reaches its port reads and"
            " writes the memory of a worker"
        )


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
    if wanted > config.workers and config.listen is None:
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
    workers = config.workers if config.listen is None else WORKERS_MAX
    largest = workers if model.max_replicas is None else model.max_replicas
    if largest > workers:
        raise ConfigError(f"{where}max_replicas is {largest}, above workers {workers}")
    if model.min_replicas > largest:
        limit = "workers" if model.max_replicas is None else "max_replicas"
        raise ConfigError(f"{where}min_replicas is {model.min_replicas}, above {limit} {largest}")
