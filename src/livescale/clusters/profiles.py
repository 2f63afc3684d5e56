"""Profiles of accelerators: how long single operations took. Written down in CSV: milliseconds, one
operation or one row of operations per line.

Two kinds of lines, told apart by their columns, in files of their own or in one:
`gpu,model,tp,num_tokens` and a column per operation (Vidur's layout; `layers` is optional); and
`gpu,kind,batch_size,ctx,num_heads,num_key_value_heads,head_dim,latency_ms`. Columns of the other
kind stay empty.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path

from livescale.common.settings import ConfigError
from livescale.values.types import Value
from livescale.values.units import NS_PER_MS

HEAD = "lm_head"
_OUTSIDE_LAYERS = ("emb", HEAD)


class LinearPoint(Value, frozen=True):
    """Operations on `tokens` rows of one decoder layer, by name; attention is not among them.

    `emb` and `lm_head` are not of a layer: embedding these rows, and head and sampling for them.
    """

    gpu: str
    model: str
    tp_size: int
    tokens: int
    ops_ns: dict[str, int]

    @property
    def layer_ns(self) -> int | None:
        """Sum of the layer's operations; None when there are none in the point."""
        inside = [ns for op, ns in self.ops_ns.items() if op not in _OUTSIDE_LAYERS]
        return sum(inside) if inside else None


class AttentionPoint(Value, frozen=True):
    """Attention of one decoder layer for `batch` sequences of `context_tokens` each.

    `kind` is "prefill" (all of them are new), "decode" (the last of each is) or "extend": what a
    chunk with tokens before it takes beyond a prompt of `context_tokens`, which has as many pairs
    of positions.
    """

    gpu: str
    kind: str
    batch: int
    context_tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    ns: int


class OpProfile(Value, frozen=True):
    """Everything that was measured. `layers` are the decoder layers of the one model in it, where
    there is one."""

    linear: tuple[LinearPoint, ...] = ()
    attention: tuple[AttentionPoint, ...] = ()
    layers: int | None = None


_LINEAR = ("gpu", "model", "tp", "layers", "num_tokens")
_ATTENTION = ("kind", "batch_size", "ctx", "num_heads", "num_key_value_heads", "head_dim")
_NO_OPS = {*_LINEAR, *_ATTENTION, "latency_ms"}
_KINDS = ("prefill", "decode", "extend")
_MS_MAX = 1e9


def read_profile(*paths: Path) -> OpProfile:
    """All lines of the files. Raises ConfigError with file, line and column."""
    linear: list[LinearPoint] = []
    attention: list[AttentionPoint] = []
    layers: set[int] = set()
    for path in paths:
        for cells in _lines(path):
            if cells.has("num_tokens"):
                linear.append(_linear(cells))
                if cells.has("layers"):
                    layers.add(cells.count("layers"))
            elif cells.has("batch_size"):
                attention.append(_attention(cells))
            else:
                raise ConfigError(f"{cells.place}: neither num_tokens nor batch_size")
    if len(layers) > 1:
        raise ConfigError(f"{paths[0]}: layers differ: {min(layers)} and {max(layers)}")
    return OpProfile(tuple(linear), tuple(attention), min(layers) if layers else None)


def write_profile(path: Path, profile: OpProfile) -> None:
    """Write all points to one file, which `read_profile` reads back. Raises OSError."""
    ops = list(dict.fromkeys(op for point in profile.linear for op in point.ops_ns))
    columns = [*_LINEAR, *ops, *_ATTENTION, "latency_ms"]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        layers = {} if profile.layers is None else {"layers": profile.layers}
        for point in profile.linear:
            keys = (point.gpu, point.model, point.tp_size, point.tokens)
            row = dict(zip(("gpu", "model", "tp", "num_tokens"), keys, strict=True))
            ops_ms = {op: _ms(ns) for op, ns in point.ops_ns.items()}
            writer.writerow({**row, **layers, **ops_ms})
        for at in profile.attention:
            sizes = (at.kind, at.batch, at.context_tokens, at.heads, at.kv_heads, at.head_dim)
            row = dict(zip(_ATTENTION, sizes, strict=True))
            writer.writerow({"gpu": at.gpu, **row, "latency_ms": _ms(at.ns)})


# -- one line -------------------------------------------------------------------------------------


class _Cells:
    """One line's cells by column, and where it stands."""

    def __init__(self, cells: dict[str, str], place: str) -> None:
        self._cells = cells
        self.place = place

    def has(self, column: str) -> bool:
        return bool(self._cells.get(column))

    def text(self, column: str) -> str:
        if not self.has(column):
            raise ConfigError(f"{self.place}: {column} is missing")
        return self._cells[column]

    def count(self, column: str) -> int:
        text = self.text(column)
        if not text.isdecimal() or not 0 < len(text) < 19 or int(text) < 1:
            raise ConfigError(f"{self.place}: {column} is '{text}', not a positive whole number")
        return int(text)

    def ns(self, column: str) -> int:
        text = self.text(column)
        try:
            value_ms = float(text)
        except ValueError:
            value_ms = math.nan
        if not 0 <= value_ms <= _MS_MAX:
            raise ConfigError(f"{self.place}: {column} is '{text}', not a time in ms")
        return round(value_ms * NS_PER_MS)

    def ops(self) -> list[str]:
        return [name for name, text in self._cells.items() if text and name not in _NO_OPS]


def _lines(path: Path) -> Iterator[_Cells]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, strict=True)
            for cells in reader:
                place = f"{path} line {reader.line_num}"
                if None in cells or None in cells.values():
                    raise ConfigError(f"{place}: not as many cells as there are columns")
                yield _Cells(cells, place)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read as a profile: {error}") from error


def _linear(cells: _Cells) -> LinearPoint:
    return LinearPoint(
        cells.text("gpu"),
        cells.text("model"),
        cells.count("tp"),
        cells.count("num_tokens"),
        {op: cells.ns(op) for op in cells.ops()},
    )


def _attention(cells: _Cells) -> AttentionPoint:
    kind = cells.text("kind")
    if kind not in _KINDS:
        raise ConfigError(f"{cells.place}: kind is '{kind}', not one of {', '.join(_KINDS)}")
    return AttentionPoint(
        gpu=cells.text("gpu"),
        kind=kind,
        batch=cells.count("batch_size"),
        context_tokens=cells.count("ctx"),
        heads=cells.count("num_heads"),
        kv_heads=cells.count("num_key_value_heads"),
        head_dim=cells.count("head_dim"),
        ns=cells.ns("latency_ms"),
    )


def _ms(ns: int) -> str:
    return f"{ns / NS_PER_MS:.6f}"
