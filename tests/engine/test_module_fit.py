"""Spoiled files are refused with the tensor's name, or give the tokens of transformers."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_instance import FamilyModel, Instance, judge, load, request
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from livescale.engine.base.errors import ModelError
from livescale.engine.files.checkpoint import INDEX_FILE, SINGLE_FILE
from livescale.engine.files.layout import plan_checkpoint
from livescale.engine.files.make import FAMILY_NAMES
from livescale.engine.files.model_config import parse_config
from livescale.engine.files.model_files import read_manifest
from livescale.engine.files.module_fit import check_fit
from livescale.engine.oracle import GreedyOracle
from livescale.values.types import LayerSpan

Models = Callable[[str], FamilyModel]
Weights = dict[str, torch.Tensor]
Spoil = Callable[[Weights, dict[str, Any], random.Random], None]

LAYERS = range(4)
VOCABULARY = 512
#: what modules compute, and old checkpoints carry
TABLES = (
    "self_attn.rotary_emb.inv_freq",
    "self_attn.rotary_emb.cos_cached",
    "self_attn.rotary_emb.sin_cached",
    "self_attn.masked_bias",
    "self_attn.bias",
    "self_attn.position_ids",
)
PARAMETERS = (
    *("self_attn.q_proj.bias", "self_attn.o_proj.bias", "self_attn.q_norm.weight"),
    *("mlp.up_proj.bias", "mlp.gate.weight", "mlp.extra.weight", "post_norm.weight"),
)
VALUES: dict[str, tuple[object, ...]] = {
    "num_key_value_heads": (1, 2, 4),
    "num_attention_heads": (2, 8),
    "head_dim": (8, 16, 24, 32),
    "intermediate_size": (48, 96),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "pad_token_id": (0, VOCABULARY - 1, VOCABULARY, -VOCABULARY - 1, "none"),
    "hidden_act": ("nosuch", "gelu", "relu"),
    "rms_norm_eps": (1e-5, "much"),
    "tie_word_embeddings": (True, False),
    "num_hidden_layers": (3, 4, 5),
    "rope_parameters": ({"rope_type": "yarn"}, {"rope_type": "default", "rope_theta": "x"}),
}


def in_layers(name: str, draw: random.Random) -> list[str]:
    """In all layers, mostly: else it is found out by comparing them."""
    layers = LAYERS if draw.random() < 0.8 else [draw.choice(LAYERS)]
    return [f"model.layers.{layer}.{name}" for layer in layers]


def chosen(weights: Weights, draw: random.Random) -> list[str]:
    """A tensor of the decoder layers in all of them, or one of the ends."""
    name = draw.choice(sorted(weights))
    if not name.startswith("model.layers."):
        return [name]
    inside = name.split(".", 3)[3]
    return [name for name in in_layers(inside, draw) if name in weights]


def drop(weights: Weights, _: dict[str, Any], draw: random.Random) -> None:
    for name in chosen(weights, draw):
        del weights[name]


def rename(weights: Weights, _: dict[str, Any], draw: random.Random) -> None:
    for name in chosen(weights, draw):
        weights[name.replace("_proj", "_projection").replace("norm", "nrm") + "s"] = weights.pop(
            name
        )


def reshape(weights: Weights, _: dict[str, Any], draw: random.Random) -> None:
    way = draw.randrange(4)
    for name in chosen(weights, draw):
        whole = weights[name]
        shapes = [
            whole.mT if whole.dim() == 2 else whole[1:],
            whole[:-1],
            whole[None],
            torch.cat([whole, whole]),
        ]
        weights[name] = shapes[way].contiguous()


def retype(weights: Weights, _: dict[str, Any], draw: random.Random) -> None:
    dtype = draw.choice((torch.float16, torch.bfloat16, torch.int32, torch.float64))
    for name in chosen(weights, draw):
        weights[name] = weights[name].to(dtype)


def add_tables(weights: Weights, _: dict[str, Any], draw: random.Random) -> None:
    for table in draw.sample(TABLES, draw.randint(1, 3)):
        dtype = draw.choice((torch.float32, torch.bool, torch.int64))
        for name in in_layers(table, draw):
            weights[name] = torch.ones(1, 1, 8, 8).to(dtype)


def add_parameter(weights: Weights, _: dict[str, Any], draw: random.Random) -> None:
    parameter = draw.choice(PARAMETERS)
    for name in in_layers(parameter, draw):
        weights[name] = torch.ones(64)


def configure(_: Weights, fields: dict[str, Any], draw: random.Random) -> None:
    key = draw.choice(sorted(VALUES))
    fields[key] = draw.choice(VALUES[key])


SPOILS: tuple[Spoil, ...] = (
    *(drop, rename, reshape, retype, add_tables, add_parameter, configure, configure),
)


def spoiled(source: Path, directory: Path, spoils: list[Spoil], seed: int) -> Path:
    """A copy of the model, in one file of weights."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    weights: Weights = {}
    for file in sorted(source.glob("*.safetensors")):
        weights |= load_file(file)
    fields = json.loads((source / "config.json").read_text())
    draw = random.Random(seed)
    for spoil in spoils:
        spoil(weights, fields, draw)
    save_file(weights, directory / SINGLE_FILE, {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(fields))
    assert not (directory / INDEX_FILE).exists()
    return directory


def refused(directory: Path) -> str | None:
    """As publication does."""
    try:
        read_manifest(directory, "m")
        check_fit(directory)
    except ModelError as error:
        return str(error)
    return None


@given(
    family=st.sampled_from(sorted(FAMILY_NAMES)),
    spoils=st.lists(st.sampled_from(SPOILS), min_size=1, max_size=2),
    seed=st.integers(0, 10_000),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_not_refused_gives_the_tokens_of_transformers(
    family: str,
    spoils: list[Spoil],
    seed: int,
    family_model: Models,
    tmp_path: Path,
) -> None:
    source = family_model(family).directory
    directory = spoiled(source, tmp_path / "spoiled", spoils, seed)
    refusal = refused(directory)
    event("served" if refusal is None else "refused")
    if refusal is not None:
        assert str(directory) in refusal
        assert "\n" not in refusal
        return
    executor, manifest, _ = load(directory, kv_bytes=1 << 20)
    instance = Instance([(executor, LayerSpan(0, len(manifest.layers)))])
    specs = [request("r", 9, 3, VOCABULARY)]
    instance.add(specs)
    judge(GreedyOracle(directory), specs, instance.finish())


def only(key: str, value: object) -> Spoil:
    return lambda weights, fields, draw: fields.update({key: value})


def added(name: str, tensor: torch.Tensor) -> Spoil:
    return lambda weights, fields, draw: weights.update(
        {f"model.layers.{layer}.{name}": tensor.clone() for layer in LAYERS}
    )


def cut_everywhere(name: str) -> Spoil:
    return lambda weights, fields, draw: weights.update(
        {n: tensor[:-1].clone() for n, tensor in weights.items() if n.endswith(name)}
    )


def lost_everywhere(name: str) -> Spoil:
    def spoil(weights: Weights, fields: dict[str, Any], draw: random.Random) -> None:
        for found in [found for found in weights if found.endswith(name)]:
            del weights[found]

    return spoil


REFUSED = {
    "a bias that the configuration switches off": (
        added("self_attn.q_proj.bias", torch.ones(64)),
        r"safetensors: model\.layers\.0\.self_attn\.q_proj\.bias \(F32 \(64,\)\) is no parameter",
    ),
    "a bias that the configuration wants": (
        only("attention_bias", True),
        r"has no tensor model\.layers\.0\.self_attn\.k_proj\.bias, .* wants one of F32 \(32,\)",
    ),
    "other KV heads": (
        only("num_key_value_heads", 4),
        r"safetensors: model\.layers\.0\.self_attn\.k_proj\.weight is F32 \(32, 64\), its"
        r" config\.json wants F32 \(64, 64\)",
    ),
    "rows are missing in every layer": (
        cut_everywhere("mlp.down_proj.weight"),
        r"mlp\.down_proj\.weight is F32 \(63, 96\), its config\.json wants F32 \(64, 96\)",
    ),
    "a norm is missing in every layer": (
        lost_everywhere("input_layernorm.weight"),
        r"has no tensor model\.layers\.0\.input_layernorm\.weight, its config\.json wants one of",
    ),
    "a padding token beyond the vocabulary": (
        only("pad_token_id", VOCABULARY),
        r"config\.json describes no model that transformers builds: .*[Pp]adding_idx",
    ),
    "an activation that there is not": (
        only("hidden_act", "nosuch"),
        r"config\.json describes no model that transformers builds: .*nosuch",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_named(case: str, family_model: Models, tmp_path: Path) -> None:
    spoil, words = REFUSED[case]
    directory = spoiled(family_model("llama").directory, tmp_path / "spoiled", [spoil], 0)
    with pytest.raises(ModelError, match=words):
        check_fit(directory)


@pytest.mark.parametrize("family", sorted(FAMILY_NAMES))
def test_files_as_transformers_writes_them_fit(family: str, family_model: Models) -> None:
    check_fit(family_model(family).directory)


@pytest.mark.parametrize("family", sorted(FAMILY_NAMES))
def test_all_that_transformers_leaves_out_is_left_out(
    family: str, family_model: Models, tmp_path: Path
) -> None:
    """Buffers of its modules, and tables of older ones, in whatever dtype."""
    source = family_model(family).directory
    fields = json.loads((source / "config.json").read_text())
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(CONFIG_MAPPING[family].from_dict(fields))
    buffers = [name for name, _ in model.named_buffers() if "rotary_emb" in name]
    assert buffers
    tables = {
        **{name: torch.ones(8) for name in buffers},
        **{
            f"model.layers.{layer}.{table}": torch.ones(1, 1, 8, 8, dtype=torch.bool)
            for layer in LAYERS
            for table in TABLES
        },
    }
    plain = spoiled(source, tmp_path / "plain", [], 0)
    more = spoiled(source, tmp_path / "more", [lambda w, *_: w.update(tables)], 0)
    check_fit(more)
    shape = parse_config((source / "config.json").read_text(), "config.json")
    entries = [[layer.entries for layer in plan_checkpoint(d, shape).layers] for d in (plain, more)]
    assert entries[0] == entries[1]
