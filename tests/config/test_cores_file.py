"""`cores_profile` and `cores_max`: what a pool reads of cores, and what it refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from livescale.common.settings import ConfigError
from livescale.config.cores import cores_max, cores_model, write_cores
from livescale.config.model import ModelConfig
from livescale.config.pool import PoolConfig
from livescale.config.reading import load_config
from livescale.runtime.children.pool_process import child_environment
from livescale.runtime.models.scaling_settings import model_scaling
from livescale.values.scaling_policies import CoresModel, StagesByQueue
from livescale.values.types import ModelSpec, StageOf

MODEL = CoresModel(3e6, 7e6)


def pool(folder: Path, text: str) -> PoolConfig:
    file = folder / "pool.yaml"
    file.write_text(text)
    return load_config(file, ["somewhere"], {}, {})


def test_a_file_beside_the_pools_is_read_and_goes_into_the_policy(tmp_path: Path) -> None:
    write_cores(tmp_path / "cores.json", MODEL)
    lines = "scaling_policy: stages\ncores_profile: cores.json\n"
    config = pool(tmp_path, lines + "tuning: {cores_max: 6}\n")
    assert cores_model(config) == MODEL
    stage = ModelSpec("m/0", (1, 1, 1), 1, 1, stage=StageOf("m", 0, 2, 0))
    found = model_scaling(config, ModelConfig(path="m", stages=2), stage)
    assert isinstance(found, StagesByQueue)
    assert (found.cores, found.cores_max) == (MODEL, 6)
    assert cores_max(pool(tmp_path, lines)) == len(os.sched_getaffinity(0))
    # Threads that spin would keep those of other workers from running.
    assert child_environment(config)["OMP_WAIT_POLICY"] == "passive"
    assert "OMP_WAIT_POLICY" not in child_environment(PoolConfig()).keys() - os.environ.keys()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("tuning: {cores_max: 3}", "cores_max requires cores_profile"),
        ("cores_profile: x", "requires scaling_policy stages. The policy is slo"),
        ("scaling_policy: pipelines\ncores_profile: x", "The policy is pipelines"),
        ("scaling_policy: stages\ndevice: cuda\ncores_profile: x", "The device is cuda"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    tmp_path: Path, text: str, error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        pool(tmp_path, text)


@pytest.mark.parametrize(
    "content", [None, "{}", '{"fixed_ns": -1, "shared_ns": 5}', '{"fixed_ns": 0, "shared_ns": 0}']
)
def test_a_file_that_is_no_profile_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "cores.json").write_text(content)
    config = pool(tmp_path, "scaling_policy: stages\ncores_profile: cores.json\n")
    with pytest.raises(ConfigError, match=r"cores_profile: .*cores\.json"):
        cores_model(config)
