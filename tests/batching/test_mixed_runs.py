"""How many tokens of prompts run beside requests that decode, where their tokens are to be in time
(Sarathi-Serve, OSDI'24)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from livescale.batching.live.live_batch import LiveLimits
from livescale.batching.live.live_batcher import LiveBatcher
from livescale.batching.runs.batcher import Batcher, BatcherConfig
from livescale.batching.runs.choosing import TokenBudget
from livescale.batching.runs.run import Run, SequenceSpec
from livescale.values.types import LayerSpan, SamplingParams

_SPAN = LayerSpan(0, 10)
_CONFIG = BatcherConfig(4096, 16, 2048, 64)
_LEAST = 64
"""Tokens of a Run with prompts beside decodes, however long these take."""


def _spec(name: str, tokens: int, outputs: int) -> SequenceSpec:
    return SequenceSpec(name, 1, range(tokens), SamplingParams(outputs), (), name)


class Device:
    """Carries Runs of one instance out, which take so long for each and for each token."""

    def __init__(self, tbt_ns: int, run_ns: int, token_ns: int) -> None:
        self.live = LiveBatcher(Batcher(_CONFIG, _SPAN), 1, LiveLimits(tbt_ns=tbt_ns))
        self.live.layers_arrived(_SPAN.stop)
        self._run_ns, self._token_ns = run_ns, token_ns

    def run(self) -> tuple[Run, int]:
        run = self.live.next()
        assert run is not None
        elapsed_ns = self._run_ns + self._token_ns * run.token_count
        self.live.done(run, [[1]] * sum(s.samples for s in run.segments), elapsed_ns)
        return run, elapsed_ns


@given(most=st.integers(2, 4096), mixed=st.integers(1, 4096), decodes=st.integers(0, 64))
def test_prompts_always_move_on(most: int, mixed: int, decodes: int) -> None:
    found = TokenBudget(most, mixed).for_prompts(min(decodes, most - 1))
    assert 1 <= found <= most
    if not decodes:
        assert found == most


@settings(max_examples=examples(50))
@given(
    tbt_ns=st.integers(2_000, 10_000_000),
    run_ns=st.integers(0, 1_000),
    token_ns=st.integers(1, 5_000),
    decodes=st.integers(1, 8),
)
def test_decodes_get_their_tokens_in_time(
    tbt_ns: int, run_ns: int, token_ns: int, decodes: int
) -> None:
    """When a few Runs have shown what a token takes, no Run with prompts beside decodes takes
    longer than they may wait, unless it is as small as may be; and none is needlessly small."""
    device = Device(tbt_ns, run_ns, token_ns)
    for number in range(decodes):
        device.live.add(_spec(f"d{number}", 4, 4_000))
    for number in range(8):
        device.live.add(_spec(f"p{number}", 6_000, 1))
    for _ in range(20):
        device.run()
    run, elapsed_ns = device.run()
    assert run.prefill_tokens
    fitting = (tbt_ns - run_ns) // token_ns
    assert run.token_count <= max(_LEAST, fitting)
    assert elapsed_ns <= tbt_ns or run.token_count <= _LEAST
    assert run.token_count >= min(fitting // 2, _CONFIG.run_tokens_max)


@settings(max_examples=examples(20))
@given(tbt_ns=st.integers(0, 10_000), token_ns=st.integers(1, 5_000))
def test_prompts_alone_have_the_whole_budget(tbt_ns: int, token_ns: int) -> None:
    device = Device(tbt_ns, 0, token_ns)
    for number in range(3):
        device.live.add(_spec(f"p{number}", 2_048, 1))
    for _ in range(3):
        assert device.run()[0].token_count == _CONFIG.run_tokens_max


def test_without_a_promise_decodes_wait_for_full_runs() -> None:
    device = Device(0, 0, 1_000)
    device.live.add(_spec("d", 4, 4_000))
    device.live.add(_spec("p", 6_000, 1))
    device.run()
    assert device.run()[0].token_count == _CONFIG.run_tokens_max
