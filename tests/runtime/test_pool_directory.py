"""A pool's directory goes with the pool, or at the next start where the pool was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from livescale.common.settings import ConfigError
from livescale.runtime.models.state_directory import StateDirectory
from livescale.runtime.supervisor.pool_directory import PoolDirectory
from livescale.runtime.supervisor.supervisor import Pool
from made_config import made_config

pytestmark = pytest.mark.usefixtures("machine")

OWNER = (
    "from livescale.runtime.supervisor.pool_directory import PoolDirectory\n"
    "directory = PoolDirectory()\n"
    "(directory.path / 'w0.sock').touch()\n"
    "print(directory.path, flush=True)\n"
    "input()\n"
)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_what_a_killed_process_left_is_removed_and_no_others(temporary: Path) -> None:
    (temporary / "livescale-pool-file").touch()
    (temporary / "livescale-pool-link").symlink_to(temporary)
    strangers = {path.name for path in temporary.iterdir()}
    owners, paths = [], []
    for _ in range(2):
        owner = subprocess.Popen(
            [sys.executable, "-c", OWNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        assert owner.stdout is not None
        owners.append(owner)
        paths.append(Path(owner.stdout.readline().strip()))
    with owners[0], owners[1]:
        owners[0].kill()
        owners[0].wait()
        assert paths[0].exists()
        own = PoolDirectory()
        assert not paths[0].exists()
        assert (paths[1] / "w0.sock").exists()
        own.remove()
        assert {path.name for path in temporary.iterdir()} == strangers | {paths[1].name}
        owners[1].kill()


def test_it_is_for_its_user_alone(temporary: Path) -> None:
    directory = PoolDirectory()
    assert directory.path.parent == temporary
    assert directory.path.stat().st_mode & 0o777 == 0o700
    directory.remove()
    directory.remove()


def test_a_start_that_fails_leaves_neither_directory_nor_lock(
    tiny_model: Path, temporary: Path
) -> None:
    token, state = temporary / "token", temporary / "state"
    token.write_text("no token")
    token.chmod(0o600)
    file = temporary / "pool.yaml"
    file.write_text(f"models:\n  - path: {tiny_model}\n")
    flags = {"port": 0, "listen": "127.0.0.1:0", "token_file": str(token), "state": str(state)}
    sizes = {"workers": 1, "arena_bytes": "8MiB", "kv_bytes": "8MiB"}
    with pytest.raises(ConfigError, match="is not a valid token"):
        Pool(made_config(file, [], flags | sizes | {"device": "timed"}))
    assert {path.name for path in temporary.iterdir()} == {"token", "state", "pool.yaml"}
    StateDirectory(state).close()
