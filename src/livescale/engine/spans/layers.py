"""A model's layers as callables: built without memory, bound to an arena one at a time.

Layer 0 is the embedding, 1…L the decoder layers, L+1 final norm and head. Modules come from
transformers; parameters are views into the arena, never copies. No batching, no KV cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from livescale.engine.attention.attention import PagedBatch
from livescale.engine.attention.kv_cache import KVCache
from livescale.engine.base.errors import ModelError
from livescale.engine.files.model_config import parse_config
from livescale.engine.files.modules import DTYPES, build_model, layer_modules, misfits
from livescale.engine.products.linear_choice import ChosenLinears, WeightsLayout
from livescale.engine.products.linear_timing import known_timings
from livescale.engine.spans.compiled_span import CompiledSpan, can_compile
from livescale.engine.spans.fused import fuse
from livescale.values.types import LayerEntry, Manifest, StageOf, TensorEntry

Rope = dict[str | None, tuple[torch.Tensor, torch.Tensor]]
"""(cos, sin), each (1, T, rotated size), by layer type; None where all layers have the same."""


@dataclass(frozen=True, slots=True)
class RunState:
    """What all layers of one Run share.

    `batch` places the rows in the KV cache, `rope` is of the rows' positions, `sample_rows` (S)
    are the rows whose logits are wanted.
    """

    batch: PagedBatch
    rope: Rope
    sample_rows: torch.Tensor


LayerCall = Callable[[torch.Tensor, RunState], torch.Tensor]


class Layers:
    """All layers of one model, bound to nothing until `bind` is called for each.

    Calling `layers[i]` with (1, T, hidden) rows gives rows again; layer 0 takes token ids (1, T),
    and the head gives the logits (S, vocabulary) of the sampling rows.
    """

    def __init__(
        self, manifest: Manifest, device: torch.device, layout: WeightsLayout = "plain"
    ) -> None:
        where = f"config of {manifest.model}"
        self.config = parse_config(manifest.config_json, where)
        self.dtype = DTYPES[manifest.dtype]
        model = build_model(manifest.config_json, self.config, where, manifest.dtype)
        with device:
            # Its tables are no parameters, so the meta device left them without values.
            self._rotary: Any = type(model.model.rotary_emb)(config=model.config)
        layer_types = _rope_types(self._rotary, model.config)
        self._rope_types = sorted(set(layer_types), key=str)
        embed, norm, lm_head = model.model.embed_tokens, model.model.norm, model.lm_head
        self._embed, self._norm, self._lm_head = embed, norm, lm_head
        #: what the head begins with
        self.final_norm: Callable[[torch.Tensor], torch.Tensor] = norm
        #: parameters of layer i, named as in the manifest
        self._modules = layer_modules(model, is_tied=self.config.is_tied)
        self._calls: list[LayerCall] = [
            _embedding_call(embed, self.dtype, device),
            *(_decoder_call(*pair) for pair in zip(model.model.layers, layer_types, strict=True)),
            _head_call(norm, lm_head, model.config),
        ]
        self._bound: set[int] = set()
        self._compiled: CompiledSpan | None = None
        if manifest.stage is not None:
            self._keep(manifest.stage, manifest)
        self._is_compiled = layout in ("auto", "compiled") and can_compile(
            self._modules[1:-1], self._rotary, self.dtype, device
        )
        is_timed = layout == "auto" and device.type == "cpu" and not self._is_compiled
        self._linears = ChosenLinears(layout, known_timings() if is_timed else ())
        if len(manifest.layers) != len(self._modules):
            raise ModelError(
                f"{manifest.model}: the manifest has {len(manifest.layers)} layers,"
                f" the configuration {len(self._modules)}"
            )

    def _keep(self, stage: StageOf, manifest: Manifest) -> None:
        """Only the stage's layers, by its own numbers. Where another stage has the model's first or
        last layer, rows pass unchanged."""
        kept = slice(stage.first_layer, stage.first_layer + len(manifest.layers))
        self._modules, self._calls = self._modules[kept], self._calls[kept]
        for module in self._modules[1:-1]:
            for part in module.modules():
                if hasattr(part, "layer_idx"):
                    # Its place in the KV cache, which has the stage's layers only.
                    part.layer_idx = int(part.layer_idx) - stage.first_layer  # type: ignore[assignment,arg-type]
        if not stage.is_first:
            self._modules[0], self._calls[0] = nn.ModuleDict(), _pass_on
        if not stage.is_last:
            self._modules[-1], self._calls[-1] = nn.ModuleDict(), _pass_on

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, layers: slice) -> list[LayerCall]:
        return self._calls[layers]

    def bind(self, entry: LayerEntry, arena: torch.Tensor) -> None:
        """Make the layer's parameters views into `arena` (flat bytes).

        Raises ModelError unless the entry covers exactly the module's parameters, in their shapes.
        """
        module = self._modules[entry.layer]
        given = {tensor.name: tensor for tensor in entry.tensors}
        for misfit in misfits(module, given):
            where = f"layer {entry.layer}"
            if misfit.given is None:
                raise ModelError(f"{where} lacks tensor {misfit.name}")
            if misfit.wanted is None:
                raise ModelError(f"{where} has tensor {misfit.name}, which its module does not")
            (dtype, shape), (wanted_dtype, wanted_shape) = misfit.given, misfit.wanted
            raise ModelError(
                f"{where}: {misfit.name} is {dtype} {shape},"
                f" its module wants {wanted_dtype} {wanted_shape}"
            )
        for name, tensor in given.items():
            owner, _, leaf = name.rpartition(".")
            view = _view(arena, entry, tensor)
            setattr(module.get_submodule(owner), leaf, nn.Parameter(view, requires_grad=False))
        self._complete(entry.layer)
        self._bound.add(entry.layer)

    def parameters(self, layer: int) -> dict[str, torch.Tensor]:
        """The layer's parameters by the manifest's names."""
        return dict(self._modules[layer].named_parameters())

    def unbound(self, layers: range) -> list[int]:
        """See `ModelShape.missing`."""
        return self.config.missing(layers, self._bound)

    def rope(self, positions: torch.Tensor) -> Rope:
        """The angles of `positions` (1, T)."""
        like = torch.empty(0, dtype=self.dtype, device=positions.device)
        return {
            layer_type: self._rotary(
                like, position_ids=positions, **({"layer_type": layer_type} if layer_type else {})
            )
            for layer_type in self._rope_types
        }

    def compile(self, cache: KVCache) -> CompiledSpan | None:
        """All layers as one compiled call over the KV `cache`, bound as they are; None if the
        kernels cannot compute them."""
        if self._is_compiled:
            # Not a method: what refers to the layers keeps their views of the arena.
            angles = partial(_angles, self._rotary)
            self._compiled = CompiledSpan(self._modules[1:-1], cache, self.config, angles)
        return self._compiled

    def _complete(self, layer: int) -> None:
        """What follows from the layer's parameters: a tied head's matrix, what computes them."""
        complete = [self._modules[layer]]
        if layer == 0 and self.config.is_tied:
            self._lm_head.weight = self._embed.weight
            complete.append(nn.ModuleDict({"lm_head": self._lm_head}))
        if self._compiled is not None:
            self._bind_compiled(self._compiled, layer)
        if not self._is_compiled:
            for module in complete:
                fuse(module, self._linears)

    def _bind_compiled(self, compiled: CompiledSpan, layer: int) -> None:
        if 0 < layer < len(self) - 1:
            compiled.bind(layer - 1, self.parameters(layer))
            return
        # A tied head is complete with layer 0 and the norm, whichever comes last.
        if not self._embed.weight.is_meta:
            compiled.bind_embedding(self._embed.weight)
        if not self._norm.weight.is_meta and not self._lm_head.weight.is_meta:
            compiled.bind_head(self._norm.weight, self._lm_head.weight)


# -- helpers, in the order used -----------------------------------------------------------------


def _rope_types(rotary: nn.Module, config: Any) -> list[str | None]:
    """Of each decoder layer, what its angles depend on besides positions."""
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        return list(config.layer_types)
    return [None] * int(config.num_hidden_layers)


def _angles(rotary: Any, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    like = torch.empty(0, dtype=torch.float32)
    cosines, sines = rotary(like, position_ids=positions.unsqueeze(0))
    return cosines[0], sines[0]


def _pass_on(rows: torch.Tensor, _: RunState) -> torch.Tensor:
    return rows


def _embedding_call(embed: nn.Embedding, dtype: torch.dtype, device: torch.device) -> LayerCall:
    scale = getattr(embed, "scalar_embed_scale", None)
    if scale is None:
        return lambda token_ids, state: nn.functional.embedding(token_ids, embed.weight)
    # In the type of the weights, as these models were trained.
    factor = torch.tensor(scale, dtype=dtype, device=device)
    return lambda token_ids, state: nn.functional.embedding(token_ids, embed.weight) * factor


def _decoder_call(module: nn.Module, rope_type: str | None) -> LayerCall:
    def run(hidden: torch.Tensor, state: RunState) -> torch.Tensor:
        rows: torch.Tensor = module(hidden, state.rope[rope_type], state.batch)
        return rows

    return run


def _head_call(norm: nn.Module, lm_head: nn.Linear, config: Any) -> LayerCall:
    softcap = getattr(config, "final_logit_softcapping", None)

    def run(hidden: torch.Tensor, state: RunState) -> torch.Tensor:
        rows = norm(hidden[0].index_select(0, state.sample_rows))
        logits: torch.Tensor = lm_head(rows)
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    return run


def _view(arena: torch.Tensor, entry: LayerEntry, tensor: TensorEntry) -> torch.Tensor:
    start = entry.offset_bytes + tensor.offset_bytes
    content = arena[start : start + tensor.size_bytes]
    return content.view(DTYPES[tensor.dtype]).view(tensor.shape)
