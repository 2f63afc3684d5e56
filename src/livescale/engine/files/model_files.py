"""A Hugging Face directory as LiveScale's layers: its Manifest, and its bytes put into an arena.

Which bytes go where is decided in `layout`. No torch: processes that only describe models or read
them into host memory stay small.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import msgspec
import xxhash

from livescale.engine.base.errors import ModelError
from livescale.engine.files.checkpoint import (
    ITEM_BYTES,
    Read,
    StoredTensor,
    TensorReader,
    read_text,
)
from livescale.engine.files.layout import CheckpointPlan, LayerPlan, plan_checkpoint
from livescale.engine.files.model_config import parse_config, parse_object
from livescale.values.stages import check_stages, stage_name, stages_of
from livescale.values.types import LayerEntry, LayerSpan, Manifest, ModelSpec, SamplingDefaults

COMPARE_BYTES = 16 << 20
"""Bytes of a tied head and of its embedding that are compared at a time."""

_OTHER_STAGE = LayerPlan((), (), 0)
"""Of a layer whose bytes are another stage's: there is nothing to read."""

LAYERS_AHEAD = 2
"""Layers that are read while an earlier one is not complete: small ones keep all threads busy."""


def read_manifest(directory: Path, name: str) -> Manifest:
    """The manifest of the model in `directory`, called `name`. Reads every weight byte once.

    Raises ModelError when the directory is no model that can run.
    """
    config_json = _config_text(directory)
    config = parse_config(config_json, str(directory / "config.json"))
    checkpoint = plan_checkpoint(directory, config)
    with TensorReader() as reader:
        _check_tied_head(checkpoint, reader)
        layers = tuple(_in_order(_described(checkpoint.layers, reader)))
    return Manifest(name, config_json, checkpoint.dtype, layers)


def read_layers(
    directory: Path,
    manifest: Manifest,
    destination: memoryview,
    layers: Collection[int] | None = None,
    *,
    by_content: bool = False,
) -> Iterator[int]:
    """Copy the model's layers to `destination`, which starts at the model's offset 0.

    Yields each layer's index, in order, when its bytes (padding zeros included) are complete and
    verified by their checksum or, `by_content`, by their SHA-256; a few layers behind it are being
    read meanwhile. `layers`: only these (None: all). Raises ModelError when a file ends early or a
    layer's bytes are not those of the manifest.
    """
    assert len(destination) >= manifest.size_bytes, f"{len(destination)} < {manifest.size_bytes}"
    config = parse_config(manifest.config_json, f"config of {manifest.model}")
    checkpoint = plan_checkpoint(directory, config)

    with TensorReader() as reader:
        first = 0 if manifest.stage is None else manifest.stage.first_layer
        plans = checkpoint.layers[first : first + len(manifest.layers)]
        yield from _in_order(
            _read_layer(
                directory,
                entry,
                plan if entry.tensors or manifest.stage is None else _OTHER_STAGE,
                destination,
                reader,
                by_content,
            )
            for entry, plan in zip(manifest.layers, plans, strict=True)
            if layers is None or entry.layer in layers
        )


def model_spec(manifest: Manifest) -> ModelSpec:
    """The sizes that the control plane needs. Raises ModelError for a config that cannot run."""
    config = parse_config(manifest.config_json, f"config of {manifest.model}")
    item_bytes = ITEM_BYTES[manifest.dtype]
    kv_values = 2 * (len(manifest.layers) - 2) * config.kv_heads * config.head_dim
    return ModelSpec(
        name=manifest.model,
        layer_bytes=tuple(entry.size_bytes for entry in manifest.layers),
        kv_bytes_per_token=kv_values * item_bytes,
        model_tokens_max=config.model_tokens_max,
        row_bytes_per_token=config.hidden_size * item_bytes,
        is_tied=config.is_tied,
        stage=manifest.stage,
    )


def stage_manifests(manifest: Manifest, spans: Sequence[LayerSpan]) -> tuple[Manifest, ...]:
    """The manifest of each stage of a model: its layers alone, from offset 0 on. Raises
    StageError."""
    check_stages(model_spec(manifest), spans)
    found = []
    stages = stages_of(manifest.model, len(manifest.layers), spans)
    for (stage, layers), span in zip(stages, spans, strict=True):
        start_bytes = manifest.layers[span.start].offset_bytes
        entries = tuple(
            _entry_of_stage(manifest.layers[stage.first_layer + number], number, span, start_bytes)
            for number in range(layers)
        )
        found.append(
            msgspec.structs.replace(
                manifest,
                model=stage_name(manifest.model, stage.number),
                layers=entries,
                stage=stage,
            )
        )
    return tuple(found)


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Ids that end generation: from generation_config.json, else from config.json.

    Empty when neither names any. Raises ModelError naming the file that cannot be read.
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


