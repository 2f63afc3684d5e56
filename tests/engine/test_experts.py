"""Mixtures of experts: one manifest and the same bytes, whichever way a file keeps its experts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_instance import FamilyModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from livescale.engine.base.errors import ModelError
from livescale.engine.files.model_files import read_layers, read_manifest
from livescale.engine.files.modules import DTYPES
from livescale.values.types import Manifest

Models = Callable[[str], FamilyModel]
Weights = dict[str, torch.Tensor]

MIXTURES = ("mixtral", "qwen3_moe")
FIRST_EXPERT = {
    "mixtral": "model.layers.0.block_sparse_moe.experts.0.w1.weight",
    "qwen3_moe": "model.layers.0.mlp.experts.0.gate_proj.weight",
}


def stored_weights(directory: Path) -> Weights:
    return {k: v for file in directory.glob("*.safetensors") for k, v in load_file(file).items()}


def rewritten(source: Path, target: Path, weights: Weights) -> Path:
    """A copy of a model with other weights, in one file."""
    target.mkdir()
    shutil.copy(source / "config.json", target)
    save_file(weights, target / "model.safetensors")
    return target


def tensors(directory: Path) -> tuple[Manifest, dict[tuple[int, str], torch.Tensor]]:
    """The directory's manifest, and its tensors as they lie in an arena."""
    manifest = read_manifest(directory, "m")
    arena = bytearray(manifest.size_bytes)
    list(read_layers(directory, manifest, memoryview(arena)))
    found = {}
    for layer in manifest.layers:
        for entry in layer.tensors:
            content = torch.frombuffer(
                arena,
                dtype=DTYPES[entry.dtype],
                count=entry.size_bytes // DTYPES[entry.dtype].itemsize,
                offset=layer.offset_bytes + entry.offset_bytes,
            )
            found[layer.layer, entry.name] = content.view(entry.shape)
    return manifest, found


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("is_fused", [False, True])
def test_bytes_are_those_of_the_modules(
    family_model: Models, tmp_path: Path, family: str, is_fused: bool
) -> None:
    source = family_model(family).directory
    stock = AutoModelForCausalLM.from_pretrained(source)
    assert FIRST_EXPERT[family] in stored_weights(source), "transformers writes single experts"
    directory = source
    if is_fused:
        weights = {k: v.detach().clone() for k, v in stock.named_parameters()}
        directory = rewritten(source, tmp_path / "fused", weights)
    manifest, found = tensors(directory)
    wanted = {}
    for name, parameter in stock.named_parameters():
        path = name.split(".")
        if path[1] == "layers":
            wanted[int(path[2]) + 1, ".".join(path[3:])] = parameter
        else:
            wanted[0 if "embed" in name else 5, name.removeprefix("model.")] = parameter
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert manifest.layers == read_manifest(source, "m").layers


def test_dense_layers_among_mixtures(family_model: Models) -> None:
    manifest = read_manifest(family_model("qwen3_moe").directory, "m")
    has_experts = [
        any(tensor.name == "mlp.experts.gate_up_proj" for tensor in layer.tensors)
        for layer in manifest.layers
    ]
    assert has_experts == [False, True, False, True, True, False]


def drop(name: str) -> Callable[[Weights], None]:
    return lambda weights: weights.__delitem__(name)


def reshape(weights: Weights) -> None:
    weights[FIRST_EXPERT["mixtral"]] = torch.ones(3, 64)


def keep_both(weights: Weights) -> None:
    weights["model.layers.0.mlp.experts.gate_up_proj"] = torch.ones(4, 2 * 96, 64)


def add_expert(weights: Weights) -> None:
    weights[FIRST_EXPERT["mixtral"].replace(".0.w1", ".4.w1")] = torch.ones(96, 64)


def drop_all(weights: Weights) -> None:
    for name in [n for n in weights if n.startswith("model.layers.2.") and "experts" in n]:
        del weights[name]


BROKEN: dict[str, tuple[Callable[[Weights], None], str]] = {
    "an expert is missing": (
        drop("model.layers.0.block_sparse_moe.experts.2.w3.weight"),
        r"experts\.0\.w1\.weight is one of 7 parts of experts, 4 experts have 8",
    ),
    "an expert too many": (add_expert, r"is one of 9 parts of experts, 4 experts have 8"),
    "an expert of another size": (
        reshape,
        r"experts\.0\.w3\.weight has shape \(96, 64\), .*experts\.0\.w1\.weight has \(3, 64\)",
    ),
    "both ways": (
        keep_both,
        r"w1\.weight is a part of model\.layers\.0\.mlp\.experts\.gate_up_proj",
    ),
    "a layer without experts": (
        drop_all,
        r"model\.layers\.2 has no mlp\.experts\.gate_up_proj, nor its parts",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_experts_are_refused_by_name(
    family_model: Models, tmp_path: Path, case: str
) -> None:
    break_it, message = BROKEN[case]
    source = family_model("mixtral").directory
    weights = stored_weights(source)
    break_it(weights)
    directory = rewritten(source, tmp_path / "m", dict(sorted(weights.items())))
    with pytest.raises(ModelError, match=message):
        read_manifest(directory, "m")


def test_number_of_experts_is_the_configurations(family_model: Models, tmp_path: Path) -> None:
    source = family_model("mixtral").directory
    directory = rewritten(source, tmp_path / "m", stored_weights(source))
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_local_experts": 3}))
    with pytest.raises(ModelError, match="is one of 8 parts of experts, 3 experts have 6"):
        read_manifest(directory, "m")
