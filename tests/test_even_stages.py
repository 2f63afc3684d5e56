"""Stages that are even by time: the best of all ways to cut, by trying them all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.clusters.profiles import HEAD, LinearPoint, OpProfile, write_profile
from livescale.common.errors import UserError
from livescale.config.reading import load_config
from livescale.engine.files.model_files import model_spec
from livescale.latency.layer_times import request_layer_ns
from livescale.latency.table import TableLatency
from livescale.runtime.models.catalog import manifests_of, prepare_models
from livescale.values.stages import StageError, even_stages
from livescale.values.types import LayerSpan, ModelSpec

times = st.lists(st.integers(0, 50), min_size=3, max_size=9)


def spec_of(layers: int) -> ModelSpec:
    return ModelSpec("m", (1,) * layers, kv_bytes_per_token=layers - 2, model_tokens_max=9)


def all_cuts(layers: int, count: int) -> list[tuple[LayerSpan, ...]]:
    """Each stage has a decoder layer, and the spans begin with layer 0."""
    found = []
    for starts in itertools.combinations(range(2, layers - 1), count - 1):
        edges = [0, *starts, layers]
        found.append(tuple(map(LayerSpan, edges[:-1], edges[1:])))
    return found


def sums(spans: Sequence[LayerSpan], layer_ns: Sequence[int]) -> list[int]:
    return [sum(layer_ns[span.start : span.stop]) for span in spans]


@given(times, st.integers(1, 7))
def test_no_other_cut_is_more_even(layer_ns: list[int], count: int) -> None:
    layers = len(layer_ns)
    if count > layers - 2:
        with pytest.raises(StageError, match=f"cannot have {count} stages"):
            even_stages(spec_of(layers), count, layer_ns)
        return
    spans = even_stages(spec_of(layers), count, layer_ns)
    assert spans in all_cuts(layers, count)

    def cost(cut: Sequence[LayerSpan]) -> tuple[int, int]:
        of_stages = sums(cut, layer_ns)
        return max(of_stages), sum(ns * ns for ns in of_stages)

    assert cost(spans) == min(map(cost, all_cuts(layers, count)))


@given(st.integers(1, 12), st.integers(1, 12))
def test_without_times_stages_have_as_many_layers_or_one_more(
    decoder_layers: int, count: int
) -> None:
    count = min(count, decoder_layers)
    spans = even_stages(spec_of(decoder_layers + 2), count)
    numbers = [span.decoder_layers(decoder_layers + 2) for span in spans]
    assert sum(numbers) == decoder_layers
    assert max(numbers) - min(numbers) <= 1
    assert numbers[0] == max(numbers)


def test_times_of_another_model_are_refused() -> None:
    with pytest.raises(StageError, match="has 6 layers, the profile is of 5"):
        even_stages(spec_of(6), 2, (0, 1, 1, 1, 0))


def profiled(layer_ns: int, head_ns: int, layers: int) -> OpProfile:
    """A layer takes that long for any Run, the head likewise."""
    ops_ns = {"mlp": layer_ns, HEAD: head_ns}
    points = [LinearPoint("cpu", "m", 1, tokens, ops_ns) for tokens in (1, 2048)]
    return OpProfile(tuple(points), layers=layers)


def test_a_requests_time_is_shared_out_among_layers_and_head() -> None:
    found = request_layer_ns(TableLatency.measured(profiled(100, 30, layers=3)))
    # The prompt, and an eighth of 32 steps of eight requests.
    assert found == (0, 500, 500, 500, 150)


def test_a_profile_moves_layers_away_from_a_slow_head(tiny_model: Path, tmp_path: Path) -> None:
    def spans(head_ns: int, layers: int = 4) -> list[LayerSpan]:
        write_profile(tmp_path / "times.csv", profiled(1000, head_ns, layers))
        path = tmp_path / "pool.yaml"
        stages = f"{{path: '{tiny_model}', stages: 2, stage_profile: times.csv}}"
        path.write_text(f"workers: 2\nmodels:\n  - {stages}\n")
        config = load_config(path, [], {}, {})
        [entry] = prepare_models(config)
        specs = map(model_spec, manifests_of(config.models[0], entry.manifest))
        return [spec.stage.span(spec.layers) for spec in specs if spec.stage is not None]

    assert spans(10) == [LayerSpan(0, 3), LayerSpan(3, 6)]
    assert spans(2000) == [LayerSpan(0, 4), LayerSpan(4, 6)]
    with pytest.raises(UserError, match="has 6 layers, the profile is of 9"):
        spans(10, layers=7)
