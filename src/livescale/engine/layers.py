"""A model's layers as callables: built without memory, bound to an arena one at a time.

Layer 0 is the embedding, 1…L the decoder layers, L+1 final norm and head. Modules come from
transformers; parameters are views into the arena, never copies. No batching, no KV cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from livescale.engine.attention import ATTENTION, PagedBatch
from livescale.engine.errors import ModelError
from livescale.engine.model_config import parse_config, parse_object
from livescale.types import LayerEntry, Manifest, TensorEntry

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""torch's dtypes by their safetensors names."""


@dataclass(frozen=True, slots=True)
class RunState:
    """What all layers of one Run share.

    `batch` places the rows in the KV cache, `rope` is (cos, sin) of the rows' positions,
    `sample_rows` (S) are the rows whose logits are wanted.
    """

    batch: PagedBatch
    rope: tuple[torch.Tensor, torch.Tensor]
    sample_rows: torch.Tensor


LayerCall = Callable[[torch.Tensor, RunState], torch.Tensor]


class Layers:
    """All layers of one model, bound to nothing until `bind` is called for each.

    Calling `layers[i]` with (1, T, hidden) rows gives rows again; layer 0 takes token ids (1, T),
    and the head gives the logits (S, vocabulary) of the sampling rows.
    """

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        where = f"config of {manifest.model}"
        self.config = parse_config(manifest.config_json, where)
        self.dtype = DTYPES[manifest.dtype]
        model = _build(manifest.config_json, where, self.dtype)
        with device:
            # Its table is no parameter, so the meta device left it without values.
            self._rotary: Any = type(model.model.rotary_emb)(config=model.config)
        embed, norm, lm_head = model.model.embed_tokens, model.model.norm, model.lm_head
        head = {"norm": norm} if self.config.is_tied else {"norm": norm, "lm_head": lm_head}
        #: parameters of layer i, named as in the manifest
        self._modules: list[nn.Module] = [
            nn.ModuleDict({"embed_tokens": embed}),
            *model.model.layers,
            nn.ModuleDict(head),
        ]
        self._calls: list[LayerCall] = [
            _embedding_call(embed),
            *(_decoder_call(module) for module in model.model.layers),
            _head_call(norm, embed if self.config.is_tied else lm_head),
        ]
        self._is_bound = [False] * len(self._modules)
        if len(manifest.layers) != len(self._modules):
            raise ModelError(
                f"{manifest.model}: the manifest has {len(manifest.layers)} layers,"
                f" the configuration {len(self._modules)}"
            )

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, layers: slice) -> list[LayerCall]:
        return self._calls[layers]

    def bind(self, entry: LayerEntry, arena: torch.Tensor) -> None:
        """Make the layer's parameters views into `arena` (flat bytes).

        Raises ModelError unless the entry covers exactly the module's parameters, in their shapes.
        """
        module = self._modules[entry.layer]
        wanted = {name: tuple(p.shape) for name, p in self.parameters(entry.layer).items()}
        given = {tensor.name: tensor for tensor in entry.tensors}
        for name in sorted(wanted.keys() - given.keys()):
            raise ModelError(f"layer {entry.layer} lacks tensor {name}")
        for name in sorted(given.keys() - wanted.keys()):
            raise ModelError(f"layer {entry.layer} has tensor {name}, which its module does not")
        for name, tensor in given.items():
            if tensor.shape != wanted[name] or DTYPES[tensor.dtype] != self.dtype:
                raise ModelError(
                    f"layer {entry.layer}: {name} is {tensor.dtype} {tensor.shape},"
                    f" its module wants {self.dtype} {wanted[name]}"
                )
        for name, tensor in given.items():
            owner, _, leaf = name.rpartition(".")
            view = _view(arena, entry, tensor)
            setattr(module.get_submodule(owner), leaf, nn.Parameter(view, requires_grad=False))
        self._is_bound[entry.layer] = True

    def parameters(self, layer: int) -> dict[str, torch.Tensor]:
        """The layer's parameters by the manifest's names."""
        return dict(self._modules[layer].named_parameters())

    def unbound(self, layers: range) -> list[int]:
        """Those of `layers` that cannot run; a tied head needs layer 0, too."""
        needed = list(layers)
        if self.config.is_tied and len(self) - 1 in layers and 0 not in layers:
            needed.append(0)
        return [layer for layer in needed if not self._is_bound[layer]]

    def rope(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), each (1, T, head size), of `positions` (1, T)."""
        like = torch.empty(0, dtype=self.dtype, device=positions.device)
        cos, sin = self._rotary(like, position_ids=positions)
        return cos, sin


# -- helpers, in the order used -----------------------------------------------------------------


def _build(config_json: str, where: str, dtype: torch.dtype) -> Any:
    """The model's modules on the meta device: shapes without memory."""
    fields = parse_object(config_json, where)
    try:
        config = CONFIG_MAPPING[str(fields["model_type"])].from_dict(fields)
        auto: Any = AutoModelForCausalLM
        with torch.device("meta"):
            model = auto.from_config(config, attn_implementation=ATTENTION, dtype=dtype)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{where} describes no model that transformers builds: {error}") from error
    return model.eval()


def _embedding_call(embed: nn.Embedding) -> LayerCall:
    return lambda token_ids, state: nn.functional.embedding(token_ids, embed.weight)


def _decoder_call(module: nn.Module) -> LayerCall:
    def run(hidden: torch.Tensor, state: RunState) -> torch.Tensor:
        # By keyword: the order of these arguments differs between families.
        rows: torch.Tensor = module(
            hidden,
            attention_mask=None,
            position_ids=state.batch.positions,
            past_key_values=None,
            position_embeddings=state.rope,
            paged=state.batch,
        )
        return rows

    return run


def _head_call(norm: nn.Module, head: nn.Linear | nn.Embedding) -> LayerCall:
    """`head` owns the matrix of logits: the LM head, or the embedding that it is tied to."""

    def run(hidden: torch.Tensor, state: RunState) -> torch.Tensor:
        rows = norm(hidden[0].index_select(0, state.sample_rows))
        return nn.functional.linear(rows, head.weight)

    return run


def _view(arena: torch.Tensor, entry: LayerEntry, tensor: TensorEntry) -> torch.Tensor:
    start = entry.offset_bytes + tensor.offset_bytes
    content = arena[start : start + tensor.size_bytes]
    return content.view(DTYPES[tensor.dtype]).view(tensor.shape)
