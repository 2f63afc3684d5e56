"""How much is tried of the same: `make test` tries a part, `make long` (`--long`) all of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

#: an ordinary family, one with windows and capped logits, and one of experts
SOME_FAMILIES = ("llama", "gemma2", "qwen3_moe")
#: of the examples of a property, in `make test`
_PART = 10
_is_long = False


def set_long(is_long: bool) -> None:
    """Before any test is imported."""
    global _is_long
    _is_long = is_long


def times() -> int:
    """How many times as long as in `make test` a property may take."""
    return _PART if _is_long else 1


def examples(count: int, least: int = 1) -> int:
    """How many of these examples of a property are tried: `least`, or more."""
    return count if _is_long else max(least, -(-count // _PART))


def mostly_long(values: Iterable[Any], short: Iterable[Any]) -> list[Any]:
    """Parameters of a test (tuples, where a test takes several), of which `make test` tries the
    `short` ones."""
    short = list(short)
    rows = [(value, value if type(value) is tuple else (value,)) for value in values]
    return [
        pytest.param(*row, marks=() if value in short else pytest.mark.long) for value, row in rows
    ]
