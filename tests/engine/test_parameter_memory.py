"""Parameters that are copied to a device's own memory compute what the arena's bytes do.

The device is a CPU here, so the copies are those that a GPU gets, and the kernels are not.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_instance import BLOCK_TOKENS, KV_BYTES, Instance, judge, request

from livescale.engine.base.errors import ModelError
from livescale.engine.executor import TorchExecutor
from livescale.engine.files.model_files import read_layers, read_manifest
from livescale.engine.oracle import GreedyOracle


def executor_with(device_bytes: int) -> TorchExecutor:
    return TorchExecutor(KV_BYTES, BLOCK_TOKENS, parameter_bytes=device_bytes)


@pytest.mark.parametrize("name", ["tiny", "tied"])
def test_copied_layers_compute_the_same(
    models: Path, oracles: dict[str, GreedyOracle], name: str
) -> None:
    manifest = read_manifest(models / name, name)
    executor = executor_with(manifest.size_bytes)
    arena = memoryview(bytearray(manifest.size_bytes))
    executor.assign(manifest, arena)
    for layer in read_layers(models / name, manifest, arena):
        executor.materialize(layer)
    # The arena is free for other bytes as soon as a layer is materialized.
    arena[:] = bytes(len(arena))
    specs = [request("a", 9, 6), request("b", 30, 4)]
    instance = Instance([(executor, manifest.span)])
    instance.add(specs)
    judge(oracles[name], specs, instance.finish())


def test_the_device_has_the_same_addresses_for_every_model(models: Path) -> None:
    manifest = read_manifest(models / "tiny", "tiny")
    executor = executor_with(2 * manifest.size_bytes)
    places = []
    for _ in range(2):
        arena = memoryview(bytearray(manifest.size_bytes))
        executor.assign(manifest, arena)
        for layer in read_layers(models / "tiny", manifest, arena):
            executor.materialize(layer)
        places.append([p.data_ptr() for p in executor.parameters(1).values()])
        executor.release()
    assert places[0] == places[1]


def test_a_model_that_does_not_fit_the_device_is_refused(models: Path) -> None:
    manifest = read_manifest(models / "tiny", "tiny")
    executor = executor_with(manifest.size_bytes - 1)
    with pytest.raises(ModelError, match=f"{manifest.size_bytes} bytes on cpu"):
        executor.assign(manifest, memoryview(bytearray(manifest.size_bytes)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_named() -> None:
    with pytest.raises(ValueError, match=r"'cuda:0': torch .* finds no CUDA device"):
        TorchExecutor(KV_BYTES, BLOCK_TOKENS, "cuda:0")
