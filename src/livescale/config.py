"""Configuration: the one table of settings, and how file, environment and flags become a value.

The fields of PoolConfig and ModelConfig *are* the table: type, default, unit, bounds and help
stand in one place. Flags and documentation are made from it. What a value leads to is decided
elsewhere. A YAML file is overridden by LIVESCALE_<NAME> variables, these by flags.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import typing
from collections.abc import Hashable, Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import msgspec
import yaml

from livescale.slo import SloError, parse_slo
from livescale.types import Value

_ENVIRONMENT_PREFIX = "LIVESCALE_"
_NOT_SETTINGS = ("LIVESCALE_DATA",)
_KIB, _MIB, _GIB, _TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
_UNLIMITED_WORDS = ("none", "null")
"""How an environment variable or a flag says None."""


class ConfigError(ValueError):
    """A setting is unknown, has a wrong value or contradicts another; the message says where."""


class About(Value, frozen=True):
    """What the table says about a setting besides its name, type and default.

    Integers lie in [lower, upper]; text is one of `choices` if there are any.
    """

    help: str
    unit: str = ""
    lower: int = 0
    upper: int = 1 << 62
    choices: tuple[str, ...] = ()


class ModelConfig(Value, frozen=True, kw_only=True):
    """One entry of `models:`."""

    path: Annotated[str, About("directory of the model; relative to the file that names it")]
    name: Annotated[str, About("name in requests; the directory's name if empty")] = ""
    min_replicas: Annotated[int, About("instances at least", lower=1)] = 1
    max_replicas: Annotated[
        int | None, About("instances at most; as many as there are workers if none", lower=1)
    ] = None
    prefill_tokens_per_s: Annotated[
        int | None, About("capacity of one instance; measured at warm-up if none", "tokens/s", 1)
    ] = None
    kv_blocks: Annotated[
        int | None, About("KV blocks of one instance; measured at warm-up if none", "blocks", 1)
    ] = None


class PoolConfig(Value, frozen=True, kw_only=True):
    """All settings of a pool. Made by `load_config`, which also checks them."""

    host: Annotated[str, About("address that the HTTP API listens on")] = "127.0.0.1"
    port: Annotated[int, About("port of the HTTP API; 0 takes a free one", upper=65535)] = 8000
    workers: Annotated[int, About("worker processes, one per device", "", 1, 4096)] = 3
    worker_threads: Annotated[int, About("compute threads of a worker", "", 1, 1024)] = 1
    device: Annotated[str, About("what a worker computes on", choices=("cpu",))] = "cpu"
    arena_bytes: Annotated[int, About("memory for parameters, per worker", "bytes", _MIB, _TIB)] = (
        _GIB
    )
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
    run_tokens_max: Annotated[
        int, About("tokens that an instance computes at once", "tokens", 1, 1 << 20)
    ] = 128
    sequences_max: Annotated[
        int, About("requests that an instance computes at once", "requests", 1, 1 << 16)
    ] = 64
    dispatched_ahead_max: Annotated[
        int, About("requests sent to an instance before it can start them", "requests", 1, 4096)
    ] = 8
    queue_requests_max: Annotated[
        int, About("requests that wait before new ones are refused", "requests", 1, 1 << 20)
    ] = 1024
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
    ] = 95
    kv_lower_percent: Annotated[
        int, About("KV blocks in use below which it may shrink", "%", 0, 100)
    ] = 75
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
    record: Annotated[str | None, About("file for the run record; none: no record")] = None
    slo: Annotated[str, About("what counts as good: '5x-mean' or 'ttft=450ms,tbt=150ms'")] = (
        "5x-mean"
    )
    log_level: Annotated[
        str, About("what is logged", choices=("debug", "info", "warning", "error"))
    ] = "warning"
    models: tuple[ModelConfig, ...] = ()


class Setting(Value, frozen=True):
    """One row of the table. `default` is meaningless where `is_required`."""

    name: str
    type: str
    is_optional: bool
    is_required: bool
    default: str | int | None
    about: About

    @property
    def is_amount_of_bytes(self) -> bool:
        return self.about.unit in ("bytes", "bytes/s")

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return _ENVIRONMENT_PREFIX + self.name.upper()


def _settings(config: type[msgspec.Struct]) -> tuple[Setting, ...]:
    """The rows that the fields of a config class are."""
    hints = typing.get_type_hints(config, include_extras=True)
    rows = []
    for field in msgspec.structs.fields(config):
        if typing.get_origin(hints[field.name]) is not Annotated:
            continue  # `models` has its own table
        kind, about = typing.get_args(hints[field.name])
        members = typing.get_args(kind) or (kind,)
        is_required = field.default is msgspec.NODEFAULT
        default = None if is_required else field.default
        is_optional = type(None) in members
        rows.append(
            Setting(field.name, members[0].__name__, is_optional, is_required, default, about)
        )
    return tuple(rows)


SETTINGS = _settings(PoolConfig)
MODEL_SETTINGS = _settings(ModelConfig)


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
        document = _read_yaml(path)
        models += _models_of(document.pop("models", None), path)
        values |= _read_values(document, SETTINGS, f"{path}: ")
    values |= _read_environment(environ)
    given = {name: value for name, value in flags.items() if value is not None}
    values |= _read_values(given, SETTINGS, "flags: ", is_text=True)
    for model_path in model_paths:
        models.append(_named(ModelConfig(path=model_path)))
    config = msgspec.convert({**values, "models": tuple(models)}, PoolConfig)
    _check(config)
    return config


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser one flag per pool setting. Values stay text; `given_flags` collects them."""
    group = parser.add_argument_group("settings", "see also LIVESCALE_<NAME> and the config file")
    for setting in SETTINGS:
        unit = f" [{setting.about.unit}]" if setting.about.unit else ""
        words = f"{setting.about.help}{unit} (default: {_shown(setting)})"
        group.add_argument(
            setting.flag,
            dest=setting.name,
            metavar="|".join(setting.about.choices) or setting.type.upper(),
            default=argparse.SUPPRESS,
            help=words.replace("%", "%%"),
        )


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
        lines.append(f"| `{setting.name}` | `{setting.variable}` | {_cells(setting)} |")
    lines += ["", "| key of `models:` | type | unit | default | meaning |", "|---|---|---|---|---|"]
    for setting in MODEL_SETTINGS:
        lines.append(f"| `{setting.name}` | {_cells(setting)} |")
    return "\n".join(lines) + "\n"


