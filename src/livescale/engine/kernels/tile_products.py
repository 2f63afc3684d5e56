"""Where this build of torch has its products of small matrices (oneDNN's micro-kernels).

`brgemm(m, n, k, lda, ldb, ldc, add, a, b, c, paired)` of torch's C++ library computes c (m, n),
fp32, as `a` (m, k) times `b` (k, n), or adds it to c. In bf16 two rows of b lie paired: (k / 2, n,
2). It uses what the CPU has (AMX, AVX-512, AVX2). Any thread may call it; it compiles a kernel for
each set of sizes and thread.

These functions are no public interface of torch: where they are missing, or the CPU lacks what they
need, kernels compute with loops of their own.
"""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass
from pathlib import Path

import torch

_LIBRARY = "lib/libtorch_cpu.so"
_FP32 = "_ZN2at6native7cpublas6brgemmEllllllbPKfS3_Pfb"
_BF16 = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"
_RELEASE = "_ZN2at6native7cpublas14brgemm_releaseEb"
_TEAM = "GOMP_parallel"


# Instruction sets that are taken for enough by torch's own question, but have no products in bf16:
# oneDNN would end the process when asked for one.
_WITHOUT_BF16 = ("AVX512_CORE", "AVX512_CORE_VNNI")


@dataclass(frozen=True, slots=True)
class TileProducts:
    """Addresses of functions; 0 stands for one that cannot be used here.

    `release` gives the registers of a thread's matrix unit back.
    """

    fp32: int = 0
    bf16: int = 0
    release: int = 0


@functools.cache
def tile_products() -> TileProducts:
    """Those of this process."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / _LIBRARY))
        fp32, bf16, release = (_address(library, name) for name in (_FP32, _BF16, _RELEASE))
    except (OSError, AttributeError):
        return TileProducts()
    if not torch._C._has_mkldnn or not torch.cpu._is_avx2_supported():
        return TileProducts()
    is_native = (
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and torch.cpu._is_avx512_bf16_supported()
        and _limit() not in _WITHOUT_BF16
    )
    return TileProducts(fp32, bf16 if is_native else 0, release if is_native else 0)


@functools.cache
def team_address() -> int:
    """Of `GOMP_parallel(function, argument, threads, flags)`, which calls a C function in the
    threads that torch computes with; 0 where these are not OpenMP's."""
    if "OpenMP" not in torch.__config__.parallel_info():
        return 0
    try:
        # Found through torch's library, so that it is the very OpenMP that torch uses.
        return _address(ctypes.CDLL(str(Path(torch.__file__).parent / _LIBRARY)), _TEAM)
    except (OSError, AttributeError):
        return 0


def _limit() -> str:
    """What oneDNN was told to use at most."""
    limits = [os.environ.get(f"{prefix}_MAX_CPU_ISA", "") for prefix in ("ONEDNN", "DNNL")]
    return (limits[0] or limits[1]).upper()


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(library[name], ctypes.c_void_p).value or 0
