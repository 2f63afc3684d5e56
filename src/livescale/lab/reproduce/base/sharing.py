"""Results that several claims look at, made once, however many processes measure.

Where there are several, the first that needs a result makes it, and others wait for its file.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec

_P = ParamSpec("_P")
_T = TypeVar("_T")
_KEPT = 64
"""Results of one function that a process keeps in memory."""


class _Folder:
    """Where processes leave results for one another; None: there is one process."""

    path: Path | None = None


def share_through(folder: Path) -> None:
    """From now on results are shared with other processes that were told this folder."""
    _Folder.path = folder


def shared(kind: Any) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Makes a function one that is called once for the same arguments, given or by default. These
    have to be hashable and to differ in their repr, its results are msgspec's values of `kind`."""

    def decorate(make: Callable[_P, _T]) -> Callable[_P, _T]:
        signature = inspect.signature(make)

        @functools.lru_cache(maxsize=_KEPT)
        def once(args: tuple[object, ...]) -> _T:
            def result() -> _T:
                return make(*args)  # type: ignore[arg-type,call-arg]

            if _Folder.path is None:
                return result()
            words = f"{make.__module__}.{make.__qualname__}{args!r}"
            name = hashlib.sha256(words.encode()).hexdigest()
            return _of_file(_Folder.path / name, kind, result)

        @functools.wraps(make)
        def of(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return once(bound.args)

        return of

    return decorate


def _of_file(path: Path, kind: Any, make: Callable[[], _T]) -> _T:
    """What the file has; made, and written, by the first process that asks."""
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if written := file.read():
            found: _T = msgspec.msgpack.decode(written, type=kind)
            return found
        result = make()
        file.write(msgspec.msgpack.encode(result))
        return result
