"""Times of linear layers on this machine, measured once and kept in a file beside Numba's cache.

What follows from them is `linear_choice.py`'s matter.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numba
import torch
from llvmlite import binding

from livescale.engine.kernels.compiled import SOURCES, cache_folder
from livescale.engine.kernels.tile_products import tile_products
from livescale.engine.products.compiled_linear import DTYPES, CompiledLinear
from livescale.engine.products.linear_choice import ROWS, SHAPES, Kind, Timing, is_complete
from livescale.engine.products.linears import Linear, plain
from livescale.engine.products.packing import can_pack, packed

FILE = "linear_times.json"

CELL_S = 0.03
"""CPU time that one number of rows of one shape may take, beyond the first rounds of all ways."""

ROUNDS_MIN, ROUNDS_MAX = 2, 9

TOO_SLOW = 3.0
"""A way that takes so many times the best one's time is not tried with more rows."""

_WEIGHTS = 1 << 21
"""Items that weights are taken of in turns: more than a core's cache holds, as in a model."""

_TURNS_MAX = 4
_ISA_SETTINGS = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
)
_DTYPE_NAMES = tuple(str(dtype) for dtype in DTYPES)

Timings = tuple[Timing, ...]

_known: dict[str, Timings] = {}


def machine_key() -> str:
    """What times depend on: CPU, what limits its instructions, libraries, kernels."""
    products = tile_products()
    limits = [f"{name}={os.environ[name]}" for name in _ISA_SETTINGS if name in os.environ]
    host = numba.config.CPU_NAME or binding.get_host_cpu_name()  # type: ignore[attr-defined]
    return "; ".join(
        (
            _cpu_model(),
            torch.backends.cpu.get_cpu_capability(),
            f"compiled for {host}",
            f"products fp32 {products.fp32 != 0} bf16 {products.bf16 != 0}",
            f"packed bf16 {can_pack(torch.bfloat16, torch.device('cpu'))}",
            *limits,
            f"torch {torch.__version__}",
            f"kernels {SOURCES[:16]}",
        )
    )


def known_timings() -> Timings:
    """Those of this machine, by this process or an earlier one; none if there are none."""
    key = machine_key()
    if key not in _known:
        found = _read(_path()).get(key, ())
        if not is_complete(found, _DTYPE_NAMES):
            return ()
        _known[key] = found
    return _known[key]


def ensure_timings() -> Timings:
    """Those of this machine, measured now if there are none: a second or two."""
    known = known_timings()
    if not known:
        known = _known[machine_key()] = measure()
        _keep(_path(), machine_key(), known)
    return known


@torch.inference_mode()
def measure() -> Timings:
    """Time all kinds in turns, by the CPU time of one thread, of which the lowest counts: other
    processes disturb that least. All kinds share their work among the same threads."""
    timings: list[Timing] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for dtype in DTYPES:
            items = torch.randn(_WEIGHTS, generator=torch.Generator().manual_seed(1)).to(dtype)
            for shape in SHAPES:
                timings += _time_shape(items, shape)
    finally:
        torch.set_num_threads(threads)
    return tuple(timings)


# -- helpers, in the order used -----------------------------------------------------------------


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "unknown CPU"


def _path() -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / FILE


def _read(path: Path | None) -> dict[str, Timings]:
    """All that the file holds; nothing if it is missing or broken."""
    if path is None:
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Timings])
    except (OSError, msgspec.DecodeError, ValueError):
        return {}


def _keep(path: Path | None, key: str, timings: Timings) -> None:
    """In the file from now on. Where it cannot be written, each process measures."""
    if path is None:
        return
    content = msgspec.json.encode(_read(path) | {key: timings})
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Replaced as a whole: another process may read it at any time.
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{FILE}-")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)


def _time_shape(items: torch.Tensor, shape: tuple[int, int]) -> list[Timing]:
    size = math.prod(shape)
    turns = min(len(items) // size, _TURNS_MAX)
    weights = [items[n * size : (n + 1) * size].view(shape) for n in range(turns)]
    makes: dict[Kind, Callable[[torch.Tensor], Linear]] = {
        "compiled": CompiledLinear,
        "plain": plain,
    }
    if can_pack(items.dtype, items.device):
        makes["packed"] = packed
    linears = {kind: [make(weight) for weight in weights] for kind, make in makes.items()}
    timings = []
    for rows in ROWS:
        x = items[: rows * shape[1]].view(rows, shape[1])
        us = _time_rows(linears, x)
        timings.append(Timing(str(items.dtype), *shape, rows, us))
        limit = TOO_SLOW * min(us.values())
        nearest = min((kind for kind in us if kind != "packed"), key=us.__getitem__)
        linears = {
            kind: made
            for kind, made in linears.items()
            if rows == 1 or us[kind] <= limit or kind == nearest
        }
    return timings


def _time_rows(linears: Mapping[Kind, Sequence[Linear]], x: torch.Tensor) -> dict[Kind, float]:
    """Microseconds of one product, by kind."""
    for made in linears.values():
        made[0](x)  # Libraries make a kernel for each number of rows.
    best: dict[Kind, float] = dict.fromkeys(linears, math.inf)
    started = time.thread_time()
    for done in range(ROUNDS_MAX):
        if done >= ROUNDS_MIN and time.thread_time() - started > CELL_S:
            break
        for kind, made in linears.items():
            begun = time.thread_time()
            for linear in made:
                linear(x)
            best[kind] = min(best[kind], (time.thread_time() - begun) * 1e6 / len(made))
    return {kind: round(us, 3) for kind, us in best.items()}
