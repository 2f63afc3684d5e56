"""TorchExecutor's dealings with arena, manifest and pool (its tokens: test_greedy.py)."""

from __future__ import annotations

import gc
from pathlib import Path

import msgspec
import pytest
import torch
from engine_instance import BLOCK_TOKENS, KV_BYTES, Instance, judge, load, request
from torch.nn.functional import linear

from livescale.batching.runs.run import Run, Segment
from livescale.engine.base.errors import ModelError
from livescale.engine.executor import TorchExecutor
from livescale.engine.files.model_files import read_layers, read_manifest
from livescale.engine.oracle import GreedyOracle
from livescale.values.types import LayerEntry, LayerSpan, Manifest, SamplingParams

ALL = LayerSpan(0, 6)


def one_segment(count: int, span: LayerSpan = ALL) -> Run:
    blocks = tuple(range(-(-count // BLOCK_TOKENS)))
    segment = Segment("r", 0, 0, tuple(range(count)), blocks, True, SamplingParams(1))
    return Run(1, span, (segment,))


@pytest.mark.parametrize("model", ["tiny", "tied", "bf16"])
def test_parameters_are_views_of_the_arena(models: Path, model: str) -> None:
    executor, manifest, arena = load(models / model)
    start = torch.frombuffer(arena, dtype=torch.uint8).data_ptr()
    for layer in manifest.layers:
        parameters = executor.parameters(layer.layer)
        assert parameters.keys() == {tensor.name for tensor in layer.tensors}
        for tensor in layer.tensors:
            parameter = parameters[tensor.name]
            assert parameter.data_ptr() == start + layer.offset_bytes + tensor.offset_bytes
            assert tuple(parameter.shape) == tensor.shape
            assert not parameter.requires_grad
            parameter_bytes = parameter.flatten().view(torch.uint8)
            assert len(parameter_bytes) == tensor.size_bytes
    norm = manifest.layers[-1]
    place = norm.offset_bytes + norm.tensors[0].offset_bytes
    arena[place : place + 4] = bytes(4)
    assert float(executor.parameters(norm.layer)["norm.weight"].flatten()[0]) == 0


def test_layers_materialize_one_by_one(models: Path) -> None:
    directory = models / "tiny"
    manifest = read_manifest(directory, "tiny")
    arena = bytearray(manifest.size_bytes)
    executor = TorchExecutor(KV_BYTES, BLOCK_TOKENS)
    executor.assign(manifest, memoryview(arena))
    assert repr(executor) == "<TorchExecutor cpu, tiny 0/6 layers, 256 KV blocks>"
    for layer in read_layers(directory, manifest, memoryview(arena)):
        with pytest.raises(AssertionError, match=f"layer {layer} is not materialized"):
            executor.run(one_segment(3, LayerSpan(0, layer + 1)))
        executor.materialize(layer)
        result = executor.run(one_segment(3, LayerSpan(0, layer + 1)))
        if layer < 5:
            assert result.hidden is not None
            assert result.hidden.shape == (3, 128)
            assert result.token_ids == []
    assert result.hidden is None
    assert len(result.token_ids) == 1


def test_tied_head_needs_layer_0(models: Path) -> None:
    executor, _, _ = load(models / "tied", layers=[4, 5])
    with pytest.raises(AssertionError, match="layer 0 is not materialized"):
        executor.run(one_segment(3, LayerSpan(4, 6)), torch.zeros(3, 128))


def test_release_frees_the_arena_and_leaves_its_bytes(models: Path) -> None:
    executor, manifest, arena = load(models / "tiny")
    executor.run(one_segment(3))
    before = bytes(arena)
    gc.disable()
    try:
        executor.release()
        arena.append(0)  # BufferError while anything looks at it
    finally:
        gc.enable()
    assert bytes(arena[:-1]) == before
    assert repr(executor) == "<TorchExecutor cpu, no model>"
    executor.assign(manifest, memoryview(arena))
    assert executor.kv_blocks == 256


def test_pool_is_recut_for_each_model(models: Path, oracles: dict[str, GreedyOracle]) -> None:
    executor, _, _ = load(models / "bf16")
    assert executor.kv_blocks == 512  # half the bytes per token
    other = Instance([(executor, ALL)])
    other.add([request("before", 50, 4)])
    other.finish()
    manifest = read_manifest(models / "tied", "tied")
    arena = bytearray(manifest.size_bytes)
    executor.assign(manifest, memoryview(arena))
    for layer in read_layers(models / "tied", manifest, memoryview(arena)):
        executor.materialize(layer)
    assert executor.kv_blocks == 256
    instance = Instance([(executor, ALL)])
    specs = [request("a", 20, 8), request("b", 9, 8)]
    instance.add(specs)
    judge(oracles["tied"], specs, instance.finish())


def test_equal_logits_give_the_lowest_id(models: Path) -> None:
    executor, manifest, arena = load(models / "tiny")
    rows = executor.run(one_segment(4, LayerSpan(0, 5))).hidden
    assert rows is not None
    best = executor.run(one_segment(4)).token_ids[0]
    head = executor.parameters(5)["lm_head.weight"]
    for twin in (3, 700, 1023):
        head[twin] = head[best]
    normed = linear(rows[-1:], head)
    assert int((normed == normed[0, best]).sum()) == 4
    executor.assign(manifest, memoryview(arena))  # what was changed are the arena's bytes
    for layer in range(6):
        executor.materialize(layer)
    assert executor.run(one_segment(4)).token_ids == [min(best, 3)]
    assert manifest.span == ALL


def changed(manifest: Manifest, layer: int, **changes: object) -> Manifest:
    """The manifest with fields of one layer's first tensor replaced; `tensors` of the layer."""
    entry = manifest.layers[layer]
    tensors = changes.pop("tensors", None)
    if tensors is None:
        tensors = (msgspec.structs.replace(entry.tensors[0], **changes), *entry.tensors[1:])
    entry = msgspec.structs.replace(entry, tensors=tensors)
    layers: tuple[LayerEntry, ...] = (
        *manifest.layers[:layer],
        entry,
        *manifest.layers[layer + 1 :],
    )
    return msgspec.structs.replace(manifest, layers=layers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensors": ()}, "layer 2 lacks tensor input_layernorm.weight"),
        ({"name": "extra.weight"}, "layer 2 lacks tensor input_layernorm.weight"),
        ({"shape": (2, 64)}, r"layer 2: input_layernorm.weight is F32 \(2, 64\), its module wants"),
        ({"dtype": "BF16"}, r"layer 2: input_layernorm.weight is BF16 \(128,\), its module wants"),
    ],
)
def test_manifest_and_module_must_agree(
    models: Path, changes: dict[str, object], message: str
) -> None:
    manifest = changed(read_manifest(models / "tiny", "tiny"), 2, **changes)
    executor = TorchExecutor(KV_BYTES, BLOCK_TOKENS)
    executor.assign(manifest, memoryview(bytearray(manifest.size_bytes)))
    executor.materialize(1)
    with pytest.raises(ModelError, match=message):
        executor.materialize(2)


def test_tensor_that_no_module_has(models: Path) -> None:
    manifest = read_manifest(models / "tiny", "tiny")
    tensors = manifest.layers[2].tensors
    extra = msgspec.structs.replace(tensors[0], name="self_attn.q_proj.bias")
    manifest = changed(manifest, 2, tensors=(*tensors, extra))
    executor = TorchExecutor(KV_BYTES, BLOCK_TOKENS)
    executor.assign(manifest, memoryview(bytearray(manifest.size_bytes)))
    with pytest.raises(ModelError, match=r"layer 2 has tensor self_attn\.q_proj\.bias, which"):
        executor.materialize(2)


def test_what_cannot_run_is_refused_with_sizes(models: Path) -> None:
    manifest = read_manifest(models / "tiny", "tiny")
    arena = memoryview(bytearray(manifest.size_bytes))
    executor = TorchExecutor(KV_BYTES, BLOCK_TOKENS)
    with pytest.raises(ModelError, match=r"tensor parallelism \(tp_size 2\) is not supported"):
        executor.assign(msgspec.structs.replace(manifest, tp_size=2), arena)
    with pytest.raises(ModelError, match=r"tiny needs 3428352 bytes of arena, there are 3428351"):
        executor.assign(manifest, arena[:-1])
    with pytest.raises(ModelError, match=r"needs 8192 bytes for one KV block .* the pool has 8191"):
        TorchExecutor(8191, BLOCK_TOKENS).assign(manifest, arena)
    fewer = msgspec.structs.replace(manifest, layers=manifest.layers[:-1])
    with pytest.raises(ModelError, match="the manifest has 5 layers, the configuration 6"):
        executor.assign(fewer, arena)
    with pytest.raises(ValueError, match="on devices 'cpu' and 'cuda', not on 'xpu'"):
        TorchExecutor(KV_BYTES, BLOCK_TOKENS, "xpu")
    assert repr(executor) == "<TorchExecutor cpu, no model>"


@pytest.mark.parametrize("span", [ALL, LayerSpan(0, 3), LayerSpan(2, 6)])
def test_measured_rate_is_positive(models: Path, span: LayerSpan) -> None:
    executor, _, _ = load(models / "tiny")
    assert executor.prefill_tokens_per_s(span, 32) > 0
    assert executor.prefill_tokens_per_s(span, 100_000) > 0  # as much as the pool holds
