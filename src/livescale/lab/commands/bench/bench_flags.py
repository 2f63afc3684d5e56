"""What benchmarks' command lines share: checks of flags, options from flags, and the figures."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, Protocol, TypeVar

from livescale.cli.loads import write_json
from livescale.common.errors import UserError
from livescale.lab.bench.base.machine import describe_run

_PACKAGES = ("livescale", "torch", "transformers", "numpy", "uvloop")
_Options = TypeVar("_Options")


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


def options_of(
    kind: Callable[..., _Options], arguments: argparse.Namespace, **others: Any
) -> _Options:
    """An options class (`kind`, a dataclass) from the flags that have the names of its fields; what
    is not such a flag is in `others`, or keeps its default."""
    given = vars(arguments)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: given[name] for name in names if name in given} | others)


def at_least(arguments: argparse.Namespace, least: int, *names: str) -> None:
    """These flags have no smaller values. Raises UserError."""
    for name in names:
        if getattr(arguments, name) < least:
            raise UserError(f"--{name.replace('_', '-')} must be at least {least}")


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
