"""Models whose files do not fit their modules are refused where they are read: when one is
published, and when a pool starts."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from livescale.common.interpreter import module_words
from livescale.config.model import ModelConfig
from livescale.config.pool import PoolConfig
from livescale.engine.errors import ModelError
from livescale.runtime.boot import PrepareBoot, Status
from livescale.runtime.restoration import restored_models
from livescale.runtime.state_directory import PoolState

pytestmark = pytest.mark.usefixtures("machine")

MISFIT = r"k_proj\.weight is F32 \(64, 128\), its config\.json wants F32 \(128, 128\)"


@pytest.fixture
def misfit(tiny_model: Path, tmp_path: Path) -> Path:
    """All layers are alike and the ends are right; but its config.json has other KV heads."""
    directory = shutil.copytree(tiny_model, tmp_path / "misfit")
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_key_value_heads": 4}))
    return directory


def pool(*models: ModelConfig, device: str = "cpu") -> PoolConfig:
    return PoolConfig(models=models, kv_bytes=8 << 20, arena_bytes=8 << 20, device=device)


def prepared(config: PoolConfig, model: ModelConfig) -> Status:
    """By the process that reads a model for publication: it ends when its standard input does."""
    words = module_words("livescale.runtime.child", "prepare", "error")
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(PrepareBoot(config, model)) + b"\n")
        process.stdin.flush()
        return msgspec.json.decode(process.stdout.readline(), type=Status)


def test_a_model_that_does_not_fit_is_not_published(tiny_model: Path, misfit: Path) -> None:
    refused = prepared(pool(), ModelConfig(path=str(misfit), name="new"))
    assert refused.entry is None
    assert refused.fatal is not None
    assert "k_proj.weight is F32 (64, 128)" in refused.fatal
    assert str(misfit) in refused.fatal
    taken = prepared(pool(), ModelConfig(path=str(tiny_model), name="new"))
    assert taken.entry is not None


def test_a_pool_does_not_start_with_one_and_does_not_serve_a_kept_one(
    tiny_model: Path, misfit: Path
) -> None:
    good = ModelConfig(path=str(tiny_model), name="good")
    bad = ModelConfig(path=str(misfit), name="bad")
    with pytest.raises(ModelError, match=MISFIT):
        restored_models(pool(good, bad), PoolState(), lambda entries: None)
    catalog = restored_models(pool(good), PoolState((bad,)), lambda entries: None)
    assert [model.settings for model in catalog.models] == [good]
    [unserved] = catalog.unserved
    assert "k_proj.weight is F32 (64, 128)" in unserved.problem


@pytest.mark.parametrize("device", ["vllm", "timed"])
def test_other_engines_have_other_modules(misfit: Path, device: str) -> None:
    bad = ModelConfig(path=str(misfit), name="bad")
    assert restored_models(pool(bad, device=device), PoolState(), lambda entries: None).models


def test_a_check_that_gives_no_answer_says_why(tiny_model: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No module named livescale' >&2\nexit 1\n")
    python.chmod(0o700)
    config = msgspec.structs.replace(
        pool(ModelConfig(path=str(tiny_model), name="m")), worker_python=str(python)
    )
    with pytest.raises(ModelError, match="could not be found out: No module named livescale"):
        restored_models(config, PoolState(), lambda entries: None)
