"""Linear layers made fast on a CPU: weights copied into the blocked layout of torch's oneDNN.

A matrix product over few rows spends its time reading the weights, and oneDNN reads its own layout
two to three times as fast as a plain matrix (`benchmarks/RESULTS.md`). The arena keeps the plain
bytes, which other workers receive: packing costs the memory of the weights a second time. Whether
it is worth that is another matter (`linear_choice.py`).
"""

from __future__ import annotations

import torch
from torch import nn

from livescale.engine.products.linears import Linear

ROWS_STEP = 16
"""Row counts above this are rounded up to a multiple: oneDNN compiles a kernel for each count."""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """True if this build of torch has packed products of `dtype` on the device."""
    has_onednn: bool = torch._C._has_mkldnn
    if device.type != "cpu" or not has_onednn:
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


def packed(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The linear of `weight` (out, in), packed."""
    layout = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_STEP)
    product = torch.ops.mkldnn._linear_pointwise.default
    sum_with = torch.ops.mkldnn._linear_pointwise.binary
    width_in, width_out = weight.shape[1], weight.shape[0]
    offset = None if bias is None else bias.detach()

    def call(x: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        out: torch.Tensor
        rows = x.numel() // width_in
        surplus = -rows % ROWS_STEP if rows > ROWS_STEP else 0
        if surplus:
            padded = nn.functional.pad(x.reshape(rows, width_in), (0, 0, 0, surplus))
            out = product(padded, layout, offset, "none", [], "")
            out = out[:rows].view(*x.shape[:-1], width_out)
            return out if added is None else out.add_(added)
        if added is None:
            out = product(x, layout, offset, "none", [], "")
        else:
            out = sum_with(x, added, layout, offset, "add")
        return out

    return call
