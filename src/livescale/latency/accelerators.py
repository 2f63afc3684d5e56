"""Accelerators as coefficients of the roofline, and what an engine adds to it.

Coefficients of A100 and H100 are fits to public operator profiles: linear layers to Vidur's
(microsoft/vidur, MIT), attention and all-reduces to AIConfigurator's (ai-dynamo/aiconfigurator,
Apache-2.0, vLLM 0.14). None of them is fitted to what a paper claims.
"""

from __future__ import annotations

from msgspec.structs import replace

from livescale.values.types import Value


class AllReduceFit(Value, frozen=True):
    """One all-reduce among `ranks`: a fixed time, and the bus rate that bytes go at."""

    ranks: int
    fixed_ns: int
    bus_bytes_per_s: int


class Accelerator(Value, frozen=True):
    """One accelerator: its peaks, and the parts of them that kernels reach.

    `linear_norm` joins the times of arithmetic and of reading weights: (a^p + b^p)^(1/p).
    `linear_ns` is fixed per layer, `prefill_ns` and `decode_ns` per layer with such attention,
    `sequence_ns` per decoding sequence.
    """

    name: str
    memory_bytes: int
    flops_per_s: float
    memory_bytes_per_s: float
    linear_compute: float
    linear_memory: float
    linear_norm: float
    activation_memory: float
    linear_ns: int
    prefill_compute: float
    prefill_memory: float
    prefill_ns: int
    decode_memory: float
    decode_ns: int
    sequence_ns: int
    all_reduce: tuple[AllReduceFit, ...]


def _fits(*rows: tuple[int, float, float], share: float = 1.0) -> tuple[AllReduceFit, ...]:
    """From (ranks, microseconds, GB/s); an alias has that share of the bus rate."""
    return tuple(
        AllReduceFit(ranks, round(fixed_us * 1e3), round(bus * share * 1e9))
        for ranks, fixed_us, bus in rows
    )


_A100_SUMS = ((2, 5.0, 170.0), (4, 5.7, 164.0), (8, 6.8, 166.0))
_H100_SUMS = ((2, 4.3, 260.0), (4, 4.9, 273.0), (8, 5.2, 264.0))

_A100 = Accelerator(
    name="a100",
    memory_bytes=80_000_000_000,
    flops_per_s=312e12,
    memory_bytes_per_s=2.039e12,
    linear_compute=0.724,
    linear_memory=0.785,
    linear_norm=1.78,
    activation_memory=0.702,
    linear_ns=37_500,
    prefill_compute=0.590,
    prefill_memory=0.341,
    prefill_ns=11_200,
    decode_memory=0.714,
    decode_ns=18_600,
    sequence_ns=17,
    all_reduce=_fits(*_A100_SUMS),
)
_H100 = Accelerator(
    name="h100",
    memory_bytes=80_000_000_000,
    flops_per_s=989.5e12,
    memory_bytes_per_s=3.35e12,
    linear_compute=0.718,
    linear_memory=0.883,
    linear_norm=1.73,
    activation_memory=0.675,
    linear_ns=32_600,
    prefill_compute=0.622,
    prefill_memory=0.341,
    prefill_ns=12_000,
    decode_memory=0.877,
    decode_ns=11_700,
    sequence_ns=37,
    all_reduce=_fits(*_H100_SUMS),
)
_H200 = replace(
    _H100,
    name="h200",
    memory_bytes=141_000_000_000,
    memory_bytes_per_s=4.8e12,
    linear_compute=0.818,
    linear_memory=0.853,
    linear_norm=3.2,
    linear_ns=4 * 4_400,
    prefill_compute=0.51,
    decode_memory=0.74,
)
"""Matrix products, 4.4 us each with four in a layer, are fitted; the rates of attention are
measured. What else a layer does, and all-reduces, are taken from the H100."""

ACCELERATORS: dict[str, Accelerator] = {
    "a100": _A100,
    "a800": replace(_A100, name="a800", all_reduce=_fits(*_A100_SUMS, share=400 / 600)),
    "h100": _H100,
    "h800": replace(_H100, name="h800", all_reduce=_fits(*_H100_SUMS, share=400 / 900)),
    "h200": _H200,
}
"""By name. A800 and H800, the versions for export, are A100 and H100 with a slower bus, NVLink of
400 GB/s instead of 600 and 900 (an assumption: no profile of them is public)."""

ITERATION_NS = 1_500_000
"""What an engine with CUDA graphs, or a native one (vLLM since 0.6, BlitzScale's), adds to every
iteration."""
