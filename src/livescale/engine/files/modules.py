"""A model's modules as transformers builds them, without memory, and what of a layer fits them.

Used by what runs a model, and by what only wants to know whether its files could be run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from livescale.engine.base.errors import ModelError
from livescale.engine.files.model_config import ModelShape, parse_object
from livescale.values.types import TensorEntry

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""torch's dtypes by their safetensors names."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Misfit:
    """A tensor of a layer that is not what the layer's module wants: shape and dtype of both, None
    on the side that has no tensor of this name."""

    name: str
    given: tuple[str, tuple[int, ...]] | None
    wanted: tuple[str, tuple[int, ...]] | None


def build_model(config_json: str, shape: ModelShape, where: str, dtype: str) -> Any:
    """The model of a config.json on the meta device, all parameters of the `dtype` (safetensors'
    name).

    Raises ModelError, with the words of transformers, for one that cannot be built, and for one
    whose sizes transformers reads otherwise than `shape` has them.
    """
    fields = parse_object(config_json, where)
    auto: Any = AutoModelForCausalLM
    try:
        config = CONFIG_MAPPING[str(fields["model_type"])].from_dict(fields)
        with torch.device("meta"):
            model = auto.from_config(config, attn_implementation="eager", dtype=DTYPES[dtype])
    except Exception as error:
        # The configuration is all that is given: whatever is raised is about that.
        words = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelError(f"{where} describes no model that transformers builds: {words}") from error
    assert not list(model.model.layers.buffers()), "layers have tables that are not filled"
    _check_reading(shape, model.config, where)
    return model.eval()


def layer_modules(model: Any, *, is_tied: bool) -> list[nn.Module]:
    """The module of each layer, whose parameters are named as in a manifest. A tied head has only
    the norm."""
    body = model.model
    head = {"norm": body.norm} if is_tied else {"norm": body.norm, "lm_head": model.lm_head}
    return [
        nn.ModuleDict({"embed_tokens": body.embed_tokens}),
        *body.layers,
        nn.ModuleDict(head),
    ]


def misfits(module: nn.Module, given: Mapping[str, TensorEntry]) -> Iterator[Misfit]:
    """Of the tensors that are `given` for a layer by name, those that its module does not take, and
    those that it lacks. The latter come first."""
    wanted = {
        name: (DTYPE_NAMES[parameter.dtype], tuple(parameter.shape))
        for name, parameter in module.named_parameters()
    }
    for name in sorted(wanted.keys() - given.keys()):
        yield Misfit(name, None, wanted[name])
    for name, tensor in given.items():
        has = (tensor.dtype, tensor.shape)
        if has != wanted.get(name):
            yield Misfit(name, has, wanted.get(name))


# -- helpers --------------------------------------------------------------------------------------


def _check_reading(ours: ModelShape, theirs: Any, where: str) -> None:
    """LiveScale and transformers read the same sizes. Raises ModelError naming the key."""
    default_head_dim = theirs.hidden_size // theirs.num_attention_heads
    readings = {
        "num_hidden_layers": (ours.decoder_layers, theirs.num_hidden_layers),
        "hidden_size": (ours.hidden_size, theirs.hidden_size),
        "vocab_size": (ours.vocab_size, theirs.vocab_size),
        "num_attention_heads": (ours.heads, theirs.num_attention_heads),
        "num_key_value_heads": (ours.kv_heads, theirs.num_key_value_heads),
        "head_dim": (ours.head_dim, getattr(theirs, "head_dim", None) or default_head_dim),
        "tie_word_embeddings": (ours.is_tied, theirs.tie_word_embeddings),
    }
    for key, (our_value, their_value) in readings.items():
        if our_value != their_value:
            raise ModelError(f"{where}: {key} is read as {our_value}, transformers: {their_value}")
