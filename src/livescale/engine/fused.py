"""Parts of decoder layers with fewer, larger steps: what a decode of a few rows spends its time on.

At few rows a step of torch costs more than its arithmetic, and a decoder layer of transformers has
about 60 of them. Here the same mathematics takes half. Only parts whose class is listed are
replaced, and each keeps its module and parameters; every other family runs as transformers has it.
No packing (`packing.py`), no cache (`attention.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from livescale.engine.attention import PagedBatch, attend
from livescale.engine.packing import packed, replace_forward, stacked

NORMS = (llama.LlamaRMSNorm, mistral.MistralRMSNorm, qwen2.Qwen2RMSNorm, qwen3.Qwen3RMSNorm)
"""`x / rms(x) * weight`, computed in fp32."""

MLPS = (llama.LlamaMLP, mistral.MistralMLP, qwen2.Qwen2MLP, qwen3.Qwen3MLP)
"""`down(act(gate(x)) * up(x))`."""

ATTENTIONS = (llama.LlamaAttention, mistral.MistralAttention, qwen2.Qwen2Attention)
"""Projections, rope over whole heads, attention, projection: nothing between."""

LAYERS = (llama.LlamaDecoderLayer, mistral.MistralDecoderLayer, qwen2.Qwen2DecoderLayer)
"""`h + attention(norm(h))`, then `h + mlp(norm(h))`."""


def fuse(layer: nn.Module) -> set[nn.Module]:
    """The decoder layer, or its parts, are computed in larger steps from now on, if they can be.

    Their weights must be complete. Returns the linears that are no longer called.
    """
    done: set[nn.Module] = set()
    part: Any
    for part in layer.modules():
        if type(part) in NORMS:
            replace_forward(part, _Norm(part))
        elif type(part) in MLPS:
            replace_forward(part, _Mlp(part))
            done |= {part.gate_proj, part.up_proj, part.down_proj}
        elif type(part) in ATTENTIONS:
            replace_forward(part, _Attention(part))
            done |= {part.q_proj, part.k_proj, part.v_proj, part.o_proj}
    if type(layer) in LAYERS:
        replace_forward(layer, _Layer(layer))
    return done


# -- helpers, in the order used -----------------------------------------------------------------


class _Norm:
    def __init__(self, norm: Any) -> None:
        self._weight = norm.weight.detach()
        self._eps = norm.variance_epsilon

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(rows, self._weight.shape, self._weight, self._eps)


class _Mlp:
    def __init__(self, mlp: Any) -> None:
        self._gate_up = packed(*stacked([mlp.gate_proj, mlp.up_proj]))
        self._down = packed(*stacked([mlp.down_proj]))
        self._act = mlp.act_fn
        self._width = mlp.gate_proj.out_features

    def __call__(self, rows: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        gate_up = self._gate_up(rows)
        gate, up = gate_up[..., : self._width], gate_up[..., self._width :]
        return self._down(self._act(gate).mul_(up), added)


class _Attention:
    """Stands for `forward`: one product for q, k and v, one rotation for all heads of q and k."""

    def __init__(self, attention: Any) -> None:
        # Not the module itself: when it is dropped, its parameters' memory is to be free at once.
        self._layer = attention.layer_idx
        self._scaling = attention.scaling
        self._qkv = packed(*stacked([attention.q_proj, attention.k_proj, attention.v_proj]))
        self._out = packed(*stacked([attention.o_proj]))
        self._head_dim = attention.head_dim
        self._heads = attention.q_proj.out_features // attention.head_dim
        self._kv_heads = attention.k_proj.out_features // attention.head_dim
        self._window = _window(attention)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        paged: PagedBatch,
        added: torch.Tensor | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        projected = self._qkv(hidden_states).view(
            hidden_states.shape[1], self._heads + 2 * self._kv_heads, self._head_dim
        )
        turning = self._heads + self._kv_heads
        turned = _turned(projected[:, :turning], *position_embeddings).transpose(0, 1)
        attended = attend(
            paged,
            self._layer,
            turned[: self._heads],
            turned[self._heads :],
            projected[:, turning:].transpose(0, 1),
            self._scaling,
            self._window,
        )
        return self._out(attended.view(1, len(attended), -1), added), None


class _Layer:
    """Calls the parts without their modules, and adds in the last step of each."""

    def __init__(self, layer: Any) -> None:
        self._before, self._between = (
            layer.input_layernorm.forward,
            layer.post_attention_layernorm.forward,
        )
        self._attention, self._mlp = layer.self_attn.forward, layer.mlp.forward

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        paged: PagedBatch,
        **_: object,
    ) -> torch.Tensor:
        rows, _none = self._attention(
            self._before(hidden_states), position_embeddings, paged, added=hidden_states
        )
        out: torch.Tensor = self._mlp(self._between(rows), rows)
        return out


def _window(attention: Any) -> int | None:
    """What the module's own forward passes as `sliding_window`."""
    if isinstance(attention, mistral.MistralAttention):
        window = getattr(attention.config, "sliding_window", None)
    else:
        window = getattr(attention, "sliding_window", None)
    return None if window is None else int(window)


def _turned(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`heads` (T, n, D) turned by the angles (1, T, D), whose two halves are equal."""
    half = heads.shape[-1] // 2
    turned = heads * cos[0].unsqueeze(1)
    sines = sin[0, :, :half].unsqueeze(1)
    turned[..., :half].addcmul_(heads[..., half:], sines, value=-1)
    turned[..., half:].addcmul_(heads[..., :half], sines)
    return turned
