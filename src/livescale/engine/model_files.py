"""A Hugging Face directory as LiveScale's layers: its Manifest, and its bytes put into an arena.

Which bytes go where is decided in `layout`. No torch: processes that only describe models or read
them into host memory stay small.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from livescale.engine.checkpoint import ITEM_BYTES, StoredTensor, TensorReader, read_text
from livescale.engine.errors import ModelError
from livescale.engine.layout import CheckpointPlan, LayerPlan, plan_checkpoint
from livescale.engine.model_config import ModelShape, parse_config, parse_object
from livescale.types import LayerEntry, Manifest, ModelSpec, SamplingDefaults

COMPARE_BYTES = 16 << 20
"""Bytes of a tied head and of its embedding that are compared at a time."""


def read_manifest(directory: Path, name: str) -> Manifest:
    """The manifest of the model in `directory`, called `name`. Reads every weight byte once.

    Raises ModelError when the directory is no model that can run.
    """
    config_json = _config_text(directory)
    config = parse_config(config_json, str(directory / "config.json"))
    checkpoint = plan_checkpoint(directory, config)
    layers: list[LayerEntry] = []
    scratch = bytearray(max(plan.size_bytes for plan in checkpoint.layers))
    offset_bytes = 0
    with TensorReader() as reader:
        _check_tied_head(checkpoint, reader)
        for layer, plan in enumerate(checkpoint.layers):
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
    return Manifest(name, config_json, checkpoint.dtype, tuple(layers))


def read_layers(directory: Path, manifest: Manifest, destination: memoryview) -> Iterator[int]:
    """Copy the model's layers to `destination`, which starts at the model's offset 0.

    Yields each layer's index, in order, when its bytes (padding zeros included) are complete.
    Raises ModelError when a file ends early or a layer's bytes are not those of the manifest.
    """
    assert len(destination) >= manifest.size_bytes, f"{len(destination)} < {manifest.size_bytes}"
    config = parse_config(manifest.config_json, f"config of {manifest.model}")
    checkpoint = plan_checkpoint(directory, config)
    with TensorReader() as reader:
        for entry, plan in zip(manifest.layers, checkpoint.layers, strict=True):
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


def _config_text(directory: Path) -> str:
    if not directory.is_dir():
        raise ModelError(f"{directory} is not a directory")
    path = directory / "config.json"
    if not path.is_file():
        raise ModelError(f"{directory} is no model: it has no config.json")
    return read_text(path)


def _check_tied_head(checkpoint: CheckpointPlan, reader: TensorReader) -> None:
    """A tied model's file may hold the head, too, but only as a copy of the embedding.

    transformers runs such a file with two different tables, against its configuration.
    """
    head = checkpoint.tied_head
    if head is None:
        return
    embedding = checkpoint.layers[0].sources[0].parts[0]
    is_equal = (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
    for start in range(0, head.size_bytes, COMPARE_BYTES):
        is_equal = is_equal and _piece(head, start, reader) == _piece(embedding, start, reader)
    if not is_equal:
        raise ModelError(
            f"{head.path}: {head.name} differs from {embedding.name}, though config.json ties them;"
            " set tie_word_embeddings to false"
        )


def _piece(tensor: StoredTensor, start: int, reader: TensorReader) -> bytearray:
    content = bytearray(min(COMPARE_BYTES, tensor.size_bytes - start))
    piece = dataclasses.replace(
        tensor, offset_bytes=tensor.offset_bytes + start, size_bytes=len(content)
    )
    reader.read_into(piece, memoryview(content))
    return content


def _fill(content: memoryview, plan: LayerPlan, reader: TensorReader) -> None:
    """Write one layer. Padding is zeroed: the place may hold another model's bytes."""
    end = 0
    for source, entry in zip(plan.sources, plan.entries, strict=True):
        content[end : entry.offset_bytes] = bytes(entry.offset_bytes - end)
        end = entry.offset_bytes
        for part in source.parts:
            reader.read_into(part, content[end : end + part.size_bytes])
            end += part.size_bytes
    content[end:] = bytes(len(content) - end)
