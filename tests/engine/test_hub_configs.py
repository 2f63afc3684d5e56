"""Configurations as they lie beside published models are read alike by LiveScale and transformers.

Keys and values are those of the files, with fewer layers and a smaller vocabulary.
"""

from __future__ import annotations

import json

import pytest
import torch

from livescale.engine.base.errors import ModelError
from livescale.engine.files.model_config import parse_config
from livescale.engine.spans.layers import Layers
from livescale.values.types import LayerEntry, Manifest

SMALL = {"vocab_size": 64, "num_hidden_layers": 4, "torch_dtype": "bfloat16"}

RUN: dict[str, dict[str, object]] = {
    "Llama 3.1 8B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "Qwen 2.5 0.5B": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 21,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "Qwen 3 0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "Mistral 7B v0.1": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
    },
    "Gemma 2 2B": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "max_position_embeddings": 8192,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
    },
    "Gemma 3 1B": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "Phi 3 mini 4k": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096,
        "pad_token_id": 0,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
        "tie_word_embeddings": False,
    },
    "Mixtral 8x7B": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "Qwen 3 30B A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    },
}


def build(fields: dict[str, object]) -> Layers:
    entries = tuple(LayerEntry(layer, 0, 0, (), "", "") for layer in range(6))
    return Layers(Manifest("m", json.dumps(fields), "BF16", entries), torch.device("cpu"))


@pytest.mark.parametrize("name", RUN)
def test_published_configurations_are_read_alike(name: str) -> None:
    layers = build(RUN[name] | SMALL)
    shape = layers.config
    experts = {len(layers.parameters(1 + i)["mlp.gate.weight"]) for i in shape.expert_layers}
    assert experts == ({shape.experts} if shape.experts else set())
    assert parse_config(json.dumps(RUN[name] | SMALL), "config.json") == shape


def test_a_reading_that_differs_is_refused() -> None:
    # Without the key transformers takes 32 KV heads, and 14 heads cannot share them.
    fields = {k: v for k, v in RUN["Qwen 2.5 0.5B"].items() if k != "num_key_value_heads"} | SMALL
    with pytest.raises(ModelError, match="14 attention heads do not share 32 KV heads"):
        build(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 100}, "describes no model that transformers builds: .*not a multiple"),
        ({"num_attention_heads": "8"}, "num_attention_heads must be a positive integer, not '8'"),
        ({"head_dim": None}, "describes no model that transformers builds: .*head_dim"),
    ],
)
def test_what_transformers_refuses_is_a_model_error(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=f"(?s){message}"):
        build(RUN["Gemma 2 2B"] | SMALL | change)
