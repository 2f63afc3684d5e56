"""Children whose next life cannot begin, or begins while they are let go."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest
from boot_messages import lonely_agent

from livescale.config.pool import PoolConfig
from livescale.runtime.children.kept_children import ChildCare, KeptChildren
from livescale.runtime.children.pool_process import Child
from livescale.runtime.wire.news import News
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")
WAIT_S = 60.0


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that can be taken away."""
    path = tmp_path / "python"
    give(path)
    return path


def give(python: Path) -> None:
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)


class Owner:
    """Of one agent: what it is told, and whether its pool was ready."""

    def __init__(self, directory: Path, python: Path, was_ready: bool) -> None:
        boot = lonely_agent(directory)
        self.child = Child("agent 0", "agent", lambda _: boot, python=str(python))
        self.news: asyncio.Queue[News] = asyncio.Queue()
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        care = ChildCare(
            heed=lambda *_: None,
            peers=lambda child: [child.restarts],
            was_ready=lambda: was_ready,
            tell=self.news.put_nowait,
            failed=self.failure.set_result,
        )
        self.kept = KeptChildren(PoolConfig(), [self.child], care)

    async def start(self) -> None:
        await self.kept.start()
        await self.child.is_ready.wait()

    async def stop(self) -> None:
        self.kept.let_go()
        await self.kept.end([self.child], patient(WAIT_S))
        await self.kept.close()


def test_a_child_without_interpreter_is_tried_again_until_there_is_one(
    tmp_path: Path, python: Path
) -> None:
    async def play() -> None:
        owner = Owner(tmp_path, python, was_ready=True)
        await owner.start()
        python.unlink()
        owner.child.signal(signal.SIGKILL)
        assert "killed by signal 9" in (await owner.news.get()).text
        for _ in range(3):
            news = await owner.news.get()
            assert news.is_problem
            assert news.text.startswith("agent 0 could not be started (")
            assert "No such file" in news.text
        give(python)
        await owner.child.is_ready.wait()
        assert owner.child.restarts.failed_starts == 0
        await owner.stop()

    run(play())


def test_a_child_that_never_begins_again_is_given_up_with_the_reason(
    tmp_path: Path, python: Path
) -> None:
    async def play() -> None:
        owner = Owner(tmp_path, python, was_ready=False)
        await owner.start()
        python.unlink()
        owner.child.signal(signal.SIGKILL)
        reason = await owner.failure
        assert reason.startswith("agent 0 cannot start: FileNotFoundError: ")
        await owner.stop()

    run(play())


@pytest.mark.parametrize("turns", range(0, 60, 6))
def test_owners_that_stop_while_a_child_starts_again_end(
    tmp_path: Path, python: Path, turns: int
) -> None:
    """So many turns of the event loop after its end: before, during and after the next start."""

    async def play() -> None:
        owner = Owner(tmp_path, python, was_ready=True)
        await owner.start()
        first = owner.child.life
        owner.child.signal(signal.SIGKILL)
        while owner.child.life == first:
            await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        await owner.stop()
        assert not owner.child.is_alive

    before = set(psutil.Process().children())
    run(play())
    assert set(psutil.Process().children()) <= before, "nobody is left"


def test_a_first_start_that_fails_is_an_error(tmp_path: Path) -> None:
    async def play() -> None:
        owner = Owner(tmp_path, tmp_path / "no-python", was_ready=False)
        with pytest.raises(FileNotFoundError):
            await owner.kept.start()
        owner.kept.let_go()
        await owner.kept.close()

    run(play())


def run(play: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(play, patient(WAIT_S)))
