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


@given(layers=sizes, chunk_bytes=st.integers(1, 1 << 16))
def test_a_member_of_a_chain_lags_one_chunk(layers: list[int], chunk_bytes: int) -> None:
    """BlitzScale §5.1; that hops add up to a chain's law is tested with the transfers."""
    network = Network(1_000_000, 1_000_000, chunk_bytes)
    exact = Fraction(min(chunk_bytes, sum(layers)) * 10**9, 1_000_000)
    assert 0 <= network.chunk_ns(layers) - exact < 1


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