# -- from text and YAML to values -----------------------------------------------------------------


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping; YAML's usual loaders keep the last one."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        seen: list[object] = []
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                mark = key_node.start_mark
                raise yaml.constructor.ConstructorError(None, None, f"'{key}' stands twice", mark)
            seen.append(key)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[object, object]:
    try:
        with path.open(encoding="utf-8") as file:
            document = yaml.load(file, _StrictLoader)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text ({error.reason})") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date or number
        raise ConfigError(f"{path}: {error}") from None
    if document is None:
        return {}
    return _mapping(document, f"{path}: the file")


def _mapping(document: object, what: str) -> dict[object, object]:
    if not isinstance(document, dict):
        raise ConfigError(f"{what} must be a mapping of keys to values, not {_kind(document)}")
    return document


def _read_environment(environ: Mapping[str, str]) -> dict[str, object]:
    known = {setting.variable: setting.name for setting in SETTINGS}
    given = {}
    for variable in sorted(environ):
        if not variable.startswith(_ENVIRONMENT_PREFIX) or variable in _NOT_SETTINGS:
            continue
        if variable not in known:
            raise ConfigError(_unknown("environment: unknown variable", variable, known))
        given[known[variable]] = environ[variable]
    return _read_values(given, SETTINGS, "environment: ", is_text=True)


def _read_values(
    given: Mapping[typing.Any, object],
    settings: tuple[Setting, ...],
    where: str,
    is_text: bool = False,
) -> dict[str, object]:
    """Checked values by name. Raises ConfigError for the first unknown key or bad value."""
    known = {setting.name: setting for setting in settings}
    values: dict[str, object] = {}
    for name, value in given.items():
        if name not in known:
            others = [*known, "models"] if settings is SETTINGS else known
            raise ConfigError(_unknown(f"{where}unknown setting", str(name), others))
        values[name] = _read_value(known[name], value, f"{where}{name}", is_text)
    return values


def _read_value(setting: Setting, value: object, where: str, is_text: bool) -> object:
    if is_text and isinstance(value, str):
        value = _from_text(setting, value)
    if value is None and setting.is_optional:
        return None
    if setting.is_amount_of_bytes and isinstance(value, str):
        value = _amount_of_bytes(value, where)
    if setting.type == "int":
        return _checked_int(setting, value, where)
    if not isinstance(value, str):
        raise ConfigError(f"{where} must be text, not {_kind(value)}")
    if not value and setting.default != "":
        raise ConfigError(f"{where} is empty")
    if setting.about.choices and value not in setting.about.choices:
        raise ConfigError(f"{where} is '{value}', not one of {', '.join(setting.about.choices)}")
    return value


