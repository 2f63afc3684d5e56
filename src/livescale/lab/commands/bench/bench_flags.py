"""What benchmarks' command lines share: flags of options, checks of flags, and the figures."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from livescale.cli.loads import write_json
from livescale.common.errors import UserError
from livescale.lab.bench.base.machine import describe_run
from livescale.lab.bench.base.made_models import BenchShape, parse_shape

_PACKAGES = ("livescale", "torch", "transformers", "numpy", "uvloop")
TRANSFER_PACKAGES = ("livescale", "torch", "safetensors", "xxhash", "numpy")
_Options = TypeVar("_Options")
_FINITE = sys.float_info.max


class Bench(NamedTuple):
    """One benchmark: its flags and its run function, whose docstring begins with the help."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]

    @property
    def help(self) -> str:
        words, _, _ = (self.run.__doc__ or "").partition("\n\n")
        return " ".join(words.split())


class BenchReport(Protocol):
    """What a benchmark found."""

    def text(self) -> str: ...

    def as_json(self) -> dict[str, object]: ...


def say(line: str) -> None:
    """Print progress, at once."""
    print(line, flush=True)


def finish(
    report: BenchReport,
    arguments: argparse.Namespace,
    packages: Sequence[str] = _PACKAGES,
    *,
    is_good: bool = True,
) -> int:
    """Print the table, and write the figures where `--json` asks for them; the exit status."""
    print(f"\n{report.text()}", flush=True)
    write_figures(report.as_json(), arguments, packages)
    return 0 if is_good else 1


def write_figures(
    figures: dict[str, object], arguments: argparse.Namespace, packages: Sequence[str] = _PACKAGES
) -> None:
    """With the machine, the versions of `packages` and the command. Raises UserError."""
    if arguments.json is not None:
        write_json(arguments.json, {**figures, **describe_run(packages)})


def flags_of(parser: argparse.ArgumentParser, defaults: object) -> Callable[..., None]:
    """Adds flags by name of a field of an options object, and help: a number, a text or a file, by
    default what the object has. More words go to `add_argument`."""

    def add(name: str, words: str, **more: Any) -> None:
        value = getattr(defaults, name)
        kind = type(value)
        own: dict[str, Any] = {"default": value, "help": words}
        if kind in (int, float):
            own |= {"type": kind, "metavar": "N"}
        parser.add_argument(_flag(name), **(own | more))

    return add


def options_of(
    kind: Callable[..., _Options], arguments: argparse.Namespace, **others: Any
) -> _Options:
    """An options class (`kind`, a dataclass) from the flags that have the names of its fields; what
    is not such a flag is in `others`, or keeps its default."""
    given = vars(arguments)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: given[name] for name in names if name in given} | others)


def shape_of(arguments: argparse.Namespace) -> BenchShape:
    """The shape of `--shape`. Raises BenchError for one that cannot be built."""
    shape = parse_shape(arguments.shape, None, None, None)
    shape.preset(arguments.vocabulary)
    return shape


def check_folder(file: Path | None, flag: str) -> None:
    """Raises UserError where a file that is wanted cannot be written."""
    if file is not None and not os.access(file.absolute().parent, os.W_OK):
        raise UserError(f"{flag} {file}: the folder is not writable")


def at_least(arguments: argparse.Namespace, least: int, *names: str) -> None:
    """These flags have no smaller values. Raises UserError."""
    for name in names:
        if getattr(arguments, name) < least:
            raise UserError(f"{_flag(name)} must be at least {least}")


def positive(arguments: argparse.Namespace, *names: str, most: float = _FINITE) -> None:
    """These flags are above 0, and `most` at most. Raises UserError."""
    for name in names:
        if not 0 < getattr(arguments, name) <= most:
            words = f", and {most:g} at most" if most < _FINITE else ""
            raise UserError(f"{_flag(name)} must be positive{words}")


def within(arguments: argparse.Namespace, least: int, most: int, *names: str) -> None:
    """These flags have no smaller and no larger values. Raises UserError."""
    for name in names:
        if not least <= getattr(arguments, name) <= most:
            raise UserError(f"{_flag(name)} must be {least} to {most}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def whole_numbers(text: str, flag: str, wanted: str, least: int, most: int) -> list[int]:
    """The numbers of "1,8,32". Raises UserError, which says what is `wanted`."""
    numbers = text.split(",")
    if not all(number.isdecimal() and least <= int(number) <= most for number in numbers):
        raise UserError(f"{flag} {text!r} must be {wanted}")
    return [int(number) for number in numbers]


def kinds_of_workers(text: str, known: Sequence[str]) -> tuple[str, ...]:
    """The kinds of "timed,cpu", each once. Raises UserError."""
    kinds = tuple(text.split(","))
    if len(set(kinds)) < len(kinds) or not set(kinds) <= set(known):
        raise UserError(f"--workers {text!r}: write timed, cpu or both")
    return kinds


def chosen(names: Sequence[str], flag: str, known: Sequence[str]) -> tuple[str, ...]:
    """The names, if all are known. Raises UserError."""
    for name in names:
        if name not in known:
            raise UserError(f"{flag}: unknown {name!r}, there are {', '.join(known)}")
    return tuple(names)
