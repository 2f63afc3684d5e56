"""Linear layers as what computes them, and modules that compute with another one than their own.

Which one is fastest differs between machines, types and numbers of rows (`linear_choice.py`); what
is built of linears (`fused.py`) is given a way to make them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn


class Linear(Protocol):
    """`x @ weight.T + bias`, and `added` on top if given: all shapes (..., out), x (..., in)."""

    def __call__(self, x: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor: ...


MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]
"""Of a complete weight (out, in) and its bias (out)."""


def plain(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """torch's own, over the weight as it lies, on any device."""
    weight = weight.detach()
    offset = None if bias is None else bias.detach()

    def call(x: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        out = nn.functional.linear(x, weight, offset)
        return out if added is None else out.add_(added)

    return call


def stacked(members: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One matrix and one bias (if they have any); a copy, unless the matrices lie above each
    other."""
    weights = [member.weight.detach() for member in members]
    joined = _joined(weights)
    return torch.cat(weights) if joined is None else joined, _biases(members)


def in_place(members: Sequence[nn.Linear], make: MakeLinear) -> Linear:
    """Made of the weights where they lie: one product if they lie above each other, else one for
    each."""
    joined = _joined([member.weight.detach() for member in members])
    if joined is not None:
        return make(joined, _biases(members))
    parts = [make(member.weight, member.bias) for member in members]

    def call(x: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.cat([part(x) for part in parts], dim=-1)
        return out if added is None else out.add_(added)

    return call


def replace_forward(module: nn.Module, call: Callable[..., object]) -> None:
    """Calling the module calls `call`; the module keeps its parameters."""
    # An attribute of the instance hides the method of the class.
    setattr(module, "forward", call)  # noqa: B010 (a plain assignment is an error to mypy)


# -- helpers, in the order used -----------------------------------------------------------------


def _joined(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The matrices (out, in) as one, if they lie above each other in one memory."""
    first, width_in = weights[0], weights[0].shape[1]
    stop = first.data_ptr()
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or weight.data_ptr() != stop:
            return None
        stop += weight.nbytes
    return first.as_strided((sum(len(weight) for weight in weights), width_in), (width_in, 1))


def _biases(members: Sequence[nn.Linear]) -> torch.Tensor | None:
    biases = [member.bias.detach() for member in members if member.bias is not None]
    assert len(biases) in (0, len(members)), "some biases are missing"
    return torch.cat(biases) if biases else None
