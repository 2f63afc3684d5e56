"""Mixtures of experts with few steps: rows sorted by expert, one product for each that has any.

For experts whose weights are multiplied where they lie. Else transformers' way is as good.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from livescale.engine.products.linear_choice import ChosenLinears
from livescale.engine.products.linears import Linear


class Experts:
    """Stands for the `forward` of transformers' experts: the sum of each row's experts, weighted.

    An expert is `down(act(gate(x)) * up(x))`.
    """

    def __init__(
        self, gate_up: Sequence[Linear], down: Sequence[Linear], act: Any, width: int
    ) -> None:
        """By expert; `width` is the size of a gate."""
        self._gate_up, self._down, self._act, self._width = gate_up, down, act, width

    @classmethod
    def of(cls, module: Any, linears: ChosenLinears) -> Experts | None:
        """Those of the module, `gate_up_proj` (experts, 2 * width, hidden) and `down_proj`
        (experts, hidden, width); None where nothing is gained."""
        gate_up = [linears.of_expert(weight) for weight in module.gate_up_proj.detach()]
        down = [linears.of_expert(weight) for weight in module.down_proj.detach()]
        made_up = [linear for linear in gate_up if linear is not None]
        made_down = [linear for linear in down if linear is not None]
        if len(made_up) + len(made_down) < len(gate_up) + len(down):
            return None
        return cls(made_up, made_down, module.act_fn, module.down_proj.shape[2])

    def __call__(
        self, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """`rows` (T, hidden) go to `experts` (T, chosen), and count by `weights` (T, chosen)."""
        chosen = experts.shape[1]
        order = experts.flatten().argsort()
        counts = torch.bincount(experts.flatten(), minlength=len(self._down)).tolist()
        sent = rows.index_select(0, order // chosen)
        outputs, start = [], 0
        for expert, count in enumerate(counts):
            if count:
                outputs.append(self._one(expert, sent[start : start + count]))
                start += count
        came = torch.empty_like(sent)
        came[order] = torch.cat(outputs)
        by_row = came.view(len(rows), chosen, -1) * weights.unsqueeze(-1)
        return by_row.sum(dim=1).to(rows.dtype)

    def _one(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        gate_up = self._gate_up[expert](rows)
        gate, up = gate_up[..., : self._width], gate_up[..., self._width :]
        return self._down[expert](self._act(gate).mul_(up))
