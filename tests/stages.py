"""The two stages of the suite. A test is of the real stage if it, or a fixture of it, uses the
fixture `machine`; every other one is deterministic: no process, no connection, no sleep."""

from __future__ import annotations

import asyncio
import multiprocessing.util
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

DETERMINISTIC, REAL = "deterministic", "real"
#: what a deterministic test never does, as the interpreter's audit hooks call it
_FORBIDDEN = frozenset(
    {
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.spawn",
        "os.system",
        "socket.bind",
        "socket.connect",
        "subprocess.Popen",
    }
)
#: what the test that runs now did of that; None where it may
_done: list[str] | None = None
#: threads that fixtures of other tests keep alive
_strangers: frozenset[int | None] = frozenset()


def stage_of(item: pytest.Item) -> str:
    return REAL if "machine" in getattr(item, "fixturenames", ()) else DETERMINISTIC


def hook() -> None:
    """Once per process: an audit hook cannot be taken away again."""
    sys.addaudithook(_heed)


def _heed(event: str, args: tuple[Any, ...]) -> None:
    if event in _FORBIDDEN:
        _note(event)


def _note(what: str) -> None:
    if _done is not None and threading.get_ident() not in _strangers:
        _done.append(what)


@contextmanager
def deterministic() -> Iterator[None]:
    """Whatever waits for time, another process or a peer inside fails at its end, by name."""
    global _done, _strangers
    others = (
        thread for thread in threading.enumerate() if thread is not threading.current_thread()
    )
    _strangers = frozenset(thread.ident for thread in others)
    sleep, sleep_in_loop, done_before = time.sleep, asyncio.sleep, _done
    spawn = multiprocessing.util.spawnv_passfds

    def noted_sleep(seconds: float) -> None:
        _note(f"time.sleep({seconds})")
        sleep(seconds)

    async def noted_sleep_in_loop(seconds: float, result: Any = None) -> Any:
        if seconds > 0:
            _note(f"asyncio.sleep({seconds})")
        return await sleep_in_loop(seconds, result)

    # No audit event tells of the processes that multiprocessing spawns.
    def noted_spawn(path: bytes, words: Sequence[bytes], fds: Sequence[int]) -> int:
        _note("multiprocessing.spawn")
        return spawn(path, words, fds)

    _done = []
    time.sleep, asyncio.sleep = noted_sleep, noted_sleep_in_loop  # type: ignore[assignment]
    multiprocessing.util.spawnv_passfds = noted_spawn
    try:
        yield
        done = sorted(set(_done))
    finally:
        _done = done_before
        time.sleep, asyncio.sleep = sleep, sleep_in_loop
        multiprocessing.util.spawnv_passfds = spawn
    if done:
        pytest.fail(
            f"a test of the deterministic stage did {', '.join(done)}: "
            "give it a clock or a double, or the fixture `machine`",
            pytrace=False,
        )
