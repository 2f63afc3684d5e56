"""Live scaling changes no token: every family, whatever a loading instance and its source do with
the batches, judged by stock transformers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache

import pytest
from engine_instance import FamilyModel, Instance, load, request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_pair import LivePair, LiveRequest, LiveScenario, Transcript
from msgspec.structs import replace

from effort import examples, mostly_long
from livescale.batching.live.live_batch import LiveLimits
from livescale.engine.executor import TorchExecutor
from livescale.engine.files.make import FAMILY_NAMES
from livescale.engine.oracle import GreedyCheck
from livescale.values.types import LayerSpan, Manifest, SamplingParams

LAYERS = 6  # of the made models
ALL = LayerSpan(0, LAYERS)
MODELS = [name + other for name in FAMILY_NAMES for other in ("", " other")]
SOME = ["llama", "gemma2 other", "qwen3_moe", "phi3"]
KV_BYTES = 1 << 20

Models = Callable[[str], FamilyModel]
Empty = Callable[[], TorchExecutor]


@pytest.fixture(scope="module")
def tally() -> Iterator[Counter[str]]:
    """What happened in all examples of this module: near ties are as rare as promised."""
    counts: Counter[str] = Counter()
    yield counts
    print(*(f"{name}: {count}" for name, count in sorted(counts.items())), sep=", ")
    assert counts["near ties"] * 10_000 <= counts["tokens"] + 9_999, counts


@pytest.fixture(scope="module")
def targets(family_model: Models) -> Callable[[str], Empty]:
    """By model's name: gives the same executor each time, without any layer."""

    @cache
    def make(name: str) -> Empty:
        executor, manifest, arena = load(family_model(name).directory, (), KV_BYTES)
        return lambda: _emptied(executor, manifest, arena)

    return make


def _emptied(executor: TorchExecutor, manifest: Manifest, arena: bytearray) -> TorchExecutor:
    executor.assign(manifest, memoryview(arena))
    return executor


# -- what can happen ------------------------------------------------------------------------------

WAYS = st.sampled_from(
    [
        SamplingParams(1),
        SamplingParams(1, temperature=1.0, seed=3),
        SamplingParams(1, temperature=0.7, top_k=20, repetition_penalty=1.3, seed=5),
    ]
)


@st.composite
def rarely(draw: st.DrawFn, of: int = 8) -> bool:
    # Not the ends, which are drawn more often than others.
    return draw(st.integers(0, of)) == of // 2


@st.composite
def live_requests(draw: st.DrawFn, name: str) -> LiveRequest:
    prompt, output = draw(st.integers(1, 50)), draw(st.integers(1, 14))
    earlier = draw(st.integers(1, 5)) if draw(rarely(3)) else 0
    at_ns = draw(st.integers(0, 400_000))
    cancel_ns = at_ns + draw(st.integers(0, 900_000))
    spec = dataclasses.replace(
        request(name, prompt, output, 512),
        attempt=draw(st.integers(1, 3)),
        sampling=replace(draw(WAYS), output_tokens_max=earlier + output),
        generated_ids=tuple(request(f"{name} earlier", earlier, 1, 512).prompt_ids),
    )
    return LiveRequest(
        spec,
        at_ns,
        is_sources=draw(rarely()),
        cancel_ns=cancel_ns if draw(rarely()) else None,
    )


