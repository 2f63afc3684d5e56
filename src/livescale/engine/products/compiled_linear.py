"""Linear layers over weights as they lie, by the compiled kernels and torch's own threads.

fp32 and bf16 on a CPU. No copy of the weights, and no GIL while it computes.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from livescale.engine.kernels.compiled import SQUARE
from livescale.engine.kernels.job import WIDE_ITEMS, lanes_of
from livescale.engine.kernels.linear import (
    COUNTER_BYTES,
    COUNTERS,
    LINE_BYTES,
    LINEAR,
    TILE_BYTES,
    linear_address,
)
from livescale.engine.kernels.team import function_address
from livescale.engine.kernels.tile_products import TileProducts, team_address, tile_products

DTYPES = (torch.float32, torch.bfloat16)

ALONE_PRODUCTS = 1 << 18
"""Products (weights times rows) below which a second thread costs more than it saves."""

_CACHE_LINE_BYTES = 64


def can_compile_linear(weight: torch.Tensor) -> bool:
    """True if the kernels can multiply `weight` (out, in) where it lies."""
    is_here = weight.device.type == "cpu" and weight.dtype in DTYPES
    # Squares of features and rows are turned at once, in bf16 of pairs of features.
    return is_here and weight.is_contiguous() and weight.shape[1] % (2 * SQUARE) == 0


class CompiledLinear:
    """The linear of `weight` (out, in), for which `can_compile_linear` holds. A `Linear`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        assert bias is None or bias.dtype is weight.dtype
        # Held, since the kernel knows their addresses only.
        self._weight = weight.detach()
        self._bias = None if bias is None else bias.detach().contiguous()
        self._width, self._features = weight.shape
        self._fixed = (
            self._weight.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
            self._features,
            self._width,
        )

    def __call__(self, x: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        return self.on(_desk(x.dtype), x, added)

    def on(self, desk: Desk, x: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        """The same with the memory and the products of `desk`."""
        assert x.dtype is self._weight.dtype
        assert x.shape[-1] == self._features
        out = torch.empty(*x.shape[:-1], self._width, dtype=x.dtype)
        rows = out.numel() // self._width
        if rows:
            x = x.contiguous()
            added = None if added is None else added.contiguous()
            assert added is None or (added.dtype, added.numel()) == (x.dtype, out.numel())
            added_address = 0 if added is None else added.data_ptr()
            desk.run(
                (*self._fixed, x.data_ptr(), added_address, out.data_ptr(), rows, lanes_of(rows))
            )
        return out


@dataclass(frozen=True, slots=True)
class LinearKernel:
    """`address` of the kernel; calls of it `alone`, and by a `team` of threads (function, argument,
    threads, flags), None where torch's threads are not OpenMP's."""

    address: int
    alone: Any
    team: Any


@functools.cache
def linear_kernel() -> LinearKernel:
    """Compiled, or read from Numba's cache."""
    address = linear_address()
    alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
    team = None
    if team_address():
        kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        team = ctypes.CFUNCTYPE(None, *kinds)(team_address())
    return LinearKernel(address, alone, team)


# -- helpers, in the order used -----------------------------------------------------------------


class Desk:
    """Memory of the calls of one Python thread with one type: it grows with the largest."""

    def __init__(self, dtype: torch.dtype, products: TileProducts) -> None:
        self._functions = linear_kernel()
        self._job = np.zeros(1, LINEAR)
        self._flat = self._job.view(np.int64)
        self._address = self._job.ctypes.data
        self.memory: dict[str, np.ndarray] = {}
        self._fits = (0, 0, 0)
        self._counters = self._place("counters", COUNTERS * COUNTER_BYTES).view(np.int64)
        job = self._job
        is_paired = dtype is torch.bfloat16 and products.bf16 != 0
        self._is_row_operand = is_paired or dtype is torch.float32
        job["is_paired"] = is_paired
        job["item_bytes"], job["operand_bytes"] = dtype.itemsize, 2 if is_paired else 4
        job["fp32_product"], job["bf16_product"] = products.fp32, products.bf16
        job["release"] = products.release if is_paired else 0
        job["yield_core"] = function_address("sched_yield")

    def run(self, fields: tuple[int, ...]) -> None:
        """`fields` are the values of CALL_FIELDS."""
        _, _, features, width, x, _, _, rows, lanes = fields
        threads = torch.get_num_threads()
        if width * features * rows < ALONE_PRODUCTS:
            threads = 1
        self._fit(features, lanes, threads)
        self._flat[: len(fields)] = fields
        # One row is an operand as it lies.
        is_operand = rows == 1 and self._is_row_operand
        self._job["operand"] = x if is_operand else self.memory["operand"].ctypes.data
        self._counters[:] = 0
        if threads == 1 or not self._functions.team:
            self._functions.alone(self._address)
        else:
            self._functions.team(self._functions.address, self._address, threads, 0)

    def _fit(self, features: int, lanes: int, threads: int) -> None:
        needed = (features, lanes, threads)
        if all(has >= wanted for has, wanted in zip(self._fits, needed, strict=True)):
            return
        features, lanes, threads = self._fits = tuple(map(max, self._fits, needed))  # type: ignore[assignment]
        self._place("operand", 4 * features * lanes)
        for name, size_bytes in (
            ("wide", 4 * max(WIDE_ITEMS, 4 * features)),
            ("tiles", TILE_BYTES + LINE_BYTES),
        ):
            size_bytes += -size_bytes % _CACHE_LINE_BYTES
            self._job[f"{name}_bytes"] = size_bytes
            self._place(name, size_bytes * threads)

    def _place(self, name: str, size_bytes: int) -> np.ndarray:
        memory = np.zeros(size_bytes + _CACHE_LINE_BYTES, np.uint8)
        start = -memory.ctypes.data % _CACHE_LINE_BYTES
        self.memory[name] = memory[start : start + size_bytes]
        self._job[name] = self.memory[name].ctypes.data
        return self.memory[name]


_LOCAL = threading.local()


def _desk(dtype: torch.dtype) -> Desk:
    """This thread's: a call with the GIL given up may meet another one."""
    desks: dict[torch.dtype, Desk] | None = getattr(_LOCAL, "desks", None)
    if desks is None:
        desks = _LOCAL.desks = {}
    if dtype not in desks:
        desks[dtype] = Desk(dtype, tile_products())
    return desks[dtype]
