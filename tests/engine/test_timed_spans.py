"""The timed executor inside the model: spans, rows and KV have their sizes and their times."""

from __future__ import annotations

import time
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.batching.runs.run import Run, Segment
from livescale.engine.executor import TorchExecutor
from livescale.engine.files.make import Preset, make_model
from livescale.engine.files.model_files import model_spec, read_manifest
from livescale.engine.timed import TimedExecutor
from livescale.latency.work import LinearLatency, span_ns
from livescale.values.types import LayerSpan, Manifest, SamplingParams

KV_BYTES, BLOCK_TOKENS = 1 << 20, 16
INSTANT = LinearLatency(0, 0)


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Manifest]:
    """By whether the head is tied: models of five decoder layers with odd sizes."""
    root = tmp_path_factory.mktemp("timed")
    sizes = Preset(5, 48, 80, 6, 2, 640)
    for name, is_tied in (("own", False), ("tied", True)):
        make_model(root / name, sizes, family="qwen3", tied=is_tied)
    return {is_tied: read_manifest(root / name, name) for name, is_tied in _NAMES}


_NAMES = (("own", False), ("tied", True))


def ready(manifest: Manifest, latency: LinearLatency = INSTANT) -> TimedExecutor:
    executor = TimedExecutor(KV_BYTES, BLOCK_TOKENS, latency)
    executor.assign(manifest, memoryview(bytearray(manifest.size_bytes)))
    for layer in range(len(manifest.layers)):
        executor.materialize(layer)
    return executor


def batch(span: LayerSpan, prompts: list[int], stop: int) -> Run:
    """Whole prompts of so many tokens over a span of a model that ends at `stop`."""
    segments = []
    for number, tokens in enumerate(prompts):
        prompt = tuple(range(number, number + tokens))
        blocks = tuple(range(-(-tokens // BLOCK_TOKENS)))
        segments.append(
            Segment(
                *(f"r{number}", 0, 0, prompt, blocks, span.stop == stop, SamplingParams(4)),
                prompt_ids=prompt,
            )
        )
    return Run(1, span, tuple(segments))


@given(
    is_tied=st.booleans(),
    prompts=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    cuts=st.sets(st.integers(1, 6)),
)
def test_however_a_run_is_cut_and_passed_on_its_tokens_are_the_same(
    manifests: dict[bool, Manifest], is_tied: bool, prompts: list[int], cuts: set[int]
) -> None:
    manifest = manifests[is_tied]
    stop, row_bytes = manifest.span.stop, model_spec(manifest).row_bytes_per_token
    whole = ready(manifest).run(batch(manifest.span, prompts, stop)).token_ids
    assert len(whole) == len(prompts)
    executor, rows, start = ready(manifest), None, 0
    told: list[int] = []
    for cut in [*sorted(cuts), stop]:
        run = batch(LayerSpan(start, cut), prompts, stop)
        result = executor.run(run, rows, told.append)
        assert told == [layer for layer in range(1, stop - 1) if layer < cut]
        if cut < stop:
            assert result.token_ids == []
            assert isinstance(result.hidden, bytearray)
            content = executor.export_rows(result.hidden)
            assert content.nbytes == sum(prompts) * row_bytes
            executor = ready(manifest)
            rows, start = executor.import_rows(content, sum(prompts)), cut
    assert result.hidden is None
    assert result.token_ids == whole


@pytest.mark.parametrize("is_tied", [False, True])
def test_layers_run_as_soon_as_they_are_there(
    manifests: dict[bool, Manifest], is_tied: bool
) -> None:
    manifest = manifests[is_tied]
    stop = manifest.span.stop
    executor = TimedExecutor(KV_BYTES, BLOCK_TOKENS, INSTANT)
    executor.assign(manifest, memoryview(bytearray(manifest.size_bytes)))
    rows: bytearray | None = None
    for layer in range(stop - 1):
        run = batch(LayerSpan(layer, layer + 1), [5], stop)
        with pytest.raises(AssertionError, match=f"layer {layer} is not materialized"):
            executor.run(run, rows)
        executor.materialize(layer)
        hidden = executor.run(run, rows).hidden
        assert isinstance(hidden, bytearray)
        rows = hidden
    # The head alone, elsewhere: a tied one computes with layer 0.
    other = TimedExecutor(KV_BYTES, BLOCK_TOKENS, INSTANT)
    other.assign(manifest, memoryview(bytearray(manifest.size_bytes)))
    other.materialize(stop - 1)
    last = batch(LayerSpan(stop - 1, stop), [5], stop)
    if is_tied:
        with pytest.raises(AssertionError, match="layer 0 is not materialized"):
            other.run(last, rows)
        other.materialize(0)
    assert (
        other.run(last, rows).token_ids
        == ready(manifest).run(batch(manifest.span, [5], stop)).token_ids
    )


@pytest.mark.usefixtures("machine")
def test_spans_take_their_share_of_the_time(manifests: dict[bool, Manifest]) -> None:
    manifest = manifests[False]
    latency = LinearLatency(base_ns=10_000_000, per_token_ns=500_000)
    executor = ready(manifest, latency)
    rows, due_ns = None, 0
    started_ns = time.monotonic_ns()
    for span, layers in ((LayerSpan(0, 2), 1), (LayerSpan(2, 5), 3), (LayerSpan(5, 7), 1)):
        run = batch(span, [20, 7], manifest.span.stop)
        hidden = executor.run(run, rows).hidden
        due_ns += span_ns(latency, run.work, layers, 5)
        if hidden is not None:
            assert isinstance(hidden, bytearray)
            rows = hidden
    assert due_ns == latency.run_ns(batch(manifest.span, [20, 7], 7).work)
    # As for whole Runs: only too little is an error.
    assert time.monotonic_ns() - started_ns >= due_ns - 2_000_000


@given(
    tokens=st.integers(1, 70),
    layer=st.integers(0, 4),
    blocks=st.lists(st.integers(0, 60), max_size=6),
)
def test_kv_has_the_sizes_and_the_limits_of_a_real_pool(
    manifests: dict[bool, Manifest], tokens: int, layer: int, blocks: list[int]
) -> None:
    timed, real = ready(manifests[False]), real_pool(manifests[False])
    assert timed.kv_layer_bytes(tokens) == real.kv_layer_bytes(tokens)
    said = []
    for executor in (timed, real):
        try:
            content = executor.export_kv(layer, blocks, tokens)
            executor.import_kv(layer, blocks, tokens, memoryview(bytearray(content)))
            said.append(str(content.nbytes))
            with pytest.raises(ValueError, match=r"bytes of KV"):
                executor.import_kv(layer, blocks, tokens, memoryview(bytearray(3)))
        except ValueError as error:
            said.append(str(error))
    assert said[0] == said[1]


def test_rows_of_another_size_are_refused_as_by_a_real_one(manifests: dict[bool, Manifest]) -> None:
    timed, real = ready(manifests[False]), real_pool(manifests[False])
    for tokens, size_bytes in ((3, 3 * 48 * 4 + 1), (0, 0), (2, 48 * 4)):
        said = []
        for executor in (timed, real):
            with pytest.raises(ValueError, match="bytes of rows") as error:
                executor.import_rows(memoryview(bytes(size_bytes)), tokens)
            said.append(str(error.value))
        assert said[0] == said[1]


@cache
def real_pool(manifest: Manifest) -> TorchExecutor:
    executor = TorchExecutor(KV_BYTES, BLOCK_TOKENS)
    executor.assign(manifest, memoryview(bytearray(manifest.size_bytes)))
    return executor