@st.composite
def scenarios(draw: st.DrawFn) -> LiveScenario:
    count = draw(st.integers(4, 10))
    requests = tuple(draw(live_requests(f"x{index}")) for index in range(count))
    needed = max(len(r.spec.prompt_ids) + r.spec.sampling.output_tokens_max for r in requests)
    gaps = draw(st.lists(st.integers(0, 500_000), min_size=LAYERS, max_size=LAYERS))
    layer_ns = [sum(gaps[: layer + 1]) for layer in range(LAYERS)]
    if draw(rarely()):
        layer_ns = draw(st.permutations(layer_ns))
    fewest = -(-needed // 4)
    blocks = st.integers(fewest, fewest + 9) | st.integers(fewest, fewest + 50)
    run_tokens_max = draw(st.integers(8, 64))
    return LiveScenario(
        draw(
            st.sampled_from(
                ["zigzag", "best-effort", "zigzag", "zigzag", "overlap", "stop-the-world"]
            )
        ),
        requests,
        tuple(layer_ns),
        LiveLimits(
            batches_max=draw(st.integers(1, 8)),
            batch_tokens_max=draw(st.integers(1, 150)),
            span_ns=draw(st.sampled_from([1_000, 30_000, 100_000, 10_000_000])),
            gap_ns=draw(st.sampled_from([1_000, 30_000, 100_000, 10_000_000])),
            kv_layers_ahead=draw(st.integers(1, 4)),
            answer_ns=draw(st.sampled_from([10**10, 10**10, 200_000])),
            move_factor=draw(st.sampled_from([1, 0])),
        ),
        run_tokens_max,
        sequences_max=draw(st.integers(2, 8)),
        growth_tokens=draw(st.sampled_from([0, 0, 8])),
        kv_blocks=(draw(blocks), draw(blocks)),
        message_ns=draw(st.sampled_from([0, 1_000, 50_000])),
        cut_ns=draw(st.integers(0, 1_500_000)) if draw(rarely()) else None,
        fail_ns=draw(st.integers(0, 1_500_000)) if draw(rarely()) else None,
        seed=draw(st.integers(0, 1000)),
    )


# -- tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", mostly_long(MODELS, SOME))
@pytest.mark.parametrize("order", ["zigzag", "best-effort"])
def test_a_burst_is_shared(
    family_model: Models,
    targets: Callable[[str], Empty],
    tally: Counter[str],
    name: str,
    order: str,
) -> None:
    """Batches go over at several points, with their KV, to a source with little room."""
    burst = LiveScenario(
        order,
        tuple(LiveRequest(request(f"b{i}", 30, 12, 512, 1), i * 30_000) for i in range(8)),
        layer_ns=tuple(300_000 * layer for layer in range(LAYERS)),
        limits=LiveLimits(batch_tokens_max=60, span_ns=100_000, gap_ns=100_000),
        kv_blocks=(80, 20),
        message_ns=1_000,
    )
    counts = played(family_model(name), targets(name), burst)
    points = [layer for layer in range(LAYERS) if counts[f"handover at {layer}"]]
    assert len(points) > (2 if order == "zigzag" else 1), f"{counts}"
    assert counts["batches taken"] > 3, f"{counts}"
    assert counts["KV layers"] > 3, f"{counts}"
    assert counts["preemptions"] > 0, f"{counts}"
    tally += counts


@pytest.mark.parametrize("name", mostly_long(MODELS, SOME))
def test_running_requests_move(
    family_model: Models, targets: Callable[[str], Empty], tally: Counter[str], name: str
) -> None:
    """All of them began at the source; half go on at the target, which is there soon."""
    burst = LiveScenario(
        "zigzag",
        tuple(
            LiveRequest(request(f"m{i}", 9 + 4 * i, 40, 512, 1), i * 10_000, is_sources=True)
            for i in range(8)
        ),
        layer_ns=tuple(50_000 * layer for layer in range(LAYERS)),
        limits=LiveLimits(move_factor=1),
        kv_blocks=(100, 160),
        message_ns=1_000,
    )
    counts = played(family_model(name), targets(name), burst)
    assert counts[f"handover at {LAYERS}"] > 1, f"{counts}"
    assert counts["KV layers"] == (LAYERS - 2) * counts[f"handover at {LAYERS}"], f"{counts}"
    tally += counts


@pytest.mark.parametrize("name", mostly_long(MODELS, SOME))
@given(scenario=scenarios())
@settings(
    max_examples=examples(8),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_every_token_is_right(
    family_model: Models,
    targets: Callable[[str], Empty],
    tally: Counter[str],
    name: str,
    scenario: LiveScenario,
) -> None:
    tally += played(family_model(name), targets(name), scenario)


def played(model: FamilyModel, empty: Empty, scenario: LiveScenario) -> Counter[str]:
    """Plays the scenario and judges all tokens; counts of what happened."""
    target = empty()
    for executor in (model.executor, target):
        executor._pool.fill_(0xFF)  # every fp32 in it is NaN: what is not moved is missed
    pair = LivePair(scenario, model.executor, target, LAYERS)
    pair.play()
    left = {r.spec.request for r in scenario.requests if r.cancel_ns is not None}
    texts = list(pair.transcripts.values())
    for text in texts:
        is_whole = len(text.tokens) == text.spec.sampling.output_tokens_max
        assert is_whole or text.spec.request in left, f"{text}"
    greedy = [text for text in texts if text.spec.sampling.temperature == 0]
    checks = judged(model, greedy)
    for text in texts:
        if text.spec.sampling.temperature > 0:
            assert text.new_tokens == undisturbed(model.executor, text), f"{text}"
            pair.counts["sampled tokens"] += len(text.new_tokens)
    pair.counts["tokens"] += sum(check.tokens for check in checks)
    pair.counts["near ties"] += sum(check.near_ties for check in checks)
    return pair.counts


def judged(model: FamilyModel, texts: list[Transcript]) -> list[GreedyCheck]:
    """All new tokens are greedy; those of earlier attempts were drawn, and are given."""
    known = [(*text.spec.prompt_ids, *text.spec.generated_ids) for text in texts]
    pairs = [(ids, text.new_tokens) for ids, text in zip(known, texts, strict=True)]
    checks = model.oracle.check_many(pairs)
    for text, check in zip(texts, checks, strict=True):
        assert check.is_right, f"tokens {check.wrong} of {text}"
    return checks


def undisturbed(executor: TorchExecutor, text: Transcript) -> list[int]:
    """As many tokens as the text has, from an instance that does nothing else."""
    if not text.new_tokens:
        return []
    instance = Instance([(executor, ALL)])
    instance.add([text.spec])
    tokens = instance.finish()[text.spec.request]
    earlier = len(text.spec.generated_ids)
    return tokens[earlier : earlier + len(text.new_tokens)]
