"""RMS norms of rows: in one compiled pass on a CPU, by torch elsewhere."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch.nn import functional

from livescale.engine.kernels.row_norms import row_norms_address

DTYPES = (torch.float32, torch.bfloat16)


class RowNorm:
    """`x / rms(x) * weight` of rows (..., features), computed in fp32."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        """`weight` (features) is of the rows' type, or fp32."""
        self._weight, self._epsilon = weight, epsilon
        self._features = len(weight)
        self._kernel = row_norms_kernel() if weight.device.type == "cpu" else None
        # What the kernel reads. A copy of a narrow weight, which is small.
        self._wide = weight.float().contiguous()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self._kernel is None or rows.dtype not in DTYPES:
            return self._by_torch(rows)
        rows = rows.contiguous()
        out = torch.empty_like(rows)
        count = rows.numel() // self._features
        self._kernel(
            rows.data_ptr(),
            self._wide.data_ptr(),
            out.data_ptr(),
            count,
            self._features,
            rows.itemsize,
            self._epsilon,
        )
        return out

    def _by_torch(self, rows: torch.Tensor) -> torch.Tensor:
        weight = self._weight
        if weight.dtype is rows.dtype:
            return functional.rms_norm(rows, weight.shape, weight, self._epsilon)
        wide = functional.rms_norm(rows.float(), weight.shape, self._wide, self._epsilon)
        return wide.type_as(rows)


@functools.cache
def row_norms_kernel() -> Any:
    """The kernel as a function of C, compiled or read from Numba's cache."""
    kinds = (*(ctypes.c_int64,) * 6, ctypes.c_float)
    return ctypes.CFUNCTYPE(None, *kinds)(row_norms_address())
