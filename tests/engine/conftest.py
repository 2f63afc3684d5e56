"""Models that are made once for all engine tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from engine_instance import FamilyModel, load
from transformers import AutoModelForCausalLM

from livescale.engine.executor import TorchExecutor
from livescale.engine.files.make import FAMILY_NAMES, Preset, make_model
from livescale.engine.oracle import GreedyOracle

torch.set_num_threads(int(os.environ.get("ENGINE_TEST_THREADS", "1")))


@pytest.fixture(scope="session")
def models(made_once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """A directory with `tiny`, `tied` (sharded, fp32) and `bf16` (a single file)."""
    return made_once("engine", make_engine_models)


def make_engine_models(root: Path) -> None:
    make_model(root / "tiny", "tiny", seed=7)
    make_model(root / "tied", "tiny", seed=8, tied=True)
    AutoModelForCausalLM.from_pretrained(root / "tiny", dtype=torch.bfloat16).save_pretrained(
        root / "bf16"
    )


@pytest.fixture(scope="session")
def oracles(models: Path) -> dict[str, GreedyOracle]:
    return {name: GreedyOracle(models / name) for name in ("tiny", "tied")}


@pytest.fixture(scope="session")
def executors(models: Path) -> dict[str, TorchExecutor]:
    """Complete executors. Their pools keep what earlier tests wrote, as in a serving instance."""
    return {name: load(models / name, kv_bytes=4 << 20)[0] for name in ("tiny", "tied")}


@pytest.fixture(scope="session")
def family_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], FamilyModel]:
    """Models by name, made when they are first asked for: `qwen3`, or `qwen3 other` with its
    embedding tied or not, whichever is unusual in the family."""
    root = tmp_path_factory.mktemp("families")

    @cache
    def make(name: str) -> FamilyModel:
        family, _, other = name.partition(" ")
        is_tied = FAMILY_NAMES[family].is_tied != bool(other)
        sizes = Preset(4, 64, 96, 4, 2, 512)
        directory = root / name.replace(" ", "-")
        make_model(directory, sizes, seed=5, family=family, tied=is_tied)
        return FamilyModel(directory, load(directory, kv_bytes=1 << 20)[0], GreedyOracle(directory))

    return make
