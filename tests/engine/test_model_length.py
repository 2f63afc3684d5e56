"""How long prompt and answer may be: what a config.json's rope makes of its length.

The oracle is vLLM's rule over the table that transformers' configuration class makes of the fields.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from effort import examples
from livescale.engine.base.errors import ModelError
from livescale.engine.files.families import FAMILIES
from livescale.engine.files.model_config import parse_config

POSITIONS = 4096
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def config_of(architecture: str = "LlamaForCausalLM", **more: object) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": FAMILIES[architecture].model_type,
        "vocab_size": 64,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": POSITIONS,
        **more,
    }


def length(fields: dict[str, Any]) -> int:
    return parse_config(json.dumps(fields), "config.json").model_tokens_max


PUBLISHED = {
    "Qwen 2.5 7B with yarn, as its card says": (
        "Qwen2ForCausalLM",
        32768,
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        131072,
    ),
    "Qwen 3 8B with yarn, whose length has room for an answer": (
        "Qwen3ForCausalLM",
        40960,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        131072,
    ),
    "Yarn Llama 2 7B 128k, which has the length twice": (
        "LlamaForCausalLM",
        131072,
        {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
        131072,
    ),
    "Vicuna 1.5 16k": ("LlamaForCausalLM", 4096, {"type": "linear", "factor": 4.0}, 16384),
    "Llama 3.1 8B": (
        "LlamaForCausalLM",
        131072,
        {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192},
        131072,
    ),
    "Gemma 3 4B": ("Gemma3ForCausalLM", 131072, {"rope_type": "linear", "factor": 8.0}, 131072),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_length(name: str) -> None:
    architecture, positions, table, tokens = PUBLISHED[name]
    fields = config_of(architecture, max_position_embeddings=positions, rope_scaling=table)
    assert length(fields) == tokens


def length_of_vllm(fields: dict[str, Any]) -> int:
    """vLLM's rule, over the table as transformers completes it; `default` has no factor there."""
    config = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    table = config.rope_parameters
    if table["rope_type"] in ("default", "llama3"):
        return config.max_position_embeddings
    if table["rope_type"] == "yarn":
        return int(table["original_max_position_embeddings"] * table["factor"])
    return int(config.max_position_embeddings * table["factor"])


factors = st.integers(1, 64) | st.floats(1, 64)


@st.composite
def tables(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from((None, "default", "linear", "yarn", "llama3")))
    if kind is None:
        return {}
    table: dict[str, Any] = dict(LLAMA3) if kind == "llama3" else {}
    table[draw(st.sampled_from(("type", "rope_type")))] = kind
    if kind != "default" or draw(st.booleans()):
        table["factor"] = draw(factors)
    if kind in ("yarn", "llama3") and draw(st.booleans()):
        table["original_max_position_embeddings"] = draw(st.integers(16, POSITIONS))
    return table


# Phi-3 runs no rope that stretches, and Gemma 3 has the factor in its length.
STRETCHED = sorted(set(FAMILIES) - {"Phi3ForCausalLM", "Gemma3ForCausalLM"})
LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 2.0}


@settings(max_examples=examples(150))
@example("LlamaForCausalLM", {}, LINEAR, None)
@example("LlamaForCausalLM", {"type": "default"}, LINEAR, None)
@example("LlamaForCausalLM", {"rope_type": "yarn", "factor": 2.0}, None, 1024)
@given(
    architecture=st.sampled_from(STRETCHED),
    scaling=st.none() | tables(),
    parameters=st.none() | tables(),
    beside=st.none() | st.integers(16, POSITIONS),
)
def test_length_is_that_of_vllm_over_the_table_of_transformers(
    architecture: str,
    scaling: dict[str, Any] | None,
    parameters: dict[str, Any] | None,
    beside: int | None,
) -> None:
    fields = config_of(architecture)
    if scaling is not None:
        fields["rope_scaling"] = scaling
    if parameters is not None:
        fields["rope_parameters"] = parameters
    if beside is not None:
        fields["original_max_position_embeddings"] = beside
    text = json.dumps(fields)
    assert length(json.loads(text)) == length_of_vllm(json.loads(text))


def test_yarn_without_a_factor_has_its_length_already() -> None:
    table = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512}
    assert length(config_of(rope_parameters=table)) == POSITIONS


@pytest.mark.parametrize("kind", ["linear", "yarn"])
@pytest.mark.parametrize("factor", [0, -1, 1e-9, "4", True, [2], float("nan"), float("inf")])
def test_a_factor_that_gives_no_length_is_named(kind: str, factor: object) -> None:
    fields = config_of(rope_scaling={"rope_type": kind, "factor": factor})
    with pytest.raises(ModelError, match=r"config\.json: rope_scaling: a factor of .* no length"):
        length(fields)


@pytest.mark.parametrize("original", [0, -5, 1.5, "512"])
def test_an_original_length_that_is_none_is_named(original: object) -> None:
    table = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": original}
    with pytest.raises(ModelError, match="rope_parameters: original_max_position_embeddings must"):
        length(config_of(rope_parameters=table))
