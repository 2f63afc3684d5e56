"""What a setting is, and how text and YAML become checked values. Which settings there are stands
in `config/pool.py`.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import typing
from collections.abc import Hashable, Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import TextIO

import msgspec
import yaml

from livescale.common.errors import UserError
from livescale.values.scaling_policies import Period
from livescale.values.types import Value

ENVIRONMENT_PREFIX = "LIVESCALE_"
BYTES_MAX = 1 << 62
"""No amount of bytes is larger; a slip of the pen must not fill the memory."""
_KIB, _MIB, _GIB, _TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
_NAME_CHARS_MAX = 64
"""No name is longer; looking for the nearest one of a long text takes time."""
_UNLIMITED_WORDS = ("none", "null")
"""How text gives None, wherever it stands. YAML itself knows only null."""
_YAML_SWITCH = {True: "on", False: "off"}
"""What a file had where YAML reads a boolean."""


class ConfigError(UserError, ValueError):
    """A setting is unknown, has a wrong value or contradicts another; the message says where."""


class About(Value, frozen=True):
    """What the table has of a setting besides its name, type and default.

    Integers lie in [lower, upper]; text is one of `choices` if there are any. What most people set
    `is_common`; the first sentence of its help is its short help.
    """

    help: str
    unit: str = ""
    lower: int = 0
    upper: int = 1 << 62
    choices: tuple[str, ...] = ()
    is_common: bool = False


class Setting(Value, frozen=True):
    """One row of the table. `default` is meaningless where `is_required`. One of type "mapping" has
    settings of its own, its `keys`."""

    name: str
    type: str
    is_optional: bool
    is_required: bool
    default: str | int | None
    about: About
    keys: tuple[Setting, ...] = ()

    @property
    def is_amount_of_bytes(self) -> bool:
        return self.about.unit in ("bytes", "bytes/s")

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()


def settings_of(config: type[msgspec.Struct]) -> tuple[Setting, ...]:
    """The rows that the fields of a config class are."""
    hints = typing.get_type_hints(config, include_extras=True)
    rows = []
    for field in msgspec.structs.fields(config):
        kind, *about_it = typing.get_args(hints[field.name]) or (None,)
        about = about_it[0] if about_it else None
        if not isinstance(about, About):
            continue  # `models` has its own table, and `Tuning` is none
        members = typing.get_args(kind) or (kind,)
        is_required = field.default is msgspec.NODEFAULT
        default = None if is_required else field.default
        is_optional = type(None) in members
        keys = settings_of(members[0]) if issubclass(members[0], msgspec.Struct) else ()
        kind_name = "mapping" if keys else members[0].__name__
        rows.append(Setting(field.name, kind_name, is_optional, is_required, default, about, keys))
    return tuple(rows)


# -- from text and YAML to values -----------------------------------------------------------------


def read_values(
    given: Mapping[typing.Any, object],
    settings: tuple[Setting, ...],
    where: str,
    is_text: bool = False,
    also: tuple[str, ...] = (),
) -> dict[str, object]:
    """Checked values by name. Raises ConfigError for the first unknown key or bad value.

    `is_text` reads numbers from strings; `also` names keys that are no settings but
    may be meant by an unknown one.
    """
    known = {setting.name: setting for setting in settings}
    values: dict[str, object] = {}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(unknown(f"{where}unknown setting", str(name), [*known, *also]))
        values[name] = _read_value(known[name], value, f"{where}{name}", is_text)
    return values


def _read_value(setting: Setting, value: object, where: str, is_text: bool) -> object:
    if setting.is_optional and (value is None or _is_none(value)):
        return None
    if is_text and isinstance(value, str):
        value = _from_text(setting, value)
    if isinstance(value, bool) and _YAML_SWITCH[value] in setting.about.choices:
        value = _YAML_SWITCH[value]
    if setting.is_amount_of_bytes and isinstance(value, str):
        value = amount_of_bytes(value, where)
    if setting.type == "int":
        return _checked_int(setting, value, where)
    if setting.keys:
        return _checked_mapping(setting, value, where)
    if not isinstance(value, str):
        raise ConfigError(f"{where} must be text, not {kind_of(value)}")
    if not value and setting.default != "":
        raise ConfigError(f"{where} is empty")
    if setting.about.choices and value not in setting.about.choices:
        raise ConfigError(f"{where} is '{value}', not one of {', '.join(setting.about.choices)}")
    return value


def _is_none(value: object) -> bool:
    return isinstance(value, str) and value.lower() in _UNLIMITED_WORDS


def _from_text(setting: Setting, text: str) -> object:
    """What a flag's or variable's text stands for: a number if it is one, a mapping as YAML has
    it."""
    if setting.keys:
        with contextlib.suppress(yaml.YAMLError):
            return _from_yaml(text)
        return text
    is_number = setting.type == "int" and re.fullmatch(r"[+-]?\d{1,30}", text.strip())
    return int(text) if is_number else text


def _checked_int(setting: Setting, value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{where} must be a whole number, not {kind_of(value)}")
    about = setting.about
    unit = f" {about.unit}" if about.unit else ""
    if value < about.lower:
        raise ConfigError(f"{where} is {value}{unit}, below the least value {about.lower}")
    if value > about.upper:
        raise ConfigError(f"{where} is {value}{unit}, above the largest value {about.upper}")
    return value


def _checked_mapping(setting: Setting, value: object, where: str) -> dict[str, object]:
    values = read_values(as_mapping(value, where), setting.keys, f"{where}: ")
    for key in setting.keys:
        if key.is_required and key.name not in values:
            raise ConfigError(f"{where}: {key.name} is missing")
    return values


_AMOUNT = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kKMGT])(i?))?(?:B(?:/s)?)?")
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def amount_of_bytes(text: str, where: str) -> int:
    """Bytes in "512MiB", "1.5GB", "65536". Raises ConfigError."""
    found = _AMOUNT.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{where} is '{text}'. Write bytes as 1048576, '1MiB' or '1MB'")
    base = 1024 if found[3] else 1000
    amount = Decimal(found[1]) * base ** _POWER[(found[2] or "").upper()]
    if amount != amount.to_integral_value():
        raise ConfigError(f"{where} is '{text}', not a whole number of bytes")
    if amount > BYTES_MAX:
        raise ConfigError(f"{where} is '{text}', above the largest amount of {BYTES_MAX} bytes")
    return int(amount)


_PERIOD = re.compile(r"(\d\d):(\d\d)-(\d\d):(\d\d)((?: (?:min|max)=\d{1,9}){2})")
_MINUTE_NS = 60_000_000_000


def size_text(amount_bytes: float) -> str:
    """Bytes as a person reads them: "16.1 GB"."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if amount_bytes >= factor:
            return f"{amount_bytes / factor:.3g} {unit}"
    return f"{amount_bytes:.0f} B"


