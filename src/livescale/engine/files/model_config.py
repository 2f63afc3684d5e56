"""What LiveScale must know of a model's config.json. Pure text in, values out; no files, no torch.

The whole text travels with the manifest and is read again by transformers; here only the sizes
are taken out of it, and what cannot run is refused before any weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass

from livescale.engine.base.errors import ModelError
from livescale.engine.files.families import FAMILIES, Family

SUPPORTED_ARCHITECTURES = tuple(FAMILIES)

ATTENTION_KINDS = ("full_attention", "sliding_attention")
"""Values of `layer_types` that can run."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only model. `is_tied`: the head computes with the embedding's weights.

    `expert_layers` are the decoder layers (from 0) that mix `experts` experts.
    """

    family: Family
    decoder_layers: int
    hidden_size: int
    vocab_size: int
    heads: int
    kv_heads: int
    head_dim: int
    model_tokens_max: int
    is_tied: bool
    experts: int
    expert_layers: tuple[int, ...]

    @property
    def architecture(self) -> str:
        return self.family.architecture

    def missing(self, layers: range, present: Container[int]) -> list[int]:
        """Layers that are not `present` and without which `layers` cannot run; a tied head needs
        layer 0, too."""
        needed = list(layers)
        if self.is_tied and self.decoder_layers + 1 in layers and 0 not in layers:
            needed.append(0)
        return [layer for layer in needed if layer not in present]


def parse_config(text: str, where: str) -> ModelShape:
    """The sizes in a config.json; `where` names it in errors.

    Raises ModelError when it is not JSON, lacks a field, or describes a model that cannot run.
    """
    fields = parse_object(text, where)
    family = _family(fields, where)
    _refuse_features(fields, where)
    _refuse_rope(fields, family, where)
    layers = _positive(fields, "num_hidden_layers", where)
    hidden_size = _positive(fields, "hidden_size", where)
    heads = _positive(fields, "num_attention_heads", where)
    # A key that is absent has the family's default; null stands for the sizes' own arithmetic.
    kv_default = heads if "num_key_value_heads" in fields else family.kv_heads
    kv_heads = _positive(fields, "num_key_value_heads", where, kv_default or heads)
    if heads % kv_heads:
        raise ModelError(f"{where}: {heads} attention heads do not share {kv_heads} KV heads")
    head_default = None if "head_dim" in fields else family.head_dim
    experts, expert_layers = _experts(fields, family, layers, where)
    return ModelShape(
        family=family,
        decoder_layers=layers,
        hidden_size=hidden_size,
        vocab_size=_positive(fields, "vocab_size", where),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_positive(fields, "head_dim", where, head_default or hidden_size // heads),
        model_tokens_max=_model_tokens_max(fields, family, where),
        is_tied=bool(fields.get("tie_word_embeddings", family.is_tied)),
        experts=experts,
        expert_layers=expert_layers,
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


def _family(fields: Mapping[str, object], where: str) -> Family:
    named = fields.get("architectures")
    if not isinstance(named, list) or not named:
        raise ModelError(f"{where} names no architecture (`architectures` is missing or empty)")
    family = FAMILIES.get(str(named[0]))
    if family is None:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ModelError(f"{where}: architecture {named[0]} is not supported, only {supported}")
    model_type = fields.get("model_type", family.model_type)
    if model_type != family.model_type:
        raise ModelError(
            f"{where}: model_type {model_type} is not that of {family.architecture},"
            f" {family.model_type}"
        )
    return family


def _refuse_features(fields: Mapping[str, object], where: str) -> None:
    if fields.get("quantization_config") is not None:
        raise ModelError(f"{where}: quantized weights (quantization_config) are not supported")
    if fields.get("use_bidirectional_attention"):
        raise ModelError(
            f"{where}: attention to later tokens (use_bidirectional_attention) is not supported"
        )
    kinds = fields.get("layer_types") or []
    if not isinstance(kinds, list):
        raise ModelError(f"{where}: layer_types must be a list, not {kinds!r}")
    for kind in kinds:
        if kind not in ATTENTION_KINDS:
            supported = ", ".join(ATTENTION_KINDS)
            raise ModelError(f"{where}: layer type {kind} is not supported, only {supported}")


def _refuse_rope(fields: Mapping[str, object], family: Family, where: str) -> None:
    for key in ("rope_parameters", "rope_scaling"):
        rope = fields.get(key)
        # Some families have one table per layer type.
        nested = [rope, *rope.values()] if isinstance(rope, dict) else []
        for table in nested:
            kind = table.get("rope_type", table.get("type")) if isinstance(table, dict) else None
            if kind is not None and kind not in family.rope_types:
                supported = ", ".join(family.rope_types)
                raise ModelError(
                    f"{where}: {key} of type {kind} is not supported for"
                    f" {family.architecture}, only {supported}"
                )


def _model_tokens_max(fields: Mapping[str, object], family: Family, where: str) -> int:
    """The longest prompt and answer: as many positions as the model's angles are made for.

    `linear` stretches `max_position_embeddings` by its factor, `yarn` the length before it,
    `original_max_position_embeddings`. transformers documents it so, and vLLM computes its
    `max_model_len` so. transformers itself has no limit, and equal angles at any position: only
    which table holds, and what is absent from it, is as in its configuration classes.

    vLLM differs in three places, where the angles of transformers decide. A factor in a table of
    type `default` stretches nothing. `original_max_position_embeddings` beside the table, instead
    of in it, is not read. `yarn` with a factor of null has its length in
    `max_position_embeddings`. The length of `llama3` stands there, too.
    """
    tokens = _positive(fields, "max_position_embeddings", where)
    key = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    table = fields.get(key)
    if family.is_length_scaled or not isinstance(table, dict):
        return tokens
    kind = table.get("rope_type", table.get("type"))
    factor = table.get("factor")
    if kind not in ("linear", "yarn") or (kind == "yarn" and factor is None):
        return tokens
    where = f"{where}: {key}"
    if kind == "yarn":
        tokens = _positive(table, "original_max_position_embeddings", where, tokens)
    stretched = 0
    if isinstance(factor, int | float) and not isinstance(factor, bool):
        with suppress(OverflowError, ValueError):  # JSON in Python has Infinity and NaN
            stretched = int(tokens * factor)
    if stretched < 1:
        raise ModelError(f"{where}: a factor of {factor!r} gives {tokens} tokens no length")
    return stretched


def _experts(
    fields: Mapping[str, object], family: Family, layers: int, where: str
) -> tuple[int, tuple[int, ...]]:
    """Number of experts, and the decoder layers that mix them; 0 and none in most families."""
    if family.experts is None:
        return 0, ()
    key = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    experts = _positive(fields, key, where, family.experts.count)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ModelError(f"{where}: mlp_only_layers must be a list, not {dense!r}")
    step = _positive(fields, "decoder_sparse_step", where, 1)
    return experts, tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)


def _positive(
    fields: Mapping[str, object], key: str, where: str, default: int | None = None
) -> int:
    value = fields.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{where}: {key} must be a positive integer, not {value!r}")
    return value
