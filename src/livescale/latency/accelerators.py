"""Accelerators as coefficients of the roofline, and engines as what they add to it.

Coefficients of A100 and H100 are fits to public operator profiles: linear layers to Vidur's
(microsoft/vidur, MIT), attention and all-reduces to AIConfigurator's (ai-dynamo/aiconfigurator,
Apache-2.0, vLLM 0.14). None of them is fitted to what a paper claims.
"""

from __future__ import annotations

import msgspec

from livescale.types import Value


class AllReduceFit(Value, frozen=True):
    """One all-reduce among `ranks`: a fixed time, and the bus rate that bytes go at."""

    ranks: int
    fixed_ns: int
    bus_bytes_per_s: int


class Accelerator(Value, frozen=True):
    """One accelerator: its peaks, and the parts of them that kernels reach.

    `linear_norm` joins the times of arithmetic and of reading weights: (a^p + b^p)^(1/p).
    `linear_ns` is fixed per layer, `prefill_ns` and `decode_ns` per layer with such attention,
    `sequence_ns` per decoding sequence. `launch_ns` is the least that a layer takes when Python
    launches every kernel; `eager_slowdowns` are (ranks, factor) of prefills then.
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
    all_reduce_graph: tuple[AllReduceFit, ...]
    all_reduce_nccl: tuple[AllReduceFit, ...]
    launch_ns: int
    eager_slowdowns: tuple[tuple[int, float], ...]

    def eager_slowdown(self, tp_size: int) -> float:
        """The factor of the most ranks that are no more than these; of the fewest if there are
        none: only tensor-parallel engines were measured."""
        known = [factor for ranks, factor in self.eager_slowdowns if ranks <= tp_size]
        return known[-1] if known else self.eager_slowdowns[0][1]


class EngineProfile(Value, frozen=True):
    """What an engine adds: time per iteration and per sequence of it.

    An engine that `is_eager` launches kernel by kernel from Python and reduces with NCCL.
    """

    name: str
    iteration_ns: int
    sequence_ns: int
    is_eager: bool


def _fits(*rows: tuple[int, float, float], share: float = 1.0) -> tuple[AllReduceFit, ...]:
    """From (ranks, microseconds, GB/s); an alias has that share of the bus rate."""
    return tuple(
        AllReduceFit(ranks, round(fixed_us * 1e3), round(bus * share * 1e9))
        for ranks, fixed_us, bus in rows
    )


_A100_GRAPH = ((2, 5.0, 170.0), (4, 5.7, 164.0), (8, 6.8, 166.0))
_A100_NCCL = ((2, 12.0, 147.6), (4, 15.9, 167.7), (8, 24.0, 174.2))
_H100_GRAPH = ((2, 4.3, 260.0), (4, 4.9, 273.0), (8, 5.2, 264.0))
_H100_NCCL = ((2, 7.1, 239.1), (4, 10.6, 292.6), (8, 17.4, 333.1))
_A800_SHARE, _H800_SHARE = 400 / 600, 400 / 900
"""NVLink of the versions for export: 400 GB/s instead of 600 and 900."""


def _a100(name: str, share: float) -> Accelerator:
    return Accelerator(
        name=name,
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
        all_reduce_graph=_fits(*_A100_GRAPH, share=share),
        all_reduce_nccl=_fits(*_A100_NCCL, share=share),
        launch_ns=550_000,
        eager_slowdowns=((4, 1.2), (8, 1.34)),
    )


def _h100(name: str, share: float) -> Accelerator:
    return Accelerator(
        name=name,
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
        all_reduce_graph=_fits(*_H100_GRAPH, share=share),
        all_reduce_nccl=_fits(*_H100_NCCL, share=share),
        launch_ns=370_000,
        eager_slowdowns=((4, 1.39), (8, 1.62)),
    )


def _h200() -> Accelerator:
    """Matrix products, 4.4 us each with four in a layer, are fitted; the rates of attention are
    measured. What else a layer does, and all-reduces, are taken from the H100."""
    return msgspec.structs.replace(
        _h100("h200", 1.0),
        memory_bytes=141_000_000_000,
        memory_bytes_per_s=4.8e12,
        linear_compute=0.818,
        linear_memory=0.853,
        linear_norm=3.2,
        linear_ns=4 * 4_400,
        prefill_compute=0.51,
        decode_memory=0.74,
    )


ACCELERATORS: dict[str, Accelerator] = {
    "a100": _a100("a100", 1.0),
    "a800": _a100("a800", _A800_SHARE),
    "h100": _h100("h100", 1.0),
    "h800": _h100("h800", _H800_SHARE),
    "h200": _h200(),
}
"""By name. A800 and H800 are A100 and H100 with a slower bus (an assumption: no profile of them is
public)."""

ENGINES: dict[str, EngineProfile] = {
    "graph": EngineProfile("graph", iteration_ns=1_500_000, sequence_ns=0, is_eager=False),
    "eager-2023": EngineProfile("eager-2023", iteration_ns=0, sequence_ns=350_000, is_eager=True),
}
"""`graph`: CUDA graphs or a native engine (vLLM since 0.6, BlitzScale's). `eager-2023`: Python
launches every kernel (vLLM up to 0.2), and that is its whole time per iteration."""
