"""What lies in the directory where a pool is started runs in none of its processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from livescale.config.model import ModelConfig
from livescale.config.pool import PoolConfig
from livescale.main import main
from livescale.runtime.children.pool_process import Child
from livescale.runtime.supervisor.listening import listen_inside
from livescale.runtime.wire.boot import PrepareBoot, Status
from livescale.runtime.wire.examination import ExaminationError, ExamineBoot, examine_inside
from livescale.runtime.wire.protocol import Address
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")

WAIT_S = 60
# A command that runs another one, as `ip netns exec` does.
PREFIX = ("env",)
# Of the standard library and of a dependency: each process imports some of them first.
NAMES = ("queue", "logging", "socket", "signal", "msgspec", "random", "tempfile", "bisect")


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that modules of the working directory write to when they are imported."""
    here = tmp_path / "here"
    here.mkdir()
    tracks = tmp_path / "tracks"
    for name in NAMES:
        text = f"open({str(tracks)!r}, 'a').write('{name} ')\nraise SystemExit(3)\n"
        (here / f"{name}.py").write_text(text)
    monkeypatch.chdir(here)
    return tracks


def test_a_child_process(trap: Path) -> None:
    heard: list[Status] = []
    boot = PrepareBoot(PoolConfig(), ModelConfig(path="/nowhere", name="tiny"))

    async def live() -> None:
        # Any kind will do; this one ends by itself.
        child = Child("prepare", "prepare", lambda _: boot, heed=heard.append)  # type: ignore[arg-type, return-value]
        await child.start(PoolConfig())
        await asyncio.wait_for(child.watch(), patient(WAIT_S))

    asyncio.run(live())
    assert not trap.exists()
    assert "/nowhere" in str(heard[0].fatal)


def test_a_socket_made_elsewhere(trap: Path) -> None:
    with listen_inside(PREFIX, "127.0.0.1") as listener:
        assert listener.getsockname()[1] > 0
    assert not trap.exists()


def test_an_examination(trap: Path) -> None:
    with listen_inside((), "127.0.0.1") as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ExaminationError):
        examine_inside(PREFIX, ExamineBoot("secret", Address("127.0.0.1", port)))
    assert not trap.exists()


def test_parallel_seeds(trap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    main(["swarm", "--seeds", "2", "--jobs", "2"])
    assert not trap.exists()
