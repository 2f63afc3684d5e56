"""Models as sizes: what a simulation needs to know of well-known checkpoints."""

from __future__ import annotations

from livescale.types import ModelSpec

_HIDDEN = 4096
_INTERMEDIATE = 14336
_VOCABULARY = 128256
_LAYERS = 32
_KV_HEADS = 8
_HEAD_WIDTH = 128
_BF16_BYTES = 2

_ATTENTION = 2 * _HIDDEN * _HIDDEN + 2 * _HIDDEN * _KV_HEADS * _HEAD_WIDTH
_DECODER_LAYER_BYTES = _BF16_BYTES * (_ATTENTION + 3 * _HIDDEN * _INTERMEDIATE + 2 * _HIDDEN)
_EMBEDDING_BYTES = _BF16_BYTES * _VOCABULARY * _HIDDEN

LLAMA_3_8B = ModelSpec(
    name="llama-3-8b",
    layer_bytes=(
        _EMBEDDING_BYTES,
        *([_DECODER_LAYER_BYTES] * _LAYERS),
        _EMBEDDING_BYTES + _BF16_BYTES * _HIDDEN,
    ),
    kv_bytes_per_token=_BF16_BYTES * 2 * _LAYERS * _KV_HEADS * _HEAD_WIDTH,
    model_tokens_max=8192,
)
"""Llama 3 8B in bf16: 8,030,261,248 parameters, embedding and head not tied."""
