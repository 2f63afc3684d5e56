"""What a pool keeps for its next start: written whole or not at all, by one pool, for its user."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from livescale.common.settings import ConfigError
from livescale.config.model import ModelConfig
from livescale.config.pool import PoolConfig
from livescale.runtime.models.restoration import (
    restored_models,
    state_of,
    survives_restart,
)
from livescale.runtime.models.state_directory import (
    ChangedModel,
    PoolState,
    StateDirectory,
    write_state,
)
from livescale.runtime.wire.protocol import Catalog
from no_room import no_room

FILE = "models.json"
STATE = PoolState(
    (ModelConfig(path="/models/a", name="a", min_replicas=0, priority=7),),
    (
        ChangedModel(
            ModelConfig(path="/models/b", name="b"),
            ModelConfig(path="/models/b", name="b", max_replicas=2),
        ),
    ),
)


def test_what_was_written_is_read_by_the_next_pool(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "state"
    first = StateDirectory(path)
    assert first.read() == PoolState()
    write_state(path, PoolState())
    write_state(path, STATE)
    assert first.read() == STATE
    first.close()
    again = StateDirectory(path)
    assert again.read() == STATE
    again.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}


def test_a_second_pool_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    first = StateDirectory(tmp_path)
    with pytest.raises(ConfigError, match=f"another pool uses it .process {os.getpid()}"):
        StateDirectory(tmp_path)
    first.close()
    StateDirectory(tmp_path).close()


def test_a_full_disk_is_an_error_that_leaves_the_directory_free(tmp_path: Path) -> None:
    with no_room(), pytest.raises(ConfigError, match=f"{tmp_path} cannot be used"):
        StateDirectory(tmp_path)
    StateDirectory(tmp_path).close()


@pytest.mark.usefixtures("machine")
def test_the_lock_goes_with_a_process_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib\n"
        "from livescale.runtime.models.state_directory import StateDirectory\n"
        "kept = StateDirectory(pathlib.Path(sys.argv[1]))\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match=str(other.pid)):
            StateDirectory(tmp_path)
        other.send_signal(signal.SIGKILL)
        other.wait()
    StateDirectory(tmp_path).close()


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not a valid state file"),
        (b"\0\1\2", "not a valid state file"),
        (b"[]", "not a valid state file"),
        (b'{"kind": "a game", "version": 1, "level": 3}', "a game"),
        (b'{"kind": "livescale pool state", "version": 2, "state": {}}', "version 2"),
        (b'{"kind": "livescale pool state", "version": 1, "state": {"x": 1}}', "broken"),
        (b'{"kind": "livescale pool state", "version": 1, "state": {"published": [{}]}}', "path"),
    ],
)
def test_a_broken_or_foreign_file_is_named_and_left_alone(
    raw: bytes, says: str, tmp_path: Path
) -> None:
    (tmp_path / FILE).write_bytes(raw)
    directory = StateDirectory(tmp_path)
    with pytest.raises(ConfigError, match=says) as error:
        directory.read()
    directory.close()
    assert str(tmp_path / FILE) in str(error.value)
    assert (tmp_path / FILE).read_bytes() == raw


@given(cut=st.integers(0, 2000), raw=st.binary(max_size=20))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_file_is_taken_for_another(cut: int, raw: bytes, tmp_path: Path) -> None:
    """Whatever a file lost or has too much: it is the state as it was written, or refused."""
    write_state(tmp_path, STATE)
    file = tmp_path / FILE
    file.write_bytes(file.read_bytes()[:cut] + raw)
    directory = StateDirectory(tmp_path)
    try:
        assert directory.read() == STATE
    except ConfigError:
        pass
    finally:
        directory.close()


@pytest.mark.parametrize("fails_at", ["open", "fsync", "replace"])
def test_a_write_that_fails_leaves_what_was_there(
    fails_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_state(tmp_path, STATE)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path if fails_at == "replace" else os, fails_at, full)
    with pytest.raises(OSError, match="No space"):
        write_state(tmp_path, PoolState())
    monkeypatch.undo()
    directory = StateDirectory(tmp_path)
    assert directory.read() == STATE
    directory.close()


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="Run: chmod 700"):
        StateDirectory(tmp_path)
    tmp_path.chmod(0o700)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=r"state .*file"):
        StateDirectory(file)


# -- configuration and state ----------------------------------------------------------------------


def start(config: PoolConfig, state: PoolState) -> Catalog:
    return restored_models(config, state, lambda entries: None)


def test_what_is_configured_goes_before_what_is_kept(tiny_model: Path, tmp_path: Path) -> None:
    own = ModelConfig(path=str(tiny_model), name="own", max_replicas=2)
    config = PoolConfig(models=(own,), kv_bytes=8 << 20, arena_bytes=8 << 20)
    changed = ModelConfig(path=str(tiny_model), name="own", max_replicas=3, priority=5)
    gone = tmp_path / "gone"
    other = shutil.copytree(tiny_model, tmp_path / "other")
    kept = (
        ModelConfig(path=str(other), name="other", min_replicas=0),
        ModelConfig(path=str(gone), name="gone"),
        ModelConfig(path=str(other), name="own"),
        ModelConfig(path=str(other), name="many", max_replicas=99),
    )
    restored = start(config, PoolState(kept, (ChangedModel(own, changed),)))
    assert [model.settings for model in restored.models] == [changed, kept[0]]
    assert restored.models[0].policy.instances_max == 3
    problems = {model.settings.name: model.problem for model in restored.unserved}
    assert str(gone) in problems.pop("gone")
    assert "max_replicas is 99" in problems.pop("many")
    assert not problems
    # What cannot be served now is not forgotten.
    state = state_of(config, restored)
    assert {model.name for model in state.published} == {"other", "gone", "many"}
    assert state.changed == (ChangedModel(own, changed),)
    assert start(config, state) == restored

    # An entry that was edited since is the newer word.
    edited = ModelConfig(path=str(tiny_model), name="own", max_replicas=1)
    (model,) = start(
        PoolConfig(models=(edited,), kv_bytes=8 << 20), PoolState((), state.changed)
    ).models
    assert model.settings == edited


def test_changed_limits_outlive_another_name_of_the_same_directory(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(tiny_model)
    (tmp_path / "elsewhere").mkdir()

    def configured(path: str) -> PoolConfig:
        own = ModelConfig(path=path, name="own", max_replicas=1)
        return PoolConfig(models=(own,), workers=4, kv_bytes=8 << 20, arena_bytes=8 << 20)

    monkeypatch.chdir(tmp_path)
    config = configured("link")
    changed = ModelConfig(path="link", name="own", max_replicas=3)
    restored = start(config, PoolState((), (ChangedModel(config.models[0], changed),)))
    kept = state_of(config, restored)
    monkeypatch.chdir(tmp_path / "elsewhere")
    for path in ("../link", "../elsewhere/../link", str(link), str(tiny_model)):
        (model,) = start(configured(path), kept).models
        assert (model.settings.path, model.settings.max_replicas) == (path, 3)


@pytest.mark.parametrize("is_kept", [False, True])
def test_what_survives_is_what_the_next_start_has(
    is_kept: bool, tiny_model: Path, tmp_path: Path
) -> None:
    own = ModelConfig(path=str(tiny_model), name="own")
    config = PoolConfig(models=(own,), kv_bytes=8 << 20, arena_bytes=8 << 20)
    other = ModelConfig(path=str(shutil.copytree(tiny_model, tmp_path / "other")), name="other")
    changed = ModelConfig(path=str(tiny_model), name="own", priority=1)
    for settings_now in (own, changed, other):
        (base,) = start(config, PoolState()).models
        now = base.__class__(base.entry, base.policy, settings_now)
        state = state_of(config, Catalog((now,))) if is_kept else PoolState()
        next_start = [model.settings for model in start(config, state).models]
        survives = survives_restart(config, settings_now, is_kept=is_kept)
        assert survives == (settings_now in next_start)
