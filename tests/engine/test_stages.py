"""Stages of a model, each in an executor of its own that has only their bytes: the tokens are those
of stock transformers, and every byte of the model is in one stage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine_instance import BLOCK_TOKENS, KV_BYTES, FamilyModel, Instance, judge, request

from effort import mostly_long
from livescale.engine.executor import TorchExecutor
from livescale.engine.files.make import FAMILY_NAMES
from livescale.engine.files.model_files import (
    model_spec,
    read_layers,
    read_manifest,
    stage_manifests,
)
from livescale.values.stages import StageError, check_stages, even_stages, stage_specs
from livescale.values.types import LayerSpan

Models = Callable[[str], FamilyModel]
MODELS = [name + other for name in FAMILY_NAMES for other in ("", " other")]


@pytest.mark.parametrize(
    ("name", "count"),
    mostly_long(
        [(name, count) for name in MODELS for count in (1, 2, 3, 4)],
        [("llama", 2), ("llama other", 4), ("qwen3_moe", 3), ("gemma3", 2)],
    ),
)
def test_tokens_are_those_of_the_whole_model(family_model: Models, name: str, count: int) -> None:
    model = family_model(name)
    manifest = read_manifest(model.directory, "m")
    spec = model_spec(manifest)
    if spec.is_tied and count > 1:
        with pytest.raises(StageError, match="its head computes with the embedding's matrix"):
            stage_manifests(manifest, even_stages(spec, count))
        return
    manifests = stage_manifests(manifest, even_stages(spec, count))
    executors = []
    for stage in manifests:
        arena = bytearray(stage.size_bytes)
        executor = TorchExecutor(KV_BYTES, BLOCK_TOKENS)
        executor.assign(stage, memoryview(arena))
        for layer in read_layers(model.directory, stage, memoryview(arena)):
            executor.materialize(layer)
        executors.append((executor, stage.span))
    specs = [request(f"{name}{n}", 5 + 9 * n, 12, 512) for n in range(5)]
    instance = Instance(executors)
    instance.add(specs)
    judge(model.oracle, specs, instance.finish())
    assert sum(stage.size_bytes for stage in manifests) == manifest.size_bytes
    assert tuple(map(model_spec, manifests)) == stage_specs(spec, even_stages(spec, count))
    kv_bytes = [model_spec(stage).kv_bytes_per_token for stage in manifests]
    assert sum(kv_bytes) == spec.kv_bytes_per_token
    blocks = [KV_BYTES // (BLOCK_TOKENS * size) for size in kv_bytes]
    assert [executor.kv_blocks for executor, _ in executors] == blocks


@pytest.mark.parametrize(
    ("spans", "problem"),
    [
        ([], "no stages are listed"),
        ([(0, 2), (3, 6)], r"stage \[3, 6\) does not begin with layer 2"),
        ([(0, 3), (2, 6)], r"stage \[2, 6\) does not begin with layer 3"),
        ([(1, 3), (3, 6)], r"stage \[1, 3\) does not begin with layer 0"),
        ([(0, 3), (3, 5)], r"has 6 layers, its last stage is \[3, 5\)"),
        ([(0, 1), (1, 6)], r"stage \[0, 1\) has no decoder layer"),
        ([(0, 5), (5, 6)], r"stage \[5, 6\) has no decoder layer"),
    ],
)
def test_spans_that_are_no_stages_are_refused(
    family_model: Models, spans: list[tuple[int, int]], problem: str
) -> None:
    spec = model_spec(read_manifest(family_model("llama").directory, "m"))
    with pytest.raises(StageError, match=problem):
        check_stages(spec, [LayerSpan(*span) for span in spans])


@pytest.mark.parametrize("count", [0, 5, 9])
def test_more_stages_than_layers_are_refused(family_model: Models, count: int) -> None:
    spec = model_spec(read_manifest(family_model("llama").directory, "m"))
    with pytest.raises(StageError, match=f"cannot have {count} stages"):
        even_stages(spec, count)