def _in_order(reads: Iterable[Future[Read]]) -> Iterator[Read]:
    """What comes of the reads. Each is begun when all but LAYERS_AHEAD before it are over."""
    under_way: deque[Future[Read]] = deque()
    for read in reads:
        under_way.append(read)
        if len(under_way) > LAYERS_AHEAD:
            yield under_way.popleft().result()
    while under_way:
        yield under_way.popleft().result()


def _described(plans: Sequence[LayerPlan], reader: TensorReader) -> Iterator[Future[LayerEntry]]:
    """The entries of all layers, in order; their bytes are read into memory that is used again."""
    size_bytes_max = max(plan.size_bytes for plan in plans)
    scratches = [memoryview(bytearray(size_bytes_max)) for _ in range(LAYERS_AHEAD + 1)]
    offset_bytes = 0
    for layer, plan in enumerate(plans):
        content = scratches[layer % len(scratches)][: plan.size_bytes]
        yield _fill(content, plan, reader, partial(_entry, layer, offset_bytes, plan, content))
        offset_bytes += plan.size_bytes


def _entry(layer: int, offset_bytes: int, plan: LayerPlan, content: memoryview) -> LayerEntry:
    return LayerEntry(
        layer=layer,
        offset_bytes=offset_bytes,
        size_bytes=plan.size_bytes,
        tensors=plan.entries,
        checksum=_checksum(content),
        content_hash=hashlib.sha256(content).hexdigest(),
    )


def _entry_of_stage(
    entry: LayerEntry, number: int, span: LayerSpan, start_bytes: int
) -> LayerEntry:
    """Layer `number` of the stage; one that is another stage's is without bytes."""
    offset_bytes = entry.offset_bytes - start_bytes
    if entry.layer in span:
        return msgspec.structs.replace(entry, layer=number, offset_bytes=offset_bytes)
    nothing = memoryview(b"")
    at_bytes = max(offset_bytes, 0)
    return LayerEntry(
        number, at_bytes, 0, (), _checksum(nothing), hashlib.sha256(nothing).hexdigest()
    )


def _checksum(content: memoryview) -> str:
    # Not the one-call form: that one keeps other threads from running.
    hasher = xxhash.xxh3_64()
    hasher.update(content)
    return hasher.hexdigest()


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
    reader.read_into(tensor, memoryview(content), start)
    return content


def _read_layer(
    directory: Path,
    entry: LayerEntry,
    plan: LayerPlan,
    destination: memoryview,
    reader: TensorReader,
    by_content: bool,
) -> Future[int]:
    """The layer's index, when its bytes are those of the manifest."""

    def refuse() -> int:
        raise ModelError(f"{directory} changed: layer {entry.layer} differs from its manifest")

    if plan.entries != entry.tensors:
        return reader.start((), refuse)
    content = destination[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]

    def check() -> int:
        if by_content:
            is_right = hashlib.sha256(content).hexdigest() == entry.content_hash
        else:
            is_right = _checksum(content) == entry.checksum
        if not is_right:
            kind = "SHA-256" if by_content else "checksum"
            raise ModelError(f"{directory} changed: layer {entry.layer} has another {kind}")
        return entry.layer

    return _fill(content, plan, reader, check)


def _fill(
    content: memoryview, plan: LayerPlan, reader: TensorReader, then: Callable[[], Read]
) -> Future[Read]:
    """Write one layer, then call `then`. Padding is zeroed: the place may hold other bytes."""
    reads = []
    end = 0
    for source, entry in zip(plan.sources, plan.entries, strict=True):
        content[end : entry.offset_bytes] = bytes(entry.offset_bytes - end)
        end = entry.offset_bytes
        for part in source.parts:
            reads.append((part, content[end : end + part.size_bytes]))
            end += part.size_bytes
    content[end:] = bytes(len(content) - end)
    return reader.start(reads, then)
