"""Writes the weights and configuration of a made model of any family: transformers builds and
saves it, so that the files are as transformers writes them. No tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

WINDOW_TOKENS = 24
"""Sliding windows of made models: so short that a paragraph crosses them."""

TIED_EMBEDDING_SCALE = 0.1
"""Size of a made embedding that is the head, too, beside one that is not."""

#: What makes a family what it is, strong enough that greedy tokens depend on it: soft caps in the
#: range of the scores, head sizes that are not hidden size / heads, angles that differ by layer.
_FEATURES: dict[str, dict[str, object]] = {
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": WINDOW_TOKENS,
        "max_window_layers": 2,
    },
    "qwen3": {"head_dim": 24},
    "mistral": {"sliding_window": WINDOW_TOKENS},
    "gemma2": {
        "head_dim": 24,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.0,
        "sliding_window": WINDOW_TOKENS,
    },
    "gemma3_text": {
        "head_dim": 24,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW_TOKENS,
        "sliding_window_pattern": 3,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "phi3": {"sliding_window": WINDOW_TOKENS, "partial_rotary_factor": 0.5},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "head_dim": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "moe_intermediate_size": 96,
        "mlp_only_layers": [1],
    },
}


def write_family(directory: Path, family: str, sizes: Mapping[str, object], seed: int) -> None:
    """Put config.json and the weights (fp32) of a `family` model of these sizes into `directory`.

    Equal arguments give equal bytes. A shard holds half the model.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    fields = {**sizes, **_FEATURES[family], "pad_token_id": None}
    config = CONFIG_MAPPING[family].from_dict(fields)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    total_bytes = _fill(model, seed)
    model.save_pretrained(directory, max_shard_size=-(-total_bytes // 2))


def _fill(model: Any, seed: int) -> int:
    """Draw all parameters; their bytes.

    Norms and biases lie around their initial values. A matrix keeps the scale of its input, so
    that neither attention nor logits are flat: greedy tokens then depend on the whole context.
    """
    total_bytes = 0
    for index, (name, parameter) in enumerate(model.named_parameters()):
        stream = np.random.Generator(np.random.PCG64([seed, index]))
        noise = torch.from_numpy(stream.standard_normal(parameter.shape, dtype=np.float32))
        with torch.no_grad():
            if parameter.dim() == 1:
                parameter.add_(noise, alpha=0.1)
            else:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
            if name.endswith("embed_tokens.weight") and model.config.tie_word_embeddings:
                # Small beside what the layers add, or the head finds the input's token again.
                parameter.mul_(TIED_EMBEDDING_SCALE)
        total_bytes += parameter.nbytes
    return total_bytes
