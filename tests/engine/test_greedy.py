"""Greedy tokens of Batcher and TorchExecutor are those of stock transformers, however batched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_instance import Instance, judge, load, request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from effort import examples, mostly_long
from livescale.batching.runs.run import Run, SequenceSpec
from livescale.engine.executor import TorchExecutor
from livescale.engine.oracle import GreedyOracle
from livescale.values.types import LayerSpan

LAYERS = 6  # of the tiny models
ALL = LayerSpan(0, LAYERS)
MODELS = ("tiny", "tied")
MIXED = [(1, 9), (40, 5), (7, 20), (13, 1), (22, 14), (3, 11)]

Executors = dict[str, TorchExecutor]
Oracles = dict[str, GreedyOracle]


def mixed_requests() -> list[SequenceSpec]:
    return [request(f"r{i}", prompt, output) for i, (prompt, output) in enumerate(MIXED)]


@pytest.mark.parametrize("model", MODELS)
def test_alone(executors: Executors, oracles: Oracles, model: str) -> None:
    for spec in mixed_requests():
        instance = Instance([(executors[model], ALL)])
        instance.add([spec])
        judge(oracles[model], [spec], instance.finish())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("run_tokens_max", mostly_long([8, 11, 30, 512], [11]))
def test_mixed_and_chunked(
    executors: Executors, oracles: Oracles, model: str, run_tokens_max: int
) -> None:
    instance = Instance([(executors[model], ALL)], run_tokens_max, sequences_max=5)
    specs = mixed_requests()
    instance.add(specs)
    judge(oracles[model], specs, instance.finish())
    segments = [segment for run in instance.runs for segment in run.segments]
    chunks = [s for s in segments if s.first_position > 0 and s.token_count > 1]
    assert bool(chunks) == (run_tokens_max < 40), "the longest prompt is cut in the middle or not"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("cut", mostly_long(range(1, LAYERS), [1, LAYERS - 1]))
def test_two_spans_with_hidden_rows_carried_across(
    models: Path, oracles: Oracles, model: str, cut: int
) -> None:
    first, second = LayerSpan(0, cut), LayerSpan(cut, LAYERS)
    # A tied head runs only where layer 0 is.
    second_layers = [*range(cut, LAYERS)] + [0] * (model == "tied")
    instance = Instance(
        [
            (load(models / model, range(cut))[0], first),
            (load(models / model, second_layers)[0], second),
        ],
        run_tokens_max=16,
    )
    specs = mixed_requests()
    instance.add(specs)
    judge(oracles[model], specs, instance.finish())


def test_contexts_of_very_different_length_decode_together(
    executors: Executors, oracles: Oracles
) -> None:
    specs = [request(f"c{n}", n, 12) for n in (700, 2, 130, 300, 280, 60)]
    instance = Instance([(executors["tiny"], ALL)], run_tokens_max=2048)
    instance.add(specs)
    judge(oracles["tiny"], specs, instance.finish())
    assert len(instance.runs) == 12, "one prefill, then all decodes together"


@pytest.mark.parametrize("is_in_flight", [False, True])
def test_cancelled_neighbour_leaves_no_trace(
    executors: Executors, oracles: Oracles, is_in_flight: bool
) -> None:
    instance = Instance([(executors["tiny"], ALL)], run_tokens_max=16, sequences_max=3)
    specs = mixed_requests()
    instance.add(specs)

    def cancel() -> None:
        assert instance.batcher.cancel("r1", 0)

    for _ in range(2):
        instance.step()
    if is_in_flight:
        instance.step(during=cancel)
    else:
        cancel()
    outputs = instance.finish()
    # r1's blocks went to others while r0 was still running.
    judge(oracles["tiny"], [spec for spec in specs if spec.request != "r1"], outputs)
    assert len(outputs["r1"]) < MIXED[1][1]


def test_second_attempt_goes_on_where_the_first_was(executors: Executors, oracles: Oracles) -> None:
    spec = request("again", 9, 16)
    first = Instance([(executors["tiny"], ALL)])
    first.add([spec])
    whole = first.finish()["again"]
    for kept in (1, 7, 15):
        resumed = SequenceSpec("again", 1, spec.prompt_ids, spec.sampling, tuple(whole[:kept]))
        second = Instance([(executors["tiny"], ALL)], run_tokens_max=8)
        second.add([resumed])
        judge(oracles["tiny"], [spec], second.finish())


def test_unwritten_kv_bytes_have_no_influence(models: Path, oracles: Oracles) -> None:
    executor, _, _ = load(models / "tiny")
    executor._pool.fill_(0xFF)  # every fp32 in it is NaN
    specs = mixed_requests()
    instance = Instance([(executor, ALL)], run_tokens_max=16)
    instance.add(specs)
    judge(oracles["tiny"], specs, instance.finish())


@st.composite
def loads(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, SequenceSpec, int | None]]]:
    """run_tokens_max, sequences_max, and (arrival step, request, cancel step) triples."""
    run_tokens_max = draw(st.integers(1, 48))
    sequences_max = draw(st.integers(1, min(run_tokens_max, 6)))
    count = draw(st.integers(1, 8))
    arrivals = []
    for index in range(count):
        spec = request(f"h{index}", draw(st.integers(1, 60)), draw(st.integers(1, 10)))
        cancel_at = draw(st.none() | st.integers(0, 30))
        arrivals.append((draw(st.integers(0, 20)), spec, cancel_at))
    return run_tokens_max, sequences_max, arrivals


@given(load=loads(), model=st.sampled_from(MODELS))
@settings(
    max_examples=examples(80),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_mix_of_requests(
    executors: Executors,
    oracles: Oracles,
    load: tuple[int, int, list[tuple[int, SequenceSpec, int | None]]],
    model: str,
) -> None:
    run_tokens_max, sequences_max, arrivals = load
    instance = Instance([(executors[model], ALL)], run_tokens_max, sequences_max)
    cancelled = set()
    last = max(max(arrive_at, cancel_at or 0) for arrive_at, _, cancel_at in arrivals)
    for step in range(last + 1):
        instance.add([spec for arrive_at, spec, _ in arrivals if arrive_at == step])
        now = [spec.request for _, spec, cancel_at in arrivals if cancel_at == step]

        def cancel(names: list[str] = now) -> None:
            cancelled.update(name for name in names if instance.batcher.cancel(name, 0))

        if instance.batcher.has_work:
            instance.step(during=cancel)
        else:
            cancel()
    outputs = instance.finish()
    specs = [spec for _, spec, _ in arrivals if spec.request not in cancelled]
    judge(oracles[model], specs, outputs)


def test_bf16_stays_near_fp32(models: Path) -> None:
    executor, _, _ = load(models / "bf16")
    stock = AutoModelForCausalLM.from_pretrained(models / "bf16", dtype=torch.bfloat16)
    exact = AutoModelForCausalLM.from_pretrained(models / "bf16", dtype=torch.float32)
    spec = request("half", 300, 1)
    instance = Instance([(executor, ALL)], run_tokens_max=64)
    instance.add([spec])
    hidden = []
    while instance.batcher.has_work:
        emissions = instance.step()
        run = instance.runs[-1]
        rows = executor.run(Run(run.id, LayerSpan(0, LAYERS - 1), run.segments)).hidden
        assert rows is not None
        assert rows.dtype == torch.bfloat16
        hidden.append(rows)
    with torch.inference_mode():
        logits = stock.lm_head(stock.model.norm(torch.cat(hidden))).float()
        wanted = exact(input_ids=torch.tensor([spec.prompt_ids])).logits[0]
    error = (logits - wanted).abs() / wanted.std(dim=-1, keepdim=True)
    assert float(error.quantile(0.99)) <= 0.1
    assert [*emissions[0].token_ids] == [int(logits[-1].argmax())]
