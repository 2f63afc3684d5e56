"""What a machine decides for a pool: it fits, and what was given stays."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.common.settings import ConfigError
from livescale.config.automatic import MachineMemory, ModelNeed, fitted
from livescale.config.model import ModelConfig
from livescale.config.pool import PoolConfig

GIB = 1 << 30
MIB = 1 << 20
MODELS = (ModelConfig(path="m", name="m", min_replicas=0),)
needs = st.lists(
    st.builds(ModelNeed, st.integers(1 << 20, 64 * GIB), st.integers(1 << 16, 16 * GIB)),
    min_size=1,
    max_size=4,
)


def pool(**fields: object) -> PoolConfig:
    return msgspec.structs.replace(PoolConfig(models=MODELS), **fields)


def taken(config: PoolConfig, found: list[ModelNeed]) -> int:
    """What such a pool takes of the memory of a machine, at most."""
    sizes = [need.size_bytes for need in found]
    copies = config.host_memory_bytes
    if copies is None:
        copies = sum(sizes) + max(sizes)
    second = max(sizes) if config.weights_layout == "auto" else 0
    return copies + config.workers * (config.arena_bytes + config.kv_bytes + second)


@given(needs, st.integers(0, 256 * GIB))
def test_what_is_chosen_fits_the_memory_and_the_models(found: list[ModelNeed], free: int) -> None:
    largest = max(need.size_bytes for need in found)
    try:
        config, words = fitted(pool(), (), found, MachineMemory(free))
    except ConfigError as error:
        problem = str(error)
    else:
        problem = ""
    if problem:
        assert "too little for a model" in problem
        assert free < 1.4 * largest + 2 * MIB
        return
    assert taken(config, found) <= free
    assert config.workers >= 1
    assert config.arena_bytes >= largest
    context = max(need.context_bytes for need in found)
    assert config.kv_bytes >= min(context, free // 4) - MIB
    assert words.startswith("memory: ")


@given(needs, st.integers(0, 128 * GIB), st.integers(0, 128 * GIB))
def test_more_memory_is_never_fewer_workers(found: list[ModelNeed], free: int, more: int) -> None:
    try:
        less, _ = fitted(pool(), (), found, MachineMemory(free))
    except ConfigError:
        return
    assert fitted(pool(), (), found, MachineMemory(free + more))[0].workers >= less.workers


@given(
    needs,
    st.fixed_dictionaries(
        {},
        optional={
            "workers": st.integers(1, 8),
            "arena_bytes": st.integers(MIB, 64 * GIB),
            "kv_bytes": st.integers(MIB, 8 * GIB),
            "host_memory_bytes": st.integers(0, 64 * GIB),
        },
    ),
)
def test_what_was_given_stays(found: list[ModelNeed], own: dict[str, int]) -> None:
    config, _ = fitted(pool(**own), own, found, MachineMemory(4096 * GIB))
    assert {name: getattr(config, name) for name in own} == own


def test_what_was_given_and_does_not_fit_is_left_to_the_check_that_names_it() -> None:
    config = pool(arena_bytes=1024 * GIB)
    found = fitted(config, {"arena_bytes"}, [ModelNeed(30 * MIB, 8 * MIB)], MachineMemory(GIB))
    assert found == (config, "")


def test_a_model_of_8_gb_is_served_by_24_gib() -> None:
    eight = [ModelNeed(8 * 10**9, 512 * MIB)]
    config, words = fitted(pool(), (), eight, MachineMemory(23 * GIB))
    assert config.workers == 1
    assert config.host_memory_bytes == 8 * 10**9
    assert words.startswith("memory: 24.7 GB free: 1 worker with 8 GB for parameters and ")
    assert "Too little for 3 workers, a second model on a worker (--help: --workers, " in words


def test_small_models_get_what_they_always_had() -> None:
    config, words = fitted(pool(), (), [ModelNeed(30 * MIB, 8 * MIB)], MachineMemory(20 * GIB))
    assert "Too little" not in words
    assert config == msgspec.structs.replace(pool(), kv_bytes=256 * MIB)


def test_a_gpu_is_a_worker_and_least_numbers_of_instances_hold() -> None:
    small = [ModelNeed(30 * MIB, 8 * MIB)]
    machine = MachineMemory(200 * GIB, gpus=8)
    assert fitted(pool(device="cuda"), (), small, machine)[0].workers == 8
    models = (ModelConfig(path="m", name="m", min_replicas=5),)
    config, _ = fitted(pool(models=models), (), small, MachineMemory(200 * GIB))
    assert config.workers == 5
    with pytest.raises(ConfigError, match="too little for a model"):
        fitted(pool(models=models), (), small, MachineMemory(GIB // 10))
