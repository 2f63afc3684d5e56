"""Every family's greedy tokens are those of stock transformers, however they are batched, chunked
and cut into spans; and what makes a family what it is decides its tokens."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from engine_instance import FamilyModel, Instance, judge, load, request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from effort import SOME_FAMILIES, examples, mostly_long
from livescale.batching.runs.run import Run, Segment, SequenceSpec
from livescale.engine.attention import kv_cache
from livescale.engine.executor import TorchExecutor
from livescale.engine.files.families import FAMILIES, Family
from livescale.engine.files.make import FAMILY_NAMES
from livescale.engine.files.make_family import WINDOW_TOKENS
from livescale.engine.oracle import GreedyCheck, GreedyOracle
from livescale.engine.products.linear_choice import WeightsLayout
from livescale.values.types import LayerSpan, SamplingParams

LAYERS = 6  # of the made models
ALL = LayerSpan(0, LAYERS)
MODELS = [name + other for name in FAMILY_NAMES for other in ("", " other")]
#: prompts and outputs that begin before a window's length and end behind it, and long ones
MIXED = [(1, 30), (60, 6), (17, 12), (24, 9), (25, 2), (33, 5)]

LAYOUTS: tuple[WeightsLayout, ...] = ("packed", "compiled", "plain")

Models = Callable[[str], FamilyModel]


def mixed_requests() -> list[SequenceSpec]:
    return [request(f"r{i}", prompt, output, 512) for i, (prompt, output) in enumerate(MIXED)]


@pytest.fixture(scope="module")
def tally() -> Iterator[list[GreedyCheck]]:
    """All verdicts of this module: near ties must be as rare as promised."""
    checks: list[GreedyCheck] = []
    yield checks
    tokens = sum(check.tokens for check in checks)
    near_ties = sum(check.near_ties for check in checks)
    assert near_ties * 10_000 <= tokens + 9_999, f"{near_ties} near ties in {tokens} tokens"


# -- the matrix ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", mostly_long(MODELS, FAMILY_NAMES))
def test_alone(family_model: Models, tally: list[GreedyCheck], name: str) -> None:
    model = family_model(name)
    outputs = {}
    for spec in mixed_requests():
        instance = Instance([(model.executor, ALL)])
        instance.add([spec])
        outputs |= instance.finish()
    tally += judge(model.oracle, mixed_requests(), outputs)
    chosen = [token for output in outputs.values() for token in output]
    assert len(set(chosen)) > len(chosen) // 4, "outputs vary, else they prove little"


@pytest.mark.parametrize("name", mostly_long(MODELS, FAMILY_NAMES))
@pytest.mark.parametrize("run_tokens_max", mostly_long([7, 25, 512], [25]))
def test_mixed_and_chunked(
    family_model: Models, tally: list[GreedyCheck], name: str, run_tokens_max: int
) -> None:
    model = family_model(name)
    instance = Instance([(model.executor, ALL)], run_tokens_max, sequences_max=5)
    specs = mixed_requests()
    instance.add(specs)
    tally += judge(model.oracle, specs, instance.finish())


@pytest.mark.parametrize("name", mostly_long(FAMILY_NAMES, ["gemma2", "mixtral"]))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_weights(
    family_model: Models, tally: list[GreedyCheck], name: str, layout: WeightsLayout
) -> None:
    model = family_model(name)
    executor, manifest, _ = load(model.directory, weights_layout=layout)
    specs = mixed_requests()
    instance = Instance([(executor, manifest.span)], run_tokens_max=40, sequences_max=5)
    instance.add(specs)
    tally += judge(model.oracle, specs, instance.finish())


@pytest.mark.parametrize("name", mostly_long(MODELS, FAMILY_NAMES))
@pytest.mark.parametrize("cut", mostly_long([1, 3, 5], [3]))
def test_two_spans(family_model: Models, tally: list[GreedyCheck], name: str, cut: int) -> None:
    model = family_model(name)
    is_tied = model.executor._model.layers.config.is_tied
    # A tied head runs only where layer 0 is.
    second_layers = [*range(cut, LAYERS)] + [0] * is_tied
    stages = [
        (load(model.directory, range(cut))[0], LayerSpan(0, cut)),
        (load(model.directory, second_layers)[0], LayerSpan(cut, LAYERS)),
    ]
    instance = Instance(stages, run_tokens_max=16)
    specs = mixed_requests()
    instance.add(specs)
    tally += judge(model.oracle, specs, instance.finish())


@pytest.mark.parametrize("name", mostly_long(FAMILY_NAMES, SOME_FAMILIES))
def test_preempted(family_model: Models, tally: list[GreedyCheck], name: str) -> None:
    model = family_model(name)
    instance = Instance([(model.executor, ALL)], 32, kv_blocks=24, growth_tokens=0)
    specs = [request(f"p{i}", 20 + 3 * i, 28 - 3 * i, 512) for i in range(6)]
    instance.add(specs)
    tally += judge(model.oracle, specs, instance.finish())
    assert instance.batcher.room.preemptions > 0


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_prefixes_reused(family_model: Models, tally: list[GreedyCheck], name: str) -> None:
    model = family_model(name)
    instance = Instance([(model.executor, ALL)], 16)
    first = request("first", 50, 6, 512)
    instance.add([first])
    outputs = instance.finish()
    later = [
        dataclasses.replace(request(f"l{shared}", 9, 7, 512), prompt_ids=(*known[:shared], *own))
        for shared, own in ((48, (1, 2, 3)), (33, (4,)), (20, tuple(range(40))), (53, ()))
        if (known := (*first.prompt_ids, *outputs["first"]))
    ]
    instance.add(later)
    tally += judge(model.oracle, [first, *later], instance.finish())
    assert instance.batcher.room.reused_tokens >= 48 + 32 + 20 + 52


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_unwritten_kv_bytes_have_no_influence(family_model: Models, name: str) -> None:
    model = family_model(name)
    executor, _, _ = load(model.directory)
    executor._pool.fill_(0xFF)  # every fp32 in it is NaN
    specs = mixed_requests()
    instance = Instance([(executor, ALL)], run_tokens_max=16)
    instance.add(specs)
    judge(model.oracle, specs, instance.finish())


@given(
    name=st.sampled_from(["qwen2", "mistral other", "gemma2", "gemma3_text", "mixtral"]),
    sizes=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 12)), min_size=1, max_size=7),
    run_tokens_max=st.integers(4, 60),
    kv_blocks=st.integers(21, 60),
    shared_tokens=st.integers(0, 40),
)
@settings(
    max_examples=examples(40),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_mix_of_requests_in_little_memory(
    family_model: Models,
    name: str,
    sizes: list[tuple[int, int]],
    run_tokens_max: int,
    kv_blocks: int,
    shared_tokens: int,
) -> None:
    model = family_model(name)
    instance = Instance([(model.executor, ALL)], run_tokens_max, 4, kv_blocks, growth_tokens=0)
    common = request("common", shared_tokens, 1, 512).prompt_ids
    specs = []
    for index, (prompt, output) in enumerate(sizes):
        own = request(f"x{index}", prompt, output, 512)
        prompt_ids = (*common[: prompt - 1], *own.prompt_ids)[:prompt]
        specs.append(dataclasses.replace(own, prompt_ids=prompt_ids))
    instance.add(specs)
    judge(model.oracle, specs, instance.finish())


# -- what makes a family what it is -------------------------------------------------------------


NO_WINDOW: dict[str, object] = {"use_sliding_window": False, "layer_types": None}

#: model, and a change of its configuration under which the very same weights say something else
FEATURES: dict[str, tuple[str, dict[str, object]]] = {
    "window of some layers (qwen2)": ("qwen2", NO_WINDOW),
    "window of all layers (mistral)": ("mistral", {"sliding_window": None}),
    "window of all layers (phi3)": ("phi3", {"sliding_window": None}),
    "alternating windows (gemma2)": ("gemma2", {"sliding_window": 10_000}),
    "alternating windows (gemma3)": ("gemma3_text", {"sliding_window": 10_000}),
    "which layers have a window": (
        "gemma3_text",
        {"layer_types": ["full_attention", *["sliding_attention"] * 3]},
    ),
    "window of another size": ("mistral", {"sliding_window": 7}),
    "window of a mixture": ("mixtral", {"sliding_window": 9}),
    "attention soft cap": ("gemma2", {"attn_logit_softcapping": None}),
    "attention scale": ("gemma2", {"query_pre_attn_scalar": 64}),
    "rotation of a part": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}},
    ),
    "angles by layer type": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "linear rope": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "yarn rope": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "experts per token": ("mixtral", {"num_experts_per_tok": 1}),
    "weights of experts": ("qwen3_moe", {"norm_topk_prob": False}),
    "positions that only linear rope adds": (
        "llama",
        {"max_position_embeddings": 40, "rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
    "positions that only yarn adds": (
        "qwen2",
        {"max_position_embeddings": 40, "rope_scaling": {"type": "yarn", "factor": 4.0}},
    ),
}


@pytest.mark.parametrize("feature", mostly_long(FEATURES, list(FEATURES)[::3]))
def test_feature_is_run_and_decides_tokens(
    family_model: Models, tmp_path: Path, tally: list[GreedyCheck], feature: str
) -> None:
    name, change = FEATURES[feature]
    model = family_model(name)
    directory = with_config(model.directory, tmp_path / "changed", change)
    specs = mixed_requests()
    outputs = []
    for executor in (model.executor, load(directory)[0]):
        instance = Instance([(executor, ALL)], run_tokens_max=31)
        instance.add(specs)
        outputs.append(instance.finish())
    assert outputs[0] != outputs[1]
    tally += judge(GreedyOracle(directory), specs, outputs[1])


def with_config(source: Path, target: Path, change: dict[str, object]) -> Path:
    """A copy of a model with another configuration (None removes nothing: it is null)."""
    shutil.copytree(source, target)
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    return target


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "qwen3_moe"])
def test_logits_are_those_of_transformers(family_model: Models, name: str) -> None:
    # A cap on the logits moves no maximum: greedy tokens do not show it.
    model = family_model(name)
    prompt_ids = request("logits", 70, 1, 512).prompt_ids
    stock = AutoModelForCausalLM.from_pretrained(model.directory)
    with torch.inference_mode():
        wanted = stock(input_ids=torch.tensor([prompt_ids])).logits[0]
    assert float((logits(model.executor, prompt_ids) - wanted).abs().max()) < 1e-4


def half_and_exact(
    model: FamilyModel, directory: Path, layout: WeightsLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits (prompts, tokens, vocabulary) of a bf16 model: ours, those of transformers in bf16,
    and in fp32."""
    half = AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.bfloat16)
    half.save_pretrained(directory)
    exact = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompts = [request(f"half {n}", 120, 1, 512).prompt_ids for n in range(8)]
    with torch.inference_mode():
        stock, wanted = (m(input_ids=torch.tensor(prompts)).logits for m in (half, exact))
    executor = load(directory, weights_layout=layout)[0]
    ours = torch.stack([logits(executor, prompt_ids) for prompt_ids in prompts])
    return ours.float(), stock.float(), wanted


