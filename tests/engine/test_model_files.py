"""Manifests describe the files' bytes exactly, and broken directories are refused by name."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from livescale.engine.base.errors import ModelError
from livescale.engine.files.model_files import eos_token_ids, model_spec, read_layers, read_manifest

SIZES = st.integers(1, 40)


def write_model(directory: Path, weights: dict[str, np.ndarray], **config: object) -> None:
    """A single-file model; `config` overrides what is derived from the weights."""
    vocabulary, hidden = weights["model.embed_tokens.weight"].shape
    layers = len({name.split(".")[2] for name in weights if name.startswith("model.layers.")})
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 1,
        "max_position_embeddings": 64,
        **config,
    }
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields))
    save_file(weights, str(directory / "model.safetensors"))


def made_up(layers: int, vocabulary: int, hidden: int, inner: int) -> dict[str, np.ndarray]:
    """Weights with Llama's names, odd sizes and random bytes."""
    draw = np.random.default_rng([layers, vocabulary, hidden, inner])
    shapes = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        for name in "vqko":
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (hidden, hidden)
    return {name: draw.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def module_name(layer: int, layers: int, name: str) -> str:
    """The checkpoint's name of a manifest's tensor."""
    if name == "lm_head.weight":
        return name
    return f"model.layers.{layer - 1}.{name}" if 0 < layer < layers - 1 else f"model.{name}"


@given(layers=st.integers(1, 12), vocabulary=SIZES, hidden=SIZES, inner=SIZES)
def test_layout_holds_every_tensor_once_aligned_and_apart(
    tmp_path_factory: pytest.TempPathFactory, layers: int, vocabulary: int, hidden: int, inner: int
) -> None:
    directory = tmp_path_factory.mktemp("model")
    weights = made_up(layers, vocabulary, hidden, inner)
    write_model(directory, weights)
    manifest = read_manifest(directory, "m")
    arena = bytearray(b"\xff" * manifest.size_bytes)
    assert list(read_layers(directory, manifest, memoryview(arena))) == list(range(layers + 2))

    found = {}
    expected_start = 0
    for index, layer in enumerate(manifest.layers):
        assert (layer.layer, layer.offset_bytes) == (index, expected_start)
        assert layer.offset_bytes % 4096 == layer.size_bytes % 4096 == 0
        expected_start += layer.size_bytes
        content = arena[layer.offset_bytes : expected_start]
        assert layer.checksum == xxhash.xxh3_64_hexdigest(content)
        assert layer.content_hash == hashlib.sha256(content).hexdigest()
        end = 0
        for tensor in layer.tensors:
            start = tensor.offset_bytes
            assert start % 64 == 0
            assert not any(content[end:start]), "padding is zero"
            end = start + tensor.size_bytes
            values = np.frombuffer(content[start:end], np.float32).reshape(tensor.shape)
            found[module_name(index, layers + 2, tensor.name)] = values
        assert end <= layer.size_bytes
        assert not any(content[end:])
    assert found.keys() == weights.keys()
    assert all(np.array_equal(found[name], weights[name]) for name in weights)


def test_projections_that_run_together_are_neighbours(models: Path) -> None:
    layer = read_manifest(models / "tiny", "tiny").layers[1]
    names = [tensor.name.split(".")[-2] for tensor in layer.tensors]
    text = " ".join(names)
    assert "q_proj k_proj v_proj" in text
    assert "gate_proj up_proj" in text
    ends = {tensor.name: tensor.offset_bytes + tensor.size_bytes for tensor in layer.tensors}
    starts = {tensor.name: tensor.offset_bytes for tensor in layer.tensors}
    assert ends["self_attn.q_proj.weight"] == starts["self_attn.k_proj.weight"]
    assert ends["self_attn.k_proj.weight"] == starts["self_attn.v_proj.weight"]
    assert ends["mlp.gate_proj.weight"] == starts["mlp.up_proj.weight"]


def test_sharded_model_bytes_equal_the_safetensors(models: Path) -> None:
    directory = models / "tiny"
    manifest = read_manifest(directory, "tiny")
    assert manifest.config_json == (directory / "config.json").read_text()
    assert manifest.dtype == "F32"
    arena = bytearray(manifest.size_bytes)
    list(read_layers(directory, manifest, memoryview(arena)))
    stored = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(str(file), "np") as tensors:
            stored.update({name: tensors.get_tensor(name) for name in tensors.keys()})  # noqa: SIM118
    for layer in manifest.layers:
        for tensor in layer.tensors:
            name = module_name(layer.layer, len(manifest.layers), tensor.name)
            start = layer.offset_bytes + tensor.offset_bytes
            assert bytes(arena[start : start + tensor.size_bytes]) == stored.pop(name).tobytes()
    assert not stored


def test_tied_head_is_left_out_even_if_the_file_has_it(tmp_path: Path) -> None:
    weights = made_up(2, 8, 8, 8)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    write_model(tmp_path / "m", weights, tie_word_embeddings=True)
    head = read_manifest(tmp_path / "m", "m").layers[-1]
    assert [tensor.name for tensor in head.tensors] == ["norm.weight"]


def test_computed_rope_tables_of_old_checkpoints_are_no_parameters(tmp_path: Path) -> None:
    weights = made_up(1, 8, 8, 8)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    write_model(tmp_path / "m", weights)
    names = [tensor.name for tensor in read_manifest(tmp_path / "m", "m").layers[1].tensors]
    assert not any("rotary" in name for name in names)


def test_spec_of_a_model(models: Path) -> None:
    manifest = read_manifest(models / "tiny", "tiny")
    spec = model_spec(manifest)
    assert (spec.name, spec.layers, spec.size_bytes) == ("tiny", 6, manifest.size_bytes)
    assert spec.kv_bytes_per_token == 2 * 4 * 2 * 32 * 4  # K and V, layers, heads, size, fp32
    assert spec.model_tokens_max == 4096
    half = model_spec(read_manifest(models / "bf16", "bf16"))
    assert half.kv_bytes_per_token * 2 == spec.kv_bytes_per_token


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 6}, (5,)),
        ({"eos_token_id": [5, 7]}, {}, (5, 7)),
        ({}, {"eos_token_id": 6}, (6,)),
        (None, {"eos_token_id": [6]}, (6,)),
        (None, {"eos_token_id": None}, ()),
    ],
)
def test_eos_token_ids(
    tmp_path: Path, generation: dict | None, config: dict, expected: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert eos_token_ids(tmp_path) == expected


def test_eos_token_ids_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": "<end>"}')
    with pytest.raises(ModelError, match=r"config\.json: eos_token_id must be token ids"):
        eos_token_ids(tmp_path)


# -- broken directories -------------------------------------------------------------------------


def edit_config(**changes: object) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def edit_weights(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        path = directory / "model.safetensors"
        weights = load_file(str(path))
        change(weights)
        save_file(weights, str(path))

    return edit


def unindexed(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    shutil.copy(directory / "a.safetensors", directory / "b.safetensors")


def wrong_index(weight_map: dict[str, object]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        (directory / "model.safetensors").rename(directory / "a.safetensors")
        index = {"weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))

    return edit


def cut(keep_bytes: int) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        path = directory / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep_bytes])

    return edit


def cast(*names: str, dtype: str) -> Callable[[Path], None]:
    return edit_weights(
        lambda w: w.update({n: w[n].astype(dtype) for n in (names or tuple(w))}),
    )


FIRST = "model.embed_tokens.weight"
BROKEN = {
    "no directory": (shutil.rmtree, r"m is not a directory"),
    "no config": (lambda d: (d / "config.json").unlink(), r"m is no model: it has no config\.json"),
    "config is no JSON": (
        lambda d: (d / "config.json").write_text("{oops"),
        r"config\.json is not valid JSON",
    ),
    "config is a list": (
        lambda d: (d / "config.json").write_text("[]"),
        r"config\.json holds list instead of a JSON object",
    ),
    "config is no text": (
        lambda d: (d / "config.json").write_bytes(b"\xff\xfe"),
        r"config\.json cannot be read",
    ),
    "architecture": (
        edit_config(architectures=["GPT2LMHeadModel"]),
        r"architecture GPT2LMHeadModel is not supported, only LlamaForCausalLM, Qwen2",
    ),
    "no architecture": (edit_config(architectures=None), r"config\.json names no architecture"),
    "quantized": (edit_config(quantization_config={"bits": 4}), r"quantized weights"),
    "rope": (edit_config(rope_scaling={"type": "dynamic"}), r"rope_scaling of type dynamic"),
    "rope of one kind of layer": (
        edit_config(rope_parameters={"full_attention": {"rope_type": "longrope"}}),
        r"rope_parameters of type longrope is not supported for LlamaForCausalLM, only default,",
    ),
    "yarn that is longrope": (
        edit_config(architectures=["Phi3ForCausalLM"], rope_scaling={"type": "yarn"}),
        r"rope_scaling of type yarn is not supported for Phi3ForCausalLM, only default",
    ),
    "another family's type": (
        edit_config(model_type="qwen2"),
        r"model_type qwen2 is not that of LlamaForCausalLM, llama",
    ),
    "bidirectional": (
        edit_config(architectures=["Gemma3ForCausalLM"], use_bidirectional_attention=True),
        r"attention to later tokens \(use_bidirectional_attention\) is not supported",
    ),
    "layer type": (
        edit_config(layer_types=["full_attention", "chunked_attention"]),
        r"layer type chunked_attention is not supported, only full_attention, sliding_attention",
    ),
    "no size": (edit_config(hidden_size=None), r"hidden_size must be a positive integer, not None"),
    "odd size": (edit_config(vocab_size="8"), r"vocab_size must be a positive integer, not '8'"),
    "odd heads": (
        edit_config(num_attention_heads=4, num_key_value_heads=3),
        r"4 attention heads do not share 3 KV heads",
    ),
    "no weights": (
        lambda d: (d / "model.safetensors").unlink(),
        r"m holds no \*\.safetensors file",
    ),
    "several files, no index": (unindexed, r"holds 2 safetensors files and no model\.safeten"),
    "index without map": (wrong_index({}), r"index\.json has no weight_map"),
    "index names a missing file": (
        wrong_index({FIRST: "gone.safetensors"}),
        r"index\.json names gone\.safetensors, which is not in .*m$",
    ),
    "index leads out": (
        wrong_index({FIRST: "../m/a.safetensors"}),
        r"names \.\./m/a\.safetensors, which is not in",
    ),
    "index names a missing tensor": (
        wrong_index({"model.extra": "a.safetensors"}),
        r"index\.json says that model\.extra is in a\.safetensors, but it is not",
    ),
    "empty file": (cut(0), r"model\.safetensors is truncated: expected 8 bytes, the file has 0"),
    "cut in the header": (cut(20), r"model\.safetensors is truncated: expected \d+ bytes, .* 20$"),
    "cut in the data": (
        lambda d: cut((d / "model.safetensors").stat().st_size - 1)(d),
        r"model\.safetensors is truncated: expected (\d+) bytes, the file has \d+",
    ),
    "no safetensors": (
        lambda d: (d / "model.safetensors").write_bytes(b"PK\x03\x04" * 100),
        r"is no safetensors file: header of",
    ),
    "broken header": (
        lambda d: (d / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"[1, "),
        r"has a broken safetensors header",
    ),
    "lying header": (
        lambda d: (d / "model.safetensors").write_bytes(
            (len(h := b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}')).to_bytes(
                8, "little"
            )
            + h
            + bytes(8)
        ),
        r"a has 8 bytes for shape \(3,\) of F32",
    ),
    "a layer lacks a tensor": (
        edit_weights(lambda w: w.pop("model.layers.1.self_attn.k_proj.weight")),
        r"model\.layers\.1 lacks self_attn\.k_proj\.weight, which model\.layers\.0 has",
    ),
    "a layer has one more": (
        edit_weights(lambda w: w.pop("model.layers.0.self_attn.k_proj.weight")),
        r"model\.layers\.0 lacks self_attn\.k_proj\.weight, which model\.layers\.1 has",
    ),
    "a layer is missing": (
        edit_config(num_hidden_layers=3),
        r"model\.layers\.2 lacks .*, which model\.layers\.0 has",
    ),
    "a layer too many": (
        edit_config(num_hidden_layers=1),
        r"holds model\.layers\.1\..* no part of a LlamaForCausalLM with 1 layers",
    ),
    "shapes differ": (
        edit_weights(
            lambda w: w.update({"model.layers.1.mlp.up_proj.weight": np.ones((2, 8), np.float32)})
        ),
        r"model\.layers\.1\.mlp\.up_proj\.weight has shape \(2, 8\), in model\.layers\.0",
    ),
    "vocabulary differs": (
        edit_config(vocab_size=9),
        r"model\.embed_tokens\.weight has shape \(8, 8\), config\.json says \(9, 8\)",
    ),
    "no embedding": (
        edit_weights(lambda w: w.pop(FIRST)),
        r"has no tensor model\.embed_tokens\.weight",
    ),
    "tied head is another": (
        edit_config(tie_word_embeddings=True),
        r"lm_head\.weight differs from model\.embed_tokens\.weight, though config\.json ties them",
    ),
    "no norm": (
        edit_weights(lambda w: w.pop("model.norm.weight")),
        r"has no tensor model\.norm\.weight",
    ),
    "no head": (
        edit_weights(lambda w: w.pop("lm_head.weight")),
        r"m has no tensor lm_head\.weight",
    ),
    "integers": (
        cast(dtype="int32"),
        r"embed_tokens\.weight is I32, supported are F32, F16, BF16",
    ),
    "mixed": (
        cast("model.norm.weight", dtype="float16"),
        r"model\.norm\.weight is F16 but model\.embed_tokens\.weight is F32",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_directory_is_refused_by_name(tmp_path: Path, case: str) -> None:
    directory = tmp_path / "m"
    write_model(directory, made_up(2, 8, 8, 8))
    read_manifest(directory, "m")
    break_it, message = BROKEN[case]
    break_it(directory)
    with pytest.raises(ModelError, match=message) as caught:
        read_manifest(directory, "m")
    assert str(directory) in str(caught.value)


def test_architecture_is_refused_before_weights_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="MambaForCausalLM"):
        read_manifest(tmp_path, "m")


def test_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    directory = tmp_path / "m"
    weights = made_up(2, 8, 8, 8)
    write_model(directory, weights)
    manifest = read_manifest(directory, "m")
    layers = read_layers(directory, manifest, memoryview(bytearray(manifest.size_bytes)))
    assert next(layers) == 0
    path = directory / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 4)
    with pytest.raises(ModelError, match=r"model\.safetensors ends inside .*: read \d+ of its"):
        list(layers)


def test_directory_that_changed_since_its_manifest(tmp_path: Path) -> None:
    directory = tmp_path / "m"
    write_model(directory, made_up(2, 8, 8, 8))
    manifest = read_manifest(directory, "m")
    write_model(directory, made_up(2, 8, 8, 9))
    with pytest.raises(ModelError, match="changed: layer 0 has another checksum"):
        list(read_layers(directory, manifest, memoryview(bytearray(manifest.size_bytes))))
