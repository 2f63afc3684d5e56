"""Requests of an engine that schedules by itself (vLLM), whose steps the test makes up."""

from __future__ import annotations

import pytest

from livescale.batching.engine_serving import EngineServing
from livescale.batching.runs.batcher import BatcherConfig
from livescale.batching.runs.engine_step import EngineStep, StepTokens
from livescale.batching.runs.run import SequenceSpec
from livescale.values.types import LayerSpan, SamplingParams

CONFIG = BatcherConfig(kv_blocks=64, block_tokens=16, run_tokens_max=256, sequences_max=8)
PROMPT = tuple(range(40))


@pytest.mark.parametrize(
    ("generated", "found", "told"), [((), 32, 32), ((), 48, 40), ((7, 8), 32, 0), ((7, 8), 0, 0)]
)
def test_what_an_attempt_found_of_the_prompt_is_told_with_the_first_token_only(
    generated: tuple[int, ...], found: int, told: int
) -> None:
    """A gateway adds what it is told: a later attempt would count what an earlier one computed."""
    serving = EngineServing(1, CONFIG, LayerSpan(0, 4))
    serving.layers_arrived(4)
    serving.add(SequenceSpec("r", 2, PROMPT, SamplingParams(9), generated_ids=generated))
    run = serving.next()
    assert run is not None
    [first] = serving.stepped(run, EngineStep((StepTokens("r", 2, (9,), None, found),)), 1)
    assert (first.index, first.cached_tokens) == (len(generated), told)
    run = serving.next()
    assert run is not None
    [second] = serving.stepped(run, EngineStep((StepTokens("r", 2, (9,)),)), 1)
    assert second.cached_tokens == 0
