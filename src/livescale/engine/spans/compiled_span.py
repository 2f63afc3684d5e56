"""A model's layers as one compiled call (`kernels/`): its addresses, memory and team of threads.

For Llama, Mistral, Qwen2 and Qwen3 in fp32 and bf16 on a CPU. Weights are read where they lie in
the arena: a layer can be used as soon as its bytes are there, and there is no second copy."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.activations import SiLUActivation

from livescale.batching.runs.run import Run
from livescale.engine.attention.kv_cache import KVCache
from livescale.engine.files.model_config import ModelShape
from livescale.engine.kernels.job import JOB, LAYER, ORDER
from livescale.engine.kernels.products import BF16, FP32
from livescale.engine.kernels.tile_products import tile_products
from livescale.engine.spans.fused import classes_of, window_of
from livescale.engine.spans.span_memory import SpanMemory
from livescale.engine.spans.span_rows import SpanRows, span_rows
from livescale.engine.spans.span_team import SpanTeam

LAYERS = classes_of("DecoderLayer", ("Llama", "Mistral", "Qwen2", "Qwen3"))
"""`h + attention(norm(h))`, then `h + mlp(norm(h))`; rope over whole heads, RMS norms."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Angles that depend on the position alone."""

_ORDER = ORDER.split()

_PARAMETERS = {
    "input_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "out": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "out_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
}


