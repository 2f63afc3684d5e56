"""Whole layers as one compiled call, beside the same layers as transformers' modules."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from effort import examples, mostly_long
from livescale.batching.runs.run import Run, Segment
from livescale.engine.executor import TorchExecutor
from livescale.engine.files.make import Preset, make_model
from livescale.engine.files.model_files import read_layers, read_manifest
from livescale.engine.kernels import tile_products as tiles
from livescale.engine.products.linear_choice import WeightsLayout
from livescale.values.types import LayerSpan, SamplingParams

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
BLOCK_TOKENS, VOCABULARY, LAYERS = 4, 320, 3
#: blocks of requests alternate: one of each, then the next one of each
REQUESTS_MAX = 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WAYS = [*itertools.product(FAMILIES, DTYPES)]
SOME_WAYS = [("llama", "fp32"), ("mistral", "bf16"), ("qwen2", "fp32"), ("qwen3", "bf16")]
#: of the rows' spread; bf16 has 8 bits, and each of the two rounds in other places
BOUNDS = {"fp32": 1e-4, "bf16": 0.1}


@pytest.fixture(scope="module", params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[TorchExecutor]]:
    """By family and type: an executor with compiled layers, one with modules."""
    root = tmp_path_factory.mktemp("compiled")
    made: dict[tuple[str, str], list[TorchExecutor]] = {}

    def pair(family: str, dtype: str) -> list[TorchExecutor]:
        if (family, dtype) not in made:
            directory = root / f"{family}-{dtype}"
            make_model(directory, Preset(LAYERS, 96, 160, 6, 2, VOCABULARY), seed=3, family=family)
            if dtype == "bf16":
                narrow(directory)
            made[family, dtype] = [load(directory, layout) for layout in ("auto", "plain")]
        return made[family, dtype]

    return pair


def narrow(directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    shutil.rmtree(directory)
    model.save_pretrained(directory)


def load(directory: Path, layout: WeightsLayout) -> TorchExecutor:
    manifest = read_manifest(directory, "model")
    arena = memoryview(bytearray(manifest.size_bytes))
    executor = TorchExecutor(8 << 20, BLOCK_TOKENS, weights_layout=layout)
    executor.assign(manifest, arena)
    for layer in read_layers(directory, manifest, arena):
        executor.materialize(layer)
    return executor


def segment(place: int, first: int, count: int, **sampling: object) -> Segment:
    """`count` tokens of one of several requests, whose blocks lie between each other's."""
    draw = random.Random(f"{place} {first}")
    count_blocks = -(-(first + count) // BLOCK_TOKENS)
    blocks = [place + REQUESTS_MAX * i for i in range(count_blocks)]
    ids = tuple(draw.randrange(VOCABULARY) for _ in range(count))
    params = SamplingParams(output_tokens_max=4, **sampling)  # type: ignore[arg-type]
    return Segment(f"r{place}", 0, first, ids, tuple(blocks), True, params)


#: requests: tokens of their context, in how many Runs these come, and how many more at last
REQUESTS = st.lists(
    st.tuples(st.integers(0, 200), st.integers(1, 3), st.integers(1, 150)), min_size=1, max_size=3
)


def runs_of(requests: list[tuple[int, int, int]]) -> list[tuple[Segment, ...]]:
    """Segments of Runs that compute each request's context in parts, then all together."""
    runs: list[tuple[Segment, ...]] = []
    for place, (context, parts, _) in enumerate(requests):
        bounds = [context * n // parts for n in range(parts + 1)]
        for start, stop in itertools.pairwise(bounds):
            if stop > start:
                runs.append((segment(place, start, stop - start),))
    runs.append(tuple(segment(n, context, more) for n, (context, _, more) in enumerate(requests)))
    return runs


@pytest.mark.parametrize(("family", "dtype"), mostly_long(WAYS, SOME_WAYS))
@settings(max_examples=examples(12))
@given(REQUESTS)
def test_rows_are_those_of_the_modules(
    pairs: Callable[[str, str], list[TorchExecutor]],
    threads: int,
    family: str,
    dtype: str,
    requests: list[tuple[int, int, int]],
) -> None:
    executors = pairs(family, dtype)
    for number, segments in enumerate(runs_of(requests)):
        run = Run(number, LayerSpan(0, LAYERS + 1), segments)
        compiled, modules = (executor.run(run).hidden for executor in executors)
        assert isinstance(compiled, torch.Tensor)
        assert isinstance(modules, torch.Tensor)
        spread = modules.float().std()
        assert (compiled.float() - modules.float()).abs().max() < BOUNDS[dtype] * 10 * spread
        assert (compiled.float() - modules.float()).abs().mean() < BOUNDS[dtype] * spread


@pytest.mark.parametrize("family", FAMILIES)
def test_a_span_goes_on_where_another_one_ended(
    pairs: Callable[[str, str], list[TorchExecutor]], threads: int, family: str
) -> None:
    compiled, modules = pairs(family, "fp32")
    segments = (segment(0, 0, 33), segment(1, 0, 1), segment(2, 0, 18))
    rows = None
    for first, last in ((0, 1), (1, 3), (3, 4)):
        rows = compiled.run(Run(1, LayerSpan(first, last), segments), rows).hidden
    whole = modules.run(Run(2, LayerSpan(0, 4), segments)).hidden
    torch.testing.assert_close(rows, whole, rtol=0, atol=1e-4)
    ends = [
        executor.run(Run(3, LayerSpan(4, 5), segments), whole) for executor in (compiled, modules)
    ]
    assert ends[0].token_ids == ends[1].token_ids


def test_sampled_tokens_log_probabilities_and_embeddings_are_those_of_the_modules(
    pairs: Callable[[str, str], list[TorchExecutor]], threads: int
) -> None:
    segments = (
        segment(0, 0, 9),
        segment(1, 0, 5, temperature=0.7, seed=5),
        segment(2, 0, 12, logprobs=3),
        segment(3, 0, 7, embeds=True),
    )
    run = Run(1, LayerSpan(0, LAYERS + 2), segments)
    compiled, modules = (executor.run(run) for executor in pairs("llama", "fp32"))
    assert compiled.token_ids == modules.token_ids
    found, wanted = compiled.logprobs["r2"], modules.logprobs["r2"]
    assert found.chosen == pytest.approx(wanted.chosen, abs=1e-4)
    assert [token for token, _ in found.top] == [token for token, _ in wanted.top]
    assert compiled.row_sums["r3"] == pytest.approx(modules.row_sums["r3"], abs=1e-3)
    alone = Run(2, LayerSpan(0, LAYERS + 2), segments[:3])
    assert pairs("llama", "fp32")[0].run(alone).token_ids == modules.token_ids[:3]


def test_equal_logits_choose_the_lowest_id(tmp_path: Path, threads: int) -> None:
    make_model(tmp_path / "model", Preset(1, 64, 96, 4, 2, 512), seed=3)
    executor = load(tmp_path / "model", "auto")
    executor.parameters(2)["lm_head.weight"].zero_()
    run = Run(1, LayerSpan(0, 3), (segment(0, 0, 3), segment(1, 0, 1)))
    assert executor.run(run).token_ids == [0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_products_of_torch_rows_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """What a CPU computes for which torch has none, or has none in bf16."""
    make_model(tmp_path / "model", Preset(2, 64, 96, 4, 2, 512), seed=3)
    if dtype == "bf16":
        narrow(tmp_path / "model")
    own = tiles.tile_products()
    run = Run(1, LayerSpan(0, 3), (segment(0, 0, 70), segment(1, 0, 1)))
    rows = []
    for products in (own, tiles.TileProducts(fp32=own.fp32), tiles.TileProducts()):
        monkeypatch.setattr(
            "livescale.engine.spans.compiled_span.tile_products", lambda found=products: found
        )
        rows.append(load(tmp_path / "model", "auto").run(run).hidden.float())
    spread = float(rows[0].std())
    for others in rows[1:]:
        assert (others - rows[0]).abs().max() < BOUNDS[dtype] * 10 * spread
