"""Presets and the plainest latency."""

from __future__ import annotations

from livescale.batching.runs.run import Run, Segment
from livescale.latency.shapes import LLAMA_3_8B
from livescale.latency.work import LinearLatency
from livescale.values.types import LayerSpan, SamplingParams


def test_linear_latency_counts_the_context_of_decodes_only() -> None:
    def segment(first: int, count: int) -> Segment:
        return Segment("r", 1, first, range(count), (), True, SamplingParams(1))

    latency = LinearLatency(1000, 10, 1)
    assert latency.run_ns(Run(1, LayerSpan(0, 3), (segment(99, 1), segment(0, 50))).work) == (
        1000 + 10 * 51 + 100
    )


def test_the_preset_has_the_parameters_of_llama_3_8b() -> None:
    assert LLAMA_3_8B.size_bytes == 2 * 8_030_261_248
    assert LLAMA_3_8B.layers == 34