def can_compile(layers: list[Any], rotary: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """True if the decoder layers, transformers' modules, are what the kernels compute."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return False
    if not layers or getattr(rotary, "rope_type", None) not in ROPE_TYPES:
        return False
    return all(
        type(layer) in LAYERS
        and isinstance(layer.mlp.act_fn, (nn.SiLU, SiLUActivation))
        and len(rotary.inv_freq) * 2 == layer.self_attn.head_dim
        and layer.mlp.gate_proj.out_features % 2 == layer.mlp.gate_proj.in_features % 2 == 0
        for layer in layers
    )


@dataclass(frozen=True, slots=True)
class SpanResult:
    """What came of a Run: hidden `rows` (rows, hidden) in the type of the weights, or `chosen`, of
    each sampling row the token with the highest logit, and the `logits` (samples, vocabulary),
    fp32, if wanted."""

    rows: torch.Tensor | None = None
    chosen: Sequence[int] = ()
    logits: torch.Tensor | None = None


class CompiledSpan:
    """The layers of one model. Each is bound when its bytes are in the arena."""

    def __init__(
        self,
        modules: Sequence[Any],
        cache: KVCache,
        config: ModelShape,
        angles: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """`modules` are transformers' decoder layers (`can_compile`); `angles` gives the cosines
        and sines (positions, head size), fp32, of positions."""
        self._shared = config.heads // config.kv_heads
        self._hidden, self._vocabulary = config.hidden_size, config.vocab_size
        self._angles = angles
        self._dtype = cache.keys.dtype
        self._job = np.zeros(1, JOB)
        items = self._job.view(np.uint8).data.cast("q")
        first = list(JOB.names or ()).index(_ORDER[0])
        self._order = items[first : first + len(_ORDER)]
        self._layers = np.zeros(len(modules), LAYER)
        self._fill_model(modules[0], cache, config)
        for number, module in enumerate(modules):
            layer = self._layers[number]
            layer["keys"] = cache.keys[number].data_ptr()
            layer["values"] = cache.values[number].data_ptr()
            layer["window"] = window_of(module.self_attn) or 0
        self._memory = SpanMemory(self._job, len(modules))
        like = BF16 if self._dtype is torch.bfloat16 else FP32
        self._team = SpanTeam(self._job, self._layers, like)
        self._tabled = 0

    def bind(self, number: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """The decoder layer's parameters are where these are, by the names in its module."""
        for place, name in _PARAMETERS.items():
            if name in parameters:
                self._layers[number][place] = parameters[name].data_ptr()

    def bind_embedding(self, weight: torch.Tensor) -> None:
        self._job["embedding"] = weight.data_ptr()

    def bind_head(self, norm: torch.Tensor, weight: torch.Tensor) -> None:
        self._job["final_norm"], self._job["head"] = norm.data_ptr(), weight.data_ptr()

    def time_parts(self, is_timed: bool) -> None:
        """From now on the first thread's time is measured, or not. Sums begin at 0."""
        for name in ("product_ticks", "attention_ticks"):
            self._job[name] = 0
        self._job["is_timed"] = is_timed

    @property
    def part_ticks(self) -> tuple[int, int]:
        """Of products, of attention, in the units of `kernels.span.clock`."""
        return int(self._job[0]["product_ticks"]), int(self._job[0]["attention_ticks"])

    def end(self) -> None:
        """The team's threads end; nothing is run from now on."""
        self._team.end()

    def run(
        self,
        run: Run,
        hidden: torch.Tensor | None,
        gives_rows: bool,
        wants_logits: bool,
        layer_ran: Callable[[int], None] | None,
    ) -> SpanResult:
        """The Run's decoder layers and, unless the Run `gives_rows`, its head; from token ids if
        there are no `hidden` rows (rows, hidden). `layer_ran` as `InstanceExecutor.run` has it."""
        rows = span_rows(run, self._shared, self._vocabulary)
        self._make_room(rows)
        given = None if hidden is None else hidden.contiguous()
        out = torch.empty(rows.rows, self._hidden, dtype=self._dtype) if gives_rows else None
        logits = torch.empty(rows.samples, self._vocabulary) if wants_logits else None
        first, stop = max(run.span.start - 1, 0), min(run.span.stop - 1, len(self._layers))
        # KV of a prompt may be wanted elsewhere before the last layer is done; that of single
        # tokens is not worth a call for each layer.
        is_told = layer_ran is not None and rows.rows > len(run.segments)
        ends = range(first + 1, stop + 1) if is_told and first < stop else (stop,)
        begin = first
        for end in ends:
            orders = {
                "segments": rows.segments.buffer_info()[0],
                "segment_count": len(run.segments),
                "first": begin,
                "stop": end,
                "begins": begin == first,
                "gives_rows": gives_rows and end == stop,
                "chooses": not gives_rows and end == stop,
                "rows_in": _address(given),
                "rows_out": _address(out),
                "logits": _address(logits),
            }
            # One copy: a step of decodes is so short that writing field by field can be seen.
            self._order[:] = array("q", [orders[name] for name in _ORDER])
            self._team.run()
            for number in range(begin, end):
                if layer_ran is not None:
                    layer_ran(number + 1)
            begin = end
        if gives_rows:
            return SpanResult(rows=out)
        return SpanResult(None, self._memory.integers("chosen")[: rows.samples].tolist(), logits)

    # -- helpers, in the order used -------------------------------------------------------------

    def _fill_model(self, module: Any, cache: KVCache, config: ModelShape) -> None:
        job, products = self._job, tile_products()
        job["hidden"], job["vocabulary"] = config.hidden_size, config.vocab_size
        job["heads"], job["kv_heads"] = config.heads, config.kv_heads
        job["head_dim"] = config.head_dim
        job["intermediate"] = module.mlp.gate_proj.out_features
        job["places"] = cache.blocks * cache.block_tokens
        job["block_tokens"] = cache.block_tokens
        job["epsilon"] = module.input_layernorm.variance_epsilon
        job["scaling"] = module.self_attn.scaling
        is_paired = self._dtype is torch.bfloat16 and products.bf16 != 0
        job["is_paired"] = is_paired
        job["item_bytes"], job["operand_bytes"] = self._dtype.itemsize, 2 if is_paired else 4
        job["fp32_product"], job["bf16_product"] = products.fp32, products.bf16
        job["release"] = products.release if is_paired else 0

    def _make_room(self, rows: SpanRows) -> None:
        threads = torch.get_num_threads()
        self._team.use(threads)
        self._memory.fit(rows.rows, rows.units, threads)
        self._fill_tables(rows.positions)

    def _fill_tables(self, positions: int) -> None:
        """Cosines and sines by position, for so many positions at least."""
        if positions <= self._tabled:
            return
        self._tabled = max(2 * self._tabled, 1 << positions.bit_length())
        half = self._job[0]["head_dim"] // 2
        tables = self._angles(torch.arange(self._tabled))
        for name, table in zip(("cosine_table", "sine_table"), tables, strict=True):
            self._memory.name(name, table[:, :half].contiguous().numpy())


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
