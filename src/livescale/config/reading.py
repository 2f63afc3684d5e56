"""How file, environment and flags become a checked configuration.

A YAML file is overridden by LIVESCALE_<NAME> variables, these by flags.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from livescale.clusters.files import read_topology
from livescale.common.addresses import parse_address
from livescale.common.help_format import HelpFormatter
from livescale.common.settings import (
    ENVIRONMENT_PREFIX,
    ConfigError,
    Setting,
    amount_of_bytes,
    as_mapping,
    check_keys,
    kind_of,
    parse_schedule,
    read_values,
    read_yaml,
    shown_default,
    unknown,
)
from livescale.config.automatic import AUTOMATIC
from livescale.config.model import (
    CHANGEABLE_SETTINGS,
    MODEL_SETTINGS,
    ModelConfig,
    check_limits,
    check_limits_given,
    check_roles,
    check_stages_given,
)
from livescale.config.pool import (
    GROUPS,
    LINEAR_PREFIX,
    ROOFLINE_PREFIX,
    SETTINGS,
    WORKERS_MAX,
    PoolConfig,
)
from livescale.config.ray_serve_file import pool_document
from livescale.config.settings.removed import instead_of
from livescale.config.settings.tuning import VLLM_BLOCK_TOKENS, Tuning
from livescale.config.slo import SloError, parse_slo

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
_READ_BY_CHILDREN = (
    *("tls_dir", "ssl_certfile", "ssl_keyfile", "worker_python"),
    *("racks", "cores_profile"),
)


def load_config(
    path: Path | None,
    model_paths: list[str],
    environ: Mapping[str, str],
    flags: Mapping[str, object],
    defaults: Mapping[str, object] | None = None,
) -> PoolConfig:
    """The checked configuration: `defaults` of the caller < YAML file < environment < flags.

    `model_paths` are added to the file's models. A flag of None was not given; the word "none"
    as a flag or variable means None. `defaults` may have what is no setting, too (`Tuning`).
    Raises ConfigError.
    """
    return load_given(path, model_paths, environ, flags, defaults)[0]


def load_given(
    path: Path | None,
    model_paths: list[str],
    environ: Mapping[str, str],
    flags: Mapping[str, object],
    defaults: Mapping[str, object] | None = None,
) -> tuple[PoolConfig, frozenset[str]]:
    """The same, and the names of all that was given. Raises ConfigError."""
    values: dict[str, object] = dict(defaults or {})
    models: list[ModelConfig] = []
    if path is not None:
        document = dict(pool_document(read_yaml(path), path))
        models += _models_of(document.pop("models", None), path)
        document.pop("ray", None)  # `config/ray.py` reads it, where Ray is asked for
        values |= _tuned(document.pop("tuning", None), f"{path}: tuning")
        _refuse_removed(document, f"{path}: ")
        _drop_auto(document, values)
        values |= read_values(document, SETTINGS, f"{path}: ", also=("models", "ray", "tuning"))
        for name in ("topology", "racks", "cores_profile"):
            if values.get(name) is not None:
                values[name] = str(path.parent / str(values[name]))
        timed_profile = values.get("timed_profile")
        formulas = (ROOFLINE_PREFIX, LINEAR_PREFIX)
        if timed_profile is not None and not str(timed_profile).startswith(formulas):
            values["timed_profile"] = str(path.parent / str(timed_profile))
    environ = dict(environ)
    _drop_auto(environ, values, lambda name: ENVIRONMENT_PREFIX + name.upper())
    values |= _read_environment(environ)
    given = {name: value for name, value in flags.items() if value is not None}
    _refuse_removed(given, "flags: ")
    _drop_auto(given, values)
    values |= read_values(given, SETTINGS, "flags: ", is_text=True)
    for name in _READ_BY_CHILDREN:
        if values.get(name) is not None:
            values[name] = os.path.abspath(str(values[name]))
    if values.get("topology") is not None:
        _take_workers(values)
    for model_path in model_paths:
        models.append(_named(ModelConfig(path=model_path)))
    if values.get("device") == "vllm":
        values.setdefault("block_tokens", VLLM_BLOCK_TOKENS)
    if "run_tokens_max" in values:
        # Each running request computes at least one token per Run, or its decoding would starve.
        most = min(int(str(values["run_tokens_max"])), Tuning().sequences_max)
        values.setdefault("sequences_max", most)
    config = msgspec.convert({**values, "models": tuple(models)}, PoolConfig)
    _check(config)
    return config, frozenset(values)


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
    changed = msgspec.convert({**msgspec.to_builtins(model), **values}, ModelConfig)
    if (changed.roles is None) != (model.roles is None):
        raise ConfigError(
            f"models: {model.name}: roles are fixed when a model is published."
            " Remove the model and publish it again"
        )
    check_limits_given(changed.roles, values, f"models: {model.name}")
    _check_model(changed, config)
    return changed


def checked_model(model: ModelConfig, config: PoolConfig) -> ModelConfig:
    """An entry of `models:` that was written down earlier, if it holds for this pool. Raises
    ConfigError."""
    fields = msgspec.to_builtins(model)
    given: dict[object, object] = {
        setting.name: fields[setting.name]
        for setting in MODEL_SETTINGS
        if fields[setting.name] != setting.default
    }
    return model_of(given, config)


def add_flags(parser: argparse.ArgumentParser, chosen: Mapping[str, str]) -> None:
    """Give the parser one flag per pool setting, and a help text that lists settings by group.

    `chosen` has the defaults that the command itself chooses, as help shows them. Values stay text;
    `given_flags` collects them.
    """
    parser.formatter_class = HelpFormatter
    parser.epilog = settings_help(chosen, is_whole=False)
    parser.set_defaults(whole_help=functools.partial(settings_help, chosen, is_whole=True))
    for setting in SETTINGS:
        parser.add_argument(
            setting.flag, dest=setting.name, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
    for name in Tuning.__struct_fields__:
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for kind in ("api", "admin"):
        refuse = functools.partial(_refused_key, kind)
        parser.add_argument(f"--{kind}-key", type=refuse, help=argparse.SUPPRESS)


def settings_help(chosen: Mapping[str, str], *, is_whole: bool) -> str:
    """Settings by group for `--help`: common settings with a line each, or all settings in full.
    `chosen` replaces defaults."""
    lines = []
    for title, group in GROUPS.items():
        shown = [setting for setting in group if is_whole or setting.about.is_common]
        lines += ["", f"{title}:"]
        for setting in shown:
            default = chosen.get(setting.name) or shown_default(setting)
            lines += _whole_help(setting, default) if is_whole else [_short_help(setting, default)]
    lines.append("")
    if "auto" in chosen.values():
        lines.append("auto: the command chooses a value for the models and the free memory.")
    lines += ["Each setting is also a variable, LIVESCALE_<NAME>, and a key of the file."]
    return "\n".join(lines if is_whole else [*lines, "--help=all shows all settings."])


def given_flags(arguments: argparse.Namespace) -> dict[str, object]:
    """The settings among the parsed arguments, for `load_config`."""
    names = {*(setting.name for setting in SETTINGS), *Tuning.__struct_fields__}
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
    for name in ("path", "stage_profile"):
        if values.get(name) is not None:
            values[name] = str(base / str(values[name]))
    model = _named(msgspec.convert(values, ModelConfig))
    check_limits_given(model.roles, values, where)
    return model


def _named(model: ModelConfig) -> ModelConfig:
    name = model.name or Path(os.path.abspath(model.path)).name
    if not name:
        raise ConfigError(f"models: '{model.path}' has no folder name. Set `name`")
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
        _refuse_removed([variable.removeprefix(ENVIRONMENT_PREFIX).lower()], "environment: ")
        if variable not in known:
            raise ConfigError(unknown("environment: unknown variable", variable, known))
        given[known[variable]] = environ[variable]
    return read_values(given, SETTINGS, "environment: ", is_text=True)


def _tuned(document: object, where: str) -> dict[str, object]:
    if document is None:
        return {}
    given = as_mapping(document, where)
    check_keys(given, Tuning.__struct_fields__, where)
    values: dict[str, object] = {}
    for key, value in given.items():
        name = str(key)
        is_amount = "_bytes" in name and isinstance(value, str)
        values[name] = amount_of_bytes(str(value), f"{where}.{name}") if is_amount else value
    try:
        msgspec.convert(values, Tuning)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from None
    return values


def _refuse_removed(given: Iterable[object], where: str) -> None:
    for name in given:
        instead = instead_of(str(name))
        if instead is not None:
            raise ConfigError(f"{where}{name} is no longer a setting. {instead}")


def _drop_auto(
    given: dict[Any, Any], values: dict[str, object], key_of: Callable[[str], str] = str
) -> None:
    """Where `given` has "auto" nothing is given, and what `values` has of before does not count."""
    for name in AUTOMATIC:
        if given.get(key_of(name)) == "auto":
            del given[key_of(name)]
            values.pop(name, None)


def _short_help(setting: Setting, default: str) -> str:
    first, _, _ = setting.about.help.partition(". ")
    return f"  {setting.flag:<20} {first.removesuffix('.')} ({default})"


def _whole_help(setting: Setting, default: str) -> list[str]:
    unit = f" [{setting.about.unit}]" if setting.about.unit else ""
    kind = "|".join(setting.about.choices) or setting.type.upper()
    words = f"{setting.about.help}{unit} (default: {default})"
    inner = textwrap.wrap(words, 76, initial_indent="      ", subsequent_indent="      ")
    return [f"  {setting.flag} {kind}", *inner]


def _refused_key(kind: str, _key: str) -> None:
    raise argparse.ArgumentTypeError(
        "keys on a command line are visible to all users of this machine. Write the keys into a"
        f" file for --{kind}-key-file, or set LIVESCALE_{kind.upper()}_KEY"
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
        raise ConfigError("workers is 0 and nodes cannot join. Set `listen`, or at least 1 worker")
    elif config.token_file is not None:
        raise ConfigError("token_file requires `listen`, the address at which nodes join")
    if config.workers or config.hosts > 1:
        _at_most(config, "hosts", "workers")
    _at_most(config, "sequences_max", "run_tokens_max")
    # They share the places of the line.
    _at_most(config, "gateways", "queue_requests_max")
    try:
        parse_slo(config.slo)
    except SloError as error:
        raise ConfigError(f"slo: {error}") from None
    if config.timed_profile is not None and config.device != "timed":
        raise ConfigError(f"timed_profile requires device timed. The device is {config.device}")
    _check_cores(config)
    _check_vllm(config)
    if config.carrier == "nixl" and importlib.util.find_spec("nixl_cu12") is None:
        raise ConfigError("carrier: nixl is not installed: pip install 'livescale[rdma]'")
    _check_tls(config)
    _check_models(config)


def _check_cores(config: PoolConfig) -> None:
    if config.cores_profile is None and config.cores_max is not None:
        raise ConfigError("cores_max requires cores_profile")
    if config.cores_profile is not None and config.scaling_policy != "stages":
        raise ConfigError(
            f"cores_profile requires scaling_policy stages. The policy is {config.scaling_policy}"
        )
    if config.cores_profile is not None and config.device in ("cuda", "vllm"):
        raise ConfigError(
            f"cores_profile requires device cpu or timed. The device is {config.device}"
        )


def _check_vllm(config: PoolConfig) -> None:
    if config.device != "vllm":
        return
    if config.workers and config.worker_python is None:
        raise ConfigError(
            "device vllm requires worker_python, an interpreter with vLLM (make vllm; docs/vllm.md)"
        )
    if config.weights_layout == "compiled":
        raise ConfigError("weights_layout compiled requires device cpu. The device is vllm")
    if config.listen is not None:
        return  # hosts with other devices may join
    for model in config.models:
        what = "roles" if model.roles is not None else "stages" if model.has_stages else None
        if what is not None:
            raise ConfigError(
                f"models: {model.name}: device vllm does not support {what}. Remove {what}, or"
                " choose device cpu or cuda"
            )


def _check_tls(config: PoolConfig) -> None:
    if config.tls_dir is None and config.data_plane_tls == "on":
        raise ConfigError("data_plane_tls on requires certificates. Set tls_dir")
    if config.tls_dir is not None and config.carrier == "nixl":
        raise ConfigError(
            "carrier nixl does not support tls_dir. NIXL gives every process that reaches its"
            " port access to the memory of a worker"
        )


def _at_most(config: PoolConfig, smaller: str, larger: str) -> None:
    low, high = getattr(config, smaller), getattr(config, larger)
    if low > high:
        raise ConfigError(f"{smaller} is {low}, above {larger} {high}")


def _check_models(config: PoolConfig) -> None:
    if not config.models:
        raise ConfigError("models: no model. Name a model's folder or a configuration file")
    seen: dict[str, str] = {}
    for model in config.models:
        if model.name in seen:
            raise ConfigError(
                f"models: '{model.name}' names both {seen[model.name]} and {model.path}."
                " Set another `name` in the configuration file"
            )
        seen[model.name] = model.path
        _check_model(model, config)
    wanted = sum(model.instances_min for model in config.models)
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
    check_stages_given(model, workers, where)
    if model.roles is None:
        check_limits(model.min_replicas, model.max_replicas, workers, where)
        return
    if model.schedule:
        raise ConfigError(f"{where}schedule and roles are both set. Remove one of them")
    check_roles(model.roles, workers, where)
