"""Workload files: which models share a pool, what is asked of each, and when.

Ground floor: YAML becomes a Workload with every request in it. Model presets are named here and
looked up by the caller that runs the workload.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from livescale.common.settings import ConfigError, as_mapping, check_keys, kind_of, read_yaml
from livescale.config.model import RolesConfig, check_limits, check_limits_given, read_roles
from livescale.config.slo import SloAbsolute, SloError, SloMultipleOfMean, parse_slo
from livescale.load.arrivals import GammaShape, gamma_trace, is_generated, named_trace, payloads_of
from livescale.load.formats import TraceError, TraceRow
from livescale.load.traces import at_rate, clip, rotate, upscale, window
from livescale.values.types import Value
from livescale.values.units import NS_PER_S

MODELS_MAX = 100_000
"""Models of one workload; a slip of the pen must not fill the memory."""

_YEAR_S = 31_536_000
_ZIPF = re.compile(r"zipf\((\d{1,2}(?:\.\d{1,6})?)\)")

_Kind = TypeVar("_Kind")
_Positive = Annotated[float, Meta(gt=0, le=1_000_000)]
_Seconds = Annotated[float, Meta(ge=0, le=_YEAR_S)]
_Count = Annotated[int, Meta(ge=1, le=MODELS_MAX)]
_Tokens = Annotated[int, Meta(ge=1)]


class WorkloadModel(Value, frozen=True):
    """One model of a pool and everything that is asked of it, in order of arrival.

    `instances_max` None: as many as there is room for. With `roles` their limits hold in place of
    these, and a pool whose size is fixed is divided as `split` says (prefill, decode).
    `clipped_requests` had to be shortened to the limits of the file.
    """

    name: str
    preset: str
    tp_size: int
    rows: tuple[TraceRow, ...]
    instances_min: int
    instances_max: int | None
    idle_ns: int
    priority: int
    slo: SloAbsolute | SloMultipleOfMean | None
    clipped_requests: int
    roles: RolesConfig | None = None
    split: tuple[int, int] = (1, 1)


class Workload(Value, frozen=True):
    """Many models on one pool. All requests arrive in [0, duration_ns)."""

    duration_ns: int
    models: tuple[WorkloadModel, ...]

    @property
    def requests(self) -> int:
        return sum(len(model.rows) for model in self.models)

    @property
    def clipped_requests(self) -> int:
        return sum(model.clipped_requests for model in self.models)


def read_workload(path: Path, data_dir: Path | None, seed: int) -> Workload:
    """The workload that a file describes, with everything drawn from the seed.

    What a model draws depends on the seed and on its name, not on the models around it. Raises
    ConfigError with file, place and value.
    """
    document = read_yaml(path)
    check_keys(document, ("seconds", "models"), f"{path}")
    seconds = _convert(document, _Head, f"{path}").seconds
    entries = document.get("models")
    if not isinstance(entries, list) or not entries:
        found = kind_of(entries) if entries != [] else "an empty list"
        raise ConfigError(f"{path}: models must be a list of models, not {found}")
    reader = _Reader(data_dir, round(seconds * NS_PER_S), seed)
    for number, item in enumerate(entries):
        where = f"{path}: models[{number}]"
        reader.add(_entry(as_mapping(item, where), where), where)
    return Workload(reader.duration_ns, tuple(reader.models.values()))


# -- helpers, in the order used -------------------------------------------------------------------


class _Head(msgspec.Struct, frozen=True):
    """What a file has of the workload as a whole."""

    seconds: Annotated[float, Meta(ge=1 / NS_PER_S, le=_YEAR_S)]


class _Entry(Value, frozen=True, kw_only=True):
    """One entry of `models:`; the names of a pool's settings where they mean the same."""

    model: Annotated[str, Meta(min_length=1)]
    name: str = ""
    count: _Count = 1
    tensor_parallel: Annotated[int, Meta(ge=1, le=64)] = 1
    trace: str | None = None
    gamma: GammaShape | None = None
    rate: _Positive | None = None
    total_rate: _Positive | None = None
    share: str = "equal"
    factor: _Positive | None = None
    start_s: _Seconds = 0.0
    shift_s: _Seconds = 0.0
    input_tokens_max: _Tokens | None = None
    output_tokens_max: _Tokens | None = None
    min_replicas: Annotated[int, Meta(ge=0)] = 1
    max_replicas: _Count | None = None
    idle_s: _Seconds = 60.0
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    slo: str | None = None
    roles: RolesConfig | None = None
    split: tuple[_Count, _Count] = (1, 1)


def _convert(value: object, kind: type[_Kind], where: str) -> _Kind:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem = str(error).replace(" - at `$.", ": `")
        raise ConfigError(f"{where}: {problem}") from None