def parse_schedule(text: str) -> tuple[Period, ...]:
    """The periods of "08:00-20:00 min=2 max=6; 20:00-24:00 min=0 max=2". Raises ConfigError."""
    return tuple(_period(part.strip()) for part in text.split(";") if part.strip())


def _period(text: str) -> Period:
    found = _PERIOD.fullmatch(text)
    limits = dict(word.split("=") for word in found[5].split()) if found is not None else {}
    if found is None or len(limits) != 2:
        raise ConfigError(f"'{text}' is not a valid period. Write '08:00-20:00 min=2 max=6'")
    hours = [int(found[place]) for place in (1, 3)]
    minutes = [int(found[place]) for place in (2, 4)]
    start, stop = (60 * hour + minute for hour, minute in zip(hours, minutes, strict=True))
    if max(minutes) > 59 or start >= 24 * 60 or stop > 24 * 60 or start == stop:
        raise ConfigError(f"'{text}' has an invalid time of day")
    try:
        least, most = int(limits["min"]), int(limits["max"])
        return Period(start * _MINUTE_NS, stop * _MINUTE_NS, least, most)
    except ValueError as error:
        raise ConfigError(f"'{text}': {error}") from None


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping; YAML's usual loaders keep the last one. And
    raises a YAMLError for any value that is not what its tag says."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        try:
            return super().construct_object(node, deep=deep)
        except (AttributeError, LookupError, ValueError) as error:
            # What the constructors of the library raise: of these, only a ValueError is in words.
            reason = f": {error}" if isinstance(error, ValueError) else ""
            problem = f"'{node.value}' is not a valid {node.tag.rpartition(':')[2]}{reason}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        seen: list[object] = []
        if not isinstance(node, yaml.MappingNode):
            return super().construct_mapping(node, deep)  # which refuses it
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                mark = key_node.start_mark
                raise yaml.constructor.ConstructorError(None, None, f"'{key}' is repeated", mark)
            seen.append(key)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[object, object]:
    try:
        with path.open(encoding="utf-8") as file:
            document = _from_yaml(file)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text ({error.reason})") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {error}") from None
    if document is None:
        return {}
    return as_mapping(document, f"{path}: the file")


def _from_yaml(text: str | TextIO) -> object:
    """What YAML stands for. Raises yaml.YAMLError, and what reading a file raises."""
    try:
        return yaml.load(text, _StrictLoader)
    except RecursionError:
        raise yaml.YAMLError("lists or mappings are nested too deeply") from None


def as_mapping(document: object, what: str) -> dict[object, object]:
    if not isinstance(document, dict):
        raise ConfigError(f"{what} must be a mapping of keys to values, not {kind_of(document)}")
    return document


# -- words ----------------------------------------------------------------------------------------


def unknown(problem: str, name: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(name[:_NAME_CHARS_MAX], known, n=1, cutoff=0.0)
    return f"{problem} '{name}' (nearest known: '{nearest[0]}')"


def check_keys(given: Iterable[object], known: Iterable[str], where: str) -> None:
    """All keys are known. Raises ConfigError for the first that is not."""
    names = tuple(known)
    for key in given:
        if key not in names:
            raise ConfigError(unknown(f"{where}: unknown key", str(key), names))


def kind_of(value: object) -> str:
    names = {dict: "a mapping", list: "a list", bool: "yes or no", type(None): "nothing"}
    return names.get(type(value)) or f"{value!r}"


def shown_default(setting: Setting) -> str:
    """The default as a person writes it."""
    if setting.is_required:
        return "required"
    if setting.default is None:
        return "none"
    if isinstance(setting.default, int) and setting.is_amount_of_bytes:
        for size, word in ((_GIB, "GiB"), (_MIB, "MiB"), (_KIB, "KiB")):
            if setting.default % size == 0:
                return f"{setting.default // size}{word}"
    return str(setting.default) or "empty"
