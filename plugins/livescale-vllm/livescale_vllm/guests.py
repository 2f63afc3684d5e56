"""From vLLM's words to a guest, and from its layers to vLLM's tensors. No vLLM is imported here."""

from __future__ import annotations

import itertools
import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from livescale.common.errors import UserError
from livescale.runtime.guest.guest_child import GuestChild
from livescale.runtime.guest.guest_messages import GuestTerms
from livescale.values.types import Manifest
from livescale.vllm_engine.parameters import ArenaParameters

_SHAPE = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "tie_word_embeddings"),
)


def read_terms(given: Mapping[str, object], where: str) -> GuestTerms:
    """Raises UserError, which names the key; `where` is what vLLM calls the whole."""
    try:
        return msgspec.convert(dict(given), GuestTerms)
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: {error}") from error


#: guests that stay holders, by what they were told: vLLM forgets its loaders after the load
_HOLDERS: dict[GuestTerms, GuestChild] = {}
_numbers = itertools.count()


def open_guest(terms: GuestTerms, model_config: Any) -> GuestChild:
    """It joins at once, and wants the model of the terms, else the one that vLLM was given."""
    # Each rank of a server is a process, and a guest.
    name = terms.name or f"{socket.gethostname()}-vllm-{os.getpid()}-{next(_numbers)}"
    model = terms.model or Path(model_config.model).name
    return GuestChild(msgspec.structs.replace(terms, name=name, model=model))


def holder(terms: GuestTerms, model_config: Any) -> GuestChild:
    """The guest that stays until this process ends or `let_go` is called; the same at each call."""
    if terms not in _HOLDERS:
        _HOLDERS[terms] = open_guest(terms, model_config)
    return _HOLDERS[terms]


def let_go(terms: GuestTerms) -> GuestChild:
    """The holder of these terms is its caller's to end."""
    return _HOLDERS.pop(terms)


def tensors(guest: GuestChild, model_config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors by the names of a checkpoint, in the order of their layers, each when its layer
    is there and verified. Raises UserError."""
    for manifest, memory, layer in guest.layers():
        if layer == 0:
            check_same(manifest, model_config)
        yield from ArenaParameters(manifest, memory).stored(layer)


def check_same(manifest: Manifest, model_config: Any) -> None:
    """Raises UserError where the pool's model is another one than vLLM was given."""
    theirs = json.loads(manifest.config_json)
    ours = model_config.hf_text_config
    for key in _SHAPE:
        if key in theirs and hasattr(ours, key) and theirs[key] != getattr(ours, key):
            raise UserError(
                f"the pool's model {manifest.model} is another one: its {key} is {theirs[key]},"
                f" and that of {model_config.model} is {getattr(ours, key)}"
            )
