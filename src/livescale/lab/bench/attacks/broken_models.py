"""Copies of a made model, each broken in one way: for publication, for loads, for a start."""

from __future__ import annotations

import enum
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from livescale.engine.files.checkpoint import INDEX_FILE, SINGLE_FILE

Weights = dict[str, np.ndarray[Any, Any]]


class BrokenWay(enum.StrEnum):
    """How a broken model comes to a pool."""

    PUBLISHED = "published"
    #: published whole, and then broken
    CHANGED = "published, then changed"
    #: in the pool's configuration: what publication would refuse reaches a worker
    CONFIGURED = "in the configuration"


@dataclass(frozen=True, slots=True)
class BrokenModel:
    """One way. `spoil` breaks what is in a directory."""

    name: str
    spoil: Callable[[Path], None]
    arrival: BrokenWay = BrokenWay.PUBLISHED


def copy_as_one_file(source: Path, directory: Path) -> None:
    """The model in `source`, with one file of weights."""
    shutil.copytree(source, directory)
    weights: Weights = {}
    for file in sorted(directory.glob("*.safetensors")):
        weights |= load_file(file)
        file.unlink()
    (directory / INDEX_FILE).unlink()
    save_file(weights, directory / SINGLE_FILE, metadata={"format": "pt"})


# -- ways to break it -----------------------------------------------------------------------------


def _with_config(**fields: object) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    return spoil


def _with_weights(change: Callable[[Weights], None]) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        weights = load_file(directory / SINGLE_FILE)
        change(weights)
        save_file(weights, directory / SINGLE_FILE, metadata={"format": "pt"})

    return spoil


def _everywhere(name: str, content: np.ndarray[Any, Any]) -> Callable[[Weights], None]:
    """A tensor more in each decoder layer."""

    def change(weights: Weights) -> None:
        norms = [found for found in weights if found.endswith(".input_layernorm.weight")]
        for norm in norms:
            weights[norm.replace("input_layernorm.weight", name)] = content.copy()

    return change


def _without(name: str) -> Callable[[Weights], None]:
    """All tensors that end so are missing."""

    def change(weights: Weights) -> None:
        for found in [found for found in weights if found.endswith(name)]:
            del weights[found]

    return change


def _retyped(name: str) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        for found in [found for found in weights if found.endswith(name)]:
            weights[found] = weights[found].astype(np.int32)

    return change


def _with_tables(weights: Weights) -> None:
    """As checkpoints of older libraries have them."""
    _everywhere("self_attn.rotary_emb.cos_cached", np.ones((1, 1, 8, 8), np.float32))(weights)
    _everywhere("self_attn.masked_bias", np.ones((1,), np.bool_))(weights)


def _cut_short(directory: Path) -> None:
    file = directory / SINGLE_FILE
    os.truncate(file, file.stat().st_size // 2)


def _with_another_byte(directory: Path) -> None:
    """The last one, in place: the size stays."""
    with (directory / SINGLE_FILE).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        (last,) = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 0xFF]))


def _vocabulary_of(directory: Path) -> int:
    size: int = json.loads((directory / "config.json").read_text())["vocab_size"]
    return size


def _with_a_foreign_padding_token(directory: Path) -> None:
    _with_config(pad_token_id=_vocabulary_of(directory))(directory)


_BIAS = _with_weights(_everywhere("self_attn.q_proj.bias", np.ones((128,), np.float32)))
_NO_NORM = _with_weights(_without(".input_layernorm.weight"))

BROKEN_MODELS = (
    BrokenModel("a byte changes", _with_another_byte, BrokenWay.CHANGED),
    BrokenModel("a padding token beyond the vocabulary", _with_a_foreign_padding_token),
    BrokenModel("tables of old checkpoints", _with_weights(_with_tables)),
    BrokenModel("a bias that is switched off", _BIAS),
    BrokenModel("other KV heads", _with_config(num_key_value_heads=4)),
    BrokenModel("an unknown activation", _with_config(hidden_act="nosuch")),
    BrokenModel("a norm is missing everywhere", _NO_NORM),
    BrokenModel("weights of int32", _with_weights(_retyped(".mlp.up_proj.weight"))),
    BrokenModel("a file cut short", _cut_short),
    BrokenModel("no tokenizer", lambda directory: (directory / "tokenizer.json").unlink()),
)
"""Ten, published while the pool runs."""

CONFIGURED_MODELS = tuple(
    BrokenModel(broken.name, broken.spoil, BrokenWay.CONFIGURED)
    for broken in BROKEN_MODELS
    if broken.name
    in {
        "a padding token beyond the vocabulary",
        "a bias that is switched off",
        "other KV heads",
        "an unknown activation",
        "a norm is missing everywhere",
    }
)
"""Those of them whose files can be read, but fit no modules."""
