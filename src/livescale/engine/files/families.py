"""What differs between the model families that can run: one table. Values only, no torch.

Modules and configuration classes come from transformers, so this holds only what is needed without
it: the defaults behind a config.json that leaves keys out, and how a file names what the modules
hold under another name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """A mixture of experts in a file: `{block}.experts.{i}.{gate, up, down}.weight`.

    `count` is the number of experts of a config.json without that number.
    """

    block: str
    gate: str
    up: str
    down: str
    count: int


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. `model_type` is transformers' name of it.

    `is_tied`, `kv_heads` and `head_dim` hold where config.json has no such key; None stands for as
    many as heads, and hidden size / heads. `rope_types` are the kinds of rope that can run.
    `is_length_scaled`: `max_position_embeddings` is the length with the factor of its rope.
    """

    architecture: str
    model_type: str
    is_tied: bool = False
    kv_heads: int | None = None
    head_dim: int | None = None
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    is_length_scaled: bool = False
    experts: ExpertNames | None = None


FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        Family("LlamaForCausalLM", "llama"),
        Family("Qwen2ForCausalLM", "qwen2", kv_heads=32),
        Family("Qwen3ForCausalLM", "qwen3", kv_heads=32, head_dim=128),
        Family("MistralForCausalLM", "mistral", kv_heads=8),
        Family("Gemma2ForCausalLM", "gemma2", is_tied=True, kv_heads=4, head_dim=256),
        Family(
            "Gemma3ForCausalLM",
            "gemma3_text",
            is_tied=True,
            kv_heads=4,
            head_dim=256,
            is_length_scaled=True,
        ),
        # transformers reads "yarn" in this family's files as longrope.
        Family("Phi3ForCausalLM", "phi3", rope_types=("default",)),
        Family(
            "MixtralForCausalLM",
            "mixtral",
            kv_heads=8,
            experts=ExpertNames("block_sparse_moe", "w1", "w3", "w2", count=8),
        ),
        Family(
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            kv_heads=4,
            experts=ExpertNames("mlp", "gate_proj", "up_proj", "down_proj", count=128),
        ),
    )
}
"""The families that can run, by their architecture's name."""

GATE_UP = "mlp.experts.gate_up_proj"
"""All experts' gate and up projections as the modules hold them: (experts, 2 * inner, hidden)."""

DOWN = "mlp.experts.down_proj"
"""All experts' down projections as the modules hold them: (experts, hidden, inner)."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a stored tensor belongs: the parameter, and which part of it (None: all of it).

    Parts are (expert, 0 or 1: gate or up), and lie in a parameter one behind the other in order.
    """

    name: str
    part: tuple[int, int] | None = None


def tensor_place(family: Family, name: str) -> TensorPlace:
    """Where a decoder layer's tensor belongs, that a file calls `name` inside the layer."""
    names = family.experts
    if names is None:
        return TensorPlace(name)
    block, _, own = name.partition(".")
    if block not in (names.block, "mlp"):
        return TensorPlace(name)
    expert = _EXPERT.fullmatch(own)
    places = {names.gate: (GATE_UP, 0), names.up: (GATE_UP, 1), names.down: (DOWN, 0)}
    if expert is None or expert[2] not in places:
        return TensorPlace(f"mlp.{own}")
    parameter, half = places[expert[2]]
    return TensorPlace(parameter, (int(expert[1]), half))


_EXPERT = re.compile(r"experts\.(0|[1-9]\d*)\.(\w+)\.weight")
