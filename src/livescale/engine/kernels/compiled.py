"""What the kernels are written with: compilation, bits of bf16, addresses, atomic counters.

Numba keeps what was compiled beside these files (or in the user's cache directory), so only the
first process of a machine waits for the compiler. No torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.core import cgutils, sigutils
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

FAST = {"reassoc", "contract", "nsz"}
"""Sums may be taken in any order, which vectors need; infinities and NaN keep their meaning."""

_I1, _I16, _I32, _I64 = ir.IntType(1), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_TYPES = {
    types.int16: _I16,
    types.int32: _I32,
    types.int64: _I64,
    types.float32: ir.FloatType(),
}


def _digest_of_sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


SOURCES = _digest_of_sources()
"""Of all kernels: one may be compiled into another one, whose own file is the same still. Taken as
early as the files are read."""


class _KernelCache(FunctionCache):
    """Numba's cache, which looks at the file of a function alone."""

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        key: tuple[Any, ...] = super()._index_key(signature, codegen)  # type: ignore[no-untyped-call]
        return (*key, SOURCES)


def cache_folder() -> Path | None:
    """Where Numba keeps what was compiled of these files; None if it can be kept nowhere."""
    try:
        cache: Any = _KernelCache(_digest_of_sources)  # type: ignore[no-untyped-call]
        return Path(cache.cache_path)
    except RuntimeError:
        return None


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: compile on the first call, or take what an earlier process has compiled."""

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = njit(fastmath=FAST, error_model="numpy", **options)(function)
        # Where neither this directory nor the user's cache can be written, each process compiles.
        with contextlib.suppress(RuntimeError):
            dispatcher._cache = _KernelCache(function)  # type: ignore[no-untyped-call]
        return dispatcher

    return decorate


def address_of(function: Callable[..., Any], signature: Any) -> int:
    """Where the function is as a C function of that signature, for as long as the process lives."""
    options = {"fastmath": FAST, "error_model": "numpy"}
    callback: Any = CFunc(function, sigutils.normalize_signature(signature), {}, options)  # type: ignore[no-untyped-call]
    with contextlib.suppress(RuntimeError):
        callback._cache = _KernelCache(function)  # type: ignore[no-untyped-call]
    callback.compile()
    _CALLBACKS.append(callback)
    return int(callback.address)


_CALLBACKS: list[Any] = []


@contextlib.contextmanager
def compiling_alone() -> Iterator[None]:
    """One process of this machine compiles at a time: the others take what the first one has
    compiled. Some 40 s of CPU time the first time, a second after that."""
    folder = cache_folder()
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "compiling.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


# -- bits ---------------------------------------------------------------------------------------


def _bitcast(_context: Any, _bits: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


def _bits(_context: Any, _value: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _I32)

    return types.uint32(types.float32), generate


def _widen(_context: Any, value: Any) -> Any:
    """fp32 is itself; bf16, which comes as int16, is the upper half of an fp32."""

    def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if value == types.float32:
            return args[0]
        bits = builder.shl(builder.zext(args[0], _I32), ir.Constant(_I32, 16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(value), generate


_float_of_bits: Any = intrinsic(_bitcast)
_bits_of_float: Any = intrinsic(_bits)
as_float: Any = intrinsic(_widen)


@compiled()
def as_bf16(value: Any) -> Any:
    """The nearest bf16 of an fp32, ties to even, as int16."""
    bits = _bits_of_float(value)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.int16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@compiled()
def pair_of(even: Any, odd: Any) -> Any:
    """Two bf16 beside each other, the first one in the lower half of an int32."""
    return np.int32((np.uint32(np.uint16(odd)) << np.uint32(16)) | np.uint32(np.uint16(even)))


@compiled()
def as_pair(even: Any, odd: Any) -> Any:
    """Two fp32 as a pair of bf16."""
    return pair_of(as_bf16(even), as_bf16(odd))


@compiled()
def exp(x: Any) -> Any:
    """e to the power of x <= 0, within 1e-6 of it where x > -10: a polynomial, so that a loop of it
    is vectors."""
    scaled = max(x * np.float32(1.44269504), np.float32(-126.0))
    whole = np.floor(scaled + np.float32(0.5))
    f = (scaled - whole) * np.float32(0.69314718)
    power = np.float32(1.0 / 720) * f + np.float32(1.0 / 120)
    power = power * f + np.float32(1.0 / 24)
    power = power * f + np.float32(1.0 / 6)
    power = power * f + np.float32(0.5)
    power = power * f + np.float32(1.0)
    power = power * f + np.float32(1.0)
    return power * _float_of_bits(np.uint32(np.int32(whole) + 127) << np.uint32(23))


@compiled()
def silu(x: Any) -> Any:
    """x / (1 + e^-x)."""
    power = exp(-abs(x))
    return x * (np.float32(1.0) if x >= 0 else power) / (np.float32(1.0) + power)


def _ticks(_context: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        kind = ir.FunctionType(_I64, [])
        name = "llvm.readcyclecounter"
        module = builder.module
        known = module.globals.get(name)
        return builder.call(known or ir.Function(module, kind, name), [])

    return types.int64(), generate


ticks: Any = intrinsic(_ticks)
"""The CPU's own clock, in units of its own."""


# -- addresses ----------------------------------------------------------------------------------


def _pointer(_context: Any, _address: Any, like: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], _TYPES[like].as_pointer())

    pointer: Any = types.CPointer(like)  # type: ignore[no-untyped-call]
    return pointer(types.int64, like), generate


