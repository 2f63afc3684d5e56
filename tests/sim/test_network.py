"""Network and latency: the laws they follow."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from livescale.batching.latency import LinearLatency
from livescale.batching.run import Run, Segment
from livescale.sim.network import Network
from livescale.sim.presets import LLAMA_3_8B
from livescale.types import LayerSpan, SamplingParams

sizes = st.lists(st.integers(1, 1 << 20), min_size=1, max_size=20)


@given(layers=sizes, place=st.integers(1, 50), chunk_bytes=st.integers(1, 1 << 16))
def test_a_chain_of_n_targets_takes_chunks_plus_n_minus_1_chunks(
    layers: list[int], place: int, chunk_bytes: int
) -> None:
    """BlitzScale §5.1: (chunks + n - 1) / chunks of one copy's time, whatever n is."""
    network = Network(1_000_000, 1_000_000, chunk_bytes)
    total = sum(layers)
    chunk = min(chunk_bytes, total)
    one_copy_ns = Fraction(total * 10**9, 1_000_000)
    chunks = Fraction(total, chunk)
    expected_ns = one_copy_ns * (chunks + place - 1) / chunks
    arrivals = network.chain_arrivals_ns(layers, place)
    assert 0 <= arrivals[-1] - expected_ns < 1
    assert list(arrivals) == sorted(arrivals)
    assert network.first_byte_ns(layers, place) <= arrivals[0]


def test_storage_delivers_layers_in_order() -> None:
    network = Network(1, 1_000_000_000, 1)
    assert network.storage_arrivals_ns([10, 20, 5]) == (10, 30, 35)


def test_linear_latency_counts_the_context_of_decodes_only() -> None:
    def segment(first: int, count: int) -> Segment:
        return Segment("r", 1, first, range(count), (), True, SamplingParams(1))

    latency = LinearLatency(1000, 10, 1)
    assert latency.run_ns(Run(1, LayerSpan(0, 3), (segment(99, 1), segment(0, 50)))) == (
        1000 + 10 * 51 + 100
    )


def test_the_preset_has_the_parameters_of_llama_3_8b() -> None:
    assert LLAMA_3_8B.size_bytes == 2 * 8_030_261_248
    assert LLAMA_3_8B.layers == 34
