"""A Hugging Face directory as LiveScale's layers: its Manifest, and its bytes put into an arena.

The layout of a layer is decided here and nowhere else. No torch: processes that only describe
models or read them into host memory stay small.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from livescale.engine.checkpoint import (
    ITEM_BYTES,
    StoredTensor,
    TensorReader,
    read_text,
    stored_tensors,
)
from livescale.engine.errors import ModelError
from livescale.engine.model_config import ModelShape, parse_config, parse_object
from livescale.types import LayerEntry, Manifest, ModelSpec, SamplingDefaults, TensorEntry

TENSOR_ALIGN_BYTES = 64  # a cache line, and enough for every vector load
LAYER_ALIGN_BYTES = 4096  # a page: a layer can be registered, mapped and dropped on its own

EMBEDDING = "embed_tokens.weight"
FINAL_NORM = "norm.weight"
LM_HEAD = "lm_head.weight"

_DECODER_TENSOR = re.compile(r"model\.layers\.(0|[1-9]\d*)\.(.+)")

#: Not parameters: old checkpoints carry the rope table, which the modules compute.
_IGNORED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")

#: Tensors of a layer in the order of use; q, k, v and gate, up are neighbours, so that each group
#: can be run as one matrix. Others follow by name.
_ORDER = (
    "input_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.q_proj.bias",
    "self_attn.k_proj.bias",
    "self_attn.v_proj.bias",
    "self_attn.o_proj.weight",
    "self_attn.o_proj.bias",
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.gate_proj.bias",
    "mlp.up_proj.bias",
    "mlp.down_proj.weight",
    "mlp.down_proj.bias",
    FINAL_NORM,
    LM_HEAD,
)


def read_manifest(directory: Path, name: str) -> Manifest:
    """The manifest of the model in `directory`, called `name`. Reads every weight byte once.

    Raises ModelError when the directory is no model that can run.
    """
    config_json = _config_text(directory)
    config = parse_config(config_json, str(directory / "config.json"))
    plans = _plan_layers(directory, config)
    dtype = _common_dtype(plans)
    layers: list[LayerEntry] = []
    scratch = bytearray(max(plan.size_bytes for plan in plans))
    offset_bytes = 0
    with TensorReader() as reader:
        for layer, plan in enumerate(plans):
            content = memoryview(scratch)[: plan.size_bytes]
            _fill(content, plan, reader)
            layers.append(
                LayerEntry(
                    layer=layer,
                    offset_bytes=offset_bytes,
                    size_bytes=plan.size_bytes,
                    tensors=plan.entries,
                    checksum=xxhash.xxh3_64_hexdigest(content),
                    content_hash=hashlib.sha256(content).hexdigest(),
                )
            )
            offset_bytes += plan.size_bytes
    return Manifest(model=name, config_json=config_json, dtype=dtype, layers=tuple(layers))


def read_layers(directory: Path, manifest: Manifest, destination: memoryview) -> Iterator[int]:
    """Copy the model's layers to `destination`, which starts at the model's offset 0.

    Yields each layer's index, in order, when its bytes (padding zeros included) are complete.
    Raises ModelError when a file ends early or a layer's bytes are not those of the manifest.
    """
    assert len(destination) >= manifest.size_bytes, f"{len(destination)} < {manifest.size_bytes}"
    config = parse_config(manifest.config_json, f"config of {manifest.model}")
    plans = _plan_layers(directory, config)
    with TensorReader() as reader:
        for entry, plan in zip(manifest.layers, plans, strict=True):
            if plan.entries != entry.tensors:
                raise ModelError(
                    f"{directory} changed: layer {entry.layer} differs from its manifest"
                )
            stop = entry.offset_bytes + entry.size_bytes
            content = destination[entry.offset_bytes : stop]
            _fill(content, plan, reader)
            if xxhash.xxh3_64_hexdigest(content) != entry.checksum:
                raise ModelError(f"{directory} changed: layer {entry.layer} has another checksum")
            yield entry.layer


def model_spec(manifest: Manifest) -> ModelSpec:
    """The sizes that the control plane needs. Raises ModelError for a config that cannot run."""
    config = parse_config(manifest.config_json, f"config of {manifest.model}")
    return ModelSpec(
        name=manifest.model,
        layer_bytes=tuple(entry.size_bytes for entry in manifest.layers),
        kv_bytes_per_token=kv_bytes_per_token(manifest, config),
        model_tokens_max=config.model_tokens_max,
    )


def kv_bytes_per_token(manifest: Manifest, config: ModelShape) -> int:
    """Bytes of keys and values that one position takes in all decoder layers together."""
    per_layer = 2 * config.kv_heads * config.head_dim * ITEM_BYTES[manifest.dtype]
    return config.decoder_layers * per_layer


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Ids that end generation: from generation_config.json, else from config.json.

    Empty when neither says. Raises ModelError naming the file that cannot be read.
    """
    for path in (directory / "generation_config.json", directory / "config.json"):
        if not path.is_file():
            continue
        value = parse_object(read_text(path), str(path)).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if value is None:
            continue
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise ModelError(f"{path}: eos_token_id must be token ids, not {value!r}")
        return tuple(ids)
    return ()


def sampling_defaults(directory: Path) -> SamplingDefaults:
    """How the model's authors sample: from generation_config.json, where there is one.

    Raises ModelError naming the file and the value that is no number.
    """
    path = directory / "generation_config.json"
    if not path.is_file():
        return SamplingDefaults()
    fields = parse_object(read_text(path), str(path))
    given = {
        name: fields[name]
        for name in SamplingDefaults.__struct_fields__
        if fields.get(name) is not None
    }
    try:
        return msgspec.convert(given, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path}: {error}") from error