def _entry(item: dict[object, object], where: str) -> _Entry:
    check_keys(item, _Entry.__struct_fields__, where)
    read_roles(item.get("roles"), f"{where}.")
    entry = _convert(item, _Entry, where)
    if (entry.trace is None) == (entry.gamma is None):
        raise ConfigError(f"{where}: give trace or gamma, one of the two")
    rates = [key for key in ("rate", "total_rate", "factor") if key in item]
    if len(rates) > 1:
        raise ConfigError(f"{where}: {' and '.join(rates)} contradict each other: give one")
    if entry.gamma is not None and rates not in (["rate"], ["total_rate"]):
        raise ConfigError(f"{where}: gamma needs a rate or a total_rate in requests per second")
    if "share" in item and entry.total_rate is None:
        raise ConfigError(f"{where}: share divides a total_rate, and there is none")
    if entry.count > 1 and entry.name and "{n}" not in entry.name:
        raise ConfigError(
            f"{where}.name is '{entry.name}': {entry.count} models need a {{n}} in it"
        )
    check_limits_given(entry.roles, [str(key) for key in item], where)
    if "split" in item and entry.roles is None:
        raise ConfigError(f"{where}: split divides instances between roles, and there are none")
    check_limits(entry.min_replicas, entry.max_replicas, None, f"{where}: ")
    return entry


def _weights(entry: _Entry, where: str) -> list[float]:
    """Each model's part of the total rate; the parts add up to 1.

    zipf(s): the n-th model is asked in proportion to 1 / n^s (Zipf's law of popularity).
    """
    found = _ZIPF.fullmatch(entry.share)
    if found is None and entry.share != "equal":
        raise ConfigError(f"{where}.share is '{entry.share}': write equal or zipf(1.1)")
    exponent = 0.0 if found is None else float(found[1])
    parts = [(n + 1) ** -exponent for n in range(entry.count)]
    whole = sum(parts)
    return [part / whole for part in parts]


@dataclass(slots=True)
class _Reader:
    """Collects the models of a file; what comes from files is read once."""

    data_dir: Path | None
    duration_ns: int
    seed: int
    models: dict[str, WorkloadModel] = field(default_factory=dict)
    _rows: dict[str, list[TraceRow]] = field(default_factory=dict)

    def add(self, entry: _Entry, where: str) -> None:
        """The models of one entry. Raises ConfigError."""
        if len(self.models) + entry.count > MODELS_MAX:
            raise ConfigError(f"{where}: there are more than {MODELS_MAX} models")
        slo = _slo(entry.slo, where)
        payloads = self._payloads(entry, where)
        for n, weight in enumerate(_weights(entry, where)):
            name = _name(entry, n)
            if name in self.models:
                raise ConfigError(f"{where}: there are two models called '{name}'")
            rate = entry.rate if entry.total_rate is None else entry.total_rate * weight
            try:
                rows = self._asked(entry, name, rate, payloads)
            except ValueError as error:  # TraceError is one
                raise ConfigError(f"{where}: {name}: {error}") from None
            rows = self._moved(rows, entry, n)
            rows, clipped = clip(rows, entry.input_tokens_max, entry.output_tokens_max)
            self.models[name] = WorkloadModel(
                name=name,
                preset=entry.model,
                tp_size=entry.tensor_parallel,
                rows=tuple(rows),
                instances_min=entry.min_replicas,
                instances_max=entry.max_replicas,
                idle_ns=round(entry.idle_s * NS_PER_S),
                priority=entry.priority,
                slo=slo,
                clipped_requests=clipped,
                roles=entry.roles,
                split=entry.split,
            )

    # -- helpers, in the order used ---------------------------------------------------------------

    def _payloads(self, entry: _Entry, where: str) -> list[TraceRow]:
        """The requests whose lengths a gamma entry takes, if it takes any."""
        try:
            return payloads_of(entry.gamma, self.data_dir) if entry.gamma else []
        except TraceError as error:
            raise ConfigError(f"{where}: {error}") from None

    def _asked(
        self, entry: _Entry, name: str, rate: float | None, payloads: list[TraceRow]
    ) -> list[TraceRow]:
        """The model's requests at its rate, before they are moved in time."""
        seed = random.Random(f"{self.seed} {name}").getrandbits(32)
        if entry.gamma is not None:
            assert rate is not None
            return gamma_trace(entry.gamma, rate, self.duration_ns, seed, payloads)
        assert entry.trace is not None
        rows = self._trace(entry.trace, seed)
        if rate is not None:
            return at_rate(rows, rate, seed)
        return rows if entry.factor is None else upscale(rows, entry.factor, seed)

    def _trace(self, name: str, seed: int) -> list[TraceRow]:
        """What a trace holds of the workload's time; a generated one is every model's own."""
        if name in self._rows:
            return self._rows[name]
        rows = window(named_trace(name, self.data_dir, seed).rows, 0, self.duration_ns)
        if not is_generated(name):
            self._rows[name] = rows
        return rows

    def _moved(self, rows: list[TraceRow], entry: _Entry, n: int) -> list[TraceRow]:
        """Turned by n shifts within the workload's time, then later by the entry's start."""
        by_ns = round(n * entry.shift_s * NS_PER_S) % self.duration_ns
        if by_ns:
            rows = rotate(rows, by_ns, self.duration_ns)
        start_ns = round(entry.start_s * NS_PER_S)
        return window(rows, -start_ns, self.duration_ns - start_ns) if start_ns else rows


def _slo(text: str | None, where: str) -> SloAbsolute | SloMultipleOfMean | None:
    try:
        return None if text is None else parse_slo(text)
    except SloError as error:
        raise ConfigError(f"{where}.slo: {error}") from None


def _name(entry: _Entry, n: int) -> str:
    if entry.name:
        return entry.name.replace("{n}", str(n))
    return f"{entry.model}-{n}" if entry.count > 1 else entry.model