def distance(given: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (given - wanted).abs() / wanted.std(dim=-1, keepdim=True)


@pytest.mark.parametrize("layout", mostly_long(LAYOUTS, ["compiled"]))
@pytest.mark.parametrize("name", ["qwen2", "mistral", "gemma2", "gemma3_text other", "phi3"])
def test_bf16_stays_near_fp32(
    family_model: Models, tmp_path: Path, name: str, layout: WeightsLayout
) -> None:
    ours, _, wanted = half_and_exact(family_model(name), tmp_path / "bf16", layout)
    assert float(distance(ours, wanted).quantile(0.99)) <= 0.1


@pytest.mark.parametrize("layout", mostly_long(LAYOUTS, ["compiled"]))
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_bf16_experts_are_as_near_as_those_of_transformers(
    family_model: Models, tmp_path: Path, name: str, layout: WeightsLayout
) -> None:
    # Where two experts score alike, rounding takes the other one: those positions are far off, and
    # what attends to them, in transformers' bf16 as in ours. Which these are is chance, so that the
    # usual prompt's usual position is compared.
    model = family_model(name)
    ours, stock, wanted = half_and_exact(model, tmp_path / "bf16", layout)
    ours_usual, stock_usual = (
        float(distance(given, wanted).flatten(1).median(dim=1).values.median())
        for given in (ours, stock)
    )
    assert ours_usual <= 1.2 * stock_usual <= 0.1
    # Where all experts are taken there is nothing to choose.
    experts = {"num_experts_per_tok": 4 if name == "mixtral" else 6}
    directory = with_config(model.directory, tmp_path / "all", experts)
    everything = dataclasses.replace(model, directory=directory)
    ours, _, wanted = half_and_exact(everything, tmp_path / "all bf16", layout)
    assert float(distance(ours, wanted).quantile(0.99)) <= 0.1


def logits(executor: TorchExecutor, prompt_ids: Iterable[int]) -> torch.Tensor:
    """Logits of all positions of a prompt that is computed in chunks."""
    token_ids = tuple(prompt_ids)
    blocks = tuple(range(len(token_ids)))
    found = []
    for start in range(0, len(token_ids), 50):
        chunk = token_ids[start : start + 50]
        segment = Segment("r", 0, start, chunk, blocks, False, SamplingParams(1))
        run = Run(1, ALL, (segment,))
        layers = executor._model.layers
        with torch.inference_mode():
            state = dataclasses.replace(executor._state(run), sample_rows=torch.arange(len(chunk)))
            [head] = layers[len(layers) - 1 :]
            found.append(head(executor._rows(run, None, None), state))
    return torch.cat(found)


# -- the table ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.model_type)
def test_defaults_are_those_of_transformers(family: Family) -> None:
    config = CONFIG_MAPPING[family.model_type]()
    assert config.tie_word_embeddings == family.is_tied
    heads = config.num_attention_heads
    assert config.num_key_value_heads == (family.kv_heads or heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    assert head_dim == (family.head_dim or config.hidden_size // heads)
    experts = family.experts.count if family.experts else None
    assert getattr(config, "num_local_experts", getattr(config, "num_experts", None)) == experts
    built = AutoModelForCausalLM._model_mapping[type(config)]
    assert built.__name__ == family.architecture


def test_windows_are_crossed() -> None:
    assert any(prompt > WINDOW_TOKENS for prompt, _ in MIXED)
    assert any(prompt < WINDOW_TOKENS < prompt + output for prompt, output in MIXED)


def test_the_document_lists_every_family() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    for family in FAMILIES.values():
        assert f"| `{family.architecture}` | `{family.model_type}` |" in text


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "qwen3"])
def test_gathered_keys_and_values_give_the_same(
    family_model: Models, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices that the compiled kernel cannot reach gather the blocks before they multiply."""
    model = family_model(family)
    monkeypatch.setattr(kv_cache, "_READ_IN_PLACE", ())
    executor, manifest, _ = load(model.directory, kv_bytes=1 << 20)
    specs = mixed_requests()
    instance = Instance([(executor, manifest.span)], run_tokens_max=32)
    instance.add(specs)
    judge(model.oracle, specs, instance.finish())