# -- helpers, in the order used -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LayerPlan:
    """Where a layer's tensors come from (`sources`) and where they go (`entries`), in one order."""

    sources: tuple[StoredTensor, ...]
    entries: tuple[TensorEntry, ...]
    size_bytes: int


def _config_text(directory: Path) -> str:
    if not directory.is_dir():
        raise ModelError(f"{directory} is not a directory")
    path = directory / "config.json"
    if not path.is_file():
        raise ModelError(f"{directory} is no model: it has no config.json")
    return read_text(path)


def _plan_layers(directory: Path, config: ModelShape) -> list[_LayerPlan]:
    layers = _group_by_layer(directory, config)
    _check_decoder_layers(directory, layers[1:-1])
    return [_plan(tensors) for tensors in layers]


def _group_by_layer(directory: Path, config: ModelShape) -> list[dict[str, StoredTensor]]:
    """Tensors of layers 0…L+1 by their names inside the layer's module."""
    head = config.decoder_layers + 1
    layers: list[dict[str, StoredTensor]] = [{} for _ in range(head + 1)]
    for name, tensor in stored_tensors(directory).items():
        decoder = _DECODER_TENSOR.fullmatch(name)
        if _IGNORED.fullmatch(name):
            continue
        if name == f"model.{EMBEDDING}":
            layers[0][EMBEDDING] = tensor
        elif name == f"model.{FINAL_NORM}":
            layers[head][FINAL_NORM] = tensor
        elif name == LM_HEAD:
            if not config.is_tied:
                layers[head][LM_HEAD] = tensor
        elif decoder and int(decoder[1]) < config.decoder_layers:
            layers[int(decoder[1]) + 1][decoder[2]] = tensor
        else:
            raise ModelError(
                f"{tensor.path} holds {name}, which is no part of a {config.architecture}"
                f" with {config.decoder_layers} layers"
            )
    _check_ends(directory, config, layers)
    return layers


def _check_ends(directory: Path, config: ModelShape, layers: list[dict[str, StoredTensor]]) -> None:
    """Embedding, final norm and head are there, in the sizes of the configuration."""
    table = (config.vocab_size, config.hidden_size)
    required = [
        (0, EMBEDDING, f"model.{EMBEDDING}", table),
        (-1, FINAL_NORM, f"model.{FINAL_NORM}", (config.hidden_size,)),
    ]
    if not config.is_tied:
        required.append((-1, LM_HEAD, LM_HEAD, table))
    for layer, name, full_name, shape in required:
        tensor = layers[layer].get(name)
        if tensor is None:
            raise ModelError(f"{directory} has no tensor {full_name}")
        if tensor.shape != shape:
            raise ModelError(
                f"{tensor.path}: {full_name} has shape {tensor.shape}, config.json says {shape}"
            )


def _check_decoder_layers(directory: Path, decoders: list[dict[str, StoredTensor]]) -> None:
    """All decoder layers hold the same tensors in the same shapes."""
    first = {name: tensor.shape for name, tensor in decoders[0].items()}
    if not first:
        raise ModelError(f"{directory} has no tensor of model.layers.0")
    for index, tensors in enumerate(decoders):
        for name in sorted(first.keys() ^ tensors.keys()):
            has, lacks = (0, index) if name in first else (index, 0)
            raise ModelError(
                f"{directory}: model.layers.{lacks} lacks {name}, which model.layers.{has} has"
            )
        for name, tensor in sorted(tensors.items()):
            if tensor.shape != first[name]:
                raise ModelError(
                    f"{tensor.path}: {tensor.name} has shape {tensor.shape},"
                    f" in model.layers.0 it is {first[name]}"
                )


def _plan(tensors: Mapping[str, StoredTensor]) -> _LayerPlan:
    ranks = {name: rank for rank, name in enumerate(_ORDER)}
    names = sorted(tensors, key=lambda name: (ranks.get(name, len(ranks)), name))
    entries = []
    offset_bytes = 0
    for name in names:
        tensor = tensors[name]
        entries.append(
            TensorEntry(name, tensor.dtype, tensor.shape, offset_bytes, tensor.size_bytes)
        )
        offset_bytes = _align(offset_bytes + tensor.size_bytes, TENSOR_ALIGN_BYTES)
    return _LayerPlan(
        sources=tuple(tensors[name] for name in names),
        entries=tuple(entries),
        size_bytes=_align(offset_bytes, LAYER_ALIGN_BYTES),
    )


def _align(amount_bytes: int, to_bytes: int) -> int:
    return -(-amount_bytes // to_bytes) * to_bytes


def _common_dtype(plans: list[_LayerPlan]) -> str:
    tensors = [tensor for plan in plans for tensor in plan.sources]
    first = tensors[0]
    for tensor in tensors:
        if tensor.dtype not in ITEM_BYTES:
            supported = ", ".join(ITEM_BYTES)
            raise ModelError(
                f"{tensor.path}: {tensor.name} is {tensor.dtype}, supported are {supported}"
            )
        if tensor.dtype != first.dtype:
            raise ModelError(
                f"{tensor.path}: {tensor.name} is {tensor.dtype} but {first.name} is"
                f" {first.dtype}; a model must have one dtype"
            )
    return first.dtype


def _fill(content: memoryview, plan: _LayerPlan, reader: TensorReader) -> None:
    """Write one layer. Padding is zeroed: the place may hold another model's bytes."""
    end = 0
    for source, entry in zip(plan.sources, plan.entries, strict=True):
        content[end : entry.offset_bytes] = bytes(entry.offset_bytes - end)
        end = entry.offset_bytes + entry.size_bytes
        reader.read_into(source, content[entry.offset_bytes : end])
    content[end:] = bytes(len(content) - end)
