"""The same function for many keys, in this process or in several at the same time."""

from __future__ import annotations

import concurrent.futures
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from livescale.common.interpreter import spawning
from livescale.lab.reproduce.base.claim import AbsentError, Conditions
from livescale.lab.reproduce.base.sharing import share_through
from livescale.load.traces import TraceError

_K = TypeVar("_K")
_T = TypeVar("_T")


@contextmanager
def results(
    make: Callable[[_K, Conditions], _T], keys: Sequence[_K], conditions: Conditions, count: int
) -> Iterator[Callable[[_K], _T | str]]:
    """Gives what a key's result is, or in words what it lacks; waits for it if need be.

    With a `count` of processes above one they begin at once, with the first keys; `make` is a
    function of a module then, and what `shared` functions give is made once in all of them.
    """
    count = min(count, len(keys))
    if count < 2:
        yield lambda key: _made(make, key, conditions)
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ProcessPoolExecutor(
            count, spawning(), share_through, (Path(folder),)
        ) as executor,
    ):
        futures = {key: executor.submit(_made, make, key, conditions) for key in keys}
        yield lambda key: futures[key].result()


def _made(make: Callable[[_K, Conditions], _T], key: _K, conditions: Conditions) -> _T | str:
    try:
        return make(key, conditions)
    except (AbsentError, TraceError) as error:
        return str(error)
