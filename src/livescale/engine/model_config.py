"""What LiveScale must know of a model's config.json. Pure text in, values out; no files, no torch.

The whole text travels with the manifest and is read again by transformers; here only the sizes
are taken out of it, and what cannot run is refused before any weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from livescale.engine.errors import ModelError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Kinds of rope whose angles change with the longest sequence of a batch."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only model. `is_tied`: the head computes with the embedding's weights."""

    architecture: str
    decoder_layers: int
    hidden_size: int
    vocab_size: int
    heads: int
    kv_heads: int
    head_dim: int
    model_tokens_max: int
    is_tied: bool


def parse_config(text: str, where: str) -> ModelShape:
    """The sizes in a config.json; `where` names it in errors.

    Raises ModelError when it is not JSON, lacks a field, or describes a model that cannot run.
    """
    fields = parse_object(text, where)
    architecture = _architecture(fields, where)
    if fields.get("quantization_config") is not None:
        raise ModelError(f"{where}: quantized weights (quantization_config) are not supported")
    _refuse_length_dependent_rope(fields, where)
    hidden_size = _positive(fields, "hidden_size", where)
    heads = _positive(fields, "num_attention_heads", where)
    kv_heads = _positive(fields, "num_key_value_heads", where, heads)
    if heads % kv_heads:
        raise ModelError(f"{where}: {heads} attention heads do not share {kv_heads} KV heads")
    return ModelShape(
        architecture=architecture,
        decoder_layers=_positive(fields, "num_hidden_layers", where),
        hidden_size=hidden_size,
        vocab_size=_positive(fields, "vocab_size", where),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_positive(fields, "head_dim", where, hidden_size // heads),
        model_tokens_max=_positive(fields, "max_position_embeddings", where),
        is_tied=bool(fields.get("tie_word_embeddings", False)),
    )


def parse_object(text: str, where: str) -> dict[str, object]:
    """A JSON object. Raises ModelError naming `where`."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ModelError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{where} holds {type(value).__name__} instead of a JSON object")
    return value


def _architecture(fields: Mapping[str, object], where: str) -> str:
    named = fields.get("architectures")
    if not isinstance(named, list) or not named:
        raise ModelError(f"{where} names no architecture (`architectures` is missing or empty)")
    if named[0] not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ModelError(f"{where}: architecture {named[0]} is not supported, only {supported}")
    return str(named[0])


def _refuse_length_dependent_rope(fields: Mapping[str, object], where: str) -> None:
    for key in ("rope_parameters", "rope_scaling"):
        rope = fields.get(key)
        kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
        if kind in LENGTH_DEPENDENT_ROPE:
            raise ModelError(f"{where}: {key} of type {kind} is not supported")


def _positive(
    fields: Mapping[str, object], key: str, where: str, default: int | None = None
) -> int:
    value = fields.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{where}: {key} must be a positive integer, not {value!r}")
    return value
