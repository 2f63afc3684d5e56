"""Linear layers made fast on a CPU: weights copied into the blocked layout of torch's oneDNN.

A matrix product over few rows spends its time reading the weights, and oneDNN reads its own layout
two to three times as fast as a plain matrix (`benchmarks/RESULTS.md`). Linears that read the same
rows (q, k, v; gate, up) become one product. The arena keeps the plain bytes, which other workers
receive: packing costs the memory of the weights a second time. No attention, no families.
"""

from collections.abc import Callable, Sequence, Set
from typing import Protocol

import torch
from torch import nn

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears of one module that are called with the same rows, in the order of the calls."""

ROWS_STEP = 16
"""Row counts above this are rounded up to a multiple: oneDNN compiles a kernel for each count."""


class Linear(Protocol):
    """`x @ weight.T + bias`, and `added` on top if given: all shapes (..., out), x (..., in)."""

    def __call__(self, x: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor: ...


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """True if this build of torch has packed products of `dtype` on the device."""
    has_onednn: bool = torch._C._has_mkldnn
    if device.type != "cpu" or not has_onednn:
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


def pack_linears(module: nn.Module, but: Set[nn.Module] = frozenset()) -> None:
    """Every plain `nn.Linear` inside the module computes with packed weights from now on.

    Its parameters stay what they are; changes to them are no longer seen. Those in `but` are left
    as they are.
    """
    for parent in list(module.modules()):
        linears = {
            name: child
            for name, child in parent.named_children()
            if type(child) is nn.Linear and child not in but
        }
        for names in GROUPS:
            if all(name in linears for name in names):
                _pack_group([linears.pop(name) for name in names])
        for linear in linears.values():
            replace_forward(linear, packed(linear.weight, linear.bias))


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


def stacked(linears: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One matrix and one bias (if they have any) for linears that read the same rows."""
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(linears)), "some biases are missing"
    weight = _joined([linear.weight.detach() for linear in linears])
    return weight, torch.cat(biases) if biases else None


def replace_forward(module: nn.Module, call: Callable[..., object]) -> None:
    """Calling the module calls `call`; the module keeps its parameters."""
    # An attribute of the instance hides the method of the class.
    setattr(module, "forward", call)  # noqa: B010 (a plain assignment is an error to mypy)


# -- helpers, in the order used -----------------------------------------------------------------


def _pack_group(linears: Sequence[nn.Linear]) -> None:
    group = _Group(linears)
    for index, linear in enumerate(linears):
        replace_forward(linear, group.member(index))


class _Group:
    """Several linears as one product: the first one called computes for all, the others take."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._widths = [linear.out_features for linear in linears]
        self._product = packed(*stacked(linears))
        #: the rows that the outputs belong to; held, so that no other tensor can have its identity
        self._rows: torch.Tensor | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()

    def member(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        is_last = index == len(self._widths) - 1

        def call(x: torch.Tensor) -> torch.Tensor:
            if self._rows is not x:
                self._outputs = torch.split(self._product(x), self._widths, dim=-1)
                self._rows = x
            out = self._outputs[index]
            if is_last:
                self._rows, self._outputs = None, ()
            return out

        return call


def _joined(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The matrices (out, in) above each other; no copy where they lie like that in the arena."""
    first, width_in = weights[0], weights[0].shape[1]
    stop = first.data_ptr()
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or weight.data_ptr() != stop:
            return torch.cat(list(weights))
        stop += weight.nbytes
    return first.as_strided((sum(len(weight) for weight in weights), width_in), (width_in, 1))