def _from_text(setting: Setting, text: str) -> object:
    """What a flag's or variable's text stands for: a number if it is one, None for "none"."""
    if setting.is_optional and text.lower() in _UNLIMITED_WORDS:
        return None
    is_number = setting.type == "int" and re.fullmatch(r"[+-]?\d{1,30}", text.strip())
    return int(text) if is_number else text


def _checked_int(setting: Setting, value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{where} must be a whole number, not {_kind(value)}")
    about = setting.about
    unit = f" {about.unit}" if about.unit else ""
    if value < about.lower:
        raise ConfigError(f"{where} is {value}{unit}, below the least value {about.lower}")
    if value > about.upper:
        raise ConfigError(f"{where} is {value}{unit}, above the largest value {about.upper}")
    return value


_AMOUNT = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kKMGT])(i?))?(?:B(?:/s)?)?")
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def _amount_of_bytes(text: str, where: str) -> int:
    """Bytes in "512MiB", "1.5GB", "65536". Raises ConfigError."""
    found = _AMOUNT.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{where} is '{text}': write bytes as 1048576, '1MiB' or '1MB'")
    base = 1024 if found[3] else 1000
    amount = Decimal(found[1]) * base ** _POWER[(found[2] or "").upper()]
    if amount != amount.to_integral_value():
        raise ConfigError(f"{where} is '{text}', which is not a whole number of bytes")
    return int(amount)


def _models_of(entries: object, path: Path) -> list[ModelConfig]:
    if entries is None:
        return []
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: models must be a list, not {_kind(entries)}")
    models = []
    for index, entry in enumerate(entries):
        where = f"{path}: models[{index}]"
        fields = _mapping({"path": entry} if isinstance(entry, str) else entry, where)
        values = _read_values(fields, MODEL_SETTINGS, f"{where}.")
        if "path" not in values:
            raise ConfigError(f"{where}: path is missing")
        values["path"] = str(path.parent / str(values["path"]))
        models.append(_named(msgspec.convert(values, ModelConfig)))
    return models


def _named(model: ModelConfig) -> ModelConfig:
    name = model.name or Path(os.path.abspath(model.path)).name
    if not name:
        raise ConfigError(f"models: '{model.path}' gives no name; set `name`")
    return msgspec.structs.replace(model, name=name)


# -- what must hold between settings --------------------------------------------------------------


def _check(config: PoolConfig) -> None:
    for name in ("token_rate", "prefill_queue", "kv"):
        unit = "ms" if name == "prefill_queue" else "percent"
        _at_most(config, f"{name}_lower_{unit}", f"{name}_upper_{unit}")
    _at_most(config, "chunk_bytes", "arena_bytes")
    # Each running request computes at least one token per run, or its decoding would starve.
    _at_most(config, "sequences_max", "run_tokens_max")
    try:
        parse_slo(config.slo)
    except SloError as error:
        raise ConfigError(f"slo: {error}") from None
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
        largest = config.workers if model.max_replicas is None else model.max_replicas
        where = f"models: {model.name}: "
        if largest > config.workers:
            raise ConfigError(f"{where}max_replicas is {largest}, above workers {config.workers}")
        if model.min_replicas > largest:
            limit = "workers" if model.max_replicas is None else "max_replicas"
            raise ConfigError(
                f"{where}min_replicas is {model.min_replicas}, above {limit} {largest}"
            )
    wanted = sum(model.min_replicas for model in config.models)
    if wanted > config.workers:
        raise ConfigError(
            f"models: min_replicas add up to {wanted}, above workers {config.workers}"
        )


# -- words ----------------------------------------------------------------------------------------


def _unknown(problem: str, name: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"{problem} '{name}' (nearest known: '{nearest[0]}')"


def _kind(value: object) -> str:
    names = {dict: "a mapping", list: "a list", bool: "yes or no", type(None): "nothing"}
    return names.get(type(value)) or f"{value!r}"


def _shown(setting: Setting) -> str:
    """The default as a person writes it."""
    if setting.is_required:
        return "required"
    if setting.default is None:
        return "none"
    if isinstance(setting.default, int) and setting.is_amount_of_bytes:
        for size, word in ((_GIB, "GiB"), (_MIB, "MiB"), (_KIB, "KiB")):
            if setting.default % size == 0:
                return f"{setting.default // size}{word}"
    return str(setting.default)


def _cells(setting: Setting) -> str:
    kind = f"{setting.type} or none" if setting.is_optional else setting.type
    words = setting.about.help.replace("|", "\\|")
    return f"{kind} | {setting.about.unit} | {_shown(setting)} | {words}"