def _fetch_add(_context: Any, _address: Any, _value: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.atomic_rmw("add", place, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


def _load(_context: Any, _address: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.load_atomic(place, ordering="seq_cst", align=8)

    return types.int64(types.int64), generate


_typed: Any = intrinsic(_pointer)
fetch_add: Any = intrinsic(_fetch_add)
"""(address of an int64, addend): what was there before."""
load: Any = intrinsic(_load)
"""(address of an int64): what is there now, whichever thread wrote it."""


@compiled(inline="always")
def vector(address: Any, like: Any, length: Any) -> Any:
    """The memory at `address` as (length) items of the type of `like` (int16, int32, int64,
    float32). A loop over items becomes vectors if the index is the loop's own variable: Numba looks
    for negative ones else."""
    return carray(_typed(np.int64(address), like), (length,))


@compiled(inline="always")
def matrix(address: Any, like: Any, rows: Any, columns: Any) -> Any:
    """The memory at `address` as (rows, columns) items of the type of `like`."""
    return carray(_typed(np.int64(address), like), (rows, columns))


# -- squares of a matrix ------------------------------------------------------------------------


def _turn_square(
    _context: Any, _like: Any, _rows: Any, _pitch: Any, _last: Any, _place: Any, _place_pitch: Any
) -> Any:
    """Three rounds of exchanges between rows: of items, of pairs, of halves."""

    def generate(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, first, pitch, last, place, place_pitch = args
        is_narrow = signature.args[0] == types.int16
        wide = ir.VectorType(_I32, SQUARE)
        kind = ir.VectorType(_I16, SQUARE) if is_narrow else wide
        rows = []
        for number in range(SQUARE):
            own = ir.Constant(_I64, number)
            taken = builder.select(builder.icmp_signed("<", own, last), own, last)
            address = builder.add(first, builder.mul(taken, pitch))
            pointer = builder.inttoptr(address, kind.as_pointer())
            row = builder.load(pointer, align=2 if is_narrow else 4)
            if is_narrow:
                row = builder.shl(builder.zext(row, wide), ir.Constant(wide, [16] * SQUARE))
            rows.append(row)
        for distance in (1, 2, 4):
            rows = _exchanged(builder, rows, distance)
        for row in rows:
            builder.store(row, builder.inttoptr(place, wide.as_pointer()), align=4)
            place = builder.add(place, place_pitch)
        return target.get_dummy_value()

    return types.void(_like, *[types.int64] * 5), generate


def _exchanged(builder: Any, rows: list[Any], distance: int) -> list[Any]:
    """Of each two rows with that distance, blocks of so many items change places across."""
    upper = [i if not i & distance else SQUARE + i - distance for i in range(SQUARE)]
    lower = [i + distance if not i & distance else SQUARE + i for i in range(SQUARE)]
    masks = [ir.Constant(ir.VectorType(_I32, SQUARE), order) for order in (upper, lower)]
    turned = list(rows)
    for number in range(SQUARE):
        if not number & distance:
            pair = rows[number], rows[number + distance]
            turned[number], turned[number + distance] = (
                builder.shuffle_vector(*pair, mask) for mask in masks
            )
    return turned


SQUARE = 8
"""Rows and columns that are turned at once, in registers."""

turn_square: Any = intrinsic(_turn_square)
"""(type of the items, address and pitch in bytes of SQUARE rows, number of the last one, which
stands for those behind it, address and pitch of the result): columns become rows. Items of 32 bits
stay what they are, bf16 becomes fp32."""


# -- C functions by their addresses ---------------------------------------------------------------


def _call_with_address(_context: Any, _function: Any, _argument: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I32, [_I64])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])

    return types.int32(types.int64, types.int64), generate


def _tile_product(
    _context: Any,
    _function: Any,
    _m: Any,
    _n: Any,
    _k: Any,
    _pitch_a: Any,
    _pitch_b: Any,
    _pitch_c: Any,
    _is_added: Any,
    _a: Any,
    _b: Any,
    _c: Any,
    _is_paired: Any,
) -> Any:
    def generate(target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I64] * 6 + [_I1] + [_I64] * 3 + [_I1])
        is_added, is_paired = (builder.trunc(args[i], _I1) for i in (7, 11))
        function = builder.inttoptr(args[0], kind.as_pointer())
        builder.call(function, [*args[1:7], is_added, *args[8:11], is_paired])
        return target.get_dummy_value()

    return types.void(*[types.int64] * 12), generate


def _clock_ns(_context: Any, _function: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        place = cgutils.alloca_once(builder, _I64, size=2)  # type: ignore[no-untyped-call]
        kind = ir.FunctionType(_I32, [_I32, _I64.as_pointer()])
        clock = ir.Constant(_I32, time.CLOCK_MONOTONIC)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [clock, place])
        seconds, rest = builder.load(place), builder.load(builder.gep(place, [_I64(1)]))
        return builder.add(builder.mul(seconds, _I64(1_000_000_000)), rest)

    return types.int64(types.int64), generate


clock_ns: Any = intrinsic(_clock_ns)
"""(address of C's `clock_gettime`): nanoseconds on the monotonic clock."""

call_with_address: Any = intrinsic(_call_with_address)
"""(function, address): what `int function(void *)` returns."""

call_tile_product: Any = intrinsic(_tile_product)
"""(function, m, n, k, pitch of a, b and c, is_added, addresses of a, b and c, is_paired): see
`tile_products.py`."""
