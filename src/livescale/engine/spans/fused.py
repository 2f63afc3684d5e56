"""Parts of decoder layers with fewer, larger steps: what a decode of a few rows spends its time on.

At few rows a step of torch costs more than its arithmetic, and a decoder layer of transformers has
about 60 of them. Here the same mathematics takes half, on any device, over whatever computes the
linears (`linears.py`). Parts are known by their classes, and keep their modules and parameters.
No cache (`attention.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.phi3 import modeling_phi3 as phi3
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from livescale.engine.attention.attention import PagedBatch, attend
from livescale.engine.products.experts import Experts
from livescale.engine.products.linear_choice import ChosenLinears
from livescale.engine.products.linears import replace_forward
from livescale.engine.products.row_norms import RowNorm

_FAMILIES: dict[str, Any] = {
    "Llama": llama,
    "Mistral": mistral,
    "Qwen2": qwen2,
    "Qwen3": qwen3,
    "Phi3": phi3,
    "Mixtral": mixtral,
    "Qwen3Moe": qwen3_moe,
    "Gemma2": gemma2,
    "Gemma3": gemma3,
}
_GEMMAS = ("Gemma2", "Gemma3")
_OTHERS = tuple(name for name in _FAMILIES if name not in _GEMMAS)


def classes_of(part: str, families: Iterable[str] = _FAMILIES) -> tuple[type[nn.Module], ...]:
    """What transformers calls `{family}{part}`, of these families."""
    return tuple(getattr(_FAMILIES[name], name + part) for name in families)


NORMS = classes_of("RMSNorm", _OTHERS)
"""`x / rms(x) * weight`, computed in fp32."""

OFFSET_NORMS = classes_of("RMSNorm", _GEMMAS)
"""`x / rms(x) * (1 + weight)`, computed in fp32."""

MLPS = classes_of("MLP", (name for name in _FAMILIES if name != "Mixtral"))
"""`down(act(gate(x)) * up(x))`."""

EXPERTS = classes_of("Experts", ("Mixtral", "Qwen3Moe"))
"""The same for each expert that a row is sent to, and the sum of these by their weights."""

ATTENTIONS = classes_of("Attention")
"""Projections, norms of each head of q and k where there are any, rope, attention, projection."""

LAYERS = classes_of("DecoderLayer", _OTHERS)
"""`h + attention(norm(h))`, then `h + mlp(norm(h))`."""

SANDWICH_LAYERS = classes_of("DecoderLayer", _GEMMAS)
"""As these, with a norm of what is added."""


def fuse(layer: nn.Module, linears: ChosenLinears) -> None:
    """The layer's parts, and itself if it is a decoder layer, are computed in larger steps from now
    on. Their weights must be complete. Parameters stay what they are; changes to them may no longer
    be seen."""
    done: set[nn.Module] = set()
    part: Any
    for part in layer.modules():
        kind = type(part)
        if kind in NORMS or kind in OFFSET_NORMS:
            replace_forward(part, _norm_of(part))
        elif kind in MLPS:
            replace_forward(part, _Mlp(part, linears))
            done |= set(part.children())
        elif kind in ATTENTIONS:
            replace_forward(part, _Attention(part, linears))
            done |= set(part.children())
        elif kind in EXPERTS:
            experts = Experts.of(part, linears)
            if experts is not None:
                replace_forward(part, experts)
        elif kind is nn.Linear and part not in done:
            replace_forward(part, linears([part]))
    if type(layer) in LAYERS:
        replace_forward(layer, _Layer(layer))
    elif type(layer) in SANDWICH_LAYERS:
        replace_forward(layer, _SandwichLayer(layer))


# -- helpers, in the order used -----------------------------------------------------------------

_Rows = Callable[[torch.Tensor], torch.Tensor]


def _norm_of(norm: Any) -> _Rows:
    if type(norm) in OFFSET_NORMS:
        return RowNorm(1 + norm.weight.detach().float(), norm.eps)
    return RowNorm(norm.weight.detach(), norm.variance_epsilon)


class _Mlp:
    def __init__(self, mlp: Any, linears: ChosenLinears) -> None:
        is_joined = hasattr(mlp, "gate_up_proj")
        self._gate_up = linears([mlp.gate_up_proj] if is_joined else [mlp.gate_proj, mlp.up_proj])
        self._down = linears([mlp.down_proj])
        self._act = mlp.activation_fn if is_joined else mlp.act_fn
        self._width = mlp.down_proj.in_features

    def __call__(self, rows: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        gate_up = self._gate_up(rows)
        gate, up = gate_up[..., : self._width], gate_up[..., self._width :]
        return self._down(self._act(gate).mul_(up), added)


class _Attention:
    """Stands for `forward`: one product for q, k and v, one rotation for all heads of q and k."""

    def __init__(self, attention: Any, linears: ChosenLinears) -> None:
        # Not the module itself: when it is dropped, its parameters' memory is to be free at once.
        self._layer = attention.layer_idx
        self._scaling = attention.scaling
        is_joined = hasattr(attention, "qkv_proj")
        self._qkv = linears(
            [attention.qkv_proj]
            if is_joined
            else [attention.q_proj, attention.k_proj, attention.v_proj]
        )
        self._out = linears([attention.o_proj])
        self._head_dim = attention.head_dim
        self._heads = attention.o_proj.in_features // attention.head_dim
        self._kv_heads = self._heads // attention.num_key_value_groups
        self._norms: tuple[_Rows, _Rows] | None = None
        if hasattr(attention, "q_norm"):
            self._norms = (_norm_of(attention.q_norm), _norm_of(attention.k_norm))
        self._window = window_of(attention)
        self._softcap: float | None = None
        if isinstance(attention, gemma2.Gemma2Attention):
            self._softcap = attention.attn_logit_softcapping

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        paged: PagedBatch,
        added: torch.Tensor | None = None,
    ) -> torch.Tensor:
        projected = self._qkv(hidden_states).view(
            hidden_states.shape[1], self._heads + 2 * self._kv_heads, self._head_dim
        )
        turning = self._heads + self._kv_heads
        turned = _turned(self._normed(projected[:, :turning]), *position_embeddings).transpose(0, 1)
        attended = attend(
            paged,
            self._layer,
            turned[: self._heads],
            turned[self._heads :],
            projected[:, turning:].transpose(0, 1),
            self._scaling,
            self._window,
            self._softcap,
        )
        return self._out(attended.view(1, len(attended), -1), added)

    def _normed(self, heads: torch.Tensor) -> torch.Tensor:
        """Heads of q and k (T, n, D)."""
        if self._norms is None:
            return heads
        of_q, of_k = self._norms
        return torch.cat((of_q(heads[:, : self._heads]), of_k(heads[:, self._heads :])), dim=1)


class _Layer:
    """Calls the parts without their modules, and adds in the last step of each."""

    def __init__(self, layer: Any) -> None:
        self._before = layer.input_layernorm.forward
        self._between = layer.post_attention_layernorm.forward
        self._attention, self._mlp = layer.self_attn.forward, layer.mlp.forward
        self._mlp_adds = type(layer.mlp) in MLPS

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        paged: PagedBatch,
    ) -> torch.Tensor:
        rows = self._attention(
            self._before(hidden_states), position_embeddings, paged, hidden_states
        )
        if self._mlp_adds:
            out: torch.Tensor = self._mlp(self._between(rows), rows)
        else:
            out = rows.add_(self._mlp(self._between(rows)))
        return out


class _SandwichLayer:
    def __init__(self, layer: Any) -> None:
        self._norms = [
            norm.forward
            for norm in (
                layer.input_layernorm,
                layer.post_attention_layernorm,
                layer.pre_feedforward_layernorm,
                layer.post_feedforward_layernorm,
            )
        ]
        self._attention, self._mlp = layer.self_attn.forward, layer.mlp.forward

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        paged: PagedBatch,
    ) -> torch.Tensor:
        before_attention, behind_attention, before_mlp, behind_mlp = self._norms
        rows = self._attention(before_attention(hidden_states), position_embeddings, paged)
        rows = behind_attention(rows).add_(hidden_states)
        out: torch.Tensor = behind_mlp(self._mlp(before_mlp(rows))).add_(rows)
        return out


def window_of(attention: Any) -> int | None:
    """What the module's own forward passes as `sliding_window`."""
    if isinstance(attention, WINDOW_OF_CONFIG):
        window = getattr(attention.config, "sliding_window", None)
    else:
        window = getattr(attention, "sliding_window", None)
    return None if window is None else int(window)


WINDOW_OF_CONFIG = classes_of("Attention", ("Mistral", "Mixtral", "Phi3"))


def _turned(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The first part of `heads` (T, n, D) turned by the angles (1, T, part), whose two halves are
    equal."""
    size = cos.shape[-1]
    if size < heads.shape[-1]:
        return torch.cat((_turned(heads[..., :size], cos, sin), heads[..., size:]), dim=-1)
    half = size // 2
    turned = heads * cos[0].unsqueeze(1)
    sines = sin[0, :, :half].unsqueeze(1)
    turned[..., :half].addcmul_(heads[..., half:], sines, value=-1)
    turned[..., half:].addcmul_(heads[..., :half], sines)
    return turned
