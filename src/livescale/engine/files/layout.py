"""Which bytes of a checkpoint make which layer, and where they lie in it.

The layout of a layer is decided here and nowhere else. No bytes are read. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from livescale.engine.base.errors import ModelError
from livescale.engine.files.checkpoint import ITEM_BYTES, StoredTensor, stored_tensors
from livescale.engine.files.families import DOWN, GATE_UP, TensorPlace, tensor_place
from livescale.engine.files.model_config import ModelShape
from livescale.values.types import TensorEntry

TENSOR_ALIGN_BYTES = 64  # a cache line, and enough for every vector load
LAYER_ALIGN_BYTES = 4096  # a page: a layer can be registered, mapped and dropped on its own

EMBEDDING = "embed_tokens.weight"
FINAL_NORM = "norm.weight"
LM_HEAD = "lm_head.weight"

_DECODER_TENSOR = re.compile(r"model\.layers\.(0|[1-9]\d*)\.(.+)")

#: Not parameters, and left out as transformers does: tables of rope, masks and positions, which
#: modules compute. Old checkpoints carry them, some in dtypes that no parameter has.
_IGNORED = re.compile(
    r"model\.(layers\.\d+\.)?((self_attn|attn|attention)\.)?(rotary_emb\.)?"
    r"((\w+_)?(inv_freq|cos_cached|sin_cached)|position_ids|causal_mask)"
    r"|model\.layers\.\d+\.(self_attn|attn|attention)\.(masked_)?bias"
)

#: Tensors of a layer in the order of use; q, k, v and gate, up are neighbours, so that each group
#: can be run as one matrix. Others follow by name.
_ORDER = (
    "input_layernorm.weight",
    "self_attn.qkv_proj.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.q_proj.bias",
    "self_attn.k_proj.bias",
    "self_attn.v_proj.bias",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "self_attn.o_proj.weight",
    "self_attn.o_proj.bias",
    "post_attention_layernorm.weight",
    "pre_feedforward_layernorm.weight",
    "mlp.gate.weight",
    GATE_UP,
    DOWN,
    "mlp.gate_up_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.gate_proj.bias",
    "mlp.up_proj.bias",
    "mlp.down_proj.weight",
    "mlp.down_proj.bias",
    "post_feedforward_layernorm.weight",
    FINAL_NORM,
    LM_HEAD,
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter as its module holds it: the bytes of `parts`, one behind the other."""

    shape: tuple[int, ...]
    parts: tuple[StoredTensor, ...]

    @property
    def dtype(self) -> str:
        return self.parts[0].dtype

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    def __str__(self) -> str:
        more = f" and {len(self.parts) - 1} more" if len(self.parts) > 1 else ""
        return f"{self.parts[0].path}: {self.parts[0].name}{more}"


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Where a layer's tensors come from (`sources`) and where they go (`entries`), in one order."""

    sources: tuple[Parameter, ...]
    entries: tuple[TensorEntry, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """All layers of a directory, and the copy of a tied embedding that it may hold as its head."""

    layers: tuple[LayerPlan, ...]
    tied_head: StoredTensor | None

    @property
    def dtype(self) -> str:
        """The one dtype of all tensors."""
        return self.layers[0].sources[0].dtype


def plan_checkpoint(directory: Path, config: ModelShape) -> CheckpointPlan:
    """Layers 0…L+1 of the directory's checkpoint.

    Raises ModelError when the tensors are not those of the configuration, or cannot run.
    """
    stored = stored_tensors(directory)
    layers = _group_by_layer(stored, config)
    _check_ends(directory, config, layers)
    _check_decoder_layers(directory, config, layers[1:-1])
    plans = tuple(_plan(tensors) for tensors in layers)
    _check_dtypes(plans)
    return CheckpointPlan(plans, stored.get(LM_HEAD) if config.is_tied else None)


# -- helpers, in the order used -----------------------------------------------------------------

_Layer = dict[str, Parameter]


def _group_by_layer(stored: Mapping[str, StoredTensor], config: ModelShape) -> list[_Layer]:
    """Parameters of layers 0…L+1 by their names inside the layer's module."""
    first, last = 0, config.decoder_layers + 1
    found: list[dict[TensorPlace, StoredTensor]] = [{} for _ in range(last + 1)]
    for name, tensor in stored.items():
        decoder = _DECODER_TENSOR.fullmatch(name)
        if _IGNORED.fullmatch(name) or (name == LM_HEAD and config.is_tied):
            continue
        if name == f"model.{EMBEDDING}":
            layer, place = first, TensorPlace(EMBEDDING)
        elif name == f"model.{FINAL_NORM}":
            layer, place = last, TensorPlace(FINAL_NORM)
        elif name == LM_HEAD:
            layer, place = last, TensorPlace(LM_HEAD)
        elif decoder and int(decoder[1]) < config.decoder_layers:
            layer, place = int(decoder[1]) + 1, tensor_place(config.family, decoder[2])
        else:
            raise ModelError(
                f"{tensor.path} holds {name}, which is no part of a {config.architecture}"
                f" with {config.decoder_layers} layers"
            )
        other = found[layer].setdefault(place, tensor)
        if other is not tensor:
            raise ModelError(f"{tensor.path}: {name} is the same parameter as {other.name}")
    return [_parameters(places, config.experts) for places in found]


def _parameters(places: Mapping[TensorPlace, StoredTensor], experts: int) -> _Layer:
    """One layer's parameters, experts merged in the order of their numbers."""
    whole = {place.name: tensor for place, tensor in places.items() if place.part is None}
    parameters = {name: Parameter(t.shape, (t,)) for name, t in whole.items()}
    for name, halves in ((GATE_UP, 2), (DOWN, 1)):
        parts = {p.part: t for p, t in places.items() if p.name == name and p.part is not None}
        if not parts:
            continue
        wanted = [(expert, half) for expert in range(experts) for half in range(halves)]
        one = next(iter(parts.values()))
        if name in whole:
            raise ModelError(f"{one.path}: {one.name} is a part of {whole[name].name}")
        if sorted(parts) != wanted:
            raise ModelError(
                f"{one.path}: {one.name} is one of {len(parts)} parts of experts,"
                f" {experts} experts have {len(wanted)}"
            )
        parameters[name] = _merged([parts[part] for part in wanted], experts, halves)
    return parameters


def _merged(parts: list[StoredTensor], experts: int, halves: int) -> Parameter:
    for part in parts:
        if len(part.shape) != 2 or part.shape != parts[0].shape:
            raise ModelError(
                f"{part.path}: {part.name} has shape {part.shape},"
                f" {parts[0].name} has {parts[0].shape}"
            )
    rows, columns = parts[0].shape
    return Parameter((experts, halves * rows, columns), tuple(parts))


def _check_ends(directory: Path, config: ModelShape, layers: list[_Layer]) -> None:
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
            raise ModelError(f"{tensor} has shape {tensor.shape}, config.json says {shape}")


def _check_decoder_layers(directory: Path, config: ModelShape, decoders: list[_Layer]) -> None:
    """All decoder layers with experts hold the same tensors in the same shapes; so do the rest."""
    mixing = [i for i in range(len(decoders)) if i in config.expert_layers]
    dense = [i for i in range(len(decoders)) if i not in config.expert_layers]
    for index in mixing:
        for name in (GATE_UP, DOWN):
            if name not in decoders[index]:
                raise ModelError(f"{directory}: model.layers.{index} has no {name}, nor its parts")
    for kind in (mixing, dense):
        _check_alike(directory, decoders, kind)


def _check_alike(directory: Path, decoders: list[_Layer], indices: Iterable[int]) -> None:
    reference: int | None = None
    for index in indices:
        tensors = decoders[index]
        if reference is None:
            reference = index
            if not tensors:
                raise ModelError(f"{directory} has no tensor of model.layers.{index}")
        first = decoders[reference]
        for name in sorted(first.keys() ^ tensors.keys()):
            has, lacks = (reference, index) if name in first else (index, reference)
            raise ModelError(
                f"{directory}: model.layers.{lacks} lacks {name}, which model.layers.{has} has"
            )
        for name, tensor in sorted(tensors.items()):
            if tensor.shape != first[name].shape:
                raise ModelError(
                    f"{tensor} has shape {tensor.shape},"
                    f" in model.layers.{reference} it is {first[name].shape}"
                )


def _plan(tensors: _Layer) -> LayerPlan:
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
    return LayerPlan(
        sources=tuple(tensors[name] for name in names),
        entries=tuple(entries),
        size_bytes=_align(offset_bytes, LAYER_ALIGN_BYTES),
    )


def _align(amount_bytes: int, to_bytes: int) -> int:
    return -(-amount_bytes // to_bytes) * to_bytes


def _check_dtypes(plans: Iterable[LayerPlan]) -> None:
    """All tensors have one dtype, and it can run."""
    tensors = [part for plan in plans for source in plan.sources for part in source.parts]
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
