"""Which way linear layers are computed: with a packed copy, by compiled kernels, or by torch.

Decided by what was timed on this machine (`linear_timing.py`). Nothing is timed here.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, cast, get_args

import msgspec
import torch
from torch import nn

from livescale.engine.products.compiled_linear import CompiledLinear, can_compile_linear
from livescale.engine.products.linears import Linear, MakeLinear, in_place, plain, stacked
from livescale.engine.products.packing import can_pack, packed

WeightsLayout = Literal["auto", "packed", "compiled", "plain"]
"""How weights lie where products are computed. `packed`: a second copy in oneDNN's own layout;
`compiled`: as in the arena, by the kernels where these can; `plain`: as in the arena, by torch.
`auto`: compiled for models whose layers the kernels can compute as a whole, for others the fastest
for each shape and number of rows, with a copy only where it gains enough (`COPY_GAIN`)."""

Kind = Literal["packed", "compiled", "plain"]
"""Of one linear."""

ROWS = (1, 8, 32, 128, 512)
"""Numbers of rows that are timed; another number is taken for the nearest one, by ratio."""

SHAPES = ((512, 512), (1024, 2048))
"""Weights (out, in) that are timed; others are taken for the nearest one by their items."""

COPY_GAIN, COPY_GAIN_ONCE = 1.05, 1.25
"""A packed copy is made where the ways without one take longer than so many times its time: as the
geometric mean over all numbers of rows, or for one of them."""


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Microseconds of one product of `rows` with weights (`width`, `features`) of a `dtype`, by
    kind. Kinds that are impossible, or were far behind with fewer rows, are missing."""

    dtype: str
    width: int
    features: int
    rows: int
    us: dict[Kind, float]


def weights_layout(name: str) -> WeightsLayout:
    """Of that name, which a configuration has checked."""
    [found] = [layout for layout in get_args(WeightsLayout) if layout == name]
    return cast(WeightsLayout, found)


def kinds_of(
    timings: Sequence[Timing], dtype: str, shape: tuple[int, int], may_copy: bool = True
) -> tuple[Kind, ...]:
    """The kind to use for each of `ROWS`; `packed` stands in it only if it is worth the memory.

    `timings` have, for the dtype, all `SHAPES` and `ROWS`.
    """
    items = math.log(shape[0] * shape[1])
    nearest = min(SHAPES, key=lambda known: abs(math.log(known[0] * known[1]) - items))
    cells = {
        timing.rows: timing.us
        for timing in timings
        if timing.dtype == dtype and (timing.width, timing.features) == nearest
    }
    without: dict[int, dict[Kind, float]] = {
        rows: {kind: us for kind, us in cells[rows].items() if kind != "packed"} for rows in ROWS
    }
    gains = [
        min(without[rows].values()) / cells[rows]["packed"]
        for rows in ROWS
        if "packed" in cells[rows]
    ]
    copies = may_copy and _is_worth_a_copy(gains)
    taken = cells if copies else without
    return tuple(min(taken[rows], key=taken[rows].__getitem__) for rows in ROWS)


def is_complete(timings: Sequence[Timing], dtypes: Sequence[str]) -> bool:
    """True if `kinds_of` has an answer for all of these, from times that can be times."""
    wanted = {(dtype, *shape, rows) for dtype in dtypes for shape in SHAPES for rows in ROWS}
    found = {
        (timing.dtype, timing.width, timing.features, timing.rows)
        for timing in timings
        if timing.us.keys() - {"packed"}
    }
    times = [us for timing in timings for us in timing.us.values()]
    return wanted <= found and all(0 < us < math.inf for us in times)


class ChosenLinears:
    """How the linears of a model are computed, by its layout. `timings` (none: nothing was timed)
    are for `auto`."""

    def __init__(self, layout: WeightsLayout, timings: Sequence[Timing] = ()) -> None:
        self._layout, self._timings = layout, timings

    def __call__(self, members: Sequence[nn.Linear]) -> Linear:
        """One for all of these, which read the same rows: their outputs are beside each other."""
        weight = members[0].weight
        shape = (sum(member.out_features for member in members), weight.shape[1])
        kinds = self._kinds(weight, shape)
        made: dict[Kind, Linear] = {}
        for kind in set(kinds):
            if kind == "packed":
                made[kind] = packed(*stacked(members))
            else:
                make: MakeLinear = CompiledLinear if kind == "compiled" else plain
                made[kind] = in_place(members, make)
        return _by_rows([made[kind] for kind in kinds], weight.shape[1])

    def of_expert(self, weight: torch.Tensor) -> Linear | None:
        """That of one of many experts, without a copy of its weight (out, in); None where nothing
        is better than transformers' way."""
        shape = (weight.shape[0], weight.shape[1])
        kinds = self._kinds(weight, shape, may_copy=False)
        if "compiled" not in kinds:
            return None
        made: dict[Kind, Linear] = {"compiled": CompiledLinear(weight), "plain": plain(weight)}
        return _by_rows([made[kind] for kind in kinds], shape[1])

    def _kinds(
        self, weight: torch.Tensor, shape: tuple[int, int], may_copy: bool = True
    ) -> tuple[Kind, ...]:
        """For each of ROWS."""
        can: dict[Kind, bool] = {
            "packed": may_copy and can_pack(weight.dtype, weight.device),
            "compiled": can_compile_linear(weight),
            "plain": True,
        }
        if self._layout == "auto" and self._timings and can["compiled"]:
            return kinds_of(self._timings, str(weight.dtype), shape, may_copy)
        order: tuple[Kind, ...] = get_args(Kind)
        if self._layout != "auto":
            order = (self._layout, "plain")
        return (next(kind for kind in order if can[kind]),) * len(ROWS)


# -- helpers, in the order used -----------------------------------------------------------------


def _is_worth_a_copy(gains: Sequence[float]) -> bool:
    """`gains` are of the numbers of rows for which the copy was timed."""
    if not gains:
        return False
    mean = math.prod(gains) ** (1 / len(gains))
    return mean > COPY_GAIN or max(gains) > COPY_GAIN_ONCE


@dataclass(frozen=True, slots=True)
class _ByRows:
    """Another linear for each class of row counts: `linears[i]` up to `bounds[i]` rows."""

    bounds: tuple[float, ...]
    linears: tuple[Linear, ...]
    features: int

    def __call__(self, x: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.numel() // self.features
        return self.linears[bisect_left(self.bounds, rows)](x, added)


def _by_rows(linears: Sequence[Linear], features: int) -> Linear:
    """`linears` are for ROWS."""
    if all(linear is linears[0] for linear in linears):
        return linears[0]
    bounds = tuple(math.sqrt(few * many) for few, many in pairwise(ROWS))
    return _ByRows(bounds, tuple(linears), features)
