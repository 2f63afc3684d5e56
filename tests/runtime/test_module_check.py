"""Models whose files do not fit their modules are refused when they are published."""

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
from livescale.engine.base.errors import ModelError
from livescale.runtime.models.module_check import ModuleCheck
from livescale.runtime.wire.boot import PrepareBoot, Status

pytestmark = pytest.mark.usefixtures("machine")


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
    words = module_words("livescale.runtime.children.child", "prepare", "error")
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


@pytest.mark.parametrize("device", ["vllm", "timed"])
def test_other_engines_have_other_modules(misfit: Path, device: str) -> None:
    model = ModelConfig(path=str(misfit), name="bad")
    with ModuleCheck(pool(device=device), (model,)) as check:
        check(misfit)


def test_a_check_that_gives_no_answer_says_why(tiny_model: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No module named livescale' >&2\nexit 1\n")
    python.chmod(0o700)
    model = ModelConfig(path=str(tiny_model), name="m")
    config = msgspec.structs.replace(pool(), worker_python=str(python))
    with (
        ModuleCheck(config, (model,)) as check,
        pytest.raises(ModelError, match="could not be found out: No module named livescale"),
    ):
        check(tiny_model.resolve())
